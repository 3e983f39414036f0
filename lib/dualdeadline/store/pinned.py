"""Expert store, pinned tier: every expert's components in host memory, as they are or as wire records."""

from __future__ import annotations

import contextlib
import ctypes
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

        device = getattr(layer.module, PARAMETERS["down"]).device
        self.devices.append(torch.device("cpu") if device.type == "meta" else device)
        taken = layer.take()
        try:
            for part in COMPONENTS:
                found = keep(taken[part].detach(), self.coded)
                del taken[part]  # on a GPU its memory is free for the next layer
                self.sources[part].append(self._pin(found) if self.pinned else found)
                if self.coded:
                    trim()
        except BaseException:
            for part, weights in taken.items():
                layer.give(part, weights)
            raise

    def _pin(self, tensor: Tensor) -> Tensor:
        """Pin the pages where they are: no copy, and no rounding up to a power of two."""
        known = any(tensor.data_ptr() == other.data_ptr() for other in self._registered)  # shared by layers
        if known or tensor.is_pinned() or self.why_not:
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
        """Return every layer's weights to its module, on the device they came from; again, what is left of them."""
        self.unpin()
        for layer, device in zip(self.layers, self.devices):
            for part in COMPONENTS:
                if layer.number < len(self.sources[part]) and part in layer.places:
                    layer.give(part, self.whole(part, layer.number).to(device))
                    self.sources[part][layer.number] = torch.empty(0)  # records and weights never both of all layers
                    if self.coded:
                        trim()

    def whole(self, component: str, layer: int) -> Tensor:
        """All experts' weights `[E, rows, columns]` of a layer on the CPU, raw ones without a copy.

        Raises:
            ValueError: a record is damaged.
        """
        if not self.coded:
            return self.sources[component][layer]
        own = self.layers[layer]
        out = torch.empty(own.E, *own.shapes[component], dtype=own.dtype)
        for expert in range(own.E):
            out[expert] = self.weights(component, layer, expert)
        return out

    def encoded(self) -> HostStore:
        """The experts of a raw store once more, as wire records; the copy gives nothing back to the model."""
        copy = HostStore([], coded=True, pinned=self.pinned)
        copy.layers = self.layers
        for part in COMPONENTS:
            made: dict[int, Tensor] = {}  # layers may hold the very same weights
            for weights in self.sources[part]:
                place = weights.data_ptr()
                if place not in made:
                    found = _records(weights)
                    made[place] = copy._pin(found) if copy.pinned else found
                copy.sources[part].append(made[place])
        return copy

    def unpin(self) -> None:
        """Release the pinned pages; nothing may read them any more."""
        _unregister(self._registered)


def _unregister(registered: list[Tensor]) -> None:
    while registered:
        torch.cuda.cudart().cudaHostUnregister(registered.pop().data_ptr())


def trim() -> None:
    """Return what was freed to the system: glibc keeps it, and many small tensors would then count twice."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def keep(weights: Tensor, coded: bool) -> Tensor:
    """What the store holds of weights `[E, rows, columns]`: themselves, in host memory, or their records."""
    if not coded or weights.dtype == torch.uint8:  # records already: no experts are bytes
        return weights.cpu().contiguous()
    return _records(weights.cpu())


def _records(weights: Tensor) -> Tensor:
    """uint8 `[E, stride]`: a wire record per expert, each as long as the longest."""
    named = ((str(number), expert) for number, expert in enumerate(weights))
    found = [record for _, record in wire.encode_many(named, BITS, total=len(weights))]
    rows = torch.zeros(len(found), max(record.nbytes for record in found), dtype=torch.uint8)
    for row, record in zip(rows, found):
        row[: record.nbytes] = record.data
    return rows
