"""Whether guesses are worth their time: decode steps with and without them, by the clock, in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

TRIAL = 16  # steps of a mode that are compared with as many of the other
SETTLE = 2  # steps after a change that count for neither: slots and link still hold what the other mode left
HOLD = 128  # steps until the mode that lost is tried again; twice as many each time that it loses again
LONGEST = 4096
MOST = 8  # tokens of a forward that is a decode step


class Worth:
    """Switches guesses off when steps take longer with them, and on again when they do not.

    Begins with guesses. After `TRIAL` steps the other mode is tried for as many, and the one whose median step is
    shorter goes on; the other is tried again after `HOLD` steps, a losing one ever more seldom. Only steps of equal
    numbers of tokens are compared.

    Args:
        clock: seconds, as `time.perf_counter`.

    Attributes:
        on: whether this step makes guesses. ms: by mode, the median step of the last comparison, or None.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.clock, self.on, self.ms = clock, True, {True: None, False: None}
        self.verdict, self.hold, self.tokens = True, HOLD, 0
        self._start: float | None = None
        self._restart()

    def _restart(self) -> None:
        """The mode that won so far, from the beginning: its steps are counted anew."""
        self.on, self.trying, self.skip, self.left = self.verdict, False, SETTLE, TRIAL
        self.times: dict[bool, list[float]] = {True: [], False: []}

    def begin(self, tokens: int) -> None:
        """A forward of so many tokens starts; one of a prompt is not timed."""
        if tokens > MOST:
            self.skip, self._start = SETTLE, None
            return
        if tokens != self.tokens:
            left = self.left
            self._restart()
            self.tokens, self.left = tokens, max(left, TRIAL)
        self._start = self.clock()

    def end(self) -> None:
        """The forward that began has ended."""
        if self._start is None:
            return
        took, self._start = 1e3 * (self.clock() - self._start), None
        if self.skip:
            self.skip -= 1
            return
        self.times[self.on] = [*self.times[self.on][1 - TRIAL :], took]
        self.left -= 1
        if self.left > 0:
            return
        if self.trying:
            self._judge()
        else:
            self.on, self.trying, self.skip, self.left = not self.verdict, True, SETTLE, TRIAL

    def _judge(self) -> None:
        self.ms = {mode: statistics.median(times) for mode, times in self.times.items()}
        better = self.ms[True] <= self.ms[False]
        self.hold = min(2 * self.hold, LONGEST) if better == self.verdict else HOLD
        self.verdict = better
        self._restart()
        self.left = self.hold

    def __str__(self) -> str:
        if None in self.ms.values():
            return "steps with and without guesses are being timed"
        return f"a step takes {self.ms[True]:.3f} ms with guesses, {self.ms[False]:.3f} ms without"
