"""Routes recorded elsewhere drive a model's routers: any model's routing can be timed inside any other's layers.

Also what a captured decode step needs to know of a call and of its static cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from dualdeadline.models import MoESpec


class Driven:
    """Replaces what the routers choose by recorded routes, one recorded token per decode step.

    The step counter is a tensor on the routers' device, moved on by the last MoE layer of every forward that has one
    token per row; all rows of a batch get the same routes. After the last recorded token the first one follows.
    A forward with more tokens per row (prefill) takes the routes from the current step on, in turn, and moves nothing.
    Hooks only launch kernels, so a forward can be captured in a CUDA graph. `place` int64 [1] is the counter itself.

    Args:
        spec: of the model to drive, from `models.describe`.
        routes: int [T,L,K] expert ids.
        weights: float [T,L,K]; default: the K weights that the router computed, in their order.
        scores: float [T,L,E] recorded predictor probabilities of layer l, for `guess`.

    Raises:
        ValueError: wrong shapes or dtypes, ids out of range or repeated within a token, scores that are NaN.
    """

    def __init__(
        self,
        spec: MoESpec,
        routes: torch.Tensor,
        weights: torch.Tensor | None = None,
        scores: torch.Tensor | None = None,
    ):
        routes = torch.as_tensor(routes)
        _check(spec, routes, weights, scores)
        device = spec.layers[0].router.weight.device
        self.T, self.L, self.E = len(routes), spec.L, spec.E
        self.place = torch.zeros(1, dtype=torch.int64, device=device)
        self._routes = _by_layer(routes.long(), device)
        self._weights = None if weights is None else _by_layer(torch.as_tensor(weights), device)
        self._ranked = None if scores is None else Ranked(torch.as_tensor(scores), device)
        self._tokens = 1  # per row, of the forward that runs
        self._handles = []
        for number, layer in enumerate(spec.layers):
            self._handles += [
                layer.decoder.register_forward_pre_hook(self._on_layer, with_kwargs=True),
                layer.router.register_forward_hook(self._on_router(number)),
            ]

    def rewind(self, step: int = 0) -> None:
        """Let the next forward use the routes of token `step`."""
        self.place.fill_(step % self.T)

    def remove(self) -> None:
        """Take the hooks off; the routers choose by themselves again."""
        while self._handles:
            self._handles.pop().remove()

    def guess(self, layer: int, top: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The most probable experts of a layer in the current step: ids int32 [1,top], probabilities float32 [1,top].

        Equal probabilities are in ascending id. The current step ends when the last MoE layer's router has run; in code
        that is compiled whole, perhaps as soon as all routes have been looked up.

        Raises:
            ValueError: no scores were given, or `layer` or `top` is out of range.
        """
        if self._ranked is None:
            raise ValueError("Driven has no scores; needed: scores float [T,L,E]")
        if not (0 <= layer < self.L and 1 <= top <= self.E):
            raise ValueError(f"layer is {layer}, top is {top}; needed: layer 0 to {self.L - 1}, top 1 to {self.E}")
        return self._ranked.at(self.place, layer, top)

    def _on_layer(self, module, args: tuple, kwargs: dict) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]  # [N, tokens per row, H]
        self._tokens = hidden.shape[1]

    def _on_router(self, number: int):
        def hook(module, args: tuple, output: tuple) -> tuple:
            # (logits, weights, ids) or (ids, weights, logits)
            found = [at for at, value in enumerate(output) if not value.is_floating_point()]
            if len(output) != 3 or len(found) != 1 or found[0] == 1:
                kinds = [value.dtype for value in output]
                raise ValueError(f"{type(module).__name__} returns {kinds}; needed: integer ids, first or last of 3")
            replaced = list(output)
            for at, table in ((found[0], self._routes), (1, self._weights)):
                if table is not None:
                    replaced[at] = self._rows(table[number], len(output[at])).to(output[at].dtype)
            if number == self.L - 1 and self._tokens == 1:
                self.place.add_(1).remainder_(self.T)
            return tuple(replaced)

        return hook

    def _rows(self, table: torch.Tensor, rows: int) -> torch.Tensor:
        """Rows of a layer's table `[T,K]` for `rows` tokens, every batch row alike."""
        index = self.place
        if self._tokens > 1:
            index = (index + torch.arange(self._tokens, device=index.device)) % self.T
        return table.index_select(0, index).repeat(rows // self._tokens, 1)


class Ranked:
    """Recorded scores [T,L,E], sorted once, so that a step's largest are looked up on the device."""

    def __init__(self, scores: torch.Tensor, device: torch.device):
        found = scores.float().sort(dim=-1, descending=True, stable=True)
        self.ids, self.values = _by_layer(found.indices.int(), device), _by_layer(found.values, device)

    def at(self, place: torch.Tensor, layer: int, top: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids int32 and scores float32 [1,top] of a layer at the step `place` int64 [1], by falling score."""
        return self.ids[layer].index_select(0, place)[:, :top], self.values[layer].index_select(0, place)[:, :top]


def _by_layer(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    return values.transpose(0, 1).contiguous().to(device)  # [L,T,...]


def _check(spec: MoESpec, routes: torch.Tensor, weights, scores) -> None:
    if routes.dim() != 3 or routes.shape[1:] != (spec.L, spec.K) or not len(routes) or routes.is_floating_point():
        raise ValueError(
            f"routes are {routes.dtype} {list(routes.shape)}; " f"needed: integers [T >= 1, {spec.L}, {spec.K}]"
        )
    low, high = int(routes.min()), int(routes.max())
    if low < 0 or high >= spec.E:
        raise ValueError(f"routes hold ids {low} to {high}; needed: 0 to {spec.E - 1}")
    ordered = routes.sort(-1).values
    repeated = (ordered[..., 1:] == ordered[..., :-1]).any(-1).nonzero()
    if len(repeated):
        token, layer = repeated[0].tolist()
        raise ValueError(
            f"routes of token {token}, layer {layer} are {routes[token, layer].tolist()}; "
            f"needed: {spec.K} different experts"
        )
    for name, value, last in (("weights", weights, spec.K), ("scores", scores, spec.E)):
        if value is None:
            continue
        value, shape = torch.as_tensor(value), [len(routes), spec.L, last]
        if list(value.shape) != shape or not value.is_floating_point():
            raise ValueError(f"{name} are {value.dtype} {list(value.shape)}; needed: floating point {shape}")
        if value.isnan().any():
            raise ValueError(f"{name} hold NaN at {value.isnan().nonzero()[0].tolist()}; needed: numbers")


# What a captured decode step (captured.py) needs of a call and of its static cache
