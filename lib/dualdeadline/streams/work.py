"""What a schedule's operations act on: expert records in host memory, slots in device memory, tokens, kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dualdeadline import kernels
from dualdeadline.schedule import COMPONENTS, DECODES, Compute, Copy, Schedule
from dualdeadline.streams.packed import Packed
from dualdeadline.streams.stages import STAGES


@dataclass(frozen=True)
class Shape:
    """Sizes of a model's experts: hidden size H, expert width F, experts per layer E, two bytes a weight."""

    name: str
    H: int
    F: int
    E: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def component_bytes(self) -> dict[str, int]:
        """Bytes of one expert's components, and of both."""
        down = self.H * self.F * self.dtype.itemsize
        return {"gate_up": 2 * down, "down": down, "expert": 3 * down}


OLMOE = Shape("olmoe", 2048, 1024, 64)
QWEN = Shape("qwen", 2048, 512, 256)


def draw_routes(shape: Shape, layers: int, tokens: int, top_k: int, seed: int) -> Tensor:
    """Uniform routes `[layers, N, K]`, distinct within a token."""
    chance = torch.rand(layers, tokens, shape.E, generator=torch.Generator().manual_seed(seed))
    return chance.topk(top_k, -1).indices


def distinct(routes: Tensor) -> tuple[int, ...]:
    """Distinct ids of routes `[N,K]`, in order of their first (token, rank)."""
    return tuple(dict.fromkeys(routes.flatten().tolist()))


