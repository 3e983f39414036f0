"""What happened when: the result of simulating or executing a schedule."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from dualdeadline import manifest
from dualdeadline.schedule import Compute, Copy, Schedule

LANES = ("link", "compute", "host")


@dataclass(frozen=True)
class Span:
    """One operation: its place in the schedule, its lane, milliseconds from the start of the run."""

    place: int
    lane: str
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Timeline:
    """Spans of one run of a schedule, in order of their start.

    Attributes:
        kind: `measured` or `simulated`.
        cancelled: places of the copies that the router's verdict cancelled.
    """

    schedule: Schedule
    spans: tuple[Span, ...]
    kind: str
    cancelled: tuple[int, ...] = ()

    @property
    def ms(self) -> float:
        """End of the last operation that the output waits for: speculation left over does not count."""
        ends = [span.end_ms for span in self.spans if not getattr(self.schedule.ops[span.place], "speculative", False)]
        return max(ends, default=0.0)

    def lane(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.lane == name]

    def busy_ms(self, lane: str) -> float:
        """Time in which a lane works on something."""
        return sum(span.end_ms - span.start_ms for span in self.lane(lane))

    @property
    def bytes(self) -> int:
        """Bytes that crossed the link."""
        return sum(self.schedule.ops[span.place].bytes for span in self.lane("link"))

    def frame(self) -> pd.DataFrame:
        """One row per span: lane, what, layer, start_ms, end_ms, bytes, speculative."""
        rows = []
        for span in self.spans:
            op = self.schedule.ops[span.place]
            copy = isinstance(op, Copy)
            rows.append({"lane": span.lane, "what": label(op), "layer": op.layer, "start_ms": span.start_ms,
                         "end_ms": span.end_ms, "bytes": op.bytes if copy else 0,
                         "speculative": copy and op.speculative})
        columns = ["lane", "what", "layer", "start_ms", "end_ms", "bytes", "speculative"]
        return pd.DataFrame(rows, columns=columns)

    def chrome(self) -> dict:
        """Trace for chrome://tracing and ui.perfetto.dev (Trace Event Format: complete events, microseconds)."""
        lanes = {lane: number for number, lane in enumerate(LANES)}
        events = [{"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": lane}}
                  for lane, number in lanes.items()]
        for span, row in zip(self.spans, self.frame().to_dict("records")):
            events.append({"ph": "X", "pid": 0, "tid": lanes[span.lane], "name": row["what"], "cat": span.lane,
                           "ts": 1e3 * span.start_ms, "dur": 1e3 * (span.end_ms - span.start_ms),
                           "args": {"layer": row["layer"], "bytes": row["bytes"], "place": span.place}})
        return {"traceEvents": events, "displayTimeUnit": "ms",
                "otherData": {"schedule": self.schedule.name, "kind": self.kind}}

    def save(self, path: Path) -> Path:
        """Write the Chrome trace, whole or not at all."""
        manifest.write_text(path, json.dumps(self.chrome()) + "\n")
        return path


def label(op) -> str:
    """Short name of an operation: `gate/up 3`, `down 1,2`, `route`."""
    if isinstance(op, Copy):
        return f"{op.piece.replace('_', '/')} {op.expert}"
    if isinstance(op, Compute):
        who = ",".join(map(str, op.experts))
        return f"{op.stage.replace('gate_up', 'gate/up').replace('_', ' ')} {who}".strip()
    return f"route {op.layer}"
