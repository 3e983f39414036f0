"""Text about decode steps at Qwen3.6's sizes; their tables are those of `report.decode`."""

from __future__ import annotations

import pandas as pd

from dualdeadline.report import decode, overlap

MODEL = "qwen-sizes"  # key of their records
GUESSES = {"residual_gate": "the predictor's", "gate_ahead": "the next router's", "oracle": "perfect"}
WRONG = ("shuffled", "random")


def answer(rows: pd.DataFrame) -> str:
    """What was measured at Qwen3.6's sizes, in Markdown."""
    if rows.empty or not len(decode.steps(rows)):
        return "Decode steps at Qwen3.6's sizes have not been measured yet; needed: this notebook run on a GPU."
    counts, raw, coded = sorted(set(decode.steps(rows).slots)), decode.ratios(rows, "raw"), decode.ratios(rows, "coded")
    cold, warm = (decode.steps(rows, "tokens_per_s", kept) for kept in (False, True))
    said = ", ".join(_speed_of(rows, count, False) for count in counts[:-1])
    plain = sorted(set(warm[warm.variant == "no prefetch"].slots)) if len(warm) else []
    kept, routes = ", ".join(_speed_of(rows, count, True) for count in plain), _driven_by(pd.concat([cold, warm]))
    off = decode.errors(rows)["off by, %"].abs()
    guessed = [_guesses(rows, start) for start in (False, True)]
    return (
        f"Measured tokens/s without prediction at Qwen3.6's sizes, routes {routes}: slots empty at each prompt "
        f"{said} of {counts[-1]} slots, {decode.best(rows, counts[-1]):.0f} with everything resident"
        + (f"; slots that stay warm {kept}" if kept else "")
        + f". A step takes {raw.min():.2f} to {raw.max():.2f} (raw) and {coded.min():.2f} to {coded.max():.2f} "
        f"(encoded) times the resident step plus the link time of its bytes ({decode.link_gbps(rows):.1f} GB/s)."
        + decode.reads(rows)
        + "".join(guessed)
        + (f" Simulated steps are off by {off.median():.1f} % (median)." if len(off) else "")
    )


def _speed_of(rows: pd.DataFrame, slots: int, warm: bool) -> str:
    return f"{decode.best(rows, slots, warm=warm):.0f} at {slots} (hit rate {decode.hit_rate(rows, slots, warm):.2f})"


def _guesses(rows: pd.DataFrame, warm: bool) -> str:
    """Tokens/s with guesses by slots, and what wrong ones cost; nothing of what was not measured."""
    part = decode.steps(rows, "prefetch_time_ratio", warm)
    part = part[part["config.budget"] == decode.SETTING] if len(part) else part
    said = []
    for label, words in GUESSES.items():
        mine = part[part.variant == f"{label}-no prefetch"] if len(part) else part
        if len(mine):
            counts = sorted(set(mine.slots))
            said.append(
                words + " " + ", ".join(f"{decode.best(rows, n, label, warm):.0f} at {n}" for n in counts)
            )
    wrong = part[part.variant.isin([f"{label}-no prefetch" for label in WRONG])] if len(part) else part
    text = f" Tokens/s with guesses{' in warm slots' if warm else ''}: {'; '.join(said)}." if said else ""
    return text + (f" A step with wrong guesses takes {_range(wrong['median'])} times as long." if len(wrong) else "")


def _range(values: pd.Series) -> str:
    low, high = f"{values.min():.3f}", f"{values.max():.3f}"
    return low if low == high else f"{low} to {high}"


def _driven_by(part: pd.DataFrame) -> str:
    """The routes behind some rows."""
    names = sorted(set(part["config.routes"]))
    return " and ".join("synthetic" if name == "synthetic" else f"of {name}, tiled over the layers" for name in names)
