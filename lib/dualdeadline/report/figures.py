"""Draw from record rows and save figures whose bytes depend on their data only."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd
from matplotlib import pyplot as plt

from dualdeadline import manifest, paths, record
from dualdeadline.report import look

DPI = 150  # legible on a high-density screen at README width, and 30 to 90 kB a figure


def curves(rows: pd.DataFrame, x: str, ax=None, hue: str = "variant", band: bool = True, scale: float = 1.0):
    """One line per `hue` over the column `x` of record rows, with a band where `low` and `high` are given.

    Args:
        rows: record rows, one per point, e.g. `read(...).query("metric == 'recall'")`.
        x: numeric column, e.g. `config.budget`.
        scale: factor on all values (100 shows shares as percent).

    Raises:
        ValueError: two rows share a line and an `x`: a config key has not been fixed.
    """
    ax = ax or plt.gca()
    twice = rows.duplicated([hue, x])
    if twice.any():
        raise ValueError(f"{int(twice.sum())} points share {hue} and {x}; fix the other config keys first")
    order = sorted(
        rows[hue].unique(), key=lambda name: (list(look.LOOKS) + [look.snake(name)]).index(look.snake(name))
    )
    for name in order:
        part = rows[rows[hue] == name].sort_values(x)
        ax.plot(part[x], part["median"] * scale, marker=".", **look.line(name))
        if band and part["low"].notna().all():
            ax.fill_between(
                part[x], part["low"] * scale, part["high"] * scale, color=look.colour(name), alpha=0.18, lw=0
            )
    return ax


def title(rows: pd.DataFrame, text: str) -> str:
    """`text (replayed; pilot-olmoe; n = 24)`: what the rows are, on which model, over how many units.

    `n` is the count the rows were made over (prompts, where prompts are resampled); a range if they differ.
    """
    if not len(rows):
        raise ValueError("no rows to draw; the filter before this figure let nothing through")
    kinds, models = sorted(set(rows["kind"])), sorted(set(rows["model"]))
    least, most = int(rows["n"].min()), int(rows["n"].max())
    size = f"n = {least:,}" if least == most else f"n = {least:,} to {most:,}"
    return f"{text}\n({'/'.join(kinds)}; {', '.join(models)}; {size})"


def provenance_line(rows: pd.DataFrame) -> str:
    """Notebook, records file and machine of some rows, in one line without the commit."""
    stages = sorted(set(rows["stage"]))
    files = ", ".join(f"notebooks/{name}.py via data_manifests/records/{name}.csv" for name in stages)
    return f"{files}; machine {', '.join(sorted(set(rows['machine'])))}"


def source(rows: pd.DataFrame) -> dict:
    """What identifies the rows behind a figure: stage, models, machines and metrics, each a sorted list."""
    return {key: sorted(set(rows[key])) for key in ("stage", "model", "machine", "metric")}


def fingerprint(workspace: paths.Workspace, source: dict) -> str:
    """16 hex digits over what the records of `source` say, not over when or at which commit.

    Covers every row of those stages, models, machines and metrics: it changes when a figure needs redrawing.
    """
    rows = pd.concat([record.visible(workspace, stage) for stage in source["stage"]])
    for key in ("model", "machine", "metric"):
        rows = rows[rows[key].isin(source[key])]
    key = ["stage", "model", "machine", "scope", "metric", "variant", "config"]
    said = rows[[*key, "unit", "median", "low", "high", "n", "kind"]].sort_values(key)
    return manifest.sha256(said.to_csv(index=False))[:16]


def save(fig, name: str, workspace: paths.Workspace, rows: pd.DataFrame | None = None) -> Path:
    """Write `<name>.png` and `<name>.pdf` in the workspace's figures folder; path of the PNG.

    A line under the figure names the notebook, records file and machine; both files carry `source(rows)` and
    its fingerprint, so a test can tell a figure that its records have outgrown. No dates, no versions: equal
    data, equal bytes.

    Args:
        name: stage number and subject, e.g. `04_recall`.
        rows: the record rows that the figure shows (write the records first, then draw); by default all rows
            of the stage that `name` begins with.

    Raises:
        ValueError: there are no such rows, or `name` does not begin with a stage number.
    """
    rows = _stage_rows(name, workspace) if rows is None else rows
    if not len(rows):
        raise ValueError(
            f"figure {name}: no record rows; write the records first, then draw from record.read"
        )
    line, behind = provenance_line(rows), source(rows)
    stamp = json.dumps(behind | {"records": fingerprint(workspace, behind)}, sort_keys=True)
    fig.supxlabel(line, x=0.01, ha="left", fontsize=4.5, color=look.GREY)
    said = {
        "png": {"Software": None, "Source": line, "Comment": stamp},
        "pdf": {"Creator": None, "Producer": None, "CreationDate": None, "Subject": line, "Keywords": stamp},
    }
    for kind, metadata in said.items():
        with manifest.atomic(workspace.figures / f"{name}.{kind}") as temporary:
            fig.savefig(temporary, format=kind, dpi=DPI, metadata=metadata)
    return workspace.figures / f"{name}.png"


def _stage_rows(name: str, workspace: paths.Workspace) -> pd.DataFrame:
    if not re.match(r"\d\d_\w", name):
        raise ValueError(f"figure name is {name!r}; needed: stage number and subject, e.g. '04_recall'")
    files = sorted(workspace.records.glob(f"{name[:3]}*.csv"))
    return record.read(workspace, files[0].stem) if files else pd.DataFrame()
