"""The predictor kernel against its torch reference, on pairs of token and layer that no fit has seen."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dualdeadline.kernels import predictor as kernels

SIDE_BY_SIDE = kernels.MAX_TOKENS  # prompts that one launch serves
INTERPRETED = kernels.Tiles(rows=128)  # few programs: the interpreter runs them one after another


@dataclass(frozen=True)
class Compared:
    """pairs: of token and target layer, compared and held out; difference: the largest of a probability, or by
    which the reference's choice beats the kernel's."""

    pairs: int
    held_out: int
    difference: float

    @property
    def share(self) -> float:
        """Of the held-out pairs, those compared."""
        return self.pairs / self.held_out


def compare(predictor, trace, device, prompts: int = 0, steps: int = 0, k: int = 8) -> Compared:
    """Step the kernel through whole prompts and compare what it gives with `predictor.score`.

    Where probabilities tie, the kernel may name another expert; it may not name a worse one.

    Args:
        predictor: a fitted SharedMLP, GateAhead or ResidualGate, horizon at least 1.
        trace: held-out decode steps.
        prompts, steps: only the first so many prompts, and of each the first so many decode steps (0: all).
        k: experts that a launch names.

    Raises:
        ValueError: a predictor at horizon 0.
    """
    if predictor.horizon < 1:
        raise ValueError(f"horizon is {predictor.horizon}; needed: at least 1")
    expected = predictor.score(trace)  # [T, L-h, E]
    rows = [list(range(start, start + int(count))) for start, count in zip(trace.prompt_starts, trace.lengths) if count]
    held_out = expected.shape[0] * expected.shape[1]
    rows = [part[: steps or None] for part in rows[: prompts or None]]
    tiles = INTERPRETED if torch.device(device).type == "cpu" else None
    worst, pairs = 0.0, 0
    for start in range(0, len(rows), SIDE_BY_SIDE):
        group = rows[start : start + SIDE_BY_SIDE]
        fused = kernels.Fused(predictor, device, len(group), min(k, predictor.E), tiles=tiles)
        for step in range(max(map(len, group))):
            here = torch.tensor(
                [part[min(step, len(part) - 1)] for part in group]
            )  # a prompt that has ended stands still
            alive = torch.tensor([step < len(part) for part in group])
            found, count = _one_token(fused, trace.router_input[here], expected[here], alive)
            worst, pairs = max(worst, found), pairs + count
    return Compared(pairs, held_out, worst)


def _one_token(fused, states: Tensor, expected: Tensor, alive: Tensor) -> tuple[float, int]:
    """Largest difference of one token's layers, states [N,L,H] and probabilities [N,L-h,E], and pairs compared."""
    p, worst = fused.prepared, 0.0
    for layer in range(p.L):
        got = fused.step(layer, states[:, layer].contiguous().to(fused.device))
        if got is not None:
            ids, chances = (value.cpu()[alive] for value in got)
            worst = max(worst, difference(ids.long(), chances, expected[alive, layer]))
    return worst, int(alive.sum()) * (p.L - p.horizon)


def difference(ids: Tensor, chances: Tensor, expected: Tensor) -> float:
    """How far ids [N,k] and probabilities [N,k] of a kernel are from expected probabilities [N,E].

    The larger of: a probability's distance from the reference's for that expert, and how much less probable the
    n-th named expert is, by the reference, than the n-th best. Infinite where an id repeats or is none, or a
    probability is NaN.
    """
    if ids.numel() == 0:
        return 0.0
    distinct = (ids.sort(-1).values.diff(dim=-1) > 0).all()
    if not distinct or ids.min() < 0 or ids.max() >= expected.shape[-1] or not torch.isfinite(chances).all():
        return float("inf")
    named = expected.gather(-1, ids)
    best = expected.topk(ids.shape[-1], -1).values
    return float(torch.maximum((chances - named).abs(), best - named.sort(-1, descending=True).values).max())
