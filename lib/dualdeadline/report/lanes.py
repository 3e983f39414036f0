"""Timelines as pictures: one row per lane, one bar per operation."""

from __future__ import annotations

import pandas as pd
from matplotlib import pyplot as plt

from dualdeadline.report import look

COLOURS = {"gate/up": look.BLUE, "down": look.ORANGE, "expert": look.GREEN, "combine": look.GREY, "before": look.SILVER}
LANES = {"link": 1, "compute": 0}


def draw(frame: pd.DataFrame, ax=None, names: bool = True):
    """Two lanes of one timeline.

    Args:
        frame: of `Timeline.frame` (lane, what, start_ms, end_ms, speculative).
        names: write the expert's number into bars that are long enough.
    """
    ax = ax or plt.gca()
    whole = frame.end_ms.max()
    for row in frame[frame.lane.isin(LANES)].itertuples():
        kind = next((name for name in COLOURS if row.what.startswith(name)), "combine")
        width = max(row.end_ms - row.start_ms, whole / 500)
        ax.barh(LANES[row.lane], width, left=row.start_ms, height=0.7, color=COLOURS[kind], edgecolor="white", lw=0.4,
                hatch="///" if row.speculative else None)
        if names and "," not in row.what and width > whole / 25:
            ax.text(row.start_ms + width / 2, LANES[row.lane], row.what.split()[-1], ha="center", va="center",
                    fontsize=5.5, color="white")
    ax.set_yticks(list(LANES.values()), list(LANES))
    ax.grid(axis="y", visible=False)
    return ax


def legend(fig) -> None:
    """One legend for all lanes of a figure."""
    kinds = [kind for kind in COLOURS if kind != "before"]
    bars = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[kind]) for kind in kinds]
    fig.legend(bars, kinds, loc="outside upper right", ncol=len(bars))
