"""Predictors of the experts that later layers will route to.

One class in one file and one line in `REGISTRY` add a predictor to every table. All share
`.fit(trace)`, `.score(trace) -> [T, L-horizon, E]` and `.online() -> step(layer, router_input, ids)`.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from dualdeadline import manifest, paths
from dualdeadline.predictors.base import Online, Predictor, View
from dualdeadline.predictors.baselines import (
    Oracle, Popularity, PreviousLayer, PreviousToken, Random, Transition,
)
from dualdeadline.predictors.gate_ahead import GateAhead
from dualdeadline.predictors.learned import Learned, LowRank, Probe, SharedMLP, Shuffled
from dualdeadline.predictors.residual import ResidualGate

REGISTRY: dict[str, type[Predictor]] = {
    kind.name: kind
    for kind in (Random, Popularity, PreviousLayer, PreviousToken, Transition, Probe, GateAhead, SharedMLP,
                 LowRank, ResidualGate, Oracle, Shuffled)
}
FILE = "predictor.safetensors"
__all__ = ["REGISTRY", "Learned", "Online", "Predictor", "View", "build", "load", "save",
           *(kind.__name__ for kind in REGISTRY.values())]


def build(name: str, **options) -> Predictor:
    """A predictor by its name in `REGISTRY`, e.g. `build("gate_ahead", horizon=2, routers=store.routers)`.

    Raises:
        ValueError: unknown name, or an option its constructor does not take.
    """
    if name not in REGISTRY:
        raise ValueError(f"predictor is {name!r}; needed: one of {', '.join(REGISTRY)}")
    try:
        return REGISTRY[name](**options)
    except TypeError as error:
        raise ValueError(f"predictor {name}: {error}") from None


def save(predictor: Predictor, folder: Path) -> Path:
    """Write a fitted predictor's tensors and options (not the routers) to `folder`; the file's path."""
    predictor._fitted()
    sizes = {key: getattr(predictor, key) for key in "LEKH"}
    about = {"name": predictor.name, "options": predictor.options(), "sizes": sizes}
    tensors = {key: value.detach().cpu().contiguous() for key, value in predictor.table.items()}
    path = Path(folder) / FILE
    with manifest.atomic(path) as temporary:
        save_file(tensors, temporary, metadata={"predictor": json.dumps(about)})
    return path


def load(folder: Path, routers=None) -> Predictor:
    """Read a predictor that `save` wrote; `routers` as in its constructor.

    Raises:
        FileNotFoundError: nothing saved there; names the stage that does.
        ValueError: the file is truncated or no predictor.
    """
    path = paths.need(Path(folder) / FILE, "03_predictors")
    try:
        with safe_open(path, "pt") as handle:
            about = json.loads((handle.metadata() or {})["predictor"])
            table = {key: handle.get_tensor(key) for key in handle.keys()}
    except Exception as error:  # safetensors raises its own kind
        raise ValueError(f"{path} is no fitted predictor ({error}); delete it and run 03_predictors") from None
    predictor = build(about["name"], routers=routers, **about["options"])
    for key, value in about["sizes"].items():
        setattr(predictor, key, value)
    predictor.table = table
    return predictor
