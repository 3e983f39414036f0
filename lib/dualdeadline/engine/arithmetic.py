"""What one layer computes for one forward, stage by stage, from slots: in eager torch, or with the fused kernels.

Whatever the order in which experts arrive, the bits are those of the resident run: every expert's products depend on
its own tokens alone, partial results keep a place of their own, and the sum over them has one order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from dualdeadline.engine.surgery import LayerExperts
from dualdeadline.kernels import experts, grouped


class Torch:
    """Expert after expert as transformers' eager loop computes them; added in ascending id in the output's dtype.

    Args:
        layer: whose experts. banks: by component, slots `[C, rows, columns]`.
        hidden: tokens [N,H]. ids, weights: routes [N,K] of the layer's router.
    """

    def __init__(self, layer: LayerExperts, banks: Mapping[str, Tensor], hidden: Tensor, ids: Tensor, weights: Tensor):
        self.layer, self.banks, self.x, self.weights = layer, banks, hidden, weights
        self.by_rank = ids.t()  # the eager loop lists an expert's tokens by rank, then by token
        self.slots: dict[str, dict[int, int]] = {}
        self.places: dict[int, tuple[Tensor, Tensor]] = {}
        self.hidden: dict[int, Tensor] = {}
        self.weighted: dict[int, Tensor] = {}

    def wave(self, slots: Mapping[str, Mapping[int, int]]) -> None:
        """The slots of the experts that are computed next."""
        self.slots = {part: dict(found) for part, found in slots.items()}

    def _product(self, component: str, expert: int, x: Tensor) -> Tensor:
        weight, bias = self.banks[component][self.slots[component][expert]], self.layer.bias(component)
        out = x @ weight if self.layer.transposed else F.linear(x, weight)
        return out if bias is None else out + bias[expert]

    def gate_up(self, chosen: Sequence[int]) -> None:
        for expert in chosen:
            rank, token = torch.where(self.by_rank == expert)
            self.places[expert] = rank, token
            self.hidden[expert] = self.layer.module._apply_gate(self._product("gate_up", expert, self.x[token]))

    def down(self, chosen: Sequence[int]) -> None:
        for expert in chosen:
            rank, token = self.places[expert]
            out = self._product("down", expert, self.hidden.pop(expert))
            self.weighted[expert] = (out * self.weights[token, rank, None]).to(self.x.dtype)

    def finish(self) -> Tensor:
        """Output [N,H]."""
        out = torch.zeros_like(self.x)
        for expert in sorted(self.weighted):
            out.index_add_(0, self.places[expert][1], self.weighted[expert])
        return out


class Fused:
    """The Triton kernels: by pair up to 8 tokens, by rows of one expert above; sums in rank order. As `Torch`."""

    def __init__(self, layer: LayerExperts, banks: Mapping[str, Tensor], hidden: Tensor, ids: Tensor, weights: Tensor):
        self.banks, self.x, self.ids = banks, hidden.contiguous(), ids
        self.weights = weights.contiguous()
        (N, K), (H, F) = ids.shape, layer.shapes["down"]
        self.few = experts.MAX_TOKENS >= N
        self.hidden = torch.empty(N, K, F, dtype=hidden.dtype, device=hidden.device)
        self.partial = torch.empty(N, K, H, device=hidden.device)
        self.E = layer.E

    def wave(self, slots: Mapping[str, Mapping[int, int]]) -> None:
        self.slots, self.plans = {}, {}
        for part, found in slots.items():
            table = torch.full((self.E,), -1, dtype=torch.int32)
            table[list(found)] = torch.tensor(list(found.values()), dtype=torch.int32)
            self.slots[part] = table.to(self.ids.device)[self.ids.long()]
            if not self.few:
                plan, C = grouped.plan(self.slots[part], len(self.banks[part])), len(self.banks[part])
                # pairs of other waves have no slot here; the kernel would zero what those waves computed
                elsewhere = torch.where(plan.blocks == C, C + 1, plan.blocks)
                blocks = torch.stack((elsewhere[:, 0], plan.blocks[:, 1]), 1)
                self.plans[part] = replace(plan, blocks=blocks)
        self.found = slots

    def _run(self, component: str, chosen: Sequence[int], inputs: Tensor, out: Tensor) -> None:
        kernel, bank = ("gate_up" if component == "gate_up" else "down"), self.banks[component]
        if self.few:
            picked = torch.tensor(list(chosen), device=self.ids.device)
            pairs = torch.isin(self.ids.flatten(), picked).nonzero()[:, 0].int()
            getattr(experts, kernel)(inputs, bank, self.slots[component], out, pairs, check=False)
        else:
            only = torch.tensor([self.found[component][expert] for expert in chosen], dtype=torch.int32)
            mask = grouped.mask(only, len(bank)).to(bank.device)
            getattr(grouped, kernel)(inputs, bank, self.plans[component], mask, out=out)

    def gate_up(self, chosen: Sequence[int]) -> None:
        self._run("gate_up", chosen, self.x, self.hidden)

    def down(self, chosen: Sequence[int]) -> None:
        self._run("down", chosen, self.hidden, self.partial)

    def finish(self) -> Tensor:
        return experts.combine(self.partial, self.weights, dtype=self.x.dtype)


KERNELS = {"torch": Torch, "fused": Fused}
