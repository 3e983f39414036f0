"""Takes a model's routed experts out of it, and puts them back: the model's code stays as it is."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dualdeadline import models

NAME = "dualdeadline"  # our entry in transformers' experts interface
PARAMETERS = {"gate_up": "gate_up_proj", "down": "down_proj"}
BIASES = {"gate_up": "gate_up_proj_bias", "down": "down_proj_bias"}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HELD = "_dualdeadline_held"  # on an experts module whose weights never were the model's: `loading` keeps them there


@dataclass
class LayerExperts:
    """The experts of one layer.

    Attributes:
        number: of the MoE layer, from 0. module: transformers' experts module.
        parameters: by component, the model's own `[E, rows, columns]`, kept without its memory while it is taken.
        places: by component, what stands in the model instead: parameters on the meta device.
        shapes: by component, of one expert. transposed: weights are `[in, out]`. biased: `[E, out]` biases exist.
    """

    number: int
    name: str
    module: nn.Module
    transposed: bool
    biased: bool
    E: int
    dtype: torch.dtype
    shapes: dict[str, tuple[int, ...]]
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    places: dict[str, nn.Parameter] = field(default_factory=dict)

    def bytes(self, component: str) -> int:
        rows, columns = self.shapes[component]
        return rows * columns * self.dtype.itemsize

    def bias(self, component: str) -> Tensor | None:
        """Biases [E, out], which stay where the model has them."""
        return getattr(self.module, BIASES[component]) if self.biased else None

    def take(self) -> dict[str, Tensor]:
        """The weights, which the model no longer holds: a parameter without memory stands in their place.

        Of a model whose experts went past it they are what `loading` kept: weights, or their wire records.
        """
        own = {part: getattr(self.module, name) for part, name in PARAMETERS.items()}
        taken = self.module.__dict__.pop(HELD, None)
        self.parameters = own
        if taken is not None:
            empty = torch.empty(0, dtype=self.dtype)
            self.parameters = {part: nn.Parameter(empty.clone(), value.requires_grad) for part, value in own.items()}
        else:
            taken = {part: value.data for part, value in own.items()}
        for part, value in own.items():
            self.places[part] = nn.Parameter(torch.empty(value.shape, dtype=self.dtype, device="meta"), False)
            setattr(self.module, PARAMETERS[part], self.places[part])
            self.parameters[part].data = torch.empty(0, dtype=self.dtype)
        return taken

    def replaced(self) -> str | None:
        """The name of a weight that somebody put into the taken module since, or None."""
        held = self.module._parameters
        return next(
            (PARAMETERS[part] for part, own in self.places.items() if held.get(PARAMETERS[part]) is not own), None
        )

    def give(self, component: str, weights: Tensor) -> None:
        """Put weights back, in the parameter they came in."""
        value = self.parameters[component]
        value.data = weights
        self.places.pop(component, None)
        setattr(self.module, PARAMETERS[component], value)


def find(model: nn.Module, empty: bool = False) -> tuple[models.MoESpec, list[LayerExperts]]:
    """Every MoE layer's experts, checked; with `empty` those of a model that has no memory yet.

    Raises:
        ValueError: no MoE layer, an unknown family, training mode, weights on several devices or already offloaded,
            adapters on experts, quantised or ungated experts.
    """
    if model.training:
        raise ValueError("the model is in training mode; needed: model.eval(), offloaded experts have no gradients")
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        raise ValueError(f"the model is spread over {model.hf_device_map}; needed: one device, or the CPU")
    if hasattr(model, "dualdeadline"):
        raise ValueError("the model's experts are offloaded already; needed: model.dualdeadline.remove() first")
    if getattr(model, "is_quantized", False):
        raise ValueError("the model is quantised; needed: bfloat16, float16 or float32 experts")
    if getattr(model, "peft_config", None) or type(model).__module__.startswith("peft"):
        raise ValueError("the model has adapters; needed: merge them (merge_and_unload) before offloading")
    spec = models.describe(model)
    return spec, [_experts(number, layer, spec, empty) for number, layer in enumerate(spec.layers)]


def _experts(number: int, layer: models.MoELayer, spec: models.MoESpec, empty: bool) -> LayerExperts:
    module, name = layer.experts, f"{layer.name}: {type(layer.experts).__name__}"
    biased, transposed = bool(module.has_bias), bool(module.is_transposed)
    if not module.has_gate:
        raise ValueError(f"{name} has no gate; needed: gated experts (gate, up and down)")
    wanted = {*PARAMETERS.values(), *(BIASES.values() if biased else ())}
    found = {key for key, _ in [*module.named_parameters(), *module.named_buffers()]}
    if found != wanted or hasattr(module, "parametrizations"):
        raise ValueError(f"{name} holds {sorted(found)}; needed: {sorted(wanted)} alone (no adapters, no quantisation)")
    kinds = {getattr(module, key).dtype for key in wanted}
    if len(kinds) > 1 or not kinds <= set(DTYPES):
        raise ValueError(f"{name} has weights of {kinds}; needed: one of {DTYPES}")
    if any(getattr(module, key).is_meta for key in wanted) and not empty and HELD not in module.__dict__:
        raise ValueError(f"{name} has weights on the meta device; needed: weights that are loaded")
    shapes = {part: tuple(getattr(module, key).shape[1:]) for part, key in PARAMETERS.items()}
    return LayerExperts(number, layer.name, module, transposed, biased, spec.E, kinds.pop(), shapes)


def fits_fused(layer: LayerExperts) -> str | None:
    """Why the fused kernels cannot compute a layer's experts, or None if they can."""
    if layer.transposed or layer.biased or not layer.module.is_concatenated:
        return "experts are transposed, biased or interleaved; the fused kernels read plain [gate; up] rows"
    if layer.dtype not in (torch.bfloat16, torch.float32):
        return f"experts are {layer.dtype}; the fused kernels read bfloat16 or float32"
    H, F = layer.shapes["down"]
    if H % 16 or F % 16:
        return f"H is {H}, F is {F}; the fused kernels need multiples of 16"
    sample = torch.linspace(-6, 6, 64).reshape(2, 32)
    gate, up = sample.chunk(2, -1)
    if not torch.allclose(layer.module._apply_gate(sample), nn.functional.silu(gate) * up):
        return "the activation is not silu(gate) * up"
    return None


def move(model: nn.Module, device: torch.device, moved: list[tuple[Tensor, torch.device]]) -> None:
    """Everything that is in memory to one device (experts are not any more); notes what moved, and where it was."""
    for value in itertools.chain(model.parameters(), model.buffers()):
        if not value.is_meta and value.device != device:
            moved.append((value, value.device))
            value.data = value.data.to(device)
