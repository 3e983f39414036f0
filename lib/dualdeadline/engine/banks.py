"""Slots of all layers in the device's memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dualdeadline.engine.surgery import LayerExperts
from dualdeadline.schedule import COMPONENTS
from dualdeadline.store import HostStore
from dualdeadline.store.pages import aligned

Banks = Mapping[str, Sequence[Tensor]]  # by component, for each layer `[C, rows, columns]`


def allocate(layers: Sequence[LayerExperts], slots: Mapping[str, int], device, shared: bool = False) -> dict:
    """Empty slots, so many per layer and component; shared: as many, but all layers name the same bank."""

    def bank(part: str, layer: LayerExperts, count: int) -> Tensor:
        shape = count, *layer.shapes[part]
        if torch.device(device).type == "cpu":  # where a file can be read into them directly
            return aligned(math.prod(shape) * layer.dtype.itemsize).view(layer.dtype).view(shape)
        return torch.zeros(shape, dtype=layer.dtype, device=device)

    if shared:
        return {part: [bank(part, layers[0], len(layers) * slots[part])] * len(layers) for part in COMPONENTS}
    return {part: [bank(part, layer, slots[part]) for layer in layers] for part in COMPONENTS}


def fill(banks: Banks, store: HostStore) -> None:
    """Every expert into the slot of its own number; there must be one for each."""
    for part in COMPONENTS:
        for layer in store.layers:
            for expert in range(layer.E):
                banks[part][layer.number][expert].copy_(store.weights(part, layer.number, expert))
