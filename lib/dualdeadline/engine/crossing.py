"""Experts crossing the link inside a captured step: weights straight into slots, wire records by way of staging memory.

Wire records cross by the same few programs as weights do, into staging memory, and are decoded from there at the speed
of device memory: the link stays full, and the products beside it keep their multiprocessors. Lists longer than the
staging memory are decoded straight from host memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dualdeadline.kernels import fetch
from dualdeadline.kernels import wire as wire_kernel
from dualdeadline.schedule import COMPONENTS
from dualdeadline.store import BITS, HostStore

FETCH_PROGRAMS, FETCH_WARPS = 32, 2  # of a fetch: small blocks leave short tails
HOST_DECODE_PROGRAMS = 264  # of a decode straight from host memory (notebook 08)
DECODE_PROGRAMS = 1056  # of a decode from staging memory that products wait for
AHEAD_PROGRAMS = 132  # of one beside the products


class Crossing:
    """Staging memory for up to `records` experts of each component, and the two steps of a crossing.

    Args:
        store, banks: of the engine. records: how many a list may hold (0: none, or nothing is coded).
        programs: of the decode from staging memory. lanes: programs of a fetch; fewer emulate a slower link.
    """

    def __init__(
        self,
        store: HostStore,
        banks: Mapping[str, Sequence[Tensor]],
        records: Sequence[int],
        device,
        programs: int = DECODE_PROGRAMS,
        lanes: int = FETCH_PROGRAMS,
    ):
        self.store, self.banks, self.programs, self.lanes = store, banks, programs, lanes
        self.staged, most = {}, max(records) if store.coded else 0
        self.row = torch.arange(max(1, most), dtype=torch.int32, device=device)
        for part, count in zip(COMPONENTS, records):
            if store.coded and count:
                size = max(source.shape[1] for source in store.sources[part])
                self.staged[part] = torch.empty(count, size, dtype=torch.uint8, device=device)

    def stages(self, listed) -> bool:
        """Whether what crosses waits in staging memory, so that nothing is written into slots before `land`."""
        return self.store.coded and all(self._fits(part, listed.source[0]) for part in COMPONENTS)

    def cross(self, number: int, index: int, listed) -> None:
        """Bring the listed experts of component `index` of a layer over the link (on the link's stream)."""
        part = COMPONENTS[index]
        source, bank = self.store.sources[part][number], self.banks[part][number]
        wanted, dest, count = listed.source[index], listed.dest[index], listed.count[index : index + 1]
        row = self.row[: len(wanted)]
        if not self.store.coded:
            fetch.fetch(source, bank, wanted, dest, count, self.lanes, FETCH_WARPS)
        elif self._fits(part, wanted):
            fetch.fetch(source, self._staging(part, number), wanted, row, count, self.lanes, FETCH_WARPS)
        else:
            wire_kernel.decode(source, bank, wanted, dest, count, BITS, HOST_DECODE_PROGRAMS, spread=True)

    def land(self, number: int, index: int, listed) -> None:
        """Decode what has crossed into its slots; nothing to do for what crossed as it is."""
        part = COMPONENTS[index]
        dest, count = listed.dest[index], listed.count[index : index + 1]
        if self.store.coded and self._fits(part, dest):
            bank, row = self.banks[part][number], self.row[: len(dest)]
            wire_kernel.decode(self._staging(part, number), bank, row, dest, count, BITS, self.programs, spread=True)

    def _fits(self, part: str, listed: Tensor) -> bool:
        return part in self.staged and len(listed) <= len(self.staged[part])

    def _staging(self, part: str, number: int) -> Tensor:
        return self.staged[part][:, : self.store.sources[part][number].shape[1]]
