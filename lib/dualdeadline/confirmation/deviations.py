"""What a run did otherwise than the protocol's `confirmation` says: parameters, choices in code, and records."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pandas as pd

from dualdeadline import manifest, schedule
from dualdeadline.confirmation import blocks, fitting, replayed

COLUMNS = ("part", "entry", "protocol", "run")
TOLERANCE = 1e-4  # of a probability that the predictor kernel gives
CHECKED = ("shared_mlp", "gate_ahead", "residual_gate")


def entries() -> dict:
    """The protocol's `confirmation`."""
    return manifest.read_yaml("protocol.yaml")["confirmation"]


def named(model: str, values: Mapping) -> dict:
    """Of some values by name, a notebook's globals say, those that the protocol fixes for any model."""
    fixed = entries()["parameters"]
    names = fixed.get(model) or next(iter(fixed.values()))
    return {name: values[name] for name in names if name in values}


def choices(**of_this_run) -> dict:
    """What the code and this run chose, under the names of the protocol's `choices`.

    Args:
        of_this_run: `checked_share`, `block_kind`, `decode_kind` and `expert_shape`.
    """
    return {
        "candidates": list(fitting.CANDIDATES),
        "chosen_by": fitting.CHOSEN_BY,
        "ours": fitting.OURS,
        "rivals": list(fitting.RIVALS),
        "shown": list(fitting.SHOWN),
        "control": fitting.CONTROL,
        "caches": list(replayed.POLICIES),
        "schedules": list(schedule.NAMES),
        "layers": list(blocks.PLACES),
        "checked_predictors": list(CHECKED),
        "tolerance": TOLERANCE,
    } | of_this_run


def listed(model: str, parameters: Mapping, chosen: Mapping, rows: pd.DataFrame) -> pd.DataFrame:
    """Every difference between protocol and run; empty when there is none.

    Args:
        parameters: the notebook's, by name. chosen: of `choices`. rows: records of this run, config spread.

    Columns: `COLUMNS`; part is `model`, `parameter`, `choice` or `record`.
    """
    fixed, lines = entries(), []
    if model not in fixed["parameters"]:
        lines.append(("model", "model", ", ".join(fixed["parameters"]), model))
    for name, wanted in fixed["parameters"].get(model, {}).items():
        lines += _differs("parameter", name, wanted, parameters.get(name))
    for name, wanted in fixed["choices"].items():
        lines += _differs("choice", name, wanted, chosen.get(name))
    for name, entry in fixed["targets"].items():
        if entry["stage"] == "11_confirmation":
            lines += _missing(name, entry["test"], parameters, rows)
    return pd.DataFrame(lines, columns=COLUMNS)


def _differs(part: str, name: str, wanted, got) -> list[tuple]:
    return [] if got == wanted else [(part, name, said(wanted), said(got))]


def said(value) -> str:
    """A value as a table shows it."""
    if isinstance(value, list | tuple):
        return ", ".join(map(said, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def config_of(test: Mapping, corpora) -> dict[str, list]:
    """The config of a target's test; `corpora` stands for the model's own."""
    return {key: list(corpora) if values == "corpora" else values for key, values in test["config"].items()}


def _missing(name: str, test: Mapping, parameters: Mapping, rows: pd.DataFrame) -> list[tuple]:
    """Comparisons that a target names and no record answers."""
    config, lines = config_of(test, parameters.get("corpora", [])), []
    for variant, *values in itertools.product(test["variants"], *config.values()):
        match = (rows["metric"] == test["metric"]) & (rows["variant"] == variant)
        for key, value in zip(config, values):
            match &= rows[f"config.{key}"] == value if f"config.{key}" in rows else False
        if not match.any():
            lines.append(("record", f"{name}: {test['metric']}", said([variant, *values]), "no record"))
    return lines
