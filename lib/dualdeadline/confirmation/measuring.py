"""Recall of the fitted predictors on prompts that nothing was chosen on, and the paired differences of the targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from dualdeadline import evaluation
from dualdeadline.confirmation import fitting
from dualdeadline.confirmation.place import Place
from dualdeadline.traces import TraceStore


def splits(corpora: Sequence[str]) -> dict[str, str]:
    """The split of each corpus that is looked at: test of the first, all of the others."""
    return {name: "all" if place else "test" for place, name in enumerate(corpora)}


def measure(
    place: Place,
    fits: pd.DataFrame,
    stores: Mapping[str, TraceStore],
    budgets: Sequence[int],
    miss_budgets: Sequence[int],
    slots: Sequence[int],
    workers: int = 2,
) -> pd.DataFrame:
    """Per-prompt recall of every predictor shown, and recall on what a cache misses of ours and its rivals.

    Returns:
        The frame of `evaluation.measure_all`; routed experts only, the shared one is never missing.
    """
    compared = (fitting.OURS, *fitting.RIVALS)
    others = [label for label in (*fitting.SHOWN, fitting.CONTROL) if label not in compared]
    parts = []
    for name, split in splits(list(stores)).items():
        trace = stores[name].split(split)
        for labels, sizes in ((compared, slots), (others, ())):
            settings = evaluation.Settings(budgets, miss_budgets, sizes)
            chosen = fitting.to_measure(fits, labels)
            parts.append(evaluation.measure_all(chosen, trace, name, split, settings, place.scores, workers))
    return pd.concat(parts, ignore_index=True)


def compared(values: pd.DataFrame, told_budget: int, resamples: int, seed: int) -> pd.DataFrame:
    """Paired differences: ours less popularity in recall, ours less each rival in recall on misses."""
    recall = values[(values.metric == "recall") & (values.budget == told_budget)]
    misses = values[values.metric == "miss_recall"]
    parts = [
        evaluation.differences(recall, fitting.OURS, ["popularity", *fitting.RIVALS], resamples, seed),
        evaluation.differences(misses, fitting.OURS, fitting.RIVALS, resamples, seed),
    ]
    return pd.concat(parts, ignore_index=True)


def leak(values: pd.DataFrame, told_budget: int, resamples: int, seed: int) -> pd.DataFrame:
    """The control less popularity: what a predictor fitted on shuffled labels still finds."""
    recall = values[(values.metric == "recall") & (values.budget == told_budget)]
    return evaluation.differences(recall, fitting.CONTROL, ["popularity"], resamples, seed)
