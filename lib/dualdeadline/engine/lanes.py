"""Lanes that an engine keeps for all its layers: the caller computes, something else copies."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

import torch

from dualdeadline.streams.lanes import CudaLanes, Mark, beside
from dualdeadline.task import Task


class CallerLanes:
    """Without a GPU: one thread copies, the calling thread computes at once, in its own grad and thread settings."""

    committed = 1

    def __init__(self):
        self.waiting: SimpleQueue[Task | None] = SimpleQueue()
        self.thread = threading.Thread(target=_serve, args=[self.waiting], name="dualdeadline-link", daemon=True)
        self.thread.start()
        weakref.finalize(self, self.waiting.put, None)  # dropped without `close`
        self.closed = False

    def enter(self) -> None:
        """A layer starts."""

    def mark(self) -> None:
        """All computation issued so far, for `fence`."""

    def fence(self, mark) -> None:
        """Copies issued from here on begin after the computation of a mark."""

    def copy(self, work: Callable[[], None], needs: Sequence[Mark]) -> Mark:
        if self.closed:
            raise RuntimeError("a copy is asked for on lanes that were closed; needed: open ones")
        waits: list[Task] = [need.end for need in needs if need.lane]

        def job() -> None:
            for wait in waits:
                wait.result()
            with torch.inference_mode():
                work()

        mark = Mark(1, None, Task(job))
        self.waiting.put(mark.end)
        return mark

    def compute(self, work: Callable[[], None], needs: Sequence[Mark]) -> Mark:
        for need in needs:
            if need.lane:
                need.end.result()
        work()
        return Mark(0, None, None)

    def done(self, mark: Mark) -> bool:
        return mark.end is None or mark.end.done

    def cancel(self, mark: Mark) -> bool:
        """Whether a copy had not begun and now never will."""
        return mark.end.cancel()

    def settle(self) -> None:
        """Wait for every copy."""
        last = Task(lambda: None)
        if not self.closed:
            self.waiting.put(last)
            last.result()

    def close(self) -> None:
        """Cancel what has not begun, wait for what has, and end the thread."""
        self.closed = True
        with contextlib.suppress(Empty):
            while True:
                left = self.waiting.get_nowait()
                if left is not None:
                    left.cancel()
        self.waiting.put(None)
        self.thread.join()


def _serve(waiting: SimpleQueue) -> None:
    """Tasks one after the other; one that was cancelled does nothing."""
    while (task := waiting.get()) is not None:
        task.run()
        del task  # and with it the layer that it copied for


class StreamLanes(CudaLanes):
    """Current stream and copy streams of a GPU, kept from layer to layer."""

    def enter(self) -> None:
        device, before = self.streams[1].device, self.streams[1:]
        self.streams[0] = torch.cuda.current_stream(device)
        if self.streams[0] in before:
            self.streams[1:] = beside(len(before), device)
            for stream, other in zip(self.streams[1:], before, strict=True):
                stream.wait_stream(other)

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
