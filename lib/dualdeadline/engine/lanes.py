"""Lanes that an engine keeps for all its layers: the caller computes, something else copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from dualdeadline.streams.lanes import CudaLanes, Mark


class CallerLanes:
    """Without a GPU: one thread copies, the calling thread computes at once, in its own grad and thread settings."""

    committed = 1

    def __init__(self):
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="dualdeadline-link")

    def enter(self) -> None:
        """A layer starts."""

    def mark(self) -> None:
        """All computation issued so far, for `fence`."""

    def fence(self, mark) -> None:
        """Copies issued from here on begin after the computation of a mark."""

    def copy(self, work: Callable[[], None], needs: Sequence[Mark]) -> Mark:
        waits: list[Future] = [need.end for need in needs if need.lane]

        def job() -> None:
            for wait in waits:
                wait.result()
            with torch.inference_mode():
                work()

        return Mark(1, None, self.pool.submit(job))

    def compute(self, work: Callable[[], None], needs: Sequence[Mark]) -> Mark:
        for need in needs:
            if need.lane:
                need.end.result()
        work()
        return Mark(0, None, None)

    def done(self, mark: Mark) -> bool:
        return mark.end is None or mark.end.done()

    def cancel(self, mark: Mark) -> bool:
        """Whether a copy had not begun and now never will."""
        return mark.end.cancel()

    def settle(self) -> None:
        """Wait for every copy."""
        self.pool.submit(lambda: None).result()

    def close(self) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)


class StreamLanes(CudaLanes):
    """Current stream and copy streams of a GPU, kept from layer to layer."""

    def enter(self) -> None:
        self.streams[0] = torch.cuda.current_stream(self.streams[1].device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self.streams[0])
        return event

    def fence(self, mark: torch.cuda.Event) -> None:
        for stream in self.streams[1:]:
            stream.wait_event(mark)

    def cancel(self, mark: Mark) -> bool:
        return False

    def settle(self) -> None:
        self.join()
        self.streams[0].synchronize()

    def close(self) -> None:
        torch.cuda.synchronize(self.streams[1].device)
