"""Expert store, pinned tier: every expert's components in host memory, as they are or as wire records."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dualdeadline import wire
from dualdeadline.schedule import COMPONENTS

if TYPE_CHECKING:
    from dualdeadline.engine.surgery import LayerExperts

WIRES = ("raw", "coded")
BITS = 3


class HostStore:
    """Takes the weights of all layers' experts, one layer after the other, so that little stands in memory twice.

    Weights that are in host memory already stay where they are; for a GPU their pages are pinned in place.

    Args:
        layers: of `surgery.find`; their modules are emptied.
        coded: keep wire records instead of the weights. pinned: a GPU reads them.

    Attributes:
        sources: by component, for each layer `[E, rows, columns]` of weights or uint8 `[E, stride]` of records.
        pinned: whether a GPU can read all of it in place; `why_not` says why it cannot.
    """

    def __init__(self, layers: Sequence[LayerExperts], coded: bool = False, pinned: bool = False):
        self.layers, self.coded, self.pinned, self.why_not = list(layers), coded, pinned, ""
        self.sources: dict[str, list[Tensor]] = {part: [] for part in COMPONENTS}
        self._registered: list[Tensor] = []
        self._release = weakref.finalize(self, _unregister, self._registered)  # also without `unpin`
        self.devices: list[torch.device] = []
        try:
            for layer in self.layers:
                self._take(layer)
        except BaseException:
            self.give_back()
            raise

    def _take(self, layer: LayerExperts) -> None:
        from dualdeadline.engine.surgery import PARAMETERS

        self.devices.append(getattr(layer.module, PARAMETERS["down"]).device)
        taken = layer.take()
        for part in COMPONENTS:
            weights = taken.pop(part)
            found = _records(weights.cpu()) if self.coded else weights.cpu().contiguous()
            del weights  # on a GPU its memory is free for the next layer
            self.sources[part].append(self._pin(found) if self.pinned else found)

    def _pin(self, tensor: Tensor) -> Tensor:
        """Pin the pages where they are: no copy, and no rounding up to a power of two."""
        if tensor.is_pinned() or self.why_not:
            return tensor
        error = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
        if int(error):
            self.pinned, self.why_not = False, f"host memory cannot be pinned (cudaHostRegister: {error})"
            warnings.warn(
                f"{self.why_not}; copies are slower and do not overlap; needed: `ulimit -l` of at least "
                f"the experts' size",
                stacklevel=2,
            )
        else:
            self._registered.append(tensor)
        return tensor

    def bytes(self, component: str, layer: int = 0) -> int:
        """Bytes that cross the link for one expert's component."""
        source = self.sources[component][layer]
        return source[0].numel() * source.element_size()

    @property
    def nbytes(self) -> int:
        """Bytes in host memory."""
        return sum(source.nbytes for sources in self.sources.values() for source in sources)

    def weights(self, component: str, layer: int, expert: int) -> Tensor:
        """One expert's weights on the CPU.

        Raises:
            ValueError: a record is damaged.
        """
        found = self.sources[component][layer][expert]
        if not self.coded:
            return found
        record = self.record(component, layer, expert)
        return wire.decode(record, threads=1).view(self.layers[layer].shapes[component])

    def record(self, component: str, layer: int, expert: int) -> wire.WireRecord:
        row = self.sources[component][layer][expert]
        return wire.WireRecord(row[: wire.WireRecord(row).header["bytes"]])

    def give_back(self) -> None:
        """Return every layer's weights to its module, on the device they came from."""
        self.unpin()
        for layer, device in zip(self.layers, self.devices):
            for part in COMPONENTS:
                if layer.number < len(self.sources[part]):
                    layer.give(part, self._whole(part, layer.number).to(device))

    def _whole(self, component: str, layer: int) -> Tensor:
        if not self.coded:
            return self.sources[component][layer]
        return torch.stack([self.weights(component, layer, expert) for expert in range(self.layers[layer].E)])

    def encoded(self) -> HostStore:
        """The experts of a raw store once more, as wire records; the copy gives nothing back to the model."""
        copy = HostStore([], coded=True, pinned=self.pinned)
        copy.layers = self.layers
        for part in COMPONENTS:
            for weights in self.sources[part]:
                found = _records(weights)
                copy.sources[part].append(copy._pin(found) if copy.pinned else found)
        return copy

    def unpin(self) -> None:
        """Release the pinned pages; nothing may read them any more."""
        _unregister(self._registered)


def _unregister(registered: list[Tensor]) -> None:
    while registered:
        torch.cuda.cudart().cudaHostUnregister(registered.pop().data_ptr())


def _records(weights: Tensor) -> Tensor:
    """uint8 `[E, stride]`: a wire record per expert, each as long as the longest."""
    named = ((str(number), expert) for number, expert in enumerate(weights))
    found = [record for _, record in wire.encode_many(named, BITS, total=len(weights))]
    rows = torch.zeros(len(found), max(record.nbytes for record in found), dtype=torch.uint8)
    for row, record in zip(rows, found):
        row[: record.nbytes] = record.data
    return rows
