"""Slots as the host-driven engine asks for them: a bank per layer and component, or one per component for all layers.

A shared pool is one row of slot tables over L*E experts: expert e of layer l is entry l*E + e, so the rules of
`cache.slots` hold unchanged, over all layers at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dualdeadline.cache import live
from dualdeadline.cache import slots as rules

POOLS = ("layer", "shared")


class Pool:
    """Slot tables and what is counted of each layer.

    Args:
        L, E: layers, experts per layer. slots: per layer, of gate/up and down; a shared pool has L times as many.
        shared: whether all layers share them.

    Attributes:
        tables: `SlotTables`. slots: of one bank. counters: int64 [L, len(COUNTERS)], of accesses of each layer.
        misses: accesses of each layer of which a component was absent.
    """

    def __init__(self, L: int, E: int, slots: Sequence[int], shared: bool = False):
        self.L, self.E, self.shared = L, E, shared
        self.slots = tuple(count * (L if shared else 1) for count in slots)
        self.tables = rules.SlotTables(1 if shared else L, E * (L if shared else 1), self.slots, "cpu")
        self.share, self.misses = tuple(slots), [0] * L
        self._own = torch.zeros(L, len(rules.COUNTERS), dtype=torch.int64)
        self.in_use: list[int] = []  # entries that the layer under way looked up; the caller clears it for the next one

    @property
    def counters(self) -> Tensor:
        return self._own if self.shared else self.tables.counters

    def _at(self, layer: int) -> tuple[int, int]:
        """Row of the tables, and what an expert's number is raised by."""
        return (0, layer * self.E) if self.shared else (layer, 0)

    def _pairs(self, found: rules.Ahead, component: int, shift: int) -> Iterator[tuple[int, int]]:
        count = int(found.count[component])
        for entry, slot in zip(found.source[component, :count].tolist(), found.dest[component, :count].tolist()):
            yield entry - shift, slot

    def lookup(self, layer: int, experts: Sequence[int]) -> tuple[list[dict[int, int]], list[set[int]]]:
        """Slots by expert, and the experts that are absent, of each component; see `slots.lookup`."""
        row, shift = self._at(layer)
        before = self.tables.counters[row].clone() if self.shared else None
        entries = [expert + shift for expert in experts]
        self.in_use += entries
        own = range(shift, shift + self.E) if self.shared else None
        found = rules.lookup(self.tables, row, torch.tensor([entries], dtype=torch.int32), judged=own)
        if before is not None:
            self._own[layer] += self.tables.counters[row] - before
        slots = [dict(zip(experts, found.slots[part, 0].tolist())) for part in range(2)]
        missing = [{expert for expert, _ in self._pairs(found, part, shift)} for part in range(2)]
        self.misses[layer] += len(missing[0] | missing[1])
        return slots, missing

    def present(self, layer: int, component: int) -> set[int]:
        """Experts of a layer whose component lies in a slot."""
        row, shift = self._at(layer)
        place = self.tables.slot_of[row, component, shift : shift + self.E]
        return set((place >= 0).nonzero()[:, 0].tolist())

    def admit(self, layer: int, names: Tensor, chances: Tensor, threshold: float, budget, control) -> list[list]:
        """(expert, slot) to fetch ahead, of each component; see `slots.admit`. What is in use is not evicted."""
        row, shift = self._at(layer)
        names = torch.where((names >= 0) & (names < self.E), names + shift, -1)
        spared = self.in_use if self.shared else ()
        found = rules.admit(self.tables, row, names, chances, threshold, budget, control, spared)
        return [list(self._pairs(found, part, shift)) for part in range(2)]

    def place(self, layer: int, experts: Sequence[int]) -> list[list]:
        """Give free slots, and no others, to experts that are absent, in the given order, at most a layer's share.

        For a prompt that will need them all: guesses as those of `admit`, but nothing is evicted for them. Returns
        (expert, slot) of each component.
        """
        (row, shift), found = self._at(layer), []
        for component, most in enumerate(self.share):
            bank = rules.Bank(self.tables, row, component)
            free = (bank.expert_of == rules.FREE).nonzero()[0].tolist()[:most]
            absent = [expert for expert in experts if bank.slot_of[expert + shift] < 0]
            found.append([(expert, bank.put(expert + shift, slot, rules.OPEN)) for expert, slot in zip(absent, free)])
            bank.add("fetched_ahead", len(found[-1]))
        return found

    def close(self, layer: int) -> None:
        """Count a layer's guesses that are still open as wasted, and all so far as no predictor's doing.

        What `place` brought for a prompt must not decide whether a predictor's guesses are worth their bytes.
        """
        row, shift = self._at(layer)
        for component in range(2):
            bank = rules.Bank(self.tables, row, component)
            mine = (bank.guessed > 0) & (bank.expert_of >= shift) & (bank.expert_of < shift + self.E)
            bank.guessed[mine] = 0
            bank.add("wasted", int(mine.sum()))
        total = self.tables.counters.sum(0).view(2, len(live.EVENTS)).sum(0)
        self.tables.settled.copy_(total[[live.IN_TIME, live.LATE]])

    def withdraw(self, layer: int, component: int, expert: int) -> None:
        """Take back an admission; see `SlotTables.withdraw`. Nothing, if its slot went to another expert since."""
        if expert in self.present(layer, component):
            row, shift = self._at(layer)
            self.tables.withdraw(row, component, expert + shift)
