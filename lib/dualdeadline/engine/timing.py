"""Lanes that take the time of what runs on them: link, compute, and how long compute waited for the link."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch

from dualdeadline.engine.lanes import CallerLanes, StreamLanes
from dualdeadline.streams.lanes import Mark
from dualdeadline.task import Task

NAMES = ("stall_ms", "link_ms", "compute_ms")


class TimedCaller(CallerLanes):
    """`CallerLanes` by `time.perf_counter`.

    Args:
        clock: seconds.

    Attributes:
        spent: milliseconds by name of `NAMES`: compute waiting for copies, copies, products of experts.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        super().__init__()
        self.clock, self.spent, self._mine = clock, dict.fromkeys(NAMES, 0.0), threading.Lock()

    def _took(self, name: str, start: float) -> None:
        with self._mine:
            self.spent[name] += 1e3 * (self.clock() - start)

    def copy(self, work: Callable[[], None], needs: Sequence[Mark]) -> Mark:
        def timed() -> None:
            start = self.clock()
            work()
            self._took("link_ms", start)

        return super().copy(timed, needs)

    def compute(self, work: Callable[[], None], needs: Sequence[Mark]) -> Mark:
        waits: list[Task] = [need.end for need in needs if need.lane]
        start = self.clock()
        for wait in waits:
            wait.result()
        if waits:
            self._took("stall_ms", start)
        start = self.clock()
        work()
        self._took("compute_ms", start)
        return Mark(0, None, None)

    def totals(self) -> dict[str, float]:
        """Milliseconds so far."""
        with self._mine:
            return dict(self.spent)


class TimedStreams(StreamLanes):
    """`StreamLanes` by CUDA events, two or three per operation; read when they have passed. As `TimedCaller`."""

    def __init__(self, device: torch.device):
        super().__init__(device, timed=True)
        self.spent, self.pending = dict.fromkeys(NAMES, 0.0), []

    def enter(self) -> None:
        super().enter()
        self._collect(lambda mark: mark.end.query())

    def _issue(self, lane: int, work: Callable[[], None], needs: Sequence[Mark]) -> Mark:
        waited = None
        if lane == 0 and any(need.lane for need in needs):
            waited = self._event()
            waited.record(self.streams[0])
        mark = super()._issue(lane, work, needs)  # its start is recorded after what it waits for
        self.pending.append((lane, waited, mark))
        return mark

    def _collect(self, passed: Callable[[Mark], bool]) -> None:
        left = []
        for lane, waited, mark in self.pending:
            if not passed(mark):
                left.append((lane, waited, mark))
                continue
            self.spent["link_ms" if lane else "compute_ms"] += mark.start.elapsed_time(mark.end)
            if waited is not None:
                self.spent["stall_ms"] += waited.elapsed_time(mark.start)
        self.pending = left

    def totals(self) -> dict[str, float]:
        """Milliseconds so far; waits for the device."""
        torch.cuda.synchronize(self.streams[0].device)
        self._collect(lambda mark: True)
        return dict(self.spent)
