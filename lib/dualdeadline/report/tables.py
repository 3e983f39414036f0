"""Tables: what is shown in notebooks, README and paper, as rows of text with the records behind them."""

from __future__ import annotations

from dataclasses import dataclass, field

import pandas as pd

from dualdeadline import paths, record
from dualdeadline.report import look, text

MODEL = "pilot-olmoe"  # the model that the published tables show
CORPUS = "pilot"  # and the prompt set
SHOWN_SLOTS = (8, 16, 32, 48)


@dataclass
class Table:
    """A finished table: `frame` holds text, `caption` its conditions, `rows` the records behind it."""

    name: str
    caption: str
    frame: pd.DataFrame
    rows: pd.DataFrame = field(repr=False)
    wide: bool = False  # spans both columns of the paper
    align: str = ""  # LaTeX column types; default: first left, others right
    gap_pt: float = 4.0  # space between columns


def table(frame: pd.DataFrame, name: str, caption: str, workspace: paths.Workspace, digits: int = 3):
    """`frame` for display in a notebook, with its caption and numbers at `digits` places.

    Writes nothing: what paper and README show is a function in `published.TABLES`, run by 12_paper.
    """
    shown = frame.style.format(precision=digits, na_rep="–", thousands=",")
    return shown.set_caption(f"{name} ({workspace.profile} profile): {caption}").set_uuid(name)


def rows_of(
    workspace: paths.Workspace, stage: str, metric: str | list[str], model: str | None = MODEL, **fixed
) -> pd.DataFrame:
    """Record rows of one metric (or several) with config keys fixed, e.g. `horizon=1`; of every model with None.

    Raises:
        FileNotFoundError: the stage has written no records yet (names the stage).
        ValueError: the stage has records, but none of this metric and these keys.
    """
    found = record.read(workspace, stage, model)
    if not len(found):
        paths.need(workspace.record_file(stage), stage)
    found = found[found["metric"].isin([metric] if isinstance(metric, str) else metric)]
    for key, wanted in fixed.items():
        column = found.get(f"config.{key}")
        if column is None:
            raise ValueError(f"{stage}, metric {metric}: no row has config key {key!r}")
        found = found[column.isin(wanted if isinstance(wanted, (list, tuple)) else [wanted])]
    if not len(found):
        raise ValueError(f"{stage} has no rows with metric {metric!r} and {fixed}; run that notebook again")
    return found


@dataclass(frozen=True)
class Subject:
    """What tables and numbers are about: one model on one prompt set, by the records of a workspace."""

    workspace: paths.Workspace
    model: str = MODEL
    corpus: str = CORPUS

    @property
    def test(self) -> dict[str, str]:
        """Config of the rows on its test split."""
        return {"corpus": self.corpus, "split": "test"}

    def rows(self, stage: str, metric: str | list[str], **fixed) -> pd.DataFrame:
        """`rows_of` for this model."""
        return rows_of(self.workspace, stage, metric, self.model, **fixed)


def pivot(
    rows: pd.DataFrame, columns: str, index: str = "variant", head: str = "", digits: int = 3
) -> pd.DataFrame:
    """Rows spread into a frame of text `value [low, high]`: labels down, the values of `columns` across.

    Raises:
        ValueError: two rows fall into one cell: a config key has not been fixed.
    """
    if rows.duplicated([index, columns]).any():
        raise ValueError(f"several rows for one {index} and {columns}; fix the other config keys first")
    cells = [
        text.value(*ends, digits=digits)
        for ends in zip(rows["median"], rows["low"], rows["high"], strict=True)
    ]
    frame = rows.assign(cell=cells).pivot(index=index, columns=columns, values="cell").fillna("–")
    ranks = (
        rows.groupby(index)["variant"].first().map(_place)
    )  # lines of one predictor or policy stay together
    order = sorted(frame.index, key=lambda name: (ranks[name], name))
    frame = frame.loc[order].rename(index=look.label if index == "variant" else str)
    frame = frame.rename_axis(None, axis=1).rename_axis(index).reset_index()
    return frame.rename(columns={index: head}).rename(columns=_whole)


def _place(name) -> tuple:
    known = list(look.LOOKS)
    key = look.snake(name)
    return (known.index(key), key) if key in known else (len(known), key)


def _whole(name) -> str:
    return str(int(name)) if isinstance(name, float) and name == int(name) else str(name)


def conditions(rows: pd.DataFrame) -> str:
    """`Replayed, pilot-olmoe, n = 24`: kind, model and count of some rows."""
    kinds, models = "/".join(sorted(set(rows["kind"]))), ", ".join(sorted(set(rows["model"])))
    sizes = sorted({int(size) for size in rows["n"]})
    size = text.count(sizes[0]) if len(sizes) == 1 else f"{text.count(sizes[0])} to {text.count(sizes[-1])}"
    return f"{kinds.capitalize()}, {models}, n = {size}"
