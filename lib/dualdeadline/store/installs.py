"""Where a component lies in host memory, and how it gets into its slot from there: one copy, or a decode."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from dualdeadline import wire
from dualdeadline.store.layout import Layout, Part
from dualdeadline.store.pages import as_bytes
from dualdeadline.store.tier import Row


class Installs:
    """Views of records and slots, made once, and what copies between them."""

    def __init__(self, layout: Layout):
        self.layout = layout
        self._slots: dict[tuple[int, int], np.ndarray] = {}
        self._zero_one: tuple[Tensor, Tensor] | None = None

    @property
    def coded(self) -> bool:
        """Whether components are wire records."""
        return self.layout.coded

    def bytes_of(self, slot: Tensor) -> np.ndarray:
        """The memory of a slot, made once for each: the same slots come again with every layer."""
        key = slot.data_ptr(), slot.numel()
        if key not in self._slots:
            self._slots[key] = as_bytes(slot)  # holds on to the slot, so that nothing else gets its address
        return self._slots[key]

    def place(self, row: Row, part: str, place: Part) -> tuple[Tensor, np.ndarray]:
        """A component in a row: its weights (of a wire record its bytes), and the memory that a read of it fills."""
        if part in row.raw:
            return row.raw[part]
        padded = row.data[place.start : place.start + place.padded]
        found = padded[: place.nbytes]
        if self.coded:
            return found, as_bytes(padded)
        row.raw[part] = found.view(self.layout.dtype).view(self.layout.shapes[part]), as_bytes(padded)
        return row.raw[part]

    def put(self, views: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> None:
        """Install components in their slots from host memory, as `fetched` gives them; on a GPU in this stream."""
        for part, view in views.items():
            slot = into[part]
            if not self.coded:
                slot.copy_(view, non_blocking=True)
            elif slot.device.type == "cpu":
                slot.copy_(self.tensor(part, view))
            else:
                self._decode(view, slot)

    def _decode(self, record: Tensor, slot: Tensor) -> None:
        from dualdeadline.kernels import wire as kernel

        zero, one = self._numbers(slot.device)
        kernel.decode(record[None], slot[None], zero, zero, one)

    def _numbers(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._zero_one is None:
            self._zero_one = tuple(torch.tensor([n], dtype=torch.int32, device=device) for n in (0, 1))
            torch.cuda.synchronize(device)  # made in another stream than the one that reads them
        return self._zero_one

    def tensor(self, component: str, data: Tensor) -> Tensor:
        """Weights from a component's bytes, uint8 in host memory."""
        if self.coded:
            return wire.decode(wire.WireRecord(data), threads=1, verify=False).view(self.layout.shapes[component])
        return data.view(self.layout.dtype).view(self.layout.shapes[component])
