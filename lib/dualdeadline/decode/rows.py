"""Record rows of measured and simulated decode steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd

from dualdeadline import steps
from dualdeadline.decode.cases import Case

RATES = {"misses_gate_up": "misses", "fetched_ahead_gate_up": "ahead", "useful_gate_up": "useful", "wasted_gate_up": "wasted"}


def _row(case: Case, variant: str, metric: str, unit: str, values: pd.Series, kind: str, resamples: int, seed: int) -> dict:
    """Mean over prompts with a 95 % interval over prompts drawn anew."""
    mean, low, high, n = steps.two_level(values, resamples, seed)
    return dict(variant=variant, metric=metric, unit=unit, kind=kind, median=mean, low=low, high=high, n=n,
                config=case.config())


def measured(found: pd.DataFrame, sizes: Mapping[str, Mapping[str, int]], resamples: int, seed: int) -> list[dict]:
    """Rows of `measure.run`: step times, tokens/s, what hit and crossed, and paired differences.

    Args:
        sizes: link bytes by wire and component.
    """
    ms = found.pivot_table(index="prompt", columns=found.case.map(_key), values="ms", sort=False)
    cases, out = {_key(case): case for case in found.case}, []
    for key, case in cases.items():
        part = found[found.case == case].set_index("prompt")
        out.append(_row(case, case.name, "step_ms", "ms", ms[key], "measured", resamples, seed))
        out.append(_row(case, case.name, "tokens_per_s", "tokens/s", 1e3 / ms[key], "measured", resamples, seed))
        accesses = part.hits_gate_up + part.misses_gate_up
        if accesses.sum():
            out.append(_row(case, case.name, "hit_rate", "share", part.hits_gate_up / accesses, "measured", resamples, seed))
            out += [_row(case, case.name, f"{name}_per_token", "components", part[column] / part.steps, "measured",
                         resamples, seed) for column, name in RATES.items()]
            out.append(_row(case, case.name, "link_bytes", "bytes", link_bytes(part, sizes[case.wire]), "measured",
                            resamples, seed))
        out += [_row(case, name, metric, unit,
                     ms[key] - ms[_key(other)] if unit == "ms" else ms[key] / ms[_key(other)], "measured", resamples, seed)
                for name, metric, unit, other in pairs(case) if _key(other) in cases]
    return out


def link_bytes(part: pd.DataFrame, sizes: Mapping[str, int]) -> pd.Series:
    """Bytes per step that crossed the link, asked for or guessed."""
    return sum((part[f"misses_{name}"] + part[f"fetched_ahead_{name}"]) * size for name, size in sizes.items()) / part.steps


def _key(case: Case) -> str:
    return repr(case)


def pairs(case: Case) -> Iterable[tuple[str, str, str, Case]]:
    """What a case is compared with, prompt by prompt."""
    if case.predictor:
        yield f"{case.name}-no prefetch", "prefetch_difference_ms", "ms", case.base
        yield f"{case.name}-no prefetch", "prefetch_time_ratio", "ratio", case.base
    elif case.schedule == "staged_barrier":
        yield "two deadlines-one deadline", "deadline_difference_ms", "ms", Case(case.slots, case.wire, "demand_serial")
        if case.wire == "coded":
            yield "encoded-raw", "wire_time_ratio", "ratio", Case(case.slots, "raw", case.schedule)


def sizes_rows(sizes: Mapping[str, Mapping[str, int]]) -> list[dict]:
    """Link bytes of each component as stored."""
    return [dict(variant=f"{wire}, {part}", metric="component_bytes", unit="bytes", kind="measured", median=size, n=1,
                 config={})
            for wire, parts in sizes.items() for part, size in parts.items()]


def baseline(variant: str, times_ms: np.ndarray, **config) -> dict:
    """Step time of something else on the same model."""
    median, low, high = np.percentile(times_ms, (50, 20, 80))
    return dict(variant=variant, metric="baseline_step_ms", unit="ms", kind="measured", median=median, low=low, high=high,
                n=len(times_ms), config=config)
