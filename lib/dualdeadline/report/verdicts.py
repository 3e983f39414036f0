"""Verdicts: the protocol's test of each hypothesis, evaluated on record rows."""

from __future__ import annotations

import functools
import itertools
import math

import pandas as pd

from dualdeadline import manifest, paths, record
from dualdeadline.report import text

COLUMNS = ("hypothesis", "model", "variant", "config", "median", "low", "high", "n", "verdict")


def hypotheses() -> dict[str, dict]:
    """The hypotheses of `protocol.yaml` by id, `H1` first."""
    return _hypotheses((paths.MANIFESTS / "protocol.yaml").stat().st_mtime_ns)


@functools.cache
def _hypotheses(changed_ns: int) -> dict[str, dict]:  # read again only when the file has changed
    return manifest.read_yaml("protocol.yaml")["hypotheses"]


def comparisons(workspace: paths.Workspace, name: str, model: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Every comparison that hypothesis `name` needs, with interval and verdict word; and the rows used.

    A comparison without a row stands there as open. Columns: `COLUMNS`; `config` is a dict.

    Raises:
        KeyError: the protocol has no such hypothesis.
        ValueError: several rows answer one comparison (a config key that the protocol does not fix).
    """
    if name not in hypotheses():
        raise KeyError(f"hypothesis {name!r} is not in protocol.yaml; known: {', '.join(hypotheses())}")
    entry = hypotheses()[name]
    return compared(workspace, name, entry["stage"], entry["test"], model)


def compared(
    workspace: paths.Workspace, name: str, stage: str, test: dict, model: str
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Every comparison of a test in the protocol's form, under the name given; as `comparisons`."""
    rows = record.read(workspace, stage, model)
    rows = rows[rows["metric"] == test["metric"]]
    lines, used = [], []
    for variant in test["variants"]:
        for values in itertools.product(*test["config"].values()):
            config = dict(zip(test["config"], values, strict=True))
            found = _matching(rows, variant, config)
            used.append(found)
            lines.append(_line(name, model, variant, config, found, test))
    return pd.DataFrame(lines, columns=COLUMNS), pd.concat(used)


def _matching(rows: pd.DataFrame, variant: str, config: dict) -> pd.DataFrame:
    match = rows["variant"] == variant
    for key, wanted in config.items():
        match &= rows[f"config.{key}"] == wanted if f"config.{key}" in rows else False
    found = rows[match]
    if len(found) > 1:
        raise ValueError(
            f"{len(found)} rows answer {variant} with {config}; the protocol names one comparison"
        )
    return found


def _line(name: str, model: str, variant: str, config: dict, found: pd.DataFrame, test: dict) -> tuple:
    row = found.iloc[0] if len(found) else {"median": math.nan, "low": math.nan, "high": math.nan, "n": 0}
    word = text.verdict(row["low"], row["high"], test["direction"], test["bound"])
    return (name, model, variant, config, row["median"], row["low"], row["high"], int(row["n"]), word)


def verdict_of(lines: pd.DataFrame) -> str:
    """The word for a whole hypothesis: supported if every comparison is, open while one has no interval."""
    words = set(lines["verdict"])
    if text.OPEN in words:
        return text.OPEN
    return text.SUPPORTED if words == {text.SUPPORTED} else text.NOT_SUPPORTED


def words(workspace: paths.Workspace, model: str) -> dict[str, str]:
    """Verdict word of every hypothesis."""
    return {name: verdict_of(comparisons(workspace, name, model)[0]) for name in hypotheses()}


def sentence(workspace: paths.Workspace, model: str) -> str:
    """The verdicts in one sentence, Markdown."""
    groups: dict[str, list[str]] = {}
    for name, word in words(workspace, model).items():
        groups.setdefault(word, []).append(f"{name} ({hypotheses()[name]['name']})")
    said = "; ".join(f"**{word}**: {', '.join(names)}" for word, names in groups.items())
    return f"For {model}, {said}."


def count_supported(lines: pd.DataFrame) -> str:
    """`9 of 12`, or a dash while the hypothesis is open."""
    if verdict_of(lines) == text.OPEN:
        return "–"
    return f"{int((lines['verdict'] == text.SUPPORTED).sum())} of {len(lines)}"