class Work:
    """Experts of some layers twice, in pinned host memory and in device slots, and one batch of tokens per layer.

    One record holds an expert, gate/up before down, so that an expert is one copy and so is each component.
    Slot `layer * E + expert` belongs to that expert; whether it counts as present is the schedule's business.

    Args:
        shape: sizes. layers: layers, with different weights, tokens and routes.
        tokens: N. top_k: K, distinct experts per token.
        kernels: `fused` (Triton), `torch` (eager, as transformers' loop).
        routes: `[layers, N, K]` expert ids (default: uniform draws).
        before: callables, one per layer, for the work up to its router (default: nothing to do).
        rewind: makes that work ready for another step.

    Raises:
        ValueError: unknown kernels, routes that do not fit, K above E.
    """

    def __init__(self, shape: Shape, layers: int = 4, tokens: int = 1, top_k: int = 8, kernels: str = "fused",
                 device="cpu", seed: int = 0, routes: Tensor | None = None,
                 before: list[Callable[[], None]] | None = None, rewind: Callable[[], None] | None = None):
        if kernels not in STAGES:
            raise ValueError(f"kernels is {kernels!r}; needed: one of {', '.join(STAGES)}")
        if not 1 <= top_k <= shape.E:
            raise ValueError(f"top_k is {top_k}; needed: 1 to {shape.E} experts")
        self.shape, self.layers, self.device = shape, layers, torch.device(device)
        self.before, self.rewind = before, rewind
        self.packed: Packed | None = None
        self._experts(seed)
        self.tokens(tokens, top_k, kernels, seed, routes)

    def _experts(self, seed: int) -> None:
        """Random weights in the slots, and the same bytes in host records."""
        self._pieces: dict[tuple[int, str, bool], tuple[Tensor, Tensor]] = {}
        shape, draw = self.shape, torch.Generator(self.device).manual_seed(seed)
        size = shape.component_bytes["expert"] // shape.dtype.itemsize
        self.records = torch.empty(self.layers * shape.E, size, dtype=shape.dtype, device=self.device)
        for record in self.records.split(shape.E):
            record.normal_(0, 0.02, generator=draw)
        self.host = torch.empty(self.records.shape, dtype=shape.dtype)
        self.host = kernels.fetch.pin(self.host) if self.device.type == "cuda" else self.host
        self.host.copy_(self.records)
        cut = 2 * shape.H * shape.F
        self.parts = {"gate_up": slice(0, cut), "down": slice(cut, None), "expert": slice(None)}
        self.bank = {"gate_up": self.records[:, :cut].unflatten(1, (2 * shape.F, shape.H)),
                     "down": self.records[:, cut:].unflatten(1, (shape.H, shape.F))}

    def pack(self, pairs: Iterable[tuple[int, int]], bits: int = 3) -> dict[str, int]:
        """Encode some (layer, expert) pairs; bytes that cross the link for copies that are `encoded`."""
        self.packed = Packed(self, pairs, bits)
        self._pieces.clear()
        return self.packed.component_bytes

    @property
    def encoded(self) -> Packed:
        """The encoded experts.

        Raises:
            ValueError: there are none.
        """
        if self.packed is None:
            raise ValueError("the work has no encoded experts; needed: Work.pack")
        return self.packed

    def tokens(self, tokens: int, top_k: int, kernels: str, seed: int = 0, routes: Tensor | None = None) -> None:
        """New tokens and routes for the same experts."""
        shape, draw = self.shape, torch.Generator().manual_seed(seed + 1)
        routes = draw_routes(shape, self.layers, tokens, top_k, seed) if routes is None else routes
        if routes.shape != (self.layers, tokens, top_k) or routes.min() < 0 or routes.max() >= shape.E:
            raise ValueError(f"routes {tuple(routes.shape)} with ids {routes.min()} to {routes.max()}; needed: "
                             f"{(self.layers, tokens, top_k)} with ids 0 to {shape.E - 1}")
        self.routes = routes.long()
        x = torch.randn(self.layers, tokens, shape.H, generator=draw)
        weights = torch.rand(self.layers, tokens, top_k, generator=draw).softmax(-1)
        self.x, self.weights = x.to(self.device, shape.dtype), weights.to(self.device, shape.dtype)
        self.out = torch.zeros_like(self.x)
        self.kernels, self.stages = kernels, STAGES[kernels](self)

    def experts(self, layer: int) -> tuple[int, ...]:
        """Distinct experts of a layer, in order of their first (token, rank)."""
        return distinct(self.routes[layer])

    def prepare(self, schedule: Schedule) -> None:
        """Move what the stages look up to the device, so that issuing allocates and waits for nothing."""
        for op in schedule.ops:
            if isinstance(op, Compute) and op.stage in DECODES:
                self.encoded.prepare(op)
            elif isinstance(op, Compute) and op.stage != "before":
                self.stages.prepare(op.layer, op.experts)
                self.stages.record(op)
            elif isinstance(op, Copy):
                self._ends(op)

    def _ends(self, op: Copy) -> tuple[Tensor, Tensor]:
        """Slot and host record of a piece, or the staging of its encoded record and that record."""
        key = op.layer * self.shape.E + op.expert, op.piece, op.encoded
        size = (self.encoded if op.encoded else self.shape).component_bytes[op.piece]
        if not (0 <= op.expert < self.shape.E and 0 <= op.layer < self.layers and op.bytes == size):
            raise ValueError(f"{op} does not fit; needed: {size} bytes of one of {self.shape.E} experts in one of "
                             f"{self.layers} layers")
        if key not in self._pieces:
            row, part = key[0], self.parts[op.piece]
            self._pieces[key] = self.packed.ends(op) if op.encoded else (self.records[row, part], self.host[row, part])
        return self._pieces[key]

    def copy(self, op: Copy) -> None:
        """Copy a piece of an expert from its host record into its slot, or encoded into staging."""
        slot, source = self._ends(op)
        slot.copy_(source, non_blocking=True)

    def compute(self, op: Compute) -> None:
        if op.stage in DECODES:
            self.encoded.decode(op)
        elif op.stage != "before":
            self.stages.run(op)
        elif self.before:
            self.before[op.layer]()

    def resident(self, layer: int) -> Tensor:
        """Output [N,H] of a layer with every expert present: what each schedule must reproduce bit by bit."""
        self.stages.prepare(layer, self.experts(layer))
        self.stages.gate_up(layer, self.experts(layer))
        self.stages.down_combine(layer, self.experts(layer))
        return self.out[layer].clone()

    def forget(self, layer: int, present: Iterable[tuple[int, str]]) -> None:
        """Fill the slots of the layer's routed experts with NaN, but for what is present."""
        present = set(present)
        for expert in self.experts(layer):
            for component in COMPONENTS:
                if (expert, component) not in present:
                    self.records[layer * self.shape.E + expert, self.parts[component]].fill_(float("nan"))
        if self.packed:
            self.packed.staging.zero_()  # a decode without its copy writes zeros
        self.out[layer].fill_(float("nan"))
        self.stages.clear()
