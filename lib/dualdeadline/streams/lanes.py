"""Where operations run: a link and a compute queue, as CUDA streams or as threads, with the same few verbs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch


POOL = 32  # streams of one priority that torch has, whatever a program asks for


@dataclass(eq=False)
class Mark:
    """An operation handed to a lane: its events, or the future that gives its two times."""

    lane: int  # 0 is compute, 1 and up are copy streams
    start: object | None
    end: object


def beside(count: int, device: torch.device) -> list[torch.cuda.Stream]:
    """`count` different streams, none of them the current one.

    torch hands out the same 32 streams in turn: one may be the stream that runs or captures the caller's work, and what
    was to run beside that work would queue up between its pieces.
    """
    found, own = [], torch.cuda.current_stream(device)
    for _ in range(2 * POOL):
        if len(found) == count:
            return found
        stream = torch.cuda.Stream(device)
        if stream != own and stream not in found:
            found.append(stream)
    raise ValueError(f"{count} streams were asked for; needed: less than the {POOL} that torch has")


class CudaLanes:
    """The current stream computes, `copy_streams` others copy in turn.

    Args:
        timed: record an event before and after each operation, for a timeline; costs about a microsecond each.
        copy_streams: 1 keeps copies in order; 2 lets two copy engines share the link.
    """

    committed = 2

    def __init__(self, device: torch.device, timed: bool = False, copy_streams: int = 1):
        self.timed = timed
        compute = torch.cuda.current_stream(device)
        self.streams = [compute, *beside(copy_streams, device)]
        self.turn = 0
        self.begin = self._event()
        self.begin.record(compute)
        for stream in self.streams[1:]:
            stream.wait_event(self.begin)

    def _event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=self.timed)

    def copy(self, work: Callable[[], None], needs: Sequence[Mark]) -> Mark:
        self.turn = self.turn % (len(self.streams) - 1) + 1
        return self._issue(self.turn, work, needs)

    def compute(self, work: Callable[[], None], needs: Sequence[Mark]) -> Mark:
        return self._issue(0, work, needs)

    def _issue(self, lane: int, work: Callable[[], None], needs: Sequence[Mark]) -> Mark:
        stream = self.streams[lane]
        for need in needs:
            if need.lane != lane:
                stream.wait_event(need.end)
        with torch.cuda.stream(stream):
            start = self._event() if self.timed else None
            if start:
                start.record(stream)
            work()
            end = self._event()
            end.record(stream)
        return Mark(lane, start, end)

    def done(self, mark: Mark) -> bool:
        return mark.end.query()

    def join(self) -> None:
        """The compute stream waits for all copies; also what ends a capture."""
        for stream in self.streams[1:]:
            event = torch.cuda.Event()
            event.record(stream)
            self.streams[0].wait_event(event)

    def times(self, mark: Mark) -> tuple[float, float]:
        """Milliseconds from the start of the run at which an operation began and ended."""
        mark.end.synchronize()
        return self.begin.elapsed_time(mark.start), self.begin.elapsed_time(mark.end)

    def close(self) -> None:
        """Wait until everything has ended."""
        torch.cuda.synchronize(self.streams[0].device)


class ThreadLanes:
    """One thread copies, one computes: the same schedule on a machine without a GPU."""

    committed = 1

    def __init__(self):
        self.pools = [ThreadPoolExecutor(1) for _ in range(2)]
        self.marks: list[Mark] = []
        self.begin = time.perf_counter()

    def copy(self, work: Callable[[], None], needs: Sequence[Mark]) -> Mark:
        return self._issue(1, work, needs)

    def compute(self, work: Callable[[], None], needs: Sequence[Mark]) -> Mark:
        return self._issue(0, work, needs)

    def _issue(self, lane: int, work: Callable[[], None], needs: Sequence[Mark]) -> Mark:
        waits: list[Future] = [need.end for need in needs]

        def job() -> tuple[float, float]:
            for wait in waits:
                wait.result()
            start = time.perf_counter()
            with torch.inference_mode():
                work()
            return start, time.perf_counter()

        self.marks.append(Mark(lane, None, self.pools[lane].submit(job)))
        return self.marks[-1]

    def done(self, mark: Mark) -> bool:
        return mark.end.done()

    def join(self) -> None:
        for mark in self.marks:
            mark.end.result()

    def times(self, mark: Mark) -> tuple[float, float]:
        start, end = mark.end.result()
        return 1e3 * (start - self.begin), 1e3 * (end - self.begin)

    def close(self) -> None:
        """Wait for what runs; an operation that failed raises here, with its own error."""
        for pool in self.pools:
            pool.shutdown(wait=True, cancel_futures=True)
        for mark in self.marks:
            if not mark.end.cancelled() and mark.end.exception():
                raise mark.end.exception()
