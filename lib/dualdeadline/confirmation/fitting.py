"""Which predictors the confirmation fits, their choice on validation, and what of an earlier run is kept."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pandas as pd

from dualdeadline import manifest, paths, predictors, selection, stamp
from dualdeadline.confirmation.place import Place
from dualdeadline.traces import TraceStore

OURS = "residual_gate"
CANDIDATES = (
    "residual_gate_default",
    "residual_gate_rank16",
    "residual_gate_no_previous_state",
    "residual_gate_no_memory",
)
RIVALS = ("gate_ahead", "shared_mlp")
SHOWN = ("popularity", "previous_token", "probe", "gate_ahead", "shared_mlp", OURS)
CONTROL = "shuffled"
CHOSEN_BY = "recall@8"


def fit(
    place: Place,
    store: TraceStore,
    horizons: Sequence[int],
    seed: int,
    seeds: int,
    budgets: Sequence[int],
    epochs: int,
    workers: int = 2,
) -> pd.DataFrame:
    """Fit what the protocol names on train, choose ours on validation; the index of fits, with a column `ours`.

    The index is written after each part, so that a stopped run goes on; fits made from other traces, code or options
    are made again.

    Args:
        horizons: layers ahead. seeds: fits of a rival that draws, from `seed` on; all else is fitted once.

    Raises:
        ValueError: a horizon below 1, or 1 not among them: there the choice is made.
    """
    if 1 not in horizons or min(horizons) < 1:
        raise ValueError(f"horizons are {list(horizons)}; needed: 1 among them, and none below")
    train, validation = store.split("train"), store.split("validation")
    said, many = stamp_of(store, epochs, budgets), list(range(seed, seed + seeds))
    done = kept(place, said)

    def add(todo: list[selection.Job]) -> pd.DataFrame:
        found = selection.fit_all(todo, train, validation, place.scores, budgets, workers, done, epochs=epochs)
        selection.write_index(found, place, stamp=said)
        return found

    done = add(selection.jobs([selection.candidate(label) for label in CANDIDATES], [1], [seed]))
    ours = selection.best(done, "ours", CHOSEN_BY)
    done = add(selection.jobs([selection.candidate(CONTROL)], [1], [seed]))
    finalists = {label: selection.candidate(label) for label in SHOWN if label != OURS} | {
        OURS: selection.finalist(ours)
    }
    for horizon in horizons:
        shown = SHOWN if horizon == 1 else (*RIVALS, OURS)  # the others are looked at one layer ahead only
        for label in shown:
            done = add(selection.jobs([finalists[label]], [horizon], many if label in RIVALS else [seed]))
    return done.assign(ours=ours)


def kept(place: Place, said: str) -> pd.DataFrame | None:
    """Fits of an earlier run that were made from the same and are still there; None where there are none."""
    if not (place.scores / "fits.csv").exists():
        return None
    fits = selection.read_index(place)
    there = fits.folder.map(lambda folder: (place.scores / folder / predictors.FILE).exists())
    found = fits[(fits["stamp"] == said) & there].drop(columns="stamp").reset_index(drop=True)
    return found if len(found) else None


def stamp_of(store: TraceStore, epochs: int, budgets: Sequence[int]) -> str:
    """Hash of what the fits depend on: traces of train and validation, routers, code, libraries and options."""
    rows = store.index[store.index.split.isin(["train", "validation"])]
    code = sorted(stamp.closure({"dualdeadline.confirmation.fitting"})) + [paths.LIB / "requirements.lock"]
    said = [sorted(rows.sha256), store.meta["routers_sha256"], epochs, list(budgets)]
    return manifest.sha256(json.dumps([said, [manifest.file_sha256(path) for path in code]]))[:16]


def to_measure(fits: pd.DataFrame, labels: Sequence[str] = SHOWN) -> pd.DataFrame:
    """Rows of the index that go to test."""
    return fits[(fits.source == "") & fits.label.isin(labels)]
