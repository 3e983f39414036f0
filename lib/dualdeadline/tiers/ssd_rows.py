"""Record rows of the SSD experiments (keyword arguments of `Recorder.add`, with `config`)."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from dualdeadline import steps


def rows(found: pd.DataFrame, metric: str, variant: str, values: Mapping[str, str] = {}) -> list[dict]:
    """Record rows of a frame: its ms as `<metric>_ms` with low and high, and further columns as metrics of their own.

    Args:
        variant: column that names the row. values: column -> unit, each recorded as
            `<metric>_<column>` where there is one.
    """
    out, plain = [], {"ms", "low", "high", "n", variant, *values}
    for row in found.to_dict("records"):
        config = {name: value for name, value in row.items() if name not in plain}
        common = dict(variant=str(row[variant]), kind="measured", n=row["n"], config=config)
        out.append(common | dict(metric=f"{metric}_ms", unit="ms", median=row["ms"], low=row["low"], high=row["high"]))
        out += [
            common | dict(metric=f"{metric}_{name}", unit=unit, median=row[name])
            for name, unit in values.items()
            if pd.notna(row[name])
        ]
    return out


def gain(found: pd.DataFrame) -> pd.DataFrame:
    """Each prefetch setting's time over that of demand loading, by prompt: DataFrame(prompt, predictor, ahead, rule,
    ratio). Below 1 it pays."""
    base = found[found.ahead == 0].set_index("prompt").ms
    part = found[found.ahead > 0]
    return part[["prompt", "predictor", "ahead", "rule"]].assign(
        ratio=part.ms.to_numpy() / base[part.prompt].to_numpy()
    )


def ratio_row(
    found: pd.DataFrame, variant: str, predictor: str, ahead: int, rule: bool, resamples: int = 2000, seed: int = 0
) -> dict:
    """Step time with a predictor's reads ahead over demand loading: mean over prompts, 95 % interval over prompts.

    Args:
        found: of `ssd_replay.prefetch`. variant: of the row, e.g. "predicted-demand".

    Raises:
        ValueError: no such setting.
    """
    part = gain(found)
    part = part[(part.predictor == predictor) & (part.ahead == ahead) & (part.rule == rule)]
    if part.empty:
        raise ValueError(f"{predictor!r}, {ahead} layers ahead, rule {rule} was not measured; needed: one that was")
    mean, low, high, n = steps.two_level(part.set_index("prompt").ratio, resamples, seed)
    first = found.iloc[0]
    config = dict(
        predictor=predictor, ahead=ahead, rule=rule, slots=int(first.slots), pause_ms=float(first.layer_pause_ms)
    )
    said = dict(variant=variant, metric="step_time_ratio", unit="ratio", kind="measured", config=config)
    return said | dict(median=mean, low=low, high=high, n=n)
