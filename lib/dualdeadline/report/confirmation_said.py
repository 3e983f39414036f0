"""What prose may say of the confirmation: numbers by name, and the notebook's answer."""

from __future__ import annotations

import pandas as pd

from dualdeadline import manifest
from dualdeadline.confirmation import deviations
from dualdeadline.report import text, verdicts
from dualdeadline.report.confirmation import fixed_value, compared, decode, second, verdict
from dualdeadline.report.confirmation_sources import kind_of, rows_of
from dualdeadline.report.tables import Subject, conditions

ANSWER = """\
**Answer.** On the {confirm_model}, four guesses one layer ahead find {confirm_recall_residual_gate} of the routed
experts (of eight, so at most half) by ResidualGate, {confirm_recall_shared_mlp} by the published study's predictor,
{confirm_recall_gate_ahead} by gate-ahead and {confirm_recall_popularity} by popularity (test split, 95 % interval
over prompts). Targets: {targets}. {confirm_decode} In the published accounting two deadlines change the stall by
{confirm_stall} ms, without any guess by {confirm_stall_without} ms; what no prefetch shows too is not credited to
prediction. Against whole experts with the same bytes ahead, two deadlines for the last expert change these blocks
by {confirm_split} (first, middle, last layer; positive is slower; {confirm_kind}), pipelining whole ones by
{confirm_whole}. Deviations from the protocol: {confirm_deviations}."""


def _places(rows: pd.DataFrame, variant: str) -> str:
    """A change of blocks by layer, `9.6 % [7.7, 11.4], ...`."""
    part = rows[(rows.metric == "block_change") & (rows.variant == f"{variant}-demand_serial")]
    ends = 100 * part[part["kind"] == kind_of(rows, "block_change")][["median", "low", "high"]]
    return ", ".join(f"{text.value(*one, digits=1)} %" for one in ends.itertuples(index=False))


def numbers(about: Subject) -> tuple[dict[str, str], pd.DataFrame]:
    """Numbers that prose may quote, by name, and the rows behind them."""
    about = second(about)
    kinds = ["recall", "hit_rate", "block_change", "deviations", "stall_difference_ms"]
    rows, entry = rows_of(about, kinds), manifest.read_yaml("models.yaml").get(about.model, {})
    told = rows_of(about, "recall", horizon=1, budget=fixed_value("C1", "budget"), **about.test)
    at = told.set_index("variant")[["median", "low", "high"]]
    hit = rows_of(about, "hit_rate", slots=fixed_value("C2", "slots"), start="cold", **about.test).set_index("variant")[
        ["median", "low", "high"]
    ]
    said = {
        f"confirm_recall_{name}": text.value(*at.loc[name])
        for name in ("popularity", "gate_ahead", "shared_mlp", "residual_gate")
    }
    waits = rows_of(about, "stall_difference_ms", **about.test)
    waits = waits[waits.variant == "residual_gate"].astype({"config.budget": int})
    ends = waits.set_index("config.budget")[["median", "low", "high"]]
    stall = {budget: text.value(*one) for budget, *one in ends.itertuples()}
    said |= {f"confirm_hit_{name}": text.value(*hit.loc[name]) for name in ("lru", "predicted", "belady")}
    said |= {f"confirm_verdict_{name.lower()}": verdict(name, about) for name in deviations.entries()["targets"]}
    said |= {
        "confirm_model": str(entry.get("title", about.model)).replace("DualDeadline ", ""),
        "confirm_misses": verdicts.count_supported(compared("C2", about)[0]),
        "confirm_deviations": text.count(rows[rows.metric == "deviations"]["median"].iloc[0]),
        "confirm_split": _places(rows, "component_priority"),
        "confirm_whole": _places(rows, "demand_pipelined"),
        "confirm_stall": stall.get(fixed_value("C1", "budget"), "–"),
        "confirm_stall_without": stall.get(0, "–"),
        "confirm_decode": decode(about, fixed_value("C6", "slots")),
        "confirm_kind": kind_of(rows, "block_change"),
        "confirm_conditions": conditions(told).lower(),
    }
    return said, rows


def answer(about: Subject) -> str:
    """The stage's answer, Markdown."""
    said, fixed = numbers(about)[0], deviations.entries()["targets"]
    words = [f"{name} ({entry['name']}) **{said[f'confirm_verdict_{name.lower()}']}**" for name, entry in fixed.items()]
    return ANSWER.format(**said, targets=", ".join(words))
