"""A layer whose routes the host reads: look-up, copies and stages by a named schedule, in waves where slots are few."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from dualdeadline import schedule, streams
from dualdeadline.cache import slots as cache
from dualdeadline.engine.arithmetic import KERNELS
from dualdeadline.engine.surgery import LayerExperts
from dualdeadline.schedule import COMPONENTS, Compute, Copy
from dualdeadline.store import HostStore
from dualdeadline.streams.lanes import Mark


class Wave:
    """What the operations of one wave's schedule act on: `copy` and `compute` of `streams.issue`."""

    def __init__(self, hosted: Hosted, number: int, dest: Mapping[str, Mapping[int, int]], job):
        self.hosted, self.number, self.dest, self.job = hosted, number, dest, job

    def copy(self, op: Copy) -> None:
        for part in op.components:
            self.hosted.bring(self.number, part, op.expert, self.dest[part][op.expert])

    def compute(self, op: Compute) -> None:
        if op.stage == "gate_up":
            self.job.gate_up(op.experts)
        elif op.stage in ("down", "down_combine"):
            self.job.down(op.experts)


class Hosted:
    """Runs layers on lanes: threads on a CPU, streams on a GPU.

    Args:
        layers, store, banks: of the engine; `banks[component][layer]` are slots `[C, rows, columns]`.
        tables: what lies in which slot, on the CPU. lanes: of `engine.lanes`.
        schedule: one of `schedule.NAMES`. kernels: `torch` or `fused`.
        guide: gives guesses for a later layer (or None).
    """

    def __init__(
        self,
        layers: Sequence[LayerExperts],
        store: HostStore,
        banks: Mapping[str, Sequence[Tensor]],
        tables: cache.SlotTables,
        lanes,
        name: str,
        kernels: str,
        guide=None,
    ):
        self.layers, self.store, self.banks, self.tables = layers, store, banks, tables
        self.lanes, self.name, self.kernels, self.guide = lanes, name, kernels, guide
        self.arriving: dict[tuple[int, int, str], Mark] = {}
        self.misses = 0  # accesses of which a component was absent

    def bring(self, number: int, component: str, expert: int, slot: int) -> None:
        """Copy one component into a slot, decoded if it is a wire record; on a GPU in the current stream."""
        into = self.banks[component][number][slot]
        if not self.store.coded:
            into.copy_(self.store.sources[component][number][expert], non_blocking=True)
        elif into.device.type == "cpu":
            into.copy_(self.store.weights(component, number, expert))
        else:
            self._decode(number, component, expert, into)

    def _decode(self, number: int, component: str, expert: int, into: Tensor) -> None:
        from dualdeadline import wire
        from dualdeadline.kernels import wire as kernel

        record = self.store.sources[component][number][expert : expert + 1]
        if not self.store.pinned:
            into.copy_(wire.decode(self.store.record(component, number, expert), into.device))
            return
        zero, one = self._numbers(into.device)
        kernel.decode(record, into[None], zero, zero, one)

    def _numbers(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if not hasattr(self, "_zero_one"):
            self._zero_one = tuple(torch.tensor([n], dtype=torch.int32, device=device) for n in (0, 1))
            torch.cuda.synchronize(device)  # made in another stream than the one that reads them
        return self._zero_one

    def layer(self, number: int, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Output [N,H] of one layer's routed experts for tokens [N,H] with routes ids, weights [N,K]."""
        routed = list(dict.fromkeys(ids.flatten().tolist()))
        chosen = [expert for expert in routed if 0 <= expert < self.layers[number].E]
        banks = {part: self.banks[part][number] for part in COMPONENTS}
        job = KERNELS[self.kernels](self.layers[number], banks, hidden, ids, weights)
        self.lanes.enter()
        self._settle_guesses(number, chosen)
        for turn, wave in enumerate(self._waves(number, chosen)):
            if turn:
                self.lanes.fence()
            self._wave(number, wave, job, ids)
        out = job.finish()
        self._speculate(number, hidden, ids)
        return out

    def _waves(self, number: int, chosen: list[int]) -> Iterator[list[int]]:
        """What is present first, so that no wave evicts what a later one has; each as large as the smaller bank."""
        C = min(len(self.banks[part][number]) for part in COMPONENTS)
        there = [self.tables.present(number, index) for index in range(len(COMPONENTS))]
        first = (
            sorted(chosen, key=lambda expert: -sum(expert in found for found in there)) if len(chosen) > C else chosen
        )
        for begin in range(0, len(first), C):
            yield first[begin : begin + C]

    def _wave(self, number: int, wave: list[int], job, ids: Tensor) -> None:
        found = cache.lookup(self.tables, number, torch.tensor([wave], dtype=torch.int32))
        slots, missing = {}, {}
        for index, part in enumerate(COMPONENTS):
            slots[part] = dict(zip(wave, found.slots[index, 0].tolist()))
            missing[part] = set(found.source[index, : int(found.count[index])].tolist())
        self.misses += len(missing["gate_up"] | missing["down"])
        job.wave(slots)
        present = frozenset((e, part) for part in COMPONENTS for e in wave if e not in missing[part])
        arrived = [self.arriving.pop(key) for key in [(number, e, part) for e, part in present] if key in self.arriving]
        tokens = dict(zip(*(found.tolist() for found in ids.unique(return_counts=True)))) if len(ids) > 1 else {}
        layer = schedule.Layer(tuple(wave), present, tokens)
        sizes = {part: self.store.bytes(part, number) for part in COMPONENTS}
        if arrived:
            self.lanes.compute(lambda: None, arrived)
        plan = schedule.block(self.name, layer, sizes, number)
        streams.issue(plan, Wave(self, number, slots, job), self.lanes)

    def _speculate(self, number: int, hidden: Tensor, ids: Tensor) -> None:
        guess = self.guide.after(number, hidden, ids) if self.guide else None
        if guess is None:
            return
        target, names, chances = guess
        found = self.guide.admit(self.tables, target, names, chances)
        for index, part in enumerate(COMPONENTS):
            count = int(found.count[index])
            for expert, slot in zip(found.source[index, :count].tolist(), found.dest[index, :count].tolist()):
                self.arriving[target, expert, part] = self.lanes.copy(
                    lambda p=part, e=expert, s=slot: self.bring(target, p, e, s), ()
                )

    def _settle_guesses(self, number: int, chosen: Sequence[int]) -> None:
        """The router has spoken: what it did not choose and has not begun to cross is cancelled."""
        wanted = set(chosen)
        for key in [key for key in self.arriving if key[0] == number and key[1] not in wanted]:
            if self.lanes.cancel(self.arriving[key]):
                del self.arriving[key]
                index, expert = COMPONENTS.index(key[2]), key[1]
                if expert in self.tables.present(number, index):
                    self.tables.withdraw(number, index, expert)
            elif self.lanes.done(self.arriving[key]):
                del self.arriving[key]

    def forget(self) -> None:
        """After an error nothing in the slots can be relied on: wait for what is under way, then begin empty."""
        self.tables.clear()  # first: a second interruption while waiting must not leave entries behind
        self.arriving.clear()
        self.lanes.settle()
