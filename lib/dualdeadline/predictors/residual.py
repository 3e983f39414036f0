"""Gate-ahead with a learned residual: our predictor. Fitted in closed form, so it has no seed and no learning rate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dualdeadline.predictors import reduced_rank
from dualdeadline.predictors.base import Online, View, membership, previous_rows, sane, view
from dualdeadline.predictors.gate_ahead import RouterAhead
from dualdeadline.predictors.learned import shared_mlp_size

FEATURES = ("state", "previous_state", "previous", "running")
MEMORY = ("state", "told", "ahead", "mean_told", "mean_ahead")


@dataclass(frozen=True)
class Remembering(View):
    """A view with what our predictor makes of it and remembers.

    unit: [G,N,H] source state at unit scale; ahead: [G,N,E] gate-ahead logits of the target layer, centred.
    past: by `MEMORY`, of the *target* layer at earlier tokens of the prompt, 0 where there are none: its unit
    state [G,N,H], what its router said, what gate-ahead had said, and running means of these two, [G,N,E] each.
    """

    unit: Tensor
    ahead: Tensor
    past: dict[str, Tensor]


class ResidualGate(RouterAhead):
    """The target layer's router on the source state, plus what a linear map knows that the router cannot.

        logits = ahead + sum_f expert_lf * feature_f + [x, x'] down up_l

    x is the source state, x' the target layer's state at the previous token (its attention reads much the same
    context again); `down` is shared by all layers, `up` belongs to each. The features, each with one factor per
    expert and layer, are gate-ahead itself, 1, and what the router and gate-ahead said at the previous token and
    on a running mean: where gate-ahead was wrong for an expert lately, it is likely to be so again.

    Args:
        rank: columns of `down`; 0: the most that keeps the parameters, calibration included, within a SharedMLP's.
        features: some of `FEATURES`; only `state` needs no memory of earlier tokens.
        ridges: penalties tried, relative to each input's energy; held-out prompts choose.
        keep: share of the running mean that is kept at each token.
    """

    name = "residual_gate"
    sources = ("rank", "features", "ridges", "keep")

    def __init__(self, horizon=1, seed=0, routers=None, rank=0, features=FEATURES, ridges=(0.003, 0.01, 0.03, 0.1),
                 keep=0.8):
        super().__init__(horizon, seed, routers)
        unknown = set(features) - set(FEATURES)
        if unknown:
            raise ValueError(f"features has {sorted(unknown)}; needed: some of {', '.join(FEATURES)}")
        self.rank, self.features, self.ridges, self.keep = rank, tuple(features), tuple(ridges), keep

    def logits(self, view: Remembering) -> Tensor:
        """[G,N,E] router-like logits."""
        learned = (self.experts(view) * self.table["expert"][view.layer][:, None]).sum(-1)
        if "down" in self.table:
            learned = learned + (self.states(view) @ self.table["down"]) @ self.table["up"][view.layer]
        return view.ahead + learned

    def states(self, view: Remembering) -> Tensor:
        """[G,N,D]: inputs of `down`, D = 2H, H or 0."""
        parts = [("state", view.unit), ("previous_state", view.past["state"])]
        return torch.cat([view.unit[..., :0], *(value for name, value in parts if name in self.features)], -1)

    def experts(self, view: Remembering) -> Tensor:
        """[G,N,E,F]: features with a factor per expert."""
        names = ["told", "ahead"] * ("previous" in self.features)
        names += ["mean_told", "mean_ahead"] * ("running" in self.features)
        return torch.stack([view.ahead, torch.ones_like(view.ahead), *(view.past[name] for name in names)], -1)

    def learn(self, trace, rows: Tensor, held: Tensor) -> None:
        sums, test = (self._sums(trace, part) for part in (rows, held))
        rank = self.affordable_rank(sums.states.shape[-1], sums.experts.shape[-1])
        found = [reduced_rank.solve(sums, rank, ridge) for ridge in self.ridges]
        self.table = min(found, key=lambda table: reduced_rank.error(test, table))

    def _sums(self, trace, rows: Tensor) -> reduced_rank.Sums:
        """What least squares needs of some rows; the target is what the router says beyond gate-ahead."""
        total = None
        for part in self.chunks(trace, rows):
            look = self._look(trace, part)
            missed = self._told(trace, part, look) - look.ahead
            sums = reduced_rank.Sums.of(self.states(look), self.experts(look), missed)
            total = sums if total is None else total + sums
        return total

    def affordable_rank(self, width: int, kinds: int) -> int:
        """Columns of `down` for inputs of `width` and `kinds` factors per expert; see `rank` above."""
        count = self.L - self.horizon
        left = shared_mlp_size(self.H, self.E, self.L) - count * (self.E * kinds + 2)
        return min(self.rank or max(1, left // (width + count * self.E)), width, count * self.E)

    def _told(self, trace, rows: Tensor, look: View) -> Tensor:
        """Centred router logits [G,N,E] of the target layers."""
        logits = sane(trace.router_logits[rows, self.horizon:].float()).transpose(0, 1).to(look.unit.device)
        return centred(self.order(logits, self.target(look.layer)))

    def _look(self, trace, rows: Tensor) -> Remembering:
        """View of whole prompts, in order, with the memory that `Online` would have at each token."""
        seen = view(trace, rows, self.horizon).to(self.device)
        unit = self.unit(seen.state, seen.layer)
        ahead = centred(self.gate(unit, self.target(seen.layer)))
        if self.horizon:
            state = sane(trace.router_input[rows, self.horizon:].float()).transpose(0, 1).to(self.device)
            state = self.unit(state, self.target(seen.layer))
            told = centred(self.gate(state, self.target(seen.layer)))
        else:
            ids = trace.routes[rows].long().transpose(0, 1).to(self.device)
            state, told = unit, centred(membership(ids, self.E))
        past = remembered(trace.prompt[rows], self.keep, state, told, ahead)
        return Remembering(seen.layer, seen.state, seen.ids, seen.previous, unit, ahead, past)

    def online(self) -> Online:
        """As `Predictor.online`; remembers per layer one state [N,H] and four vectors [N,E] of earlier tokens."""
        self._fitted()
        return RememberingOnline(self)


def centred(logits: Tensor) -> Tensor:
    """Logits less their mean over experts, which no router's choice depends on."""
    return logits - logits.mean(-1, keepdim=True)


def remembered(prompt: Tensor, keep: float, state: Tensor, told: Tensor, ahead: Tensor) -> dict[str, Tensor]:
    """`MEMORY` before each token, from what each token left: state [G,N,H], told and ahead [G,N,E]."""
    before = previous_rows(prompt)
    first = (before < 0)[None, :, None].to(state.device)
    last = [value[:, before].masked_fill(first, 0) for value in (state, told, ahead)]
    means = [torch.zeros_like(told) for _ in range(2)]
    rows = torch.arange(len(prompt))
    place = rows - torch.where(before < 0, rows, 0).cummax(0).values  # of each row in its prompt
    for step in range(1, int(place.max()) + 1):
        now = rows[place == step]
        for mean, value in zip(means, (told, ahead)):
            mean[:, now] = keep * mean[:, now - 1] + (1 - keep) * value[:, now - 1]
    return dict(zip(MEMORY, (*last, *means)))


class RememberingOnline(Online):
    """`Online` with the memory that ResidualGate reads."""

    def __init__(self, predictor: ResidualGate):
        super().__init__(predictor)
        self._memory: dict[int, dict[str, Tensor]] = {}
        self._asked: dict[int, tuple[Tensor, Tensor]] = {}  # target layer -> unit source state, ahead

    def reset(self) -> None:
        super().reset()
        self._memory.clear()
        self._asked.clear()

    def observe(self, layer: int, state: Tensor, ids: Tensor) -> None:
        super().observe(layer, state, ids)
        guide = self.predictor
        ran = self.ran(layer)
        if ran not in self._asked:
            return
        unit, ahead = self._asked.pop(ran)
        if guide.horizon:
            unit = guide.unit(state, slice(layer, layer + 1))
            told = centred(guide.gate(unit, slice(layer, layer + 1)))
        else:
            told = centred(membership(ids[None], guide.E)).to(ahead.device)
        if ahead.shape == told.shape:  # else other sequences have come: what was asked is not about them
            self._memory[ran] = self._update(self._memory.get(ran), unit, told, ahead)

    def _update(self, old: dict | None, state: Tensor, told: Tensor, ahead: Tensor) -> dict[str, Tensor]:
        keep, new = self.predictor.keep, {"state": state, "told": told, "ahead": ahead}
        for name in ("told", "ahead"):
            mean = old[f"mean_{name}"] if old is not None and old[name].shape == told.shape else 0
            new[f"mean_{name}"] = keep * mean + (1 - keep) * new[name]
        return new

    def view(self, layer: int, state: Tensor, ids: Tensor) -> Remembering:
        guide, seen = self.predictor, super().view(layer, state, ids)
        unit = guide.unit(seen.state, seen.layer)
        ahead = centred(guide.gate(unit, guide.target(seen.layer)))
        self._asked[layer + guide.horizon] = unit, ahead
        past = self._memory.get(layer + guide.horizon)
        if past is None or past["state"].shape != unit.shape:
            past = {name: torch.zeros_like(unit if name == "state" else ahead) for name in MEMORY}
        return Remembering(seen.layer, seen.state, seen.ids, seen.previous, unit, ahead, past)
