"""Work that one thread does and others wait for, with no lock that an interrupted caller could keep.

`concurrent.futures` waits on conditions: a Ctrl-C just after the main thread has got one's lock leaves it locked, and
whoever is to report an outcome then hangs. Here every change of state is one call into C.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError

LOST_S = 0.1  # after which a waiter looks again: who was interrupted between taking the gate and opening it keeps it


class Task:
    """Work and its outcome.

    Args:
        work: what `run` calls.

    Attributes:
        done: whether there is an outcome. error: what it raised. cancelled: it never ran and never will.
    """

    def __init__(self, work: Callable[[], None] | None = None):
        self.work, self.done, self.error, self.cancelled = work, False, None, False
        self._claim, self._gate = [None], threading.Lock()
        self._gate.acquire()

    @property
    def begun(self) -> bool:
        """Whether somebody has claimed it, to do or to cancel it."""
        return not self._claim

    def claim(self) -> bool:
        """Whether the caller, and nobody else, is to do it."""
        try:
            self._claim.pop()
        except IndexError:
            return False
        return True

    def finish(self, error: BaseException | None = None) -> None:
        """Say how it ended; whoever claimed it calls this once."""
        self.error, self.done = error, True
        self._gate.release()

    def run(self) -> None:
        """Do the work, if it is not done or cancelled already."""
        if not self.claim():
            return
        error = None
        try:
            self.work()
        except BaseException as found:
            error = found
        self.work = None  # and with it whatever it holds
        self.finish(error)

    def cancel(self) -> bool:
        """Whether it had not begun and now never will."""
        if not self.claim():
            return False
        self.cancelled = True
        self.finish()
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until there is an outcome; whether there is one."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.done and (end is None or time.monotonic() < end):
            if self._gate.acquire(timeout=LOST_S):
                self._gate.release()
        return self.done

    def result(self, timeout_s: float | None = None) -> None:
        """Wait, and raise what it raised.

        Raises:
            CancelledError: it never ran. TimeoutError: not in that time.
        """
        if not self.wait(timeout_s):
            raise TimeoutError(f"no outcome after {timeout_s} s")
        if self.cancelled:
            raise CancelledError
        if self.error is not None:
            raise self.error
