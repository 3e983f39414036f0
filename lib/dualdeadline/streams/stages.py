"""The expert stages of a schedule on one `Work`: with our fused kernels, or in eager torch."""

from __future__ import annotations

import torch
from torch import Tensor

from dualdeadline.kernels import experts, grouped
from dualdeadline.schedule import Compute
from dualdeadline.streams.bench import graph


class Stages:
    """Gate/up, down and combine for some experts of a layer; partial results lie in a workspace."""

    def __init__(self, work):
        self.work = work
        layers, tokens, top_k = work.routes.shape
        first = torch.arange(layers)[:, None, None] * work.shape.E
        self.slots = (work.routes + first).int().to(work.device)
        self.looked_up: dict = {}
        self.hidden = torch.empty(tokens, top_k, work.shape.F, dtype=work.shape.dtype, device=work.device)
        self.partial = torch.empty(tokens, top_k, work.shape.H, device=work.device)

    def record(self, op: Compute) -> None:
        """Make an operation cheap to launch; eager torch has nothing to make."""

    def run(self, op: Compute) -> None:
        getattr(self, op.stage)(op.layer, op.experts)

    def clear(self) -> None:
        """Fill the workspace with NaN, so that a stage that was left out shows in the output."""
        self.hidden.fill_(float("nan"))
        self.partial.fill_(float("nan"))


class Fused(Stages):
    """Triton kernels; up to 8 tokens by pair of token and rank, above by rows of one expert."""

    def __init__(self, work):
        super().__init__(work)
        self.bank, self.replays = work.bank, {}
        self.few = work.x.shape[1] <= experts.MAX_TOKENS

    def prepare(self, layer: int, chosen: tuple[int, ...]) -> None:
        key = layer, chosen
        if key not in self.looked_up:
            routes, pick = self.work.routes[layer].flatten(), torch.tensor(chosen)
            whole = set(chosen) >= set(routes.tolist())
            if self.few:
                pairs = torch.isin(routes, pick).nonzero()[:, 0].int().to(self.work.device)
                self.looked_up[key] = None if whole else pairs
            else:
                if (layer,) not in self.looked_up:
                    self.looked_up[layer,] = grouped.plan(self.slots[layer], len(self.bank["down"]))
                only = grouped.mask((pick + layer * self.work.shape.E).int(), len(self.bank["down"]))
                self.looked_up[key] = self.looked_up[layer,], None if whole else only.to(self.work.device)

    def record(self, op: Compute) -> None:
        """Capture the operation's launches: the host then replays them in microseconds, without Triton's own cost."""
        key = op.layer, op.stage, op.experts
        if self.work.device.type == "cuda" and key not in self.replays:
            self.replays[key] = graph(lambda: super(Fused, self).run(op))

    def run(self, op: Compute) -> None:
        """Replay a recorded operation; inside a capture, launch its kernels."""
        replay = self.replays.get((op.layer, op.stage, op.experts))
        if replay is None or torch.cuda.is_current_stream_capturing():
            super().run(op)
        else:
            replay()

    def gate_up(self, layer: int, chosen: tuple[int, ...]) -> None:
        x, bank, found = self.work.x[layer], self.bank["gate_up"], self.looked_up[layer, chosen]
        if self.few:
            experts.gate_up(x, bank, self.slots[layer], self.hidden, found)
        else:
            grouped.gate_up(x, bank, *found, out=self.hidden)

    def down(self, layer: int, chosen: tuple[int, ...]) -> None:
        bank, found = self.bank["down"], self.looked_up[layer, chosen]
        if self.few:
            experts.down(self.hidden, bank, self.slots[layer], self.partial, found)
        else:
            grouped.down(self.hidden, bank, *found, out=self.partial)

    def combine(self, layer: int, chosen: tuple[int, ...]) -> None:
        experts.combine(self.partial, self.work.weights[layer], self.work.out[layer])

    def down_combine(self, layer: int, chosen: tuple[int, ...]) -> None:
        if self.few:
            weights, out = self.work.weights[layer], self.work.out[layer]
            experts.down_combine(self.hidden, self.bank["down"], self.slots[layer], weights, out)
        else:
            self.down(layer, chosen)
            self.combine(layer, chosen)


class Eager(Stages):
    """One expert at a time over all its tokens in plain torch, as transformers' eager loop computes them."""

    def prepare(self, layer: int, chosen: tuple[int, ...]) -> None:
        for expert in chosen:
            if (layer, expert) not in self.looked_up:
                token, rank = (self.work.routes[layer] == expert).nonzero(as_tuple=True)
                self.looked_up[layer, expert] = token.to(self.work.device), rank.to(self.work.device)

    def _each(self, layer: int, chosen: tuple[int, ...]):
        for expert in chosen:
            yield layer * self.work.shape.E + expert, *self.looked_up[layer, expert]

    def gate_up(self, layer: int, chosen: tuple[int, ...]) -> None:
        for slot, token, rank in self._each(layer, chosen):
            self.hidden[token, rank] = experts.torch_gate_up(self.work.x[layer][token], self.work.bank["gate_up"][slot])

    def down(self, layer: int, chosen: tuple[int, ...]) -> None:
        for slot, token, rank in self._each(layer, chosen):
            self.partial[token, rank] = experts.torch_down(
                self.hidden[token, rank], self.work.bank["down"][slot]
            ).float()

    def combine(self, layer: int, chosen: tuple[int, ...]) -> None:
        weighted: Tensor = self.partial.to(self.work.shape.dtype) * self.work.weights[layer][..., None]
        total = torch.zeros_like(self.work.out[layer])
        for rank in range(weighted.shape[1]):
            total += weighted[:, rank]
        self.work.out[layer].copy_(total)

    def down_combine(self, layer: int, chosen: tuple[int, ...]) -> None:
        self.down(layer, chosen)
        self.combine(layer, chosen)


STAGES = {"fused": Fused, "torch": Eager}
