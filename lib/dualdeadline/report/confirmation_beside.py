"""The published study's figures for Qwen3.6 beside ours, each with its conditions and kind."""

from __future__ import annotations

import math

import pandas as pd

from dualdeadline import simulate
from dualdeadline.report import text
from dualdeadline.report.confirmation_sources import SHAPE, best_decode, best_rows, hardware, rows_of
from dualdeadline.report.tables import Subject, Table, conditions

BUDGET, SLOTS = 4, 128
PREDICTOR_WAYS = {"eager": "eager", "one launch": "triton"}  # ours -> the published study's


def beside(about: Subject) -> Table:
    """One line per figure: published and under which conditions, here and under which."""
    told = simulate.published()["published_qwen36"]
    lines = [
        *_recalls(about, told),
        *_stalls(about, told),
        *_blocks(about, told),
        *_predictor(about, told),
        *_decode(about),
    ]
    frame = pd.DataFrame(
        [(figure, said, terms, here, _terms(rows, more)) for figure, said, terms, here, more, rows in lines],
        columns=["figure", "published", "conditions", "here", "conditions here"],
    )
    used = pd.concat([rows for *_, rows in lines if len(rows)])
    caption = (
        f"Published Qwen3.6-35B-A3B figures beside those of {about.model}. Unless that is named qwen, it is "
        "another, small model of the same architecture. Conditions differ as stated: a difference is no contradiction. "
        f"{conditions(used)}."
    )
    return Table(
        "confirmation_beside",
        caption,
        frame,
        used,
        wide=True,
        align="p{0.17\\linewidth}rp{0.23\\linewidth}rp{0.27\\linewidth}",
        gap_pt=3.0,
    )


def _terms(rows: pd.DataFrame, more: str) -> str:
    return f"{conditions(rows)}; {more}" if len(rows) else more


def _recalls(about: Subject, told: dict) -> list[tuple]:
    rows, terms = rows_of(about, "recall", horizon=1, budget=BUDGET, **about.test), told["conditions"]["recall"]
    names = {
        "shared_mlp": ("its learned predictor", "learned"),
        "popularity": ("popularity", "popularity"),
        "residual_gate": ("ResidualGate", ""),
        "gate_ahead": ("gate-ahead", ""),
    }
    lines = []
    for name, (label, key) in names.items():
        part = rows[rows["variant"] == name]
        said = f"{told['recall'][key][str(BUDGET)]:.4f}" if key else "–"
        here = text.value(*part.iloc[0][["median", "low", "high"]])
        lines.append(
            (
                f"recall at {BUDGET}, {label}",
                said,
                terms if key else "–",
                here,
                f"one layer ahead, test split of {about.corpus}",
                part,
            )
        )
    return lines


def _stalls(about: Subject, told: dict) -> list[tuple]:
    rows = rows_of(about, "stall_ms", budget=BUDGET, **about.test)
    lines = []
    for name in ("monolithic", "staged"):
        part = rows[(rows["variant"] == "shared_mlp") & (rows["config.schedule"] == name)]
        lines.append(
            (
                f"stall at budget {BUDGET}, {name}, ms",
                f"{told[f'stall_budget{BUDGET}_ms'][name]:.3f}",
                told["conditions"][f"stall_budget{BUDGET}_ms"],
                text.value(*part.iloc[0][["median", "low", "high"]]),
                "its predictor and times, these routes",
                part,
            )
        )
    return lines


def _blocks(about: Subject, told: dict) -> list[tuple]:
    rows, lines = best_rows(about, "block_change"), []
    shown = {
        "staged_barrier-nothing_ahead": "",
        "demand_serial-nothing_ahead": "the same bytes as whole experts",
        "demand_pipelined-nothing_ahead": "these pipelined",
    }
    for place, change in told["block_change"].items():
        part = rows[(rows["config.place"] == place) & rows["variant"].isin(list(shown))].set_index(
            "variant", drop=False
        )
        staged, *others = (_percent(part.loc[name]) for name in shown)
        beside_it = "; ".join(f"{label} {value}" for label, value in zip(list(shown.values())[1:], others))
        lines.append(
            (
                f"block, staged, {place} layer",
                f"{change:+.1%}",
                told["conditions"]["block_change"],
                staged,
                f"against serial with nothing ahead, fused kernels, ResidualGate at budget {BUDGET}; {beside_it}",
                part,
            )
        )
    return lines


def _percent(row: pd.Series) -> str:
    ends = "" if math.isnan(row["low"]) else f" [{row['low']:+.1%}, {row['high']:+.1%}]"
    return f"{row['median']:+.1%}{ends}"


def _predictor(about: Subject, told: dict) -> list[tuple]:
    rows, lines = hardware(about.workspace, "06_kernels", about.model, "predictor_ms"), []
    rows = rows[rows["metric"] == "predictor_ms"]
    rows = rows[(rows["config.shape"] == SHAPE) & (rows["config.predictor"] == "shared_mlp")] if len(rows) else rows
    for way, key in PREDICTOR_WAYS.items():
        part = rows[rows["variant"] == way] if len(rows) else rows
        here = f"{part['median'].iloc[0]:.4f}" if len(part) else "not measured yet"
        lines.append(
            (
                f"its predictor's step, {key}, ms",
                f"{told['predictor_ms'][key]:.4f}",
                told["conditions"]["predictor_ms"],
                here,
                "launched" if way == "eager" else "one launch, in a CUDA graph",
                part,
            )
        )
    return lines


def _decode(about: Subject) -> list[tuple]:
    test = {"direction": "greater", "bound": 0, "config": {"slots": [SLOTS]}}
    found, rows = best_decode("", test, about)
    here = text.value(found["median"].iloc[0], digits=1) if len(rows) else "not measured yet"
    return [(f"decode, {SLOTS} of 256 slots, tokens/s", "–", "–", here, "best variant, Qwen3.6's sizes", rows)]
