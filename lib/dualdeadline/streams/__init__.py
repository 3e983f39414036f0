"""The executed twin of `simulate.run`: the same schedule, issued to a device.

    run(schedule, work) -> Timeline       on CUDA streams and events, or on threads without a GPU
    capture(schedule, work) -> replay     the same operations as one CUDA graph
    Work(...)                             the experts, slots, tokens and kernels that the operations act on
"""

from __future__ import annotations

from collections.abc import Callable

from dualdeadline.schedule import Compute, Copy, Route, Schedule
from dualdeadline.streams.bench import graph
from dualdeadline.streams.lanes import CudaLanes, Mark, ThreadLanes
from dualdeadline.streams.work import OLMOE, QWEN, Shape, Work, distinct, draw_routes
from dualdeadline.timeline import Span, Timeline

__all__ = ["OLMOE", "QWEN", "Shape", "Work", "capture", "distinct", "draw_routes", "issue", "run"]


def run(schedule: Schedule, work: Work, copy_streams: int = 1) -> Timeline:
    """Execute a schedule; its measured timeline. The output is in `work.out`.

    Speculative copies are handed to the device a few at a time (`committed` of the lanes), so that a verdict can
    cancel the rest.
    """
    work.prepare(schedule)
    cuda = work.device.type == "cuda"
    lanes = CudaLanes(work.device, True, copy_streams) if cuda else ThreadLanes()
    try:
        marks, cancelled = issue(schedule, work, lanes)
        lanes.join()
        spans = [Span(place, "link" if mark.lane else "compute", *lanes.times(mark)) for place, mark in marks.items()]
        for place, op in enumerate(schedule.ops):
            if isinstance(op, Route):  # the verdict is there when what it needs has ended
                known = max((lanes.times(marks[need])[1] for need in op.needs if need in marks), default=0.0)
                spans.append(Span(place, "host", known, known))
    finally:
        lanes.close()
    order = sorted(spans, key=lambda span: (span.start_ms, span.place))
    return Timeline(schedule, tuple(order), "measured", tuple(cancelled))


def issue(schedule: Schedule, work: Work, lanes) -> tuple[dict[int, Mark], list[int]]:
    """Hand all operations to the lanes; marks by place, and the places of cancelled copies."""
    marks: dict[int, Mark] = {}
    pending: list[int] = []
    flight: list[Mark] = []
    cancelled: list[int] = []

    def needed(op) -> list[Mark]:
        return [marks[need] for need in op.needs if need in marks]

    def copy(place: int) -> Mark:
        op = schedule.ops[place]
        marks[place] = lanes.copy(lambda: work.copy(op), needed(op))
        return marks[place]

    def feed() -> None:
        flight[:] = [mark for mark in flight if not lanes.done(mark)]
        while pending and len(flight) < lanes.committed:
            flight.append(copy(pending.pop(0)))

    for place, op in enumerate(schedule.ops):
        if isinstance(op, Compute):
            marks[place] = lanes.compute(lambda op=op: work.compute(op), needed(op))
        elif isinstance(op, Copy) and not op.speculative:
            copy(place)
        elif isinstance(op, Copy):
            pending.append(place)
            pending.sort(key=lambda other: (-schedule.ops[other].priority, other))
            feed()
        else:
            while not all(lanes.done(mark) for mark in needed(op)):
                feed()
            mine = [other for other in pending if schedule.ops[other].layer == op.layer]
            pending[:] = [other for other in pending if other not in mine]
            for other in mine:
                if schedule.ops[other].expert in op.experts:
                    copy(other)
                else:
                    cancelled.append(other)
    return marks, cancelled


def capture(schedule: Schedule, work: Work, copy_streams: int = 1) -> Callable[[], None]:
    """The schedule as one CUDA graph; returns its replay. The output is in `work.out`.

    Raises:
        ValueError: no CUDA device, or the schedule waits for a router's verdict on the host.
    """
    if work.device.type != "cuda":
        raise ValueError(f"the work is on {work.device}; needed: a CUDA device to capture a graph")
    if any(isinstance(op, Route) for op in schedule.ops):
        raise ValueError(f"{schedule.name} waits for the host at a Route; needed: a block whose routes are known")
    work.prepare(schedule)

    def all_of_it() -> None:
        lanes = CudaLanes(work.device, copy_streams=copy_streams)
        issue(schedule, work, lanes)
        lanes.join()

    return graph(all_of_it)
