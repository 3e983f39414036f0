"""The parts of a step as a table, and the check that they add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

PARTS = (
    "attention",
    "router",
    "look-up",
    "demand wait",
    "late prefetch wait",
    "install",
    "expert compute",
    "prediction",
    "launch gaps",
    "other",
)
WAITS = ("demand wait", "late prefetch wait")
STEP, PLAIN = "step", "step, not watched"
MOST = 0.03  # of a step that parts may leave out or count twice


def frame(case: str, steps: Sequence[Mapping[str, float]], measured_ms, plain_ms=()) -> pd.DataFrame:
    """DataFrame(case, part, ms, low, high, n) of some steps, all parts of each, checked.

    Args:
        steps: milliseconds by part, of each step. measured_ms: of the same steps, by another clock.
        plain_ms: of other steps that nobody watched, which shows what watching costs; may be empty.

    Raises:
        ValueError: an unknown part, or no steps. AssertionError: see `check`.
    """
    unknown = {part for step in steps for part in step} - set(PARTS)
    if unknown or not steps or len(steps) != len(measured_ms):
        raise ValueError(
            f"{len(steps)} steps, {len(measured_ms)} times, parts beyond the known ones: {sorted(unknown)}; "
            "needed: at least one step, as many times, known parts"
        )
    values = {part: [step.get(part, 0.0) for step in steps] for part in PARTS} | {STEP: measured_ms}
    values |= {PLAIN: plain_ms} if len(plain_ms) else {}
    rows = [(case, part, np.mean(ms), *np.percentile(ms, (20, 80)), len(ms)) for part, ms in values.items()]
    return check(pd.DataFrame(rows, columns=["case", "part", "ms", "low", "high", "n"]))


def check(found: pd.DataFrame) -> pd.DataFrame:
    """The same table, if the parts of each case add up to its step.

    Raises:
        AssertionError: they are off by more than 3 %.
    """
    for case, part in found.groupby("case", sort=False):
        table = part.set_index("part").ms
        total, step = table[list(PARTS)].sum(), table[STEP]
        assert abs(total - step) <= MOST * step, f"{case}: parts are {total:.4f} ms, the step {step:.4f} ms"
    return found


def records(found: pd.DataFrame, config: Mapping) -> list[dict]:
    """Record rows: metric `part_ms`, the part in the config."""
    return [
        dict(
            variant=row.case,
            metric="part_ms",
            unit="ms",
            kind="measured",
            median=row.ms,
            low=row.low,
            high=row.high,
            n=row.n,
            config={**config, "part": row.part},
        )
        for row in found.itertuples()
    ]
