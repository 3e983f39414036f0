"""Least squares with a low-rank part shared by all layers and a factor per expert, from sums over tokens.

Minimises, over layers g, tokens n and experts e, the squared error of

    target[g,n,e] ~ sum_f experts[g,n,e,f] factor[g,e,f] + states[g,n] down up[g,:,e]

plus ridge penalties. `down` [D,r] is common to all layers: reduced-rank regression (Izenman, "Reduced-rank regression
for the multivariate linear model", 1975) over several regressions at once. Nothing but sums over tokens is kept, so
rows can be streamed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

ROUNDS, INNER, STEPS = 4, 3, 8  # factor <-> low rank; down <-> up inside; conjugate gradient steps for down


@dataclass(frozen=True)
class Sums:
    """Sums over tokens of products of states s [D], experts f [E,F] and target t [E], per layer.

    states: [G,D,D] s s; cross: [G,D,E,F] s f; experts: [G,E,F,F] f f; state_target: [G,D,E]; expert_target: [G,E,F];
    target: sum of t squared; count: tokens x layers x experts.
    """

    states: Tensor
    cross: Tensor
    experts: Tensor
    state_target: Tensor
    expert_target: Tensor
    target: Tensor
    count: int

    @classmethod
    def of(cls, states: Tensor, experts: Tensor, target: Tensor) -> Sums:
        """Sums of one chunk: states [G,N,D], experts [G,N,E,F], target [G,N,E]."""
        turned = states.transpose(1, 2)
        return cls(turned @ states, (turned @ experts.flatten(2)).unflatten(2, experts.shape[2:]),
                   torch.einsum("gnef,gnek->gefk", experts, experts), turned @ target,
                   torch.einsum("gnef,gne->gef", experts, target), target.square().sum(), target.numel())

    def __add__(self, other: Sums) -> Sums:
        return Sums(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


def solve(sums: Sums, rank: int, ridge: float) -> dict[str, Tensor]:
    """Table with `expert` [G,E,F] and, where D and rank are above 0, `down` [D,r] and `up` [G,r,E].

    Args:
        ridge: penalty on each weight, as a share of its input's energy.
    """
    experts, states = penalised(sums.experts, ridge), penalised(sums.states, ridge)
    low, down, up = torch.zeros_like(sums.state_target), None, None
    for _ in range(ROUNDS if rank else 1):
        left = sums.expert_target - torch.einsum("gdef,gde->gef", sums.cross, low)
        factor = torch.linalg.solve(experts, left[..., None])[..., 0]
        if not rank:
            return {"expert": factor}
        left = sums.state_target - torch.einsum("gdef,gef->gde", sums.cross, factor)
        down = first_down(states, left, rank) if down is None else down
        for _ in range(INNER):
            up = best_up(states, left, down)
            down = better_down(states, left, down, up)
        up = best_up(states, left, down)
        low = down @ up
    return {"expert": factor, "down": down, "up": up}


def penalised(gram: Tensor, ridge: float) -> Tensor:
    """Gram matrices [...,D,D] with the ridge on their diagonals."""
    energy = gram.diagonal(dim1=-2, dim2=-1)
    return gram + torch.diag_embed(ridge * energy + 1e-4 * energy.mean(-1, keepdim=True) + 1e-6)


def first_down(states: Tensor, left: Tensor, rank: int) -> Tensor:
    """[D,r]: the leading directions of all layers' full-rank solutions, in the metric of the mean gram matrix."""
    full = torch.cat(list(torch.linalg.solve(states, left)), 1)  # [D, G E]
    root = torch.linalg.cholesky(states.mean(0))
    leading = torch.linalg.svd(root.T @ full, full_matrices=False)[0][:, :rank]
    return torch.linalg.solve_triangular(root.T, leading, upper=True)


def best_up(states: Tensor, left: Tensor, down: Tensor) -> Tensor:
    """[G,r,E]: exact for a given `down`."""
    gram = down.T @ states @ down
    return torch.linalg.solve(penalised(gram, 1e-6), down.T @ left)


def better_down(states: Tensor, left: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """`down` after some conjugate-gradient steps towards the best one for a given `up`."""
    outer = up @ up.transpose(1, 2)
    rest = (left @ up.transpose(1, 2)).sum(0) - (states @ down @ outer).sum(0)
    way, size = rest, rest.square().sum()
    for _ in range(STEPS):
        bent = (states @ way @ outer).sum(0)
        step = size / (way * bent).sum().clamp(min=1e-20)
        down, rest = down + step * way, rest - step * bent
        way, size = rest + rest.square().sum() / size.clamp(min=1e-20) * way, rest.square().sum()
    return down


def error(sums: Sums, table: dict[str, Tensor]) -> float:
    """Mean squared error of a table on the tokens behind `sums`."""
    factor = table["expert"]
    total = sums.target - 2 * (factor * sums.expert_target).sum()
    total = total + torch.einsum("gef,gefk,gek->", factor, sums.experts, factor)
    if "down" in table:
        low = table["down"] @ table["up"]
        total = total - 2 * (low * sums.state_target).sum() + (low * (sums.states @ low)).sum()
        total = total + 2 * torch.einsum("gde,gdef,gef->", low, sums.cross, factor)
    return float(total) / sums.count
