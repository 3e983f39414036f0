"""Text about decode steps at Qwen3.6's sizes; their tables are those of `report.decode`."""

from __future__ import annotations

import pandas as pd

from dualdeadline.report import decode, overlap

MODEL = "qwen-sizes"  # key of their records
GUESSES = {
    "the predictor's": "residual_gate",
    "the next router's": "gate_ahead",
    "perfect": "oracle",
    "shuffled": "shuffled",
}


def answer(rows: pd.DataFrame) -> str:
    """What was measured at Qwen3.6's sizes, in Markdown."""
    if rows.empty or not len(decode.steps(rows)):
        return "Decode steps at Qwen3.6's sizes have not been measured yet; needed: this notebook run on a GPU."
    counts, raw, coded = sorted(set(decode.steps(rows).slots)), decode.ratios(rows, "raw"), decode.ratios(rows, "coded")
    cold, warm = (decode.steps(rows, "tokens_per_s", kept) for kept in (False, True))
    said = ", ".join(_speed_of(rows, count, False) for count in counts[:-1])
    kept = ", ".join(_speed_of(rows, count, True) for count in sorted(set(warm.slots)))
    off = decode.errors(rows)["off by, %"].abs()
    guessed = [_guesses(rows, kept) for kept in (False, True)]
    return (
        f"Measured tokens/s without prediction at Qwen3.6's sizes, routes {_driven_by(cold)}: slots empty at each "
        f"prompt {said} of {counts[-1]} slots, {decode.best(rows, counts[-1]):.0f} with everything resident"
        + (f"; slots that stay warm {kept}" if kept else "")
        + f". A step takes {raw.min():.2f} to {raw.max():.2f} (raw) and {coded.min():.2f} to {coded.max():.2f} "
        f"(encoded) times the resident step plus the link time of its bytes ({decode.link_gbps(rows):.1f} GB/s). "
        + decode.reads(rows)
        + "".join(guessed)
        + (f" Simulated steps are off by {off.median():.1f} % (median)." if len(off) else "")
    )


def _speed_of(rows: pd.DataFrame, slots: int, warm: bool) -> str:
    return f"{decode.best(rows, slots, warm=warm):.0f} at {slots} (hit rate {decode.hit_rate(rows, slots, warm):.2f})"


def _guesses(rows: pd.DataFrame, warm: bool) -> str:
    """Tokens/s with the predictor's guesses and what guesses do to a step, by slots; nothing where not measured."""
    part = decode.steps(rows, "prefetch_time_ratio", warm)
    part = part[part["config.budget"] == "2-0"] if len(part) else part
    ours = part[part.variant == "residual_gate-no prefetch"] if len(part) else part
    if ours.empty:
        return ""
    speeds = ", ".join(f"{decode.best(rows, n, 'residual_gate', warm):.0f} at {n}" for n in sorted(set(ours.slots)))
    changes = {name: overlap.by_slots(part[part.variant == f"{label}-no prefetch"]) for name, label in GUESSES.items()}
    said = "; ".join(f"{name} {change}" for name, change in changes.items() if change)
    start = " Slots that stay warm, with the predictor's guesses" if warm else " With the predictor's guesses"
    return f"{start} {speeds} tokens/s; a step with guesses over one without: {said}."


def _driven_by(part: pd.DataFrame) -> str:
    (name,) = set(part["config.routes"])
    return "synthetic" if name == "synthetic" else f"of {name}, tiled over the layers"
