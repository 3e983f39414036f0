"""Where the confirmation's figures come from: its own rows, and what notebooks 06 to 09 measured at its sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pandas as pd

from dualdeadline import paths, record
from dualdeadline.confirmation import deviations
from dualdeadline.confirmation.rows import STAGE
from dualdeadline.report import decode, decode_large, tables, text, verdicts, wire
from dualdeadline.report.tables import MODEL, Subject

SHAPE = "qwen"
CONTROLS = ("oracle", "shuffled", "random")  # guesses that no decode has
FLOOR_FACTOR = 1.02  # of the copies alone, that a block may take besides a constant


def rows_of(about: Subject, metric: str | list[str], **fixed) -> pd.DataFrame:
    """The confirmation's rows of a metric, config keys fixed; errors as `tables.rows_of`."""
    return tables.rows_of(about.workspace, STAGE, metric, about.model, **fixed)


def corpora(model: str, rows: pd.DataFrame) -> list[str]:
    """Prompt sets that rows of a model speak of, the tested one first; without them those of the protocol."""
    own = rows[(rows["model"] == model) & (rows["metric"] == "recall")]
    if not len(own):
        fixed = deviations.entries()["parameters"]
        return fixed.get(model, next(iter(fixed.values())))["corpora"]
    own = record.spread(own)
    tested = own["config.split"] == "test"
    return [*dict.fromkeys(own[tested]["config.corpus"]), *dict.fromkeys(own[~tested]["config.corpus"])]


def hardware(workspace: paths.Workspace, stage: str, model: str, metric: str, other: str = MODEL) -> pd.DataFrame:
    """Measured rows of a stage that times experts of a size, whatever the model: this model's, or else another's."""
    for name in (model, other):
        rows = record.read(workspace, stage, name)
        if ((rows["metric"] == metric) & (rows["kind"] == "measured")).any():
            return rows
    return rows


def costs(workspace: paths.Workspace, model: str, other: str = MODEL) -> pd.DataFrame:
    """Rows of notebook 07 that hold cost models."""
    return hardware(workspace, "07_overlap", model, "cost", other)


def best_rows(about: Subject, metric: str | list[str], **fixed) -> pd.DataFrame:
    """Rows of a metric that may be measured or simulated: the measured ones where there are some."""
    rows = rows_of(about, metric, **fixed)
    return rows[rows["kind"] == min(rows["kind"])]  # measured comes before simulated in the alphabet


def kind_of(rows: pd.DataFrame, metric: str) -> str:
    """The best kind that rows of a metric have, or `none`."""
    return min(rows[rows["metric"] == metric]["kind"], default="none")


def kernel_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows that compare the predictor kernel: a GPU's where there are some, else the interpreter's."""
    part = rows[rows["metric"].isin(["kernel_difference", "kernel_pairs_share"])]
    return part[part["config.where"] == min(part["config.where"])] if len(part) else part  # gpu comes first


def checked_share(rows: pd.DataFrame) -> float:
    """Share of the held-out pairs that the predictor kernel was compared on, the least of all predictors."""
    part = kernel_rows(rows)
    part = part[part["metric"] == "kernel_pairs_share"]["median"]
    return float(part.min()) if len(part) else 0.0


def decode_rows(about: Subject, slots: int) -> pd.DataFrame:
    """Measured rows of whole decode steps with so many slots per layer: of this model, or of one of Qwen3.6's sizes
    that this model's recorded routes drive."""
    own, large = (record.read(about.workspace, decode.STAGE, name) for name in (about.model, decode_large.MODEL))
    driven = large[large["config.routes"] == about.model] if "config.routes" in large else large.iloc[:0]
    rows = pd.concat([part for part in (own, driven) if len(part)] or [own], ignore_index=True)
    if "config.slots" not in rows:
        return rows.iloc[:0]
    part = rows[(rows["metric"] == "tokens_per_s") & (rows["kind"] == "measured")]
    return part[pd.to_numeric(part["config.slots"], errors="coerce") == slots]


def decode_kind(about: Subject, slots: int) -> str:
    """`measured` if there are such rows, else `not measured yet`."""
    return "measured" if len(decode_rows(about, slots)) else "not measured yet"


def best_decode(name: str, test: Mapping, about: Subject, slots: int = 0) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The fastest measured decode with the target's slots, as a line of `verdicts.COLUMNS`, and its row.

    Perfect and wrong guesses do not count.
    """
    slots = slots or test["config"]["slots"][0]
    rows = decode_rows(about, slots)
    rows = rows[~rows["variant"].isin(CONTROLS)]
    rows = rows[rows["median"] == rows["median"].max()].iloc[:1]
    ends = rows[["median", "low", "high"]].iloc[0].tolist() if len(rows) else [math.nan] * 3
    return _lines(name, test, about, [("best", {"slots": slots}, ends, rows)])


def block_excess(name: str, test: Mapping, about: Subject) -> tuple[pd.DataFrame, pd.DataFrame]:
    """What a pipelined block of eight missing experts takes beyond 1.02 times the median of its own copies, ms."""
    rows = hardware(about.workspace, wire.STAGE, about.model, "block_ms")
    found = []
    for kind in test["variants"]:
        at = rows[rows["metric"].isin(["block_ms", "floor_ms"]) & (rows["kind"] == "measured")]
        if len(at):
            at = at[(at["config.shape"] == SHAPE) & (at["config.wire"] == kind) & (at["config.ready"] == 0)]
            at = at[at["variant"] == "demand_pipelined"]
        metric = at.set_index("metric")[["median", "low", "high"]] if len(at) else pd.DataFrame()
        if {"block_ms", "floor_ms"} <= set(metric.index):
            ends = (metric.loc["block_ms"] - FLOOR_FACTOR * metric.loc["floor_ms", "median"]).tolist()
        else:
            ends = [math.nan] * 3
        found.append((kind, {}, ends, at))
    return _lines(name, test, about, found)


def _lines(name: str, test: Mapping, about: Subject, found: list[tuple]) -> tuple[pd.DataFrame, pd.DataFrame]:
    lines = []
    for variant, config, (median, low, high), rows in found:
        word = text.verdict(low, high, test["direction"], test["bound"])
        count = int(rows["n"].max()) if len(rows) else 0
        lines.append((name, about.model, variant, config, median, low, high, count, word))
    return pd.DataFrame(lines, columns=verdicts.COLUMNS), pd.concat([rows for *_, rows in found])
