"""Builds the named schedules: from what a layer needs and what is present, to operations in order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dualdeadline.schedule.ops import COMPONENTS, NAMES, PIECES, Compute, Copy, Route, Schedule


@dataclass(frozen=True)
class Layer:
    """What one layer needs.

    Attributes:
        experts: distinct routed experts, in order of first rank.
        present: (expert, component) pairs that are in GPU memory already.
        tokens: by expert, how many tokens it serves (default: 1 each).
        guesses: speculative copies for this layer, (expert, piece, probability), any experts.
        guessed_at: layer whose router's verdict lets them start (default: the layer before).

    Raises:
        ValueError: experts that repeat or are missing, unknown components or pieces, no probability.
    """

    experts: tuple[int, ...]
    present: frozenset[tuple[int, str]] = frozenset()
    tokens: Mapping[int, int] = field(default_factory=dict)
    guesses: tuple[tuple[int, str, float], ...] = ()
    guessed_at: int | None = None

    def __post_init__(self):
        if not self.experts or len(set(self.experts)) < len(self.experts) or min(self.experts) < 0:
            raise ValueError(f"experts are {self.experts}; needed: at least one, distinct, none below 0")
        wrong = {part for _, part in self.present} - set(COMPONENTS)
        if wrong:
            raise ValueError(f"present names {sorted(wrong)}; needed: {', '.join(COMPONENTS)}")
        for expert, piece, chance in self.guesses:
            if expert < 0 or piece not in PIECES or not 0 <= chance <= 1:
                raise ValueError(f"guess is {(expert, piece, chance)}; needed: an expert, one of {', '.join(PIECES)}, "
                                 "and a probability from 0 to 1")


def ready(experts: Iterable[int], components: Iterable[str] = COMPONENTS) -> frozenset[tuple[int, str]]:
    """Presence of some components of some experts."""
    return frozenset((expert, component) for expert in experts for component in components)


def block(name: str, layer: Layer, bytes: Mapping[str, int], number: int = 0) -> Schedule:
    """Schedule of the experts of one layer whose routes are known.

    Args:
        name: one of `NAMES`.
        layer: experts and what is present; its guesses are ignored.
        bytes: dict(gate_up, down), of one expert's components.
        number: the layer's number in the operations.
    """
    there = frozenset((number, expert, component) for expert, component in layer.present)
    return Schedule(name, tuple(_Builder(name, bytes).layer(number, layer, ()).ops), there)


def step(name: str, layers: list[Layer], bytes: Mapping[str, int]) -> Schedule:
    """Schedule of a whole decode step: per layer the work up to its router, the verdict, and the experts.

    Guesses of a layer become speculative copies behind the verdict of `guessed_at`. Of a guess that was routed
    and missing, no demand copy is made; computes wait for the speculative one.
    """
    builder = _Builder(name, bytes)
    waiting: dict[int, list[int]] = {}
    for number, layer in enumerate(layers):
        if layer.guesses:
            source = number - 1 if layer.guessed_at is None else layer.guessed_at
            if not source < number:
                raise ValueError(f"guesses for layer {number} start at layer {source}; needed: an earlier one")
            waiting.setdefault(max(source, -1), []).append(number)
    for number in waiting.get(-1, ()):
        builder.guess(number, layers[number], ())
    for number, layer in enumerate(layers):
        before = builder.add(Compute(number, "before", needs=builder.last_compute()))
        verdict = builder.add(Route(number, tuple(layer.experts), (before,)))
        builder.layer(number, layer, (verdict,))
        for target in waiting.get(number, ()):
            builder.guess(target, layers[target], (verdict,))
    there = frozenset((number, *pair) for number, layer in enumerate(layers) for pair in layer.present)
    return Schedule(name, tuple(builder.ops), there)


class _Builder:
    """Appends operations layer by layer and knows which copy brings which component."""

    def __init__(self, name: str, bytes: Mapping[str, int]):
        if name not in NAMES:
            raise ValueError(f"schedule is {name!r}; needed: one of {', '.join(NAMES)}")
        self.name, self.bytes = name, {**bytes, "expert": bytes["gate_up"] + bytes["down"]}
        self.ops: list[Copy | Compute | Route] = []
        self.brought: dict[tuple[int, int, str], int] = {}

    def add(self, op) -> int:
        self.ops.append(op)
        return len(self.ops) - 1

    def last_compute(self) -> tuple[int, ...]:
        for place in range(len(self.ops) - 1, -1, -1):
            if isinstance(self.ops[place], Compute):
                return (place,)
        return ()

    def copy(self, number: int, expert: int, piece: str, needs, **kind) -> None:
        place = self.add(Copy(number, expert, piece, self.bytes[piece], needs, **kind))
        for component in self.ops[place].components:
            self.brought[number, expert, component] = place

    def guess(self, number: int, layer: Layer, needs) -> None:
        """Speculative copies, the most probable first; of one expert gate/up first, which is due first."""
        for expert, piece, probability in sorted(layer.guesses, key=lambda guess: (-guess[2], guess[1] == "down")):
            parts = COMPONENTS if piece == "expert" else (piece,)
            open_parts = [part for part in parts if (expert, part) not in layer.present
                          and (number, expert, part) not in self.brought]
            for part in [piece] if len(open_parts) == len(parts) else open_parts:
                self.copy(number, expert, part, needs, priority=float(probability), speculative=True)

    def layer(self, number: int, layer: Layer, verdict: tuple[int, ...]) -> _Builder:
        """Demand copies and expert stages of one layer, by the schedule's rule."""
        missing = {expert: tuple(part for part in COMPONENTS if (expert, part) not in layer.present
                                 and (number, expert, part) not in self.brought) for expert in layer.experts}
        getattr(self, f"_{self.name}")(number, layer, missing, verdict)
        return self

    def _arrivals(self, number: int, experts, *components: str) -> tuple[int, ...]:
        keys = [(number, expert, component) for expert in experts for component in components]
        return tuple(sorted({self.brought[key] for key in keys if key in self.brought}))

    def _compute(self, number: int, stage: str, experts, verdict) -> None:
        """A stage of some experts, waiting for their own bytes of that stage and nothing else."""
        if experts:
            component = "gate_up" if stage == "gate_up" else "down"
            needs = verdict + self._arrivals(number, experts, component)
            self.add(Compute(number, stage, tuple(experts), needs))

    def _whole(self, number: int, expert: int, parts, verdict) -> None:
        """What is missing of an expert, in one piece if all of it is."""
        for piece in ("expert",) if len(parts) == len(COMPONENTS) else parts:
            self.copy(number, expert, piece, verdict)

    def _demand_serial(self, number, layer, missing, verdict):
        for expert, parts in missing.items():
            self._whole(number, expert, parts, verdict)
        arrived = verdict + self._arrivals(number, layer.experts, *COMPONENTS)
        self.add(Compute(number, "gate_up", layer.experts, arrived))
        self.add(Compute(number, "down_combine", layer.experts, arrived))

    def _demand_pipelined(self, number, layer, missing, verdict):
        for expert, parts in missing.items():
            self._whole(number, expert, parts, verdict)
        waits = {expert: self._arrivals(number, [expert], *COMPONENTS) for expert in layer.experts}
        hits = [expert for expert in layer.experts if not waits[expert]]
        if len(hits) == len(layer.experts):
            return self._resident(number, layer, verdict)
        late = sorted(set(layer.experts) - set(hits), key=lambda expert: max(waits[expert]))
        groups = ([hits] if hits else []) + [[expert] for expert in late]
        for group in groups:
            arrived = verdict + self._arrivals(number, group, *COMPONENTS)
            for stage in COMPONENTS:
                self.add(Compute(number, stage, tuple(group), arrived))
        self.add(Compute(number, "combine", layer.experts, self.last_compute()))

    def _staged_barrier(self, number, layer, missing, verdict):
        for part in COMPONENTS:
            for expert, parts in missing.items():
                if part in parts:
                    self.copy(number, expert, part, verdict)
        self._resident(number, layer, verdict)

    def _staged_pipelined(self, number, layer, missing, verdict):
        order = [(part, expert) for part in COMPONENTS for expert, parts in missing.items() if part in parts]
        self._pipeline(number, layer, order, verdict)

    def _component_priority(self, number, layer, missing, verdict):
        """Whole experts first, what is missing of the others after them, most work first; the last copy is a down.

        Splitting every expert costs a copy's fixed time each; only the last copy's work is not hidden behind
        another copy, so only the last expert is worth two pieces.
        """
        whole = [expert for expert, parts in missing.items() if len(parts) == len(COMPONENTS)]
        rest = [(part, expert) for part in COMPONENTS for expert, parts in missing.items() if parts == (part,)]
        whole.sort(key=lambda expert: -self._work("expert", expert, layer))
        rest.sort(key=lambda copy: (copy[0] == "down", -self._work(*copy, layer)))
        last = whole.pop() if whole and not any(part == "down" for part, _ in rest) else None
        order = [("expert", expert) for expert in whole] + rest
        self._pipeline(number, layer, order + [(part, last) for part in COMPONENTS if last is not None], verdict)

    def _work(self, piece: str, expert: int, layer: Layer) -> float:
        """Work that waits behind a copy, up to a constant: bytes to read, once for each token beyond a few.

        With copies that outlast the work behind them, Johnson's rule for two machines in a row (1954) puts the
        longest work first, so that the shortest is left when the link falls silent.
        """
        return self.bytes[piece] * max(1.0, layer.tokens.get(expert, 1) / 8)

    def _pipeline(self, number, layer, order, verdict) -> None:
        """Copies in the given order; each stage of each expert as soon as its own bytes are there."""
        for part, expert in order:
            self.copy(number, expert, part, verdict)
        waits = {part: [e for e in layer.experts if self._arrivals(number, [e], part)] for part in COMPONENTS}
        if not waits["gate_up"] and not waits["down"]:
            return self._resident(number, layer, verdict)
        first = {part: [e for e in layer.experts if e not in waits[part]] for part in COMPONENTS}
        self._compute(number, "gate_up", first["gate_up"], verdict)
        self._compute(number, "down", [e for e in first["down"] if e not in waits["gate_up"]], verdict)
        arrivals = sorted((self.brought[number, e, part], COMPONENTS.index(part), e)
                          for part in COMPONENTS for e in waits[part])
        done = set(first["gate_up"])
        owed = {e for e in layer.experts if e in waits["gate_up"] and e not in waits["down"]}
        for _, index, expert in arrivals:
            part = COMPONENTS[index]
            if part == "gate_up":
                self._compute(number, "gate_up", [expert], verdict)
                done.add(expert)
                if expert in owed:
                    self._compute(number, "down", [expert], verdict)
                    owed.discard(expert)
            elif expert in done:
                self._compute(number, "down", [expert], verdict)
            else:
                owed.add(expert)
        self.add(Compute(number, "combine", layer.experts, self.last_compute()))

    def _resident(self, number, layer, verdict) -> None:
        self._compute(number, "gate_up", list(layer.experts), verdict)
        self._compute(number, "down_combine", list(layer.experts), verdict)

