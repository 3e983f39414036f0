"""Gate-ahead with a learned low-rank residual: our predictor."""

from __future__ import annotations

import torch
from torch import Tensor

from dualdeadline.predictors.base import View, membership
from dualdeadline.predictors.gate_ahead import RouterAhead
from dualdeadline.predictors.learned import Learned, dense, shared_mlp_size

FEATURES = ("state", "routes", "previous")


class ResidualGate(Learned, RouterAhead):
    """The target layer's router on the source state, plus what a low-rank map knows that the router cannot.

    logits = gain_l * gate_ahead + bias_l + up_l (down_l x + mix_l w)

    x is the source state at unit scale, w [E] the routing weights of the experts the source layer just chose:
    their outputs reach the target layer's input, and gate-ahead does not see them. `up` starts at zero, so that
    training starts from gate-ahead. Parameters never exceed those of a SharedMLP at the same H, E, L.
    """

    name = "residual_gate"
    sources = (*Learned.sources, "rank", "features")

    def __init__(self, *args, loss="both", rank: int = 0, features=("state", "routes"), **kwargs):
        super().__init__(*args, loss=loss, **kwargs)
        unknown = set(features) - set(FEATURES)
        if unknown:
            raise ValueError(f"features has {sorted(unknown)}; needed: some of {', '.join(FEATURES)}")
        self.rank, self.features = rank, tuple(features)

    def initial(self, draw: torch.Generator) -> dict[str, Tensor]:
        count, rank = self.L - self.horizon, self.rank or self._largest_rank()
        table = {"gain": torch.ones(count), "bias": torch.zeros(count, self.E),
                 "up": torch.zeros(count, rank, self.E)}
        if "state" in self.features:
            table["down"] = dense(draw, count, rank, self.H).transpose(1, 2).contiguous()
        if "routes" in self.features:
            table["mix"] = dense(draw, count, rank, self.E).transpose(1, 2).contiguous()
        if "previous" in self.features:
            table["stay"] = torch.zeros(count)
        return table

    def _largest_rank(self) -> int:
        """Largest rank whose parameters, calibration included, stay within a SharedMLP's."""
        count = self.L - self.horizon
        per_rank = count * (self.E + self.H * ("state" in self.features) + self.E * ("routes" in self.features))
        return max(1, (shared_mlp_size(self.H, self.E, self.L) - count * (self.E + 4)) // per_rank)

    def teach(self, router_logits: Tensor, layer: slice) -> Tensor:
        return self.order(router_logits, layer)

    def inputs(self, view: View) -> dict[str, Tensor]:
        unit = self.unit(view)
        found = {"ahead": self.gate(unit, self.target(view.layer))}
        if "state" in self.features:
            found["state"] = unit
        if "routes" in self.features:
            found["routes"] = self._weights(view, unit)
        if "previous" in self.features:
            found["previous"] = membership(view.previous, self.E)
        return found

    def forward(self, inputs: dict[str, Tensor], layer: slice) -> Tensor:
        t = {key: value[layer] for key, value in self.table.items()}
        narrow = sum(inputs[name] @ t[key] for name, key in (("state", "down"), ("routes", "mix")) if name in inputs)
        logits = inputs["ahead"] * t["gain"][:, None, None] + t["bias"][:, None] + narrow @ t["up"]
        return logits + t["stay"][:, None, None] * inputs["previous"] if "previous" in inputs else logits

    def _weights(self, view: View, unit: Tensor) -> Tensor:
        """Routing weights [G,N,E] of the experts the source layer chose, zero elsewhere."""
        if not self.horizon:  # the router of this layer has not run
            return membership(view.ids, self.E)
        scores = self.routers.probabilities(self.gate(unit, view.layer))
        return scores * membership(view.ids, self.E)
