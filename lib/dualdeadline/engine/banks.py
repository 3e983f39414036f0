"""Slots of all layers in the device's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dualdeadline.engine.surgery import LayerExperts
from dualdeadline.schedule import COMPONENTS
from dualdeadline.store import HostStore

Banks = Mapping[str, Sequence[Tensor]]  # by component, for each layer `[C, rows, columns]`


def allocate(layers: Sequence[LayerExperts], slots: Mapping[str, int], device) -> dict[str, list[Tensor]]:
    """Empty slots, so many per layer and component."""
    return {
        part: [torch.zeros(slots[part], *layer.shapes[part], dtype=layer.dtype, device=device) for layer in layers]
        for part in COMPONENTS
    }


def fill(banks: Banks, store: HostStore) -> None:
    """Every expert into the slot of its own number; there must be one for each."""
    for part in COMPONENTS:
        for layer in store.layers:
            for expert in range(layer.E):
                banks[part][layer.number][expert].copy_(store.weights(part, layer.number, expert))
