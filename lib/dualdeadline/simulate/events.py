"""Event simulator: one host, one link, one compute queue, times from a cost model."""

from __future__ import annotations

from dualdeadline.cost import CostModel
from dualdeadline.schedule import DEMAND, Compute, Copy, Route, Schedule
from dualdeadline.timeline import Span, Timeline


def run(schedule: Schedule, cost: CostModel) -> Timeline:
    """Timeline of a schedule under a cost model.

    The host issues operations in order, each at its own cost, and stops at a `Route` until its verdict is there.
    The compute queue is first in, first out, as a CUDA stream is; a stage begins with its first launch and ends
    no earlier than its last. The link never idles while a copy may start; of
    those that may it takes the one with the highest priority. A verdict cancels the layer's speculative copies
    that were not routed and makes demands of the others; a copy that has begun, or that is one of
    `cost.committed` handed to the device already, is finished.
    """
    return _Run(schedule, cost).run()


class _Run:
    """State of one simulated run."""

    def __init__(self, schedule: Schedule, cost: CostModel):
        self.ops, self.schedule, self.cost = schedule.ops, schedule, cost
        self.ended: dict[int, float] = {}
        self.spans: list[Span] = []
        self.queue: list[tuple[int, float]] = []  # computes and when the host has launched all of each
        self.waiting: dict[int, float] = {}  # copies that were issued: place -> priority
        self.cancelled: list[int] = []
        self.next, self.now = 0, 0.0  # the host's next operation, the clock
        self.busy: dict[str, tuple[float, int] | None] = {"host": None, "link": None, "compute": None}
        self.link_free = -1.0  # when the link fell silent

    def run(self) -> Timeline:
        while True:
            while self._start_host() or self._start_link() or self._start_compute():
                pass
            ends = [state[0] for state in self.busy.values() if state]
            if not ends:
                break
            self.now = min(ends)
            for lane, state in self.busy.items():
                if state and state[0] <= self.now:
                    self._end(lane, state[1])
        if self.next < len(self.ops) or self.queue:
            raise RuntimeError(f"operation {self.next} of {len(self.ops)} can never start")  # _check rules it out
        order = sorted(self.spans, key=lambda span: (span.start_ms, span.place))
        return Timeline(self.schedule, tuple(order), "simulated", tuple(sorted(self.cancelled)))

    def _begin(self, lane: str, place: int, ms: float) -> None:
        self.busy[lane] = (self.now + ms, place)
        if lane != "host" or isinstance(self.ops[place], Route):
            self.spans.append(Span(place, lane, self.now, self.now + ms))

    def _end(self, lane: str, place: int) -> None:
        self.busy[lane] = None
        op = self.ops[place]
        if lane != "host":
            self.ended[place] = self.now
            if lane == "link":
                self.link_free = self.now
        elif isinstance(op, Copy):
            self.waiting[place] = op.priority
        elif isinstance(op, Route):
            self.ended[place] = self.now
            self._verdict(op)

    def _verdict(self, route: Route) -> None:
        """Cancel the layer's wrong guesses, but for those the device already has; right ones become demands."""
        guesses = sorted((place for place in self.waiting if self.ops[place].speculative), key=self._turn)
        running = self.busy["link"] is not None and self.ops[self.busy["link"][1]].speculative
        for place in guesses[: max(0, self.cost.committed - running)]:
            self.waiting[place] = float("inf")  # queued on the device: nothing overtakes it
        for place in guesses:
            op = self.ops[place]
            if op.layer == route.layer and self.waiting[place] < float("inf"):
                if op.expert in route.experts:
                    self.waiting[place] = DEMAND
                else:
                    del self.waiting[place]
                    self.cancelled.append(place)

    def _ready(self, place: int) -> bool:
        return all(need in self.ended for need in self.ops[place].needs)

    def _turn(self, place: int) -> tuple[float, int]:
        return -self.waiting[place], place

    def _start_host(self) -> bool:
        if self.busy["host"] or self.next == len(self.ops):
            return False
        op = self.ops[self.next]
        if isinstance(op, Route) and not self._ready(self.next):
            return False
        ms = self.cost.host_ms(op)
        if isinstance(op, Copy) and op.speculative:
            ahead = sum(self.ops[place].speculative for place in self.waiting)
            ms = 0.0 if ahead >= self.cost.committed else ms  # later ones are handed over while the host waits
        self._begin("host", self.next, ms)
        if isinstance(op, Compute):
            self.queue.append((self.next, self.busy["host"][0]))
        self.next += 1
        return True

    def _start_link(self) -> bool:
        able = [place for place in self.waiting if self._ready(place)] if not self.busy["link"] else []
        if not able:
            return False
        place = min(able, key=self._turn)
        del self.waiting[place]
        silent = self.link_free < 0 or self.now > self.link_free
        self._begin("link", place, self.cost.copy_ms(self.ops[place].bytes, silent))
        return True

    def _start_compute(self) -> bool:
        if self.busy["compute"] or not self.queue or not self._ready(self.queue[0][0]):
            return False
        place, launched = self.queue.pop(0)
        needs = self.ops[place].needs
        waited = any(isinstance(self.ops[need], Copy) and self.ended[need] >= self.now for need in needs)
        ms = self.cost.compute_ms(self.ops[place], waited)
        self._begin("compute", place, max(ms, launched - self.now))
        return True
