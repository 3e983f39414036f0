"""Predictors that count or copy: the field a learned one has to beat, and the two ends of the scale."""

from __future__ import annotations

import torch
from torch import Tensor

from dualdeadline.predictors.base import Predictor, View, membership


class Random(Predictor):
    """Chance: scores drawn from a hash of seed, layer and the ids seen, so that a step repeats its draw."""

    name = "random"

    def logits(self, view: View) -> Tensor:
        """[G,N,E] uniform in [0, 1)."""
        base = torch.arange(1, view.ids.shape[-1] + 1, device=view.ids.device)
        layer = torch.arange(view.layer.start + 1, view.layer.stop + 1, device=view.ids.device)
        key = _mix((_mix(view.ids + 2) * base).sum(-1) + _mix(layer + 1000 * self.seed)[:, None])
        experts = torch.arange(self.E, device=view.ids.device)
        return (_mix(key[..., None] + _mix(experts + 7)) & 0xFFFFFF).float() / 2**24


def _mix(key: Tensor) -> Tensor:
    """Scramble int64 (SplitMix64's finaliser; arithmetic wraps, shifts keep the sign: no harm here)."""
    key = (key ^ (key >> 30)) * -4658895280553007687
    key = (key ^ (key >> 27)) * -7723592293110705685
    return key ^ (key >> 31)


class Popularity(Predictor):
    """How often each layer routed each expert in the train prompts."""

    name = "popularity"

    def learn(self, trace, rows: Tensor, held: Tensor) -> None:
        self.table["popularity"] = popularity(trace, rows, self.horizon, self.E)

    def logits(self, view: View) -> Tensor:
        """[G,N,E]: log frequency, the same for every token."""
        return self.table["popularity"][view.layer][:, None].expand(-1, view.ids.shape[1], -1)


def popularity(trace, rows: Tensor, horizon: int, experts: int) -> Tensor:
    """Log of each expert's share of tokens, [G,E], for the target layers; one token in 2 N as prior."""
    routes = trace.routes[rows, horizon:].long()
    count = torch.stack([torch.bincount(ids.flatten(), minlength=experts) for ids in routes.unbind(1)])
    return ((count + 0.5) / (len(rows) + 1)).log()


def by_rank(ids: Tensor, experts: int) -> Tensor:
    """[...,E] in [0, 1]: 1 for the first id in rank order, falling to 1/K for the last, 0 for all others."""
    count = ids.shape[-1]
    return membership(ids, experts, torch.arange(count, 0, -1, device=ids.device) / count)


class PreviousLayer(Predictor):
    """The ids the source layer routed, taken as ids of the target layer.

    Ids do not correspond between layers, so this is near chance; it is the baseline of the original study.
    """

    name = "previous_layer"

    def logits(self, view: View) -> Tensor:
        """[G,N,E]: the ids in rank order, all others level."""
        return by_rank(view.ids, self.E)


class PreviousToken(Popularity):
    """The experts the target layer routed at the previous token, in rank order, then the popular ones."""

    name = "previous_token"

    def logits(self, view: View) -> Tensor:
        """[G,N,E]: log frequency lifted above all others for ids of the previous token."""
        rank = by_rank(view.previous, self.E)
        return super().logits(view) + torch.where(rank > 0, 20 + 20 * rank, 0)  # frequencies span under 20 nats


class Transition(Popularity):
    """How often target expert j followed source expert i, averaged over the K ids of the source layer.

    `table["transition"]` [G,E,E] holds log odds against popularity; adding them up over ids is naive Bayes.
    """

    name = "transition"

    def learn(self, trace, rows: Tensor, held: Tensor) -> None:
        super().learn(trace, rows, held)
        base = self.table["popularity"].exp()
        self.table["transition"] = torch.stack([
            self._pairs(self._look(trace, part).ids, trace.routes[part, self.horizon:].long().transpose(0, 1))
            for part in rows.split(4096)
        ]).sum(0)
        joint = self.table["transition"]
        seen = joint.sum(-1, keepdim=True) / self.K  # tokens that routed i
        self.table["transition"] = ((joint + 8 * base[:, None]) / (seen + 8)).log() - base.log()[:, None]

    def _pairs(self, source: Tensor, target: Tensor) -> Tensor:
        """Joint counts [G,E,E] of source and target experts."""
        return membership(source, self.E).transpose(1, 2) @ membership(target, self.E)

    def logits(self, view: View) -> Tensor:
        """[G,N,E]: popularity plus the mean log odds of the ids seen."""
        odds = membership(view.ids, self.E) @ self.table["transition"][view.layer]
        return super().logits(view) + odds


class Oracle(Predictor):
    """The routes themselves, in rank order: the ceiling of any predictor, on any budget."""

    name = "oracle"

    def probabilities(self, view: View) -> Tensor:
        raise ValueError("the oracle reads the routes it is asked for; needed: score(trace), never online()")

    def online(self):
        """Not to be had.

        Raises:
            ValueError: always.
        """
        return self.probabilities(None)

    def _calibrate(self, trace, held: Tensor) -> None:
        """Nothing to calibrate: it is always right."""

    def score(self, trace) -> Tensor:
        """[T, L-horizon, E]: 1 for the first id in rank order, a little less for each later one, else 0."""
        self._fitted()
        ids = trace.routes[:, self.horizon:].long()
        return membership(ids, self.E, 1 - torch.arange(self.K) / 1000)
