"""One look for every figure: theme, and a fixed colour, dash and label per predictor, policy and schedule."""

from __future__ import annotations

import hashlib
import re

import seaborn as sns
from matplotlib import pyplot as plt

BLACK, GREY, SILVER = "#000000", "#767676", "#b3b3b3"
BLUE, SKY, GREEN, ORANGE, VERMILLION, PURPLE = (
    "#0072b2",
    "#56b4e9",
    "#009e73",
    "#e69f00",
    "#d55e00",
    "#cc79a7",
)
OLIVE, WINE = "#999933", "#882255"  # Paul Tol's muted set; the six above are Okabe and Ito's
SPARE = (OLIVE, WINE, PURPLE, SKY, ORANGE, GREEN)
SOLID, DASHED, DOTTED = "-", "--", ":"

# name -> label, colour, dash; a thing has one look in every figure and one label in every table
LOOKS = {
    "oracle": ("oracle", BLACK, DASHED),
    "residual_gate": ("ResidualGate (ours)", VERMILLION, SOLID),
    "gate_ahead": ("gate-ahead", BLUE, SOLID),
    "shared_mlp": ("shared MLP (original)", GREEN, SOLID),
    "low_rank": ("shared low-rank", PURPLE, SOLID),
    "probe": ("probe per layer", ORANGE, SOLID),
    "transition": ("transition table", SKY, SOLID),
    "previous_token": ("previous token", OLIVE, SOLID),
    "previous_layer": ("previous layer", WINE, SOLID),
    "popularity": ("popularity", GREY, SOLID),
    "random": ("random", SILVER, SOLID),
    "shuffled": ("shuffled labels", SILVER, DOTTED),
    "none": ("no prefetch", GREY, DASHED),
    "belady": ("Belady optimum", BLACK, DOTTED),
    "lru": ("LRU", BLUE, SOLID),
    "lfu": ("LFU", ORANGE, SOLID),
    "predicted": ("predicted eviction", VERMILLION, SOLID),
    "monolithic": ("monolithic", BLUE, SOLID),
    "staged": ("staged", VERMILLION, SOLID),
    "demand_serial": ("demand serial", GREY, SOLID),
    "demand_pipelined": ("demand pipelined", BLUE, SOLID),
    "staged_barrier": ("staged, barrier", ORANGE, SOLID),
    "staged_pipelined": ("staged, pipelined", VERMILLION, SOLID),
    "component_priority": ("component priority", GREEN, SOLID),
    "floor": ("floor: the copies alone", BLACK, DOTTED),
    "resident": ("resident", SILVER, DASHED),
    "fused": ("fused (ours)", VERMILLION, SOLID),
    "eager": ("transformers eager", GREY, SOLID),
    "batched_mm": ("transformers batched_mm", BLUE, SOLID),
    "torch_grouped_mm": ("torch grouped product", PURPLE, SOLID),
    "next_token": ("next token", PURPLE, SOLID),
    "scattered,_serial": ("nine tensors, serial", GREY, SOLID),
    "scattered,_parallel": ("nine tensors, parallel", GREY, DASHED),
    "record,_serial": ("one record, serial", BLUE, DASHED),
    "record,_raw": ("one record", BLUE, SOLID),
    "record,_encoded": ("one record, encoded", VERMILLION, SOLID),
    "grouped_mm": ("transformers grouped_mm", GREEN, SOLID),
}


def style() -> None:
    """Set the seaborn theme and make saved files depend on their data only (fixed salt, embedded fonts)."""
    sns.set_theme(
        context="paper",
        style="whitegrid",
        rc={
            "figure.figsize": (5.6, 3.3),
            "figure.constrained_layout.use": True,
            "figure.dpi": 100,
            "font.family": "DejaVu Sans",  # ships with matplotlib: the same outlines on every machine
            "axes.titlesize": 9,
            "axes.labelsize": 9,
            "legend.fontsize": 7.5,
            "xtick.labelsize": 8,
            "ytick.labelsize": 8,
            "axes.titlelocation": "left",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "grid.linewidth": 0.5,
            "legend.frameon": False,
            "lines.linewidth": 1.5,
            "svg.hashsalt": "dualdeadline",
            "pdf.fonttype": 42,
        },
    )
    plt.rcParams["image.cmap"] = "cividis"  # readable without colour vision and in grey


def snake(name: str) -> str:
    """`ResidualGate`, `residual-gate` and `residual_gate` as `residual_gate`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", str(name)).replace("-", "_").replace(" ", "_").lower()


def _look(name: str) -> tuple[str, str, str]:
    key = snake(name)
    if key in LOOKS:
        return LOOKS[key]
    family = max((known for known in LOOKS if key.startswith(f"{known}_")), key=len, default=None)
    if family:  # a variant such as shared_mlp_128: its family's colour, another dash
        text, shade, _ = LOOKS[family]
        return f"{text}, {key[len(family) + 1 :].replace('_', ' ')}", shade, DOTTED
    # a predictor added in one file gets a stable look without an edit here
    place = int(hashlib.sha256(key.encode()).hexdigest(), 16) % len(SPARE)
    return str(name).replace("_", " "), SPARE[place], "-."


def label(name: str) -> str:
    """What readers see instead of `name`; a difference `a-b` becomes `a - b`."""
    parts = str(name).split("-")
    if len(parts) == 2 and all(snake(part) in LOOKS for part in parts):
        return " - ".join(_look(part)[0] for part in parts)
    return _look(name)[0]


def colour(name: str) -> str:
    """Hex colour of a predictor, policy or schedule."""
    return _look(name)[1]


def line(name: str) -> dict:
    """Keyword arguments for `ax.plot`: colour, dash and label."""
    text, shade, dash = _look(name)
    return {"color": shade, "linestyle": dash, "label": text}


def palette(names) -> dict[str, str]:
    """`{name: colour}` for seaborn's `palette=`."""
    return {name: colour(name) for name in names}
