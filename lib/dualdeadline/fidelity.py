"""Whether the predictor kernels choose as the predictors do: top-n sets on pairs that no fit has seen."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import torch

from dualdeadline import paths, predictors, selection
from dualdeadline.kernels import predictor as kernels
from dualdeadline.traces import TraceStore


def kept_sets(
    workspace: paths.Workspace,
    corpus: str,
    split: str,
    labels: Sequence[str],
    budgets: Sequence[int],
    prompts: int = 0,
    dtypes=(torch.float32, torch.bfloat16),
    seed: int = 0,
    horizon: int = 1,
) -> pd.DataFrame:
    """Top-n sets of the kernels' arithmetic, in torch, against the float32 predictor's on float32 states.

    The kernels read states in bfloat16, in which traces store them too, and weights in one of `dtypes`.

    Args:
        prompts: pairs of the first so many prompts (0: all).

    Returns:
        DataFrame(predictor, weights, budget, pairs, kept, worse): pairs of token and layer, how many keep their set,
        and by how much a choice falls short, at most, of the one it replaces, in probability. Sums in another order
        move last bits: where two probabilities nearly tie, a set may differ and nothing be worse.
    """
    store = TraceStore(paths.need(workspace.traces / corpus, "02_traces"))
    trace = store.split(split)
    if prompts:
        trace = trace.select(trace.prompt < prompts)
    fits = selection.read_index(workspace)
    fits = fits[(fits.seed == seed) & (fits.source == "") & (fits.horizon == horizon)].set_index("label")
    rows = []
    for label in labels:
        predictor = predictors.load(workspace.scores / fits.folder[label], store.routers)
        plain = predictor.score(trace)
        for dtype in dtypes:
            found = kernels.stored(predictor, dtype).score(trace)
            for budget in budgets:
                kept, worse = chosen(plain, found, budget)
                rows.append((label, str(dtype).removeprefix("torch."), budget, kept.numel(), int(kept.sum()), worse))
    return pd.DataFrame(rows, columns=["predictor", "weights", "budget", "pairs", "kept", "worse"])


def chosen(plain: torch.Tensor, found: torch.Tensor, budget: int) -> tuple[torch.Tensor, float]:
    """Whether scores [...,E] have the `budget` largest of `plain` ones, and by how much theirs fall short at most."""
    best, wanted = plain.topk(budget, -1)
    own = found.topk(budget, -1).indices
    kept = (wanted.sort(-1).values == own.sort(-1).values).all(-1)
    short = best - plain.gather(-1, own).sort(-1, descending=True).values
    if not short.numel() or short.isnan().any():
        raise ValueError(f"{len(short)} pairs, {int(short.isnan().sum())} NaN; needed: at least one pair, numbers only")
    return kept, max(0.0, float(short.max()))
