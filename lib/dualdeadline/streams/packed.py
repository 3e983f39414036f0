"""Encoded records of the experts of a `Work`: what crosses the link instead, and the decode into the slots."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dualdeadline import kernels, wire
from dualdeadline.kernels import wire as kernel
from dualdeadline.schedule import COMPONENTS, Compute, Copy
from dualdeadline.streams.bench import graph


class Packed:
    """Wire records of some experts in pinned host memory, and as much staging on the device.

    A row holds an expert's gate/up record and, behind it, its down record, each as long as the longest of its kind, so
    that an expert is one copy and so is each component.

    Args:
        work: whose experts. pairs: (layer, expert) that may be copied. bits: of the wire format's first code.

    Attributes:
        component_bytes: dict(gate_up, down, expert) that cross the link.
    """

    def __init__(self, work, pairs: Iterable[tuple[int, int]], bits: int = 3):
        self.work, self.bits = work, bits
        rows = sorted({layer * work.shape.E + expert for layer, expert in pairs})
        self.place = {row: place for place, row in enumerate(rows)}
        named = ((part, work.host[row, work.parts[part]]) for row in rows for part in COMPONENTS)
        found = list(wire.encode_many(named, bits, total=len(rows) * len(COMPONENTS)))
        sizes = {part: [record.nbytes for name, record in found if name == part] for part in COMPONENTS}
        self.component_bytes = {part: max(found_sizes) for part, found_sizes in sizes.items()}
        cut, whole = self.component_bytes["gate_up"], sum(self.component_bytes.values())
        self.component_bytes["expert"] = whole
        self.parts = {"gate_up": slice(0, cut), "down": slice(cut, whole), "expert": slice(0, whole)}
        host = torch.empty(len(rows), whole, dtype=torch.uint8)
        self.host = kernels.fetch.pin(host) if work.device.type == "cuda" else host
        for number, (part, record) in enumerate(found):
            into = self.host[number // len(COMPONENTS), self.parts[part]]
            into[: record.nbytes], into[record.nbytes :] = record.data, 0
        self.staging = torch.zeros_like(self.host, device=work.device)
        self.rows = torch.arange(len(rows), dtype=torch.int32, device=work.device)
        self.slots = torch.tensor(rows, dtype=torch.int32, device=work.device)
        self.one = torch.ones(1, dtype=torch.int32, device=work.device)
        self.replays: dict[tuple[int, str], object] = {}
        if work.device.type == "cuda":  # compiles the decode; later captures run nothing, so no slot changes
            self.staging.copy_(self.host)
            self._decode(0, "decode_expert")
            self.staging.zero_()

    def ends(self, op: Copy) -> tuple[torch.Tensor, torch.Tensor]:
        """Staging and host record of a piece."""
        place, part = self._place(op.layer, op.expert), self.parts[op.piece]
        return self.staging[place, part], self.host[place, part]

    def _place(self, layer: int, expert: int) -> int:
        row = layer * self.work.shape.E + expert
        if row not in self.place:
            raise ValueError(f"expert {expert} of layer {layer} has no wire record; needed: a pair given to `pack`")
        return self.place[row]

    def prepare(self, op: Compute) -> None:
        """Capture a decode, so that the host replays it in microseconds."""
        key = self._place(op.layer, op.experts[0]), op.stage
        if self.work.device.type == "cuda" and key not in self.replays:
            self.replays[key] = graph(lambda: self._decode(*key), warm=False)

    def decode(self, op: Compute) -> None:
        """Decode what an operation names from staging into its slot."""
        key = self._place(op.layer, op.experts[0]), op.stage
        replay = self.replays.get(key)
        if replay is None or torch.cuda.is_current_stream_capturing():
            self._decode(*key)
        else:
            replay()

    def _decode(self, place: int, stage: str) -> None:
        piece = stage.removeprefix("decode_")
        for part in COMPONENTS if piece == "expert" else (piece,):
            if self.work.device.type == "cuda":
                ids, slots = self.rows[place : place + 1], self.slots[place : place + 1]
                kernel.decode(self.staging[:, self.parts[part]], self.work.bank[part], ids, slots, self.one, self.bits)
            else:
                data = self.staging[place, self.parts[part]]
                slot = self.work.bank[part][int(self.slots[place])]
                record = wire.WireRecord(data[: wire.WireRecord(data).header["bytes"]])
                slot.copy_(wire.decode(record, threads=1).view(slot.shape))
