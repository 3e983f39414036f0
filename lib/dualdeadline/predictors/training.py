"""Fits a predictor by gradient descent: seeded mini-batches, one-cycle rate, best epoch on held prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm.auto import tqdm

from dualdeadline.predictors.base import membership

BLOCK = 2048  # tokens whose inputs are made ready at once; mini-batches are cut from it
SMALL_BYTES = 2**27  # of all float32 inputs of a fit; two fits run side by side, each with as much again in targets


@dataclass(frozen=True)
class Batch:
    """Inputs [G,N,...] of a predictor's `forward` and what it should say: ranks and teacher [G,N,E].

    rank: 0 where not routed, else K for the first in rank order down to 1 for the last.
    """

    inputs: dict[str, Tensor]
    rank: Tensor
    teacher: Tensor
    routed: int

    def take(self, rows: Tensor) -> Batch:
        """The batch of some rows N."""
        inputs = {key: value[:, rows] for key, value in self.inputs.items()}
        return Batch(inputs, self.rank[:, rows], self.teacher[:, rows], self.routed)

    def cut(self, size: int):
        """Mini-batches of `size` tokens."""
        for start in range(0, self.rank.shape[1], size):
            part = slice(start, start + size)
            inputs = {key: value[:, part] for key, value in self.inputs.items()}
            yield Batch(inputs, self.rank[:, part], self.teacher[:, part], self.routed)


def bce(logits: Tensor, batch: Batch) -> Tensor:
    """Binary cross-entropy of every expert against 'is routed', summed over experts, mean over rows."""
    return _bce(logits, batch, None)


def kl(logits: Tensor, batch: Batch) -> Tensor:
    """Kullback-Leibler divergence from the router's own distribution over all experts (less its entropy)."""
    return -(batch.teacher * logits.log_softmax(-1)).sum(-1).mean()


def deadline(logits: Tensor, batch: Batch) -> Tensor:
    """Binary cross-entropy whose routed experts weigh by slack: the first in rank order is computed first.

    Weights fall linearly from 2K/(K+1) at rank 0 to 2/(K+1), mean 1; experts not routed weigh 1.
    """
    return _bce(logits, batch, torch.where(batch.rank > 0, 2 * batch.rank / (batch.routed + 1), 1))


def both(logits: Tensor, batch: Batch) -> Tensor:
    """`kl` for the order of all experts and a little `bce` for the cut at K."""
    return kl(logits, batch) + 0.1 * bce(logits, batch)


def _bce(logits: Tensor, batch: Batch, weight: Tensor | None) -> Tensor:
    routed = (batch.rank > 0).float()
    total = F.binary_cross_entropy_with_logits(logits, routed, weight, reduction="sum")
    return total / (logits.shape[0] * logits.shape[1])


LOSSES = {"bce": bce, "kl": kl, "deadline": deadline, "both": both}


def train(predictor, trace, rows: Tensor, held: Tensor, labels: Tensor) -> None:
    """Move `predictor.table` to the values of the epoch that does best on the held rows.

    Args:
        predictor: gives `inputs(view)`, `forward(inputs, layer)`, `loss`, `epochs`, `batch`, `rate`, `decay`.
        rows, held: rows of the trace to fit on and to choose the epoch by.
        labels: row whose routes are the target of each row of `rows`.
    """
    draw = torch.Generator().manual_seed(predictor.seed)
    weights = [value.requires_grad_() for value in predictor.table.values()]
    optimizer = torch.optim.AdamW(weights, lr=predictor.rate, weight_decay=predictor.decay, fused=True)
    per_epoch = sum(math.ceil(len(part) / predictor.batch) for part in rows.split(BLOCK))
    steps, step = predictor.epochs * per_epoch, 0
    loss = _Loss(predictor)
    kept, best = {}, math.inf
    held_batches = [ready(predictor, trace, part, part) for part in held.split(BLOCK)]
    whole = ready(predictor, trace, rows, labels) if _is_small(trace, rows) else None
    for _ in tqdm(range(predictor.epochs), desc=predictor.name, leave=False, disable=None):
        for block in torch.randperm(len(rows), generator=draw).split(BLOCK):
            made = whole.take(block) if whole else ready(predictor, trace, rows[block], labels[block])
            for batch in made.cut(predictor.batch):
                optimizer.param_groups[0]["lr"] = predictor.rate * _cycle(step / steps)
                optimizer.zero_grad(set_to_none=True)
                loss(batch).backward()
                optimizer.step()
                step += 1
        with torch.no_grad():
            now = sum(float(loss(batch)) * batch.rank.shape[1] for batch in held_batches)
        if now < best or not kept:
            best, kept = now, {key: value.detach().clone() for key, value in predictor.table.items()}
    predictor.table = kept


def _is_small(trace, rows: Tensor) -> bool:
    """Whether the inputs of all rows fit into memory at once, and need not be made anew in every epoch."""
    return rows.numel() * trace.router_input[0].numel() * 4 <= SMALL_BYTES


class _Loss:
    def __init__(self, predictor):
        self.predictor, self.function = predictor, LOSSES[predictor.loss]

    def __call__(self, batch: Batch) -> Tensor:
        layers = slice(0, batch.rank.shape[0])
        return self.function(self.predictor.forward(batch.inputs, layers), batch)


@torch.no_grad()
def ready(predictor, trace, rows: Tensor, labels: Tensor) -> Batch:
    """The batch of some rows with the routes and router logits of `labels` as its targets."""
    view = predictor._look(trace, rows)
    ids = trace.routes[labels, predictor.horizon:].long().transpose(0, 1).to(view.state.device)
    logits = trace.router_logits[labels, predictor.horizon:].float().transpose(0, 1).to(view.state.device)
    count = ids.shape[-1]
    rank = membership(ids, predictor.E, torch.arange(count, 0, -1, device=ids.device))
    teacher = predictor.teach(logits, predictor.target(view.layer)).softmax(-1)
    return Batch(predictor.inputs(view), rank, teacher, count)


def _cycle(share: float) -> float:
    """Learning-rate factor: linear warm-up over the first tenth, then a cosine to zero."""
    return share / 0.1 if share < 0.1 else 0.5 * (1 + math.cos(math.pi * (share - 0.1) / 0.9))
