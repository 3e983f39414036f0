"""Experts that a worker holds, and what it computes with them: each expert's weighted output, expert by expert."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn

from dualdeadline.engine.arithmetic import Torch
from dualdeadline.engine.surgery import LayerExperts, find
from dualdeadline.schedule import COMPONENTS

THREADS = 4  # that take digests at once


class Held:
    """The experts of all layers of a model.

    Args:
        layers: of `surgery.find`, or alike. weights: by component, for each layer `[E, rows, columns]`.

    Attributes:
        digests: of each layer, see `digest`.
    """

    def __init__(self, layers: Sequence[LayerExperts], weights: dict[str, list[Tensor]]):
        self.layers, self.weights = list(layers), weights
        self.own = dict.fromkeys(COMPONENTS, {n: n for n in range(max(layer.E for layer in layers))})
        self.digests = digests(self.layers, self.weights)

    @classmethod
    def of_model(cls, model: nn.Module, device="cpu") -> Held:
        """Take a model's experts out of it; the rest of the model can go."""
        _, layers = find(model)
        found: dict[str, list[Tensor]] = {part: [] for part in COMPONENTS}
        for layer in layers:
            layer.module.to(device)
            for part, value in layer.take().items():
                found[part].append(value.detach())
        return cls(layers, found)

    @classmethod
    def of_store(cls, model: nn.Module, folder: Path) -> Held:
        """Experts from a folder of records (`store.layout`), for a model without memory; every record is verified.

        Raises:
            ValueError: records of other sizes, a damaged one, or biases that only a checkpoint has.
        """
        from dualdeadline import wire
        from dualdeadline.store.layout import Layout
        from dualdeadline.store.pages import Memory, as_bytes
        from dualdeadline.store.reader import Reader

        _, layers = find(model, empty=True)
        layout, memory = Layout(folder), Memory()
        sizes = [(layer.E, layer.shapes, layer.dtype, layer.biased) for layer in layers]
        wanted = (layout.E, layout.shapes, layout.dtype, False)
        if len(layers) != layout.L or any(size != wanted for size in sizes):
            raise ValueError(
                f"{folder} has {layout.L} layers of {wanted}; the model has {len(layers)} of {sizes[0]}; "
                "needed: records of this model, whose experts have no biases"
            )
        reader, found = Reader(layout.path), {part: [] for part in COMPONENTS}
        try:
            for layer, part in itertools.product(layers, COMPONENTS):
                whole = torch.empty(layer.E, *layer.shapes[part], dtype=layer.dtype)
                for expert in range(layer.E):
                    record = layout.record(layer.number, expert)
                    data = memory.new(record.parts[part].padded)
                    reader.submit(record, {part: as_bytes(data)}).result()
                    raw = data[: record.parts[part].nbytes]
                    values = wire.decode(wire.WireRecord(raw)) if layout.coded else raw.view(layer.dtype)
                    whole[expert].copy_(values.view(layer.shapes[part]))
                found[part].append(whole)
        finally:
            reader.close()
        return cls(layers, found)

    @classmethod
    def synthetic(
        cls, sizes: Sequence[tuple[int, int, int]], dtype: torch.dtype = torch.bfloat16, seed: int = 0
    ) -> Held:
        """Random experts to measure with, one layer for each (H, F, E)."""
        draw, layers = torch.Generator().manual_seed(seed), []
        weights: dict[str, list[Tensor]] = {part: [] for part in COMPONENTS}
        for number, (H, F, E) in enumerate(sizes):
            shapes = {"gate_up": (2 * F, H), "down": (H, F)}
            layers.append(LayerExperts(number, f"layers.{number}", Silu(), False, False, E, dtype, shapes))
            for part, shape in shapes.items():
                weights[part].append(torch.empty(E, *shape, dtype=dtype).normal_(0, 0.02, generator=draw))
        return cls(layers, weights)

    @property
    def device(self) -> torch.device:
        return self.weights["down"][0].device

    @torch.no_grad()
    def compute(self, number: int, hidden: Tensor, ids: Tensor, weights: Tensor, chosen: Sequence[int]) -> Tensor:
        """Weighted outputs of some experts, one after another as `chosen` lists them: `[pairs, H]`.

        The rows of an expert are its tokens by rank, then by token, in the dtype of `hidden`.

        Args:
            hidden: [N,H]. ids, weights: routes [N,K].

        Raises:
            ValueError: a layer, shapes, dtypes or experts that do not fit.
        """
        layer = self._check(number, hidden, ids, weights, chosen)
        banks = {part: self.weights[part][number] for part in COMPONENTS}
        job = Torch(layer, banks, *(value.to(self.device) for value in (hidden, ids, weights)))
        job.wave(self.own)
        job.gate_up(chosen)
        job.down(chosen)
        found = [job.weighted[expert] for expert in chosen]
        return torch.cat(found).cpu() if found else hidden.new_empty(0, hidden.shape[1])

    def _check(self, number, hidden: Tensor, ids: Tensor, weights: Tensor, chosen) -> LayerExperts:
        if not isinstance(number, int) or not 0 <= number < len(self.layers):
            raise ValueError(f"layer is {number!r}; needed: 0 to {len(self.layers) - 1}")
        layer, H = self.layers[number], self.layers[number].shapes["down"][1 if self.layers[number].transposed else 0]
        if hidden.dim() != 2 or hidden.shape[1] != H or hidden.dtype != layer.dtype:
            raise ValueError(f"hidden is {hidden.dtype} {list(hidden.shape)}; needed: {layer.dtype} [N, {H}]")
        if ids.shape != weights.shape or ids.dim() != 2 or len(ids) != len(hidden) or ids.is_floating_point():
            raise ValueError(f"ids are {ids.dtype} {list(ids.shape)}, weights {list(weights.shape)}; needed: [N, K]")
        good = all(isinstance(expert, int) and 0 <= expert < layer.E for expert in chosen)
        if not good or len(set(chosen)) < len(chosen):
            raise ValueError(f"experts are {list(chosen)}; needed: different ones of 0 to {layer.E - 1}")
        return layer


class Silu(nn.Module):
    """The gate of most families, for experts without a model."""

    def _apply_gate(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        return nn.functional.silu(gate) * up


def digests(layers: Sequence[LayerExperts], weights: dict[str, Sequence[Tensor]]) -> list[str]:
    """SHA-256 of each layer's weights and biases, and of what its activation makes of a sample."""
    with ThreadPoolExecutor(THREADS) as pool:
        every = zip(layers, *(weights[part] for part in COMPONENTS), strict=True)
        return list(pool.map(lambda one: digest(one[0], one[1:]), every))


@torch.no_grad()
def digest(layer: LayerExperts, weights: Sequence[Tensor]) -> str:
    """As `digests`, of one layer; a worker with the same one computes the same function."""
    found = hashlib.sha256(f"{layer.transposed} {layer.biased} {layer.dtype}".encode())
    biases = [layer.bias(part) for part in COMPONENTS] if layer.biased else []
    sample = torch.linspace(-6, 6, 64).reshape(2, 32).to(layer.dtype)
    for value in (*weights, *biases, layer.module._apply_gate(sample)):
        found.update(memoryview(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()))
    return found.hexdigest()


def arithmetic(device: torch.device) -> dict[str, str]:
    """What decides the bits of a product beside its operands and the number of threads."""
    if device.type == "cuda":
        return {"torch": torch.__version__, "device": torch.cuda.get_device_name(device)}
    return {"torch": torch.__version__, "device": f"cpu, {torch.backends.cpu.get_cpu_capability()}"}
