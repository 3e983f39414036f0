"""A layer whose routes the host reads: look-up, copies and stages by a named schedule, in waves where slots are few."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from dualdeadline import schedule, streams
from dualdeadline.cache.pool import Pool
from dualdeadline.engine.arithmetic import KERNELS
from dualdeadline.engine.surgery import LayerExperts
from dualdeadline.schedule import COMPONENTS, Compute, Copy
from dualdeadline.store import HostStore
from dualdeadline.streams.lanes import Mark

DENSE = 4  # routes per expert from which a prompt is taken to need every expert of every layer


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


class Then:
    """Lanes that do something more as soon as so many copies were issued."""

    def __init__(self, lanes, copies: int, then: Callable[[], None]):
        self.lanes, self.left, self.then = lanes, copies, then
        self.compute, self.done, self.committed = lanes.compute, lanes.done, lanes.committed
        if not copies:
            then()

    def copy(self, work: Callable[[], None], needs: Sequence[Mark]) -> Mark:
        mark = self.lanes.copy(work, needs)
        self.left -= 1
        if not self.left:
            self.then()
        return mark


class Hosted:
    """Runs layers on lanes: threads on a CPU, streams on a GPU.

    A prompt that needs all experts is streamed with two buffers: the free slots of the next layer are filled while a
    layer computes, and where its experts take turns in its slots, half of these are filled while the others are read.

    Args:
        layers, store, banks: of the engine; `banks[component][layer]` are slots `[C, rows, columns]`.
        pool: what lies in which slot. lanes: of `engine.lanes`.
        schedule: one of `schedule.NAMES`. kernels: `torch` or `fused`.
        guide: gives guesses for a later layer (or None).
    """

    def __init__(
        self,
        layers: Sequence[LayerExperts],
        store: HostStore,
        banks: Mapping[str, Sequence[Tensor]],
        pool: Pool,
        lanes,
        name: str,
        kernels: str,
        guide=None,
    ):
        self.layers, self.store, self.banks, self.pool = layers, store, banks, pool
        self.lanes, self.name, self.kernels, self.guide = lanes, name, kernels, guide
        self.arriving: dict[tuple[int, int, str], Mark] = {}
        self.early = dict.fromkeys(COMPONENTS, 0)  # components that crossed while the layer before computed a prompt

    @property
    def misses(self) -> int:
        """Accesses of which a component was absent."""
        return sum(self.pool.misses)

    @property
    def bytes_early(self) -> int:
        """Link bytes of what crossed early for prompts."""
        return sum(count * self.store.bytes(part) for part, count in self.early.items())

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
        dense, last = ids.numel() >= DENSE * self.layers[number].E, number == len(self.layers) - 1
        worth = self.guide and self.guide.worth
        if worth and number == 0:
            worth.begin(len(hidden))
        self.lanes.enter()
        self._settle_guesses(number, chosen)
        self.pool.in_use.clear()
        waves, out = list(self._waves(number, chosen, dense)), []
        self._run(number, waves, job, ids, dense and not last)
        self.lanes.compute(lambda: out.append(job.finish()), ())
        if dense:
            self._land(number)
            self.pool.close(number)
        else:
            self._speculate(number, hidden, ids)
        if worth and last:
            worth.end()
        return out[0]

    def _run(self, number: int, waves: list[list[int]], job, ids: Tensor, ahead: bool) -> None:
        """Wave after wave; a wave has ended before its slots are filled again."""
        behind = 2 if waves and 2 * len(waves[0]) <= min(self.pool.slots) else 1
        computed = []
        for turn, wave in enumerate(waves):
            if turn >= behind:
                self.lanes.fence(computed[turn - behind])
            self._wave(number, wave, job, ids, ahead and turn == len(waves) - 1)
            computed.append(self.lanes.mark())

    def _waves(self, number: int, chosen: list[int], dense: bool) -> Iterator[list[int]]:
        """What is present first, so that no wave evicts what a later one has; each as large as the smaller bank, or
        half as large for a prompt, so that the slots of one fill while those of the other are read."""
        room = min(self.pool.slots)
        if len(chosen) > room:
            there = [self.pool.present(number, index) for index in range(len(COMPONENTS))]
            chosen = sorted(chosen, key=lambda expert: -sum(expert in found for found in there))
            room = room // 2 if dense and room > 1 else room
        for begin in range(0, len(chosen), room):
            yield chosen[begin : begin + room]

    def _wave(self, number: int, wave: list[int], job, ids: Tensor, ahead: bool) -> None:
        slots, missing = (dict(zip(COMPONENTS, found)) for found in self.pool.lookup(number, wave))
        job.wave(slots)
        present = frozenset((e, part) for part in COMPONENTS for e in wave if e not in missing[part])
        arrived = [self.arriving.pop(key) for key in [(number, e, part) for e, part in present] if key in self.arriving]
        tokens = dict(zip(*(found.tolist() for found in ids.unique(return_counts=True)))) if len(ids) > 1 else {}
        layer = schedule.Layer(tuple(wave), present, tokens)
        sizes = {part: self.store.bytes(part, number) for part in COMPONENTS}
        plan, lanes = schedule.block(self.name, layer, sizes, number), self.lanes
        if ahead:
            lanes = Then(lanes, sum(isinstance(op, Copy) for op in plan.ops), lambda: self._fill_next(number + 1))
        if arrived:
            lanes.compute(lambda: None, arrived)
        self._issue(number, plan, slots, job, lanes)

    def _issue(self, number: int, plan: schedule.Schedule, slots, job, lanes) -> None:
        """Hand a wave's operations to the lanes."""
        streams.issue(plan, Wave(self, number, slots, job), lanes)

    def _fill_next(self, target: int) -> None:
        """The first experts of the next layer cross into its free slots while this one computes a prompt."""
        for part, pairs in zip(COMPONENTS, self.pool.place(target, range(self.layers[target].E))):
            self.early[part] += len(pairs)
            self._fetch_ahead(target, part, pairs)

    def _speculate(self, number: int, hidden: Tensor, ids: Tensor) -> None:
        guess = self.guide.after(number, hidden, ids) if self.guide and self.guide.on else None
        if guess is None:
            return
        target, names, chances = guess
        if target == number:  # slots that this layer's products may still read
            self.lanes.fence(self.lanes.mark())
        for part, pairs in zip(COMPONENTS, self.guide.admit(self.pool, target, names, chances)):
            self._fetch_ahead(target, part, pairs)

    def _fetch_ahead(self, target: int, part: str, pairs: Sequence[tuple[int, int]]) -> None:
        for expert, slot in pairs:
            self.arriving[target, expert, part] = self.lanes.copy(
                lambda e=expert, s=slot: self.bring(target, part, e, s), ()
            )

    def _land(self, number: int) -> None:
        """Computation waits for what no router chose and still crosses: a graph that runs next knows no marks."""
        left = [self.arriving.pop(key) for key in [key for key in self.arriving if key[0] == number]]
        if left:
            self.lanes.compute(lambda: None, left)

    def _settle_guesses(self, number: int, chosen: Sequence[int]) -> None:
        """The router has spoken: what it did not choose and has not begun to cross is cancelled."""
        wanted = set(chosen)
        for key in [key for key in self.arriving if key[0] == number and key[1] not in wanted]:
            mark = self.arriving[key]
            if self.lanes.cancel(mark):
                del self.arriving[key]
                self.pool.withdraw(number, COMPONENTS.index(key[2]), key[1])
            elif self.lanes.done(mark):
                self.lanes.compute(lambda: None, [mark])  # raises what its copy raised: its slot holds garbage
                del self.arriving[key]

    def forget(self) -> None:
        """After an error nothing in the slots can be relied on: wait for what is under way, then begin empty."""
        self.pool.tables.clear()  # first: a second interruption while waiting must not leave entries behind
        self.arriving.clear()
        self.lanes.settle()
