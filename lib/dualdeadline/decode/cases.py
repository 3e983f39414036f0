"""What is compared: slots, wire, schedule and guesses of one variant of an offloaded model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from dualdeadline.engine.crossing import FETCH_PROGRAMS
from dualdeadline.engine.options import IN_GRAPH


@dataclass(frozen=True)
class Case:
    """One variant.

    Attributes:
        slots: per layer; as many as experts: everything is resident. wire: raw or coded.
        schedule: `demand_serial` (one deadline) or `staged_barrier` (two).
        predictor: label of recorded scores, or "" for none. budget: components ahead per layer, (gate_up, down).
        threshold: least probability. warm: slots keep what earlier prompts left in them, as a server's would.
        lanes: programs of a fetch; fewer emulate a slower link. compiled: the stock code around the experts is.
        break_even: precision below which the live control stops guesses, where it is not the engine's own.
    """

    slots: int
    wire: str = "coded"
    schedule: str = "staged_barrier"
    predictor: str = ""
    budget: tuple[int, int] = (0, 0)
    threshold: float = 0.5
    warm: bool = False
    lanes: int = FETCH_PROGRAMS
    compiled: bool = True
    break_even: float | None = None

    @property
    def name(self) -> str:
        """Variant of its record rows."""
        return self.predictor or "no prefetch"

    def config(self) -> dict:
        found = asdict(self) | {"budget": "-".join(map(str, self.budget))}
        del found["predictor"]
        if self.break_even is None:
            del found["break_even"]
        return found

    @property
    def base(self) -> Case:
        """The same without guesses."""
        return replace(self, predictor="", budget=(0, 0), threshold=Case.threshold, break_even=None)


def guess(base: Case, label: str, gate_up: int, down: int, threshold: float) -> Case:
    """A case with guesses: predictor's label, components ahead per layer, least probability."""
    return replace(base, predictor=label, budget=(gate_up, down), threshold=threshold)


def all_cases(
    slots: Sequence[int],
    E: int,
    guesses: Sequence[Sequence],
    warm: Sequence[Sequence],
    warm_slots: Sequence[int] | None = None,
) -> list[Case]:
    """Resident; both wires and both numbers of deadlines at every number of slots; guesses on encoded experts.

    Args:
        guesses, warm: arguments of `guess`, for slots that start empty and for slots that stay warm.
        warm_slots: numbers of slots that are also kept warm, each variant with slots of its own (default: all).
    """
    found = [Case(E, "raw")]
    for count in slots:
        base = Case(count)
        found += [Case(count, wire, name) for wire in ("raw", "coded") for name in IN_GRAPH]
        found += [guess(base, *one) for one in guesses]
        if warm_slots is None or count in warm_slots:
            found += warm_cases([count], E, warm)[1:]
    return found


def warm_cases(slots: Sequence[int], E: int, guesses: Sequence[Sequence]) -> list[Case]:
    """Resident, and slots that stay warm, without guesses and with them."""
    found = [Case(E, "raw")]
    for base in (Case(count, warm=True) for count in slots):
        found += [base, *(guess(base, *one) for one in guesses)]
    return found


def control_cases(
    slots: Sequence[int], E: int, guesses: Sequence[Sequence], break_evens: Sequence[float]
) -> list[Case]:
    """What the live control lets wrong guesses cost, by the precision that it asks for."""
    found = [Case(E, "raw")]
    for base in map(Case, slots):
        found.append(base)
        found += [replace(guess(base, *one), break_even=value) for one in guesses for value in break_evens]
    return found


def map_cases(slots: Sequence[int], E: int, lanes: Sequence[int], guesses: Sequence[Sequence]) -> list[Case]:
    """Where staging, compression and guesses pay: links of several speeds, and layers compiled or not."""
    found = [Case(E, "raw", compiled=False)]
    for count in slots:
        for programs, compiled in [(number, True) for number in lanes] + [(FETCH_PROGRAMS, False)]:
            base = Case(count, lanes=programs, compiled=compiled)
            found += [replace(base, wire=wire, schedule=name) for wire in ("raw", "coded") for name in IN_GRAPH]
            found += [guess(replace(base, wire=wire), *one) for wire in ("raw", "coded") for one in guesses]
    return found


def plain_cases(slots: Sequence[int], E: int) -> list[Case]:
    """Resident and some numbers of slots with the stock code around the experts captured as it is, not compiled."""
    return [Case(count, "raw" if count == E else "coded", compiled=False) for count in (E, *slots)]
