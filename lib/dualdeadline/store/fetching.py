"""Misses on their way from a file to slots, by way of host slots if there are some.

    begin(number, wanted)        reads start, as many at a time as there are rows for
    fetched(number, expert, ...) waits for one, gives what is still to be copied, and takes the row back
    ahead(number, ids, ...)      guesses, into host slots

On a CPU, raw components whose slots lie at multiples of 4,096 bytes are read straight into them: no copy at all. Else a
record is read into a host slot, or into staging, and crosses to its slots from there in one copy per component.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from dualdeadline.schedule import COMPONENTS
from dualdeadline.store.installs import Installs
from dualdeadline.store.layout import Layout
from dualdeadline.store.options import SsdOptions
from dualdeadline.store.pages import Memory, is_aligned
from dualdeadline.store.reader import FADE, Reader
from dualdeadline.store.tier import HostTier, Job, Row, Staging, in_time


class Fetching(Installs):
    """Reads of the experts of a file, for slots on a device.

    Args:
        layout: of the file. memory: where rows are made; pinned: slots are on a GPU.
    """

    def __init__(self, layout: Layout, options: SsdOptions, memory: Memory):
        super().__init__(layout)
        self.options, self.memory, self.pinned = options, memory, memory.pinned
        self.staging = Staging(options.depth + 1, layout.largest, memory)  # one more for a guess that is on its way
        self.tier = None
        if options.host_slots:
            self.tier = HostTier(layout.L, layout.E, options.host_slots, layout.largest, options.policy, memory)
        self.reader = Reader(layout.path, options.depth, options.direct, options.read)
        self.counts, self.lock = Counter(), threading.RLock()
        self.layer_ms: float | None = None
        self._entered: tuple[int, float] | None = None
        self._jobs: dict[tuple[int, int, tuple[str, ...]], Job] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return (self.tier.nbytes if self.tier else 0) + sum(row.data.nbytes for row in self.staging.rows)

    def enter(self, number: int) -> None:
        """A layer starts: the time of a layer is what guesses have to beat."""
        now = time.perf_counter()
        if self._entered and self._entered[0] == number - 1:
            ms = 1e3 * (now - self._entered[1])
            self.layer_ms = ms if self.layer_ms is None else FADE * self.layer_ms + (1 - FADE) * ms
        self._entered = number, now

    def begin(self, number: int, wanted: Iterable[tuple[int, Mapping[str, Tensor]]]) -> None:
        """Start the reads of a layer's misses, in order: (expert, slot of each component that it lacks)."""
        with self.lock:
            for expert, into in wanted:
                job = Job(number, expert, into)
                self._jobs[number, expert, tuple(into)] = job
                if self.tier:
                    self.tier.use(number, expert)
            self._pump(wake=False)

    def _pump(self, wake: bool = True) -> None:
        """Begin what waits, in order, until rows run out.

        Args:
            wake: a thread also for the first; False: whoever waits for a layer's reads makes one of them.
        """
        for job in list(self._jobs.values()):
            if not job.begun:
                if not self._start(job, True, wake):
                    return
                wake = True

    def _start(self, job: Job, urgent: bool, wake: bool = True) -> bool:
        """Find the components of a job, or read them; False if there is no row for them."""
        if self.tier and self._from_tier(job, urgent):
            return True
        missing = {part: slot for part, slot in job.into.items() if part not in job.views}
        if self._direct(missing):
            memory = {part: self.bytes_of(slot) for part, slot in missing.items()}
        else:
            job.row = self.staging.take(1 if urgent else 0)
            if job.row is None:
                return False
            memory = self._into_row(job, job.row, missing)
        job.reads.append(self.reader.submit(self.layout.record(job.number, job.expert), memory, urgent, wake))
        job.begun = True
        return True

    def _direct(self, into: Mapping[str, Tensor]) -> bool:
        """Whether components can be read straight into their slots."""
        kept = self.tier is not None  # exclusive ones leave a slot only once what lay there is copied out
        return not (self.coded or self.pinned or kept) and all(is_aligned(slot) for slot in into.values())

    def _into_row(self, job: Job, row: Row, parts: Iterable[str]) -> dict[str, np.ndarray]:
        """Memory of components in a row, as the record has them; notes where they are to be copied from."""
        record, memory = self.layout.record(job.number, job.expert), {}
        for part in parts:
            job.views[part], memory[part] = self.place(row, part, record.parts[part])
        return memory

    def _from_tier(self, job: Job, urgent: bool) -> bool:
        """Serve a job from the host slots, reading into one if need be; False: they cannot take all of it."""
        if job.held is not None:  # a part of it lies there, and for the others there was no row when it was tried first
            return False
        held = self.tier.find(job.number, job.expert)
        if held and held.failed and not held.users:
            self.tier.drop(job.number, held)
            held = None
        hit = held is not None and all(part in held.parts for part in job.into)
        if not job.counted:
            self.counts["host_hits" if hit else "host_misses"] += 1
            job.counted = True
        if held is None and not self.options.exclusive:
            held = self.tier.take(job.number, job.expert, self.reader, self._wanted(job.number))
        if held is None:
            return False
        there = [part for part in job.into if part in held.parts]
        self._into_row(job, held.row, there)
        held.users, job.held = held.users + 1, held
        job.reads += {held.parts[part] for part in there} - {None}
        missing = [part for part in job.into if part not in held.parts]
        if self.options.exclusive:
            job.begun = not missing
            return job.begun
        if missing:
            held.row.free()
            memory = self._into_row(job, held.row, missing)
            read = self.reader.submit(self.layout.record(job.number, job.expert), memory, urgent)
            held.parts |= dict.fromkeys(missing, read)
            job.reads.append(read)
        for read in job.reads:
            self.reader.hurry(read)
        job.begun = True
        return True

    def _wanted(self, number: int) -> set[int]:
        """Experts of a layer that are on their way to slots."""
        return {job.expert for job in self._jobs.values() if job.number == number}

    @contextmanager
    def fetched(self, number: int, expert: int, into: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Wait for components; those that are still to be copied into their slots: weights, or a wire record's bytes.

        On a GPU the copies are issued inside the context, on the current stream.

        Raises:
            ValueError: a record does not match its checksums. OSError: it cannot be read. ReplacedError: the file is
                another one. All name the record.
        """
        key = number, expert, tuple(into)
        with self.lock:
            job = self._jobs.get(key)
            if job is None:  # a guess for the slots themselves: nothing was begun for it
                job = self._jobs[key] = Job(number, expert, into)
            if not job.begun and not self._start(job, urgent=False):
                raise RuntimeError(f"{len(self.staging.rows)} rows are in use; needed: one for {key}")
        for read in job.reads:
            read.result()
        yield job.views
        with self.lock:
            self._jobs.pop(key, None)
            self._release(job)
            self._pump()

    def _release(self, job: Job) -> None:
        event = None
        if self.pinned:
            event = torch.cuda.Event()
            event.record()
        if job.row is not None:
            job.row.event = event
            self.staging.give(job.row)
        held = job.held
        if held is None:
            return
        held.users, held.row.event = held.users - 1, event
        for part in job.into:
            if self.options.exclusive:
                held.parts.pop(part, None)
            elif part in held.parts:
                held.parts[part] = None
        if self.options.exclusive and not held.parts and not held.users:
            self.tier.drop(job.number, held)

    def give_up(self, number: int, component: str, expert: int, slot: Tensor) -> None:
        """What a slot held goes to the exclusive host slots; runs before the slot is written again."""
        with self.lock:
            held = self.tier.find(number, expert) or self.tier.take(number, expert, self.reader, self._wanted(number))
            if held is None:
                return
            self.counts["given_up"] += 1
            view, _ = self.place(held.row, component, self.layout.record(number, expert).parts[component])
            view.copy_(slot, non_blocking=True)
            held.parts[component] = None
            if self.pinned:
                held.row.event = torch.cuda.Event()
                held.row.event.record()

    def ahead(self, number: int, ids: Tensor, chances: Tensor, threshold: float, present: set[int]) -> None:
        """Read guesses into host slots: the most probable that lie neither there nor in slots, up to the budget.

        Args:
            ids, chances: int and probability [N,G]. present: experts in the device's slots.
        """
        with self.lock:
            self.tier.predict(number, ids, chances)
            if self.options.rule and not in_time(self.options.ahead, self.layer_ms, self.reader.ms):
                self.counts["ahead_too_late"] += 1
                return
            pairs = sorted(zip(chances.flatten().tolist(), ids.flatten().tolist()), key=lambda pair: -pair[0])
            likely = list(dict.fromkeys(expert for chance, expert in pairs if chance >= threshold))[: self.tier.slots]
            absent = [e for e in likely if e not in present and not self.tier.find(number, e)]
            for expert in absent[: self.options.budget]:
                self._guess(number, expert, set(likely))

    def _guess(self, number: int, expert: int, keep: set[int]) -> None:
        held = self.tier.take(number, expert, self.reader, keep)
        if held is None:
            return
        job = Job(number, expert, {})
        memory = self._into_row(job, held.row, COMPONENTS)
        read = self.reader.submit(self.layout.record(number, expert), memory, urgent=False)
        held.parts, held.guessed = dict.fromkeys(COMPONENTS, read), True
        self.counts["ahead"] += 1

    def settle(self) -> None:
        """After an error: no read writes anywhere any more, and rows are free."""
        self.reader.settle()
        with self.lock:
            self._jobs.clear()
            self.staging.reset()
            self._entered = None
            if self.tier:
                self.tier.forget(self.options.exclusive)

    def stats(self) -> dict:
        """What happened in the tiers below the device's slots; host counts are of accesses that missed the slots."""
        done, tier = self.reader.counts, self.tier.counts if self.tier else Counter()
        names = ("evictions", "useful", "wasted", "late", "cancelled")
        host = {
            "slots": self.tier.slots if self.tier else 0,
            "policy": self.options.policy,
            "exclusive": self.options.exclusive,
            "hits": self.counts["host_hits"],
            "misses": self.counts["host_misses"],
            "given_up": self.counts["given_up"],
            "ahead": self.counts["ahead"],
            "ahead_too_late": self.counts["ahead_too_late"],
        } | {name: tier[name] for name in names}
        ssd = {name: done[name] for name in ("reads", "bytes", "retries")}
        ssd |= {"path": self.reader.path_kind, "read_ms": self.reader.ms, "layer_ms": self.layer_ms}
        return {"tiers": {"host": host, "ssd": ssd | {"depth": self.options.depth}}}
