"""Host slots between an SSD and the slots of the device: which experts' records lie there, and who has to go.

Inclusive: a record that is read lies in a host slot first and stays there when it goes on to the device. Exclusive: the
host slots hold what the device's slots gave up, and a record that goes back leaves them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from dualdeadline.store.pages import Memory
from dualdeadline.store.reader import Read, Reader

POLICIES = ("lru", "lfu", "predicted")
DECAY = 0.5  # weight of the past in an expert's predicted score, as in `cache.prefetch`


def in_time(depth: int, layer_ms: float | None, fetch_ms: float | None) -> bool:
    """Whether a guess `depth` layers ahead can arrive before its router speaks: depth x layer time >= fetch time."""
    if layer_ms is None or fetch_ms is None:
        return True  # nothing measured yet: trying is how it gets measured
    return depth * layer_ms >= fetch_ms


@dataclass(eq=False)
class Row:
    """Memory for one record.

    Attributes:
        data: uint8 `[size]`. event: of the last copy on a device that reads or writes it.
        raw: by component, a raw one's weights and the memory that a read of it fills, made once: views cost more than
            a read's hand-in, and let other threads in between.
    """

    data: Tensor
    event: object | None = None
    raw: dict[str, tuple[Tensor, np.ndarray]] = field(default_factory=dict)

    def free(self) -> Row:
        """Itself, when no copy uses it any more."""
        if self.event is not None:
            self.event.synchronize()
            self.event = None
        return self


@dataclass(eq=False)
class Held:
    """A record in a host slot.

    Attributes:
        parts: by component, its read, or None once it is there. users: copies to the device that still need it.
        guessed: read ahead and not asked for since.
    """

    expert: int
    row: Row
    parts: dict[str, Read | None] = field(default_factory=dict)
    users: int = 0
    guessed: bool = False
    used: int = 0

    @property
    def reads(self) -> list[Read]:
        return [read for read in self.parts.values() if read is not None]

    @property
    def failed(self) -> bool:
        return any(read.done and (read.cancelled or read.error) for read in self.reads)

    @property
    def busy(self) -> bool:
        return self.users > 0 or any(not read.done for read in self.reads)


@dataclass(eq=False)
class Job:
    """A miss on its way.

    Attributes:
        into: slots of what is wanted. views: by component, bytes that are to be copied; what is read straight into its
            slot has none. reads: to wait for. held: host slot in use. row: of staging.
        begun: whether reads were handed in. counted: as a hit or a miss of the host slots.
    """

    number: int
    expert: int
    into: Mapping[str, Tensor]
    views: dict[str, Tensor] = field(default_factory=dict)
    reads: list[Read] = field(default_factory=list)
    held: Held | None = None
    row: Row | None = None
    begun: bool = False
    counted: bool = False


class Staging:
    """A few rows that records pass through without staying."""

    def __init__(self, count: int, size: int, memory: Memory):
        self.rows = [Row(data) for data in memory.new(count * size).view(count, size)]
        self.free = list(self.rows)

    def take(self, leave: int = 0) -> Row | None:
        """A free row, if that leaves so many."""
        return self.free.pop(0).free() if len(self.free) > leave else None

    def give(self, row: Row) -> None:
        self.free.append(row)

    def reset(self) -> None:
        """Nobody uses any of them."""
        self.free = list(self.rows)


class HostTier:
    """Host slots of all layers.

    Args:
        L, E: layers and experts. slots: per layer. size: bytes of a slot. policy: who goes: the least recently used
            record ("lru"), the least often used, counts surviving ("lfu"), or the one with the smallest score of a
            predictor, averaged over tokens ("predicted"); ties: the least recently used.

    Raises:
        ValueError: an unknown policy, or no slots.
    """

    def __init__(self, L: int, E: int, slots: int, size: int, policy: str, memory: Memory):
        if policy not in POLICIES or slots < 1:
            raise ValueError(f"policy is {policy!r}, host slots {slots}; needed: one of {', '.join(POLICIES)}, from 1")
        self.policy, self.slots, self.counts = policy, min(slots, E), Counter()
        data = memory.new(L * self.slots * size).view(L, self.slots, size)
        self.rows = [[Row(row) for row in rows] for rows in data]
        self.free = [list(rows) for rows in self.rows]
        self.held: list[dict[int, Held]] = [{} for _ in range(L)]
        self.often, self.score = np.zeros((L, E), np.int64), np.zeros((L, E), np.float32)
        self._clock = itertools.count(1)

    def find(self, number: int, expert: int) -> Held | None:
        return self.held[number].get(expert)

    def use(self, number: int, expert: int) -> None:
        """The router asked for an expert, wherever it is found."""
        self.often[number, expert] += 1
        if held := self.find(number, expert):
            held.used = next(self._clock)
            self.counts["useful"] += held.guessed
            self.counts["late"] += held.guessed and any(not read.done for read in held.reads)
            held.guessed = False

    def predict(self, number: int, ids: Tensor, chances: Tensor) -> None:
        """Take in a guess: ids int [N,G] and probabilities [N,G]; experts not named count as 0."""
        now = np.zeros(self.score.shape[1], np.float32)
        np.maximum.at(now, ids.flatten().numpy(), chances.flatten().float().numpy())
        self.score[number] = DECAY * self.score[number] + (1 - DECAY) * now

    def take(self, number: int, expert: int, reader: Reader, keep: set[int] = frozenset()) -> Held | None:
        """A slot for an expert that has none, its memory free to be written; None if all others are in use.

        Args:
            keep: experts that stay.
        """
        if self.free[number]:
            row = self.free[number].pop(0)
        else:
            self._cancel(number, reader, keep)
            victim = min(
                (held for held in self.held[number].values() if not held.busy and held.expert not in keep),
                key=lambda held: self._worth(number, held),
                default=None,
            )
            if victim is None:
                return None
            self.counts["evictions"] += 1
            self.counts["wasted"] += victim.guessed
            row = self._remove(number, victim)
        held = self.held[number][expert] = Held(expert, row, used=next(self._clock))
        row.free()
        return held

    def _cancel(self, number: int, reader: Reader, keep: set[int]) -> None:
        """Guesses whose reads have not begun give their slots back before anything is evicted."""
        for held in list(self.held[number].values()):
            waiting = held.guessed and not held.users and held.expert not in keep
            if waiting and held.reads and not held.reads[0].done and reader.cancel(held.reads[0]):
                self.counts["cancelled"] += 1
                held.guessed, held.parts = False, {}

    def _worth(self, number: int, held: Held) -> tuple:
        """Least first: what a cancelled read left empty, then by the policy, then the least recently used."""
        table = {"lfu": self.often, "predicted": self.score}.get(self.policy)
        return bool(held.parts), 0 if table is None else table[number, held.expert], held.used

    def drop(self, number: int, held: Held) -> None:
        """A slot becomes free."""
        self.free[number].append(self._remove(number, held))

    def _remove(self, number: int, held: Held) -> Row:
        del self.held[number][held.expert]
        return held.row

    def forget(self, everything: bool) -> None:
        """After an error: drop what is not whole, or everything; no copy is under way, and no read."""
        for number, found in enumerate(self.held):
            for held in list(found.values()):
                held.users = 0
                if everything or held.failed or not held.parts or not all(read.done for read in held.reads):
                    self.drop(number, held)
            kept = {id(held.row) for held in found.values()}  # also a row that an interrupted `take` or `drop` lost
            self.free[number] = [row for row in self.rows[number] if id(row) not in kept]

    @property
    def nbytes(self) -> int:
        rows = [*itertools.chain(*self.free), *(held.row for found in self.held for held in found.values())]
        return sum(row.data.nbytes for row in rows)
