"""Expert store on an SSD: a file with one record per expert, below slots of host memory and of the device."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dualdeadline.schedule import COMPONENTS
from dualdeadline.store import sources
from dualdeadline.store.fetching import Fetching
from dualdeadline.store.layout import convert
from dualdeadline.store.options import SsdOptions
from dualdeadline.store.pages import Memory, as_bytes

if TYPE_CHECKING:
    from dualdeadline.engine.surgery import LayerExperts


class SsdStore(Fetching):
    """All layers' experts in a file; the model's own weights are given up.

    Args:
        layers: of `surgery.find`; their modules are emptied. folder: with a finished conversion of exactly these
            experts, or an unfinished or empty one, which is finished first. coded: wire records. device: of the slots.

    Raises:
        ValueError: other experts in the folder, or options that do not fit. OSError: no room for the conversion.
        RuntimeError: host memory for a GPU cannot be pinned.
    """

    why_not = ""

    def __init__(self, layers: Sequence[LayerExperts], folder: Path, coded: bool, device, options: SsdOptions):
        if options.exclusive and coded:
            raise ValueError("exclusive host slots with wire 'coded': slots hold weights; needed: inclusive, or raw")
        self.layers = list(layers)
        source = sources.ModelExperts(self.layers)
        layout = convert(source, folder, "coded" if coded else "raw")
        super().__init__(layout, options, Memory(torch.device(device).type == "cuda"))
        weakref.finalize(self, self.reader.leave)  # a model that is dropped without `remove` leaves no threads
        self.devices = [source.whole(number, "down").device for number in range(source.L)]
        for layer in self.layers:
            layer.take()

    def bytes(self, component: str, layer: int = 0) -> int:
        """Bytes of a component as it is stored; of the longest one, if they differ."""
        return self.layout.part_bytes[component]

    def weights(self, component: str, layer: int, expert: int) -> Tensor:
        """One expert's weights on the CPU, read from the file.

        Raises:
            ValueError: a record is damaged. OSError: it cannot be read.
        """
        place = self.layout.record(layer, expert)
        data = Memory().new(place.parts[component].padded)
        self.reader.submit(place, {component: as_bytes(data)}).result()
        return self.tensor(component, data[: place.parts[component].nbytes]).clone()

    def whole(self, component: str, layer: int) -> Tensor:
        """All experts' weights `[E, rows, columns]` of a layer on the CPU. Raises as `weights`."""
        return torch.stack([self.weights(component, layer, expert) for expert in range(self.layout.E)])

    def give_back(self) -> None:
        """Return every layer's weights to its module, from the file, on the device they came from."""
        for layer, device in zip(self.layers, self.devices):
            for part in [part for part in COMPONENTS if part in layer.places]:  # not those of an earlier attempt
                layer.give(part, self.whole(part, layer.number).to(device))
        self.close()

    def close(self) -> None:
        self.reader.close()
        self.memory.close()
