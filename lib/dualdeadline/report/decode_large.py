"""Text about decode steps at Qwen3.6's sizes; their tables are those of `report.decode`."""

from __future__ import annotations

import pandas as pd

from dualdeadline.report import decode

MODEL = "qwen-sizes"  # key of their records


def answer(rows: pd.DataFrame) -> str:
    """What was measured at Qwen3.6's sizes, in Markdown."""
    if rows.empty or not len(decode.steps(rows)):
        return "Decode steps at Qwen3.6's sizes have not been measured yet; needed: this notebook run on a GPU."
    counts, raw, coded = sorted(set(decode.steps(rows).slots)), decode.ratios(rows, "raw"), decode.ratios(rows, "coded")
    cold, warm = (decode.steps(rows, "tokens_per_s", kept) for kept in (False, True))
    said = ", ".join(_speed_of(rows, count, False) for count in counts[:-1])
    kept = ", ".join(_speed_of(rows, count, True) for count in sorted(set(warm.slots)))
    off = decode.errors(rows)["off by, %"].abs()
    return (
        f"Measured tokens/s without prediction at Qwen3.6's sizes, routes {_driven_by(cold)}: slots empty at each "
        f"prompt {said} of {counts[-1]} slots, {decode.best(rows, counts[-1]):.0f} with everything resident"
        + (f"; slots that stay warm {kept}" if kept else "")
        + f". A step takes {raw.min():.2f} to {raw.max():.2f} (raw) and {coded.min():.2f} to {coded.max():.2f} "
        f"(encoded) times the resident step plus the link time of its bytes ({decode.link_gbps(rows):.1f} GB/s)."
        + (f" Simulated steps are off by {off.median():.1f} % (median)." if len(off) else "")
    )


def _speed_of(rows: pd.DataFrame, slots: int, warm: bool) -> str:
    return f"{decode.best(rows, slots, warm=warm):.0f} at {slots} (hit rate {decode.hit_rate(rows, slots, warm):.2f})"


def _driven_by(part: pd.DataFrame) -> str:
    (name,) = set(part["config.routes"])
    return "synthetic" if name == "synthetic" else f"of {name}, tiled over the layers"
