"""Expert store on an SSD: a file with one record per expert, below slots of host memory and of the device."""

from __future__ import annotations

import weakref
from collections import deque
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
from dualdeadline.store.pages import Memory, aligned, as_bytes

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
        return self._whole([component], layer)[component]

    def _whole(self, parts: Sequence[str], layer: int) -> dict[str, Tensor]:
        """Some components of all experts of a layer, each expert's in one read, many of them in flight."""
        layout, waiting = self.layout, deque()
        out = {part: torch.empty(layout.E, *layout.shapes[part], dtype=layout.dtype) for part in parts}
        rows = [aligned(layout.largest) for _ in range(min(2 * self.options.depth, layout.E))]

        def finish() -> None:
            expert, places, row, read = waiting.popleft()
            read.result()
            for part in parts:
                place = places[part]
                out[part][expert] = self.tensor(part, row[place.start : place.start + place.nbytes])

        for expert in range(layout.E):
            if len(waiting) == len(rows):
                finish()
            record, row = layout.record(layer, expert), rows[expert % len(rows)]
            places = {part: record.parts[part] for part in parts}
            memory = {part: as_bytes(row[at.start : at.start + at.padded]) for part, at in places.items()}
            waiting.append((expert, places, row, self.reader.submit(record, memory)))
        while waiting:
            finish()
        return out

    def give_back(self) -> None:
        """Return every layer's weights to its module, from the file, on the device they came from."""
        for layer, device in zip(self.layers, self.devices):
            parts = [part for part in COMPONENTS if part in layer.places]  # not those of an earlier attempt
            for part, weights in self._whole(parts, layer.number).items() if parts else ():
                layer.give(part, weights.to(device))
        self.close()

    def close(self) -> None:
        self.reader.close()
        self._slots.clear()
        self.memory.close()
