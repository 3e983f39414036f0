"""Tables about kernels: one token of a block, the predictor's cost, and the stage's answer."""

from __future__ import annotations

import pandas as pd

from dualdeadline.report.tables import Subject, Table, conditions

STAGE = "06_kernels"


def one_token(rows: pd.DataFrame) -> pd.DataFrame:
    """Median ms and GB/s of one token by implementation, for each shape, the fastest first."""
    part = rows[rows.metric.isin(["resident_ms", "resident_gbps"]) & (rows["config.tokens"] == 1)]
    wide = part.pivot_table(index="variant", columns=["config.shape", "metric"], values="median")
    wide.columns = [f"{shape}, {'ms' if metric.endswith('ms') else 'GB/s'}" for shape, metric in wide.columns]
    return wide.sort_values(next(name for name in wide.columns if name.endswith("ms"))).rename_axis(None)


def predictor_costs(rows: pd.DataFrame) -> pd.DataFrame:
    """Median ms of a predictor's step by way of running it."""
    part = rows[rows.metric == "predictor_ms"]
    part = part.assign(column=part["config.predictor"] + ", " + part["config.shape"])
    return (
        part.pivot_table(index="variant", columns="column", values="median").rename_axis(None).rename_axis(None, axis=1)
    )


def one(rows: pd.DataFrame, metric: str, variant: str, **config) -> float:
    """The median of exactly one row.

    Raises:
        ValueError: none or several fit.
    """
    found = rows[(rows.metric == metric) & (rows.variant == variant)]
    for key, value in config.items():
        found = found[found[f"config.{key}"] == value]
    if len(found) != 1:
        raise ValueError(f"{len(found)} rows of {metric}, {variant}, {config}; needed: exactly one")
    return float(found["median"].iloc[0])


def answer(rows: pd.DataFrame, shape: str = "olmoe") -> str:
    """The stage's result in Markdown, from its rows."""
    here = {"shape": shape, "tokens": 1}
    block, rate = (one(rows, name, "fused", **here) for name in ("resident_ms", "resident_gbps"))
    ceiling, ratio = one(rows, "memory_gbps", "copy"), rows[rows.metric == "block_time_ratio"]
    link = rows[(rows.metric == "fetch_gbps") & (rows["config.shape"] == shape)]["median"].max()
    step = rows[(rows.metric == "predictor_ms") & (rows.variant == "one launch") & (rows["config.shape"] == shape)]
    against = "not measured yet against transformers' own implementations"
    if len(ratio):
        row = ratio.iloc[0]
        against = f"{row['median']:.3f} [{row.low:.3f}, {row.high:.3f}] of the time of {row['config.against']}"
    return (
        f"One token's eight experts take {block:.4f} ms ({rate:,.0f} GB/s of weights; a copy reaches {ceiling:,.0f} "
        f"GB/s read and written), {against}. The zero-copy fetch reaches {link:.1f} GB/s. A predictor's step costs "
        f"{step['median'].min():.4f} to {step['median'].max():.4f} ms inside a graph."
    )



def kernels(about: Subject) -> Table:
    """One token of a resident block by implementation."""
    rows = about.rows(STAGE, ["resident_ms", "resident_gbps"], tokens=1)
    frame = one_token(rows)
    digits = {name: "{:.4f}" if name.endswith("ms") else "{:,.0f}" for name in frame.columns}
    shown = frame.apply(lambda column: column.map(digits[column.name].format)).where(frame.notna(), "–")
    frame = shown.rename_axis("kernels").reset_index()
    caption = (
        "One token, eight experts resident: median ms per block and GB/s of weights. In a CUDA graph where a "
        f"variant can be captured. {conditions(rows)}."
    )
    return Table("kernels", caption, frame, rows, wide=True)
