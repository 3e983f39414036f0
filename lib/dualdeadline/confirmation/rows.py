"""Record rows of the confirmation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pandas as pd

from dualdeadline import models, paths, record

if TYPE_CHECKING:  # with Triton behind it
    from dualdeadline.confirmation.fused import Compared

STAGE = "11_confirmation"


def recorder(model: str, workspace: paths.Workspace, part: str) -> record.Recorder:
    """A recorder of one part of the stage: a part that was measured on a GPU stays when the others run again."""
    return record.Recorder(STAGE, model, models.revision(model), workspace, {"part": part})


def add_blocks(into: record.Recorder, found: pd.DataFrame, kind: str, budget: int) -> None:
    """Rows of `blocks.means`."""
    for row in found.itertuples():
        unit = "ms" if row.metric == "block_ms" else "share"
        into.add(
            row.variant,
            row.metric,
            row.median,
            unit,
            kind,
            row.low,
            row.high,
            row.n,
            place=row.place,
            layer=row.layer,
            budget=budget,
        )


def add_kernel(into: record.Recorder, compared: Mapping[str, Compared], where: str) -> None:
    """Rows of `fused.compare` by predictor: largest difference over the pairs, and their share of those held out.

    Args:
        where: `gpu` or `interpreter`; each in a recorder part of its own, and a GPU's are shown where there are some.
    """
    for name, found in compared.items():
        value = found.difference
        into.add(name, "kernel_difference", value, "1", "measured", value, value, found.pairs, where=where)
        into.add(name, "kernel_pairs_share", found.share, "share", "measured", n=found.held_out, where=where)


def add_deviations(into: record.Recorder, found: pd.DataFrame) -> None:
    """One row per deviation, and their number."""
    into.add("all", "deviations", len(found), "1", "measured")
    for row in found.itertuples():
        into.add(row.entry, "deviation", 1, "1", "measured", part=row.part, protocol=row.protocol, run=row.run)
