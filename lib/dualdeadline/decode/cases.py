"""What is compared: slots, wire, schedule and guesses of one variant of an offloaded model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Case:
    """One variant.

    Attributes:
        slots: per layer; as many as experts: everything is resident. wire: raw or coded.
        schedule: `demand_serial` (one deadline) or `staged_barrier` (two).
        predictor: label of recorded scores, or "" for none. budget: components ahead per layer, (gate_up, down).
        threshold: least probability.
    """

    slots: int
    wire: str = "coded"
    schedule: str = "staged_barrier"
    predictor: str = ""
    budget: tuple[int, int] = (0, 0)
    threshold: float = 0.5

    @property
    def name(self) -> str:
        """Variant of its record rows."""
        return self.predictor or "no prefetch"

    def config(self) -> dict:
        found = asdict(self) | {"budget": "-".join(map(str, self.budget))}
        del found["predictor"]
        return found

    @property
    def base(self) -> Case:
        """The same without guesses."""
        return Case(self.slots, self.wire, self.schedule)


def all_cases(
    slots: Sequence[int],
    E: int,
    predictors: Sequence[str],
    budgets: Sequence[tuple[int, int]],
    thresholds: Sequence[float],
) -> list[Case]:
    """Resident; both wires and both numbers of deadlines at every number of slots; guesses on the faster wire."""
    found = [Case(E, "raw")]
    for count in slots:
        found += [Case(count, wire, name) for wire in ("raw", "coded") for name in ("demand_serial", "staged_barrier")]
        found += [
            Case(count, "coded", "staged_barrier", label, tuple(budget), threshold)
            for label in predictors
            for budget in budgets
            for threshold in thresholds
        ]
    return found
