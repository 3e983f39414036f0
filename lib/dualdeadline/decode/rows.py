"""Record rows of measured and simulated decode steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import pandas as pd

from dualdeadline import steps
from dualdeadline.decode.cases import Case

RATES = {
    "misses_gate_up": "misses",
    "fetched_ahead_gate_up": "ahead",
    "useful_gate_up": "useful",
    "wasted_gate_up": "wasted",
}


def measured(found: pd.DataFrame, sizes: Mapping[str, Mapping[str, int]], resamples: int, seed: int) -> list[dict]:
    """Rows of `measure.run`: step times, tokens/s, what hit and crossed, and paired differences.

    Every number is a mean over prompts with a 95 % interval over prompts drawn anew.

    Args:
        sizes: link bytes by wire and component.
    """
    ms = found.pivot_table(index="prompt", columns=found.case.map(repr), values="ms", sort=False)
    out = []
    for case in {repr(case): case for case in found.case}.values():
        values = _values(found[found.case == case].set_index("prompt"), ms[repr(case)], sizes[case.wire])
        values += _differences(case, ms)
        for variant, metric, unit, series in values:
            out.append(row(case, variant or case.name, metric, unit, "measured", series, resamples, seed))
    return out


def row(
    case: Case, variant: str, metric: str, unit: str, kind: str, series: pd.Series, resamples: int, seed: int
) -> dict:
    """Mean over prompts of a series that is indexed by prompt, with its 95 % interval."""
    mean, low, high, n = steps.two_level(series, resamples, seed)
    said = dict(variant=variant, metric=metric, unit=unit, kind=kind, config=case.config())
    return said | dict(median=mean, low=low, high=high, n=n)


def _values(part: pd.DataFrame, ms: pd.Series, sizes: Mapping[str, int]) -> list[tuple[str, str, str, pd.Series]]:
    """(variant or empty, metric, unit, value by prompt) of one case alone."""
    found = [("", "step_ms", "ms", ms), ("", "tokens_per_s", "tokens/s", 1e3 / ms)]
    accesses = part.hits_gate_up + part.misses_gate_up
    if accesses.sum():
        found.append(("", "hit_rate", "share", part.hits_gate_up / accesses))
        found.append(("", "link_bytes", "bytes", link_bytes(part, sizes)))
        for column, name in RATES.items():
            found.append(("", f"{name}_per_token", "components", part[column] / part.steps))
    return found


def _differences(case: Case, ms: pd.DataFrame) -> list[tuple[str, str, str, pd.Series]]:
    """The same of one case against others, prompt by prompt."""
    found = []
    for name, metric, unit, other in pairs(case):
        if repr(other) in ms:
            one, two = ms[repr(case)], ms[repr(other)]
            found.append((name, metric, unit, one - two if unit == "ms" else one / two))
    return found


def link_bytes(part: pd.DataFrame, sizes: Mapping[str, int]) -> pd.Series:
    """Bytes per step that crossed the link, asked for or guessed."""
    return (
        sum((part[f"misses_{name}"] + part[f"fetched_ahead_{name}"]) * size for name, size in sizes.items())
        / part.steps
    )


def pairs(case: Case) -> Iterable[tuple[str, str, str, Case]]:
    """What a case is compared with, prompt by prompt."""
    if case.predictor:
        yield f"{case.name}-no prefetch", "prefetch_difference_ms", "ms", case.base
        yield f"{case.name}-no prefetch", "prefetch_time_ratio", "ratio", case.base
    elif case.schedule == "staged_barrier":
        yield "two deadlines-one deadline", "deadline_difference_ms", "ms", replace(case, schedule="demand_serial")
        if case.wire == "coded":
            yield "encoded-raw", "wire_time_ratio", "ratio", replace(case, wire="raw")


def sizes_rows(sizes: Mapping[str, Mapping[str, int]]) -> list[dict]:
    """Link bytes of each component as stored."""
    return [
        dict(
            variant=f"{wire}, {part}",
            metric="component_bytes",
            unit="bytes",
            kind="measured",
            median=size,
            n=1,
            config={},
        )
        for wire, parts in sizes.items()
        for part, size in parts.items()
    ]
