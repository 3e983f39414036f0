"""Gate-ahead: the target layer's own router on the source layer's state. No training.

Known from expert offloading (Eliseev and Mazur, "Fast inference of Mixture-of-Experts language models with
offloading", 2023, section 3.2), where the next layer's gate is applied to the current layer's hidden states.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dualdeadline.predictors.base import Predictor, View

TINY = 1e-6


def unit_state(state: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    """State [G,N,H] scaled to unit root mean square, after undoing a norm's factor [G,H] where one is given.

    A router input is factor * x / rms(x); dividing by the factor leaves the direction the next norm would see.
    Channels whose factor is 0 are lost and stay 0.
    """
    if norm is not None:
        norm = norm[:, None]
        state = torch.where(norm.abs() > TINY, state / torch.where(norm.abs() > TINY, norm, 1), 0)
    return state * torch.rsqrt(state.square().mean(-1, keepdim=True) + max(eps, 1e-12))


class RouterAhead(Predictor):
    """A predictor that applies the model's routers, which must be known when it is fitted or scores."""

    def _shape(self, trace) -> None:
        super()._shape(trace)
        self._need_routers()

    def _fitted(self) -> None:
        super()._fitted()
        self._need_routers()

    def _need_routers(self) -> None:
        if self.routers is None:
            raise ValueError(f"{self.name} applies the model's routers; needed: routers=store.routers")

    def unit(self, state: Tensor, layer: slice) -> Tensor:
        """States [G,N,H] of G layers at unit scale, free of those layers' norm factors.

        At horizon 0 the states are layer-start states, which no factor has touched.
        """
        norm = self._router("norm", layer, state) if self.horizon else None
        return unit_state(state, norm, self.routers.eps)

    def gate(self, unit: Tensor, layer: slice) -> Tensor:
        """Router logits [G,N,E] of G layers for unit states [G,N,H], ordered as experts are chosen."""
        norm, weight, bias = (self._router(name, layer, unit) for name in ("norm", "weight", "bias"))
        # a router without a norm of its own was fed unnormalised states: their scale is lost, order is not
        logits = (unit if norm is None else unit * norm[:, None]) @ weight.transpose(1, 2)
        return self.order(logits if bias is None else logits + bias[:, None], layer)

    def order(self, logits: Tensor, layer: slice) -> Tensor:
        """Logits [G,N,E] in the order experts are chosen: with the correction of sigmoid routers, as log scores."""
        correction = self._router("correction", layer, logits)
        if correction is None:
            return logits
        return (self.routers.probabilities(logits) + correction[:, None]).clamp(min=TINY).log()

    def _router(self, name: str, layer: slice, like: Tensor) -> Tensor | None:
        value = getattr(self.routers, name, None)
        return None if value is None else value[layer].to(like.device, torch.float32)


class GateAhead(RouterAhead):
    """Router of layer l+h on the router input of layer l, its norm factor exchanged for that of layer l+h."""

    name = "gate_ahead"

    def logits(self, view: View) -> Tensor:
        """[G,N,E]: logits of the target layer's router."""
        return self.gate(self.unit(view.state, view.layer), self.target(view.layer))
