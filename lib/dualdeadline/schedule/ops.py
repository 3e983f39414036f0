"""A schedule as data: what is copied, computed and waited for, in which order; nothing runs here.

`simulate.run` gives every operation a time from a cost model, `streams.run` issues the very same operations on a
device. All schedules are exact: they differ in what waits for what, never in what is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

NAMES = ("demand_serial", "demand_pipelined", "staged_barrier", "staged_pipelined", "component_priority")
COMPONENTS = ("gate_up", "down")
PIECES = (*COMPONENTS, "expert")  # what one copy may hold: a component, or both in one piece
DECODES = tuple(f"decode_{piece}" for piece in PIECES)  # an encoded piece that has arrived becomes weights in its slot
STAGES = ("before", "gate_up", "down", "combine", "down_combine", *DECODES)
DEMAND = 1e9  # link priority of bytes the router has asked for; speculation stays far below


@dataclass(frozen=True)
class Copy:
    """Bytes that cross the link in one piece.

    Attributes:
        layer, expert: whose. piece: one of `PIECES`. bytes: how many, above 0.
        needs: places of the operations in the schedule that must have ended first.
        priority: of the copies that may start, the link takes the one with the highest, ties in schedule order.
        speculative: made before the router of `layer` has spoken; its verdict makes it a demand or cancels it,
            unless it has begun.
        encoded: a wire record that a decode has to follow.
    """

    layer: int
    expert: int
    piece: str
    bytes: int
    needs: tuple[int, ...] = ()
    priority: float = DEMAND
    speculative: bool = False
    encoded: bool = False

    @property
    def components(self) -> tuple[str, ...]:
        return COMPONENTS if self.piece == "expert" else (self.piece,)


@dataclass(frozen=True)
class Compute:
    """One stage of a layer's work: `before` (up to its router), or an expert stage for some experts.

    `down_combine` is down for all routed experts together with the rank-ordered sum over them.
    """

    layer: int
    stage: str
    experts: tuple[int, ...] = ()
    needs: tuple[int, ...] = ()


@dataclass(frozen=True)
class Route:
    """The host learns which experts a layer's router chose; what stands after it is issued only then."""

    layer: int
    experts: tuple[int, ...] = ()
    needs: tuple[int, ...] = ()


@dataclass(frozen=True)
class Schedule:
    """Operations in the order in which the host issues them; `needs` point backwards.

    Raises:
        ValueError: an unknown piece or stage, no bytes, a need that does not point backwards, a component that is
            copied twice, an expert stage that no copy or presence serves before it is listed, or a stage before
            the one whose results it takes.
    """

    name: str
    ops: tuple[Copy | Compute | Route, ...]
    present: frozenset[tuple[int, int, str]] = field(default=frozenset(), repr=False)

    def __post_init__(self):
        there, done = set(self.present), set()
        for place, op in enumerate(self.ops):
            if any(not 0 <= need < place for need in op.needs):
                raise ValueError(f"operation {place} needs {op.needs}; needed: places before its own")
            if isinstance(op, Copy):
                self._check_copy(op, there)
            elif isinstance(op, Compute):
                self._check_compute(place, op, done)

    def _check_copy(self, op: Copy, there: set) -> None:
        if op.piece not in PIECES or op.bytes <= 0:
            raise ValueError(f"copy of {op.bytes} bytes of {op.piece!r}; needed: bytes above 0 of {', '.join(PIECES)}")
        keys = {(op.layer, op.expert, component) for component in op.components}
        if keys & there:
            raise ValueError(f"{op.piece} of expert {op.expert} in layer {op.layer} is copied, but already there")
        there |= keys

    def _check_compute(self, place: int, op: Compute, done: set) -> None:
        if op.stage not in STAGES:
            raise ValueError(f"stage is {op.stage!r}; needed: one of {', '.join(STAGES)}")
        if op.stage in DECODES and not any(self._brings(need, op) for need in op.needs):
            raise ValueError(f"operation {place} is {op.stage} of {op.experts}; needed: its copy among its needs")
        if op.stage == "combine" and {(op.layer, "down", expert) for expert in op.experts} - done:
            raise ValueError(f"operation {place} combines experts {op.experts} before all of their downs")
        component = {"gate_up": "gate_up", "down": "down", "down_combine": "down"}.get(op.stage)
        for expert in op.experts if component else ():
            if (op.layer, expert, component) not in self.present:
                served = any(isinstance(self.ops[need], Copy) and self.ops[need].layer == op.layer
                             and self.ops[need].expert == expert and component in self.ops[need].components
                             for need in op.needs)
                if not served:
                    raise ValueError(f"operation {place} computes {component} of expert {expert} in layer {op.layer}, "
                                     "which is not there; needed: a copy among its needs")
            if component == "down" and (op.layer, "gate_up", expert) not in done:
                raise ValueError(f"operation {place} computes down of expert {expert} before its gate/up")
        done |= {(op.layer, component, expert) for expert in op.experts}

    def _brings(self, need: int, op: Compute) -> bool:
        copy = self.ops[need]
        return isinstance(copy, Copy) and (copy.layer, (copy.expert,), f"decode_{copy.piece}") == (
            op.layer, op.experts, op.stage)

    @property
    def copies(self) -> list[Copy]:
        return [op for op in self.ops if isinstance(op, Copy)]

    @property
    def bytes(self) -> int:
        """Bytes over the link if nothing is cancelled."""
        return sum(op.bytes for op in self.copies)
