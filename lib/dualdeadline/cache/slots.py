"""Slot tables: which expert's component lies in which slot, and the rules by which that changes.

Every layer has two banks of slots, one for gate/up components (component 0) and one for down components (component 1);
nothing is shared between them. The functions here run on the host and define the rules; `kernels/slots.py` does the
same, bit by bit, in one launch each.

The live control of prefetch, which `admit` obeys, stands in `live.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dualdeadline.cache.live import EVENTS, IN_TIME, LATE, USEFUL, WASTED, control, is_on, settle

__all__ = ["Ahead", "Bank", "Found", "SlotTables", "admit", "control", "is_on", "lookup"]
NAMES = ("gate_up", "down")  # components 0 and 1
COUNTERS = tuple(f"{event}_{name}" for name in NAMES for event in EVENTS)  # columns of `counters`
FREE, NO_SLOT = -1, -2
OPEN, JUDGED = 1, 2  # values of `guessed`: fetched ahead, before and after the look-up it was meant for


class SlotTables:
    """Tables of L layers with E experts and slots (C_gate_up, C_down) per layer; C is the larger of both.

    Fields, int32 unless said, all on one device; the second axis is the component:
        slot_of [L,2,E]: slot of an expert, -1 absent. expert_of [L,2,C]: expert in a slot, -1 free, -2 no such slot.
        used [L,2,C]: clock value of the last use. guessed [L,2,C]: while fetched ahead and not used since OPEN, or
        JUDGED once a look-up did not ask for it. clock [L,2]: look-ups so far. counters int64 [L,14]: columns
        COUNTERS. settled int64 [2]: guesses in time and late that the control's precision has taken in.

    Raises:
        ValueError: L, E or a number of slots below 1.
    """

    FIELDS = ("slot_of", "expert_of", "used", "guessed", "clock", "counters", "settled")

    def __init__(self, L: int, E: int, slots: Sequence[int], device=None):
        if L < 1 or E < 1 or len(slots) != 2 or min(slots) < 1:
            raise ValueError(f"L is {L}, E {E}, slots {tuple(slots)}; needed: at least 1 each, slots of two components")
        self.L, self.E, self.slots, self.C = L, E, tuple(int(count) for count in slots), int(max(slots))
        make = {"dtype": torch.int32, "device": device}
        self.slot_of = torch.full((L, 2, E), -1, **make)
        self.expert_of = torch.full((L, 2, self.C), FREE, **make)
        for component, count in enumerate(self.slots):
            self.expert_of[:, component, count:] = NO_SLOT
        self.used, self.guessed = torch.zeros(L, 2, self.C, **make), torch.zeros(L, 2, self.C, **make)
        self.clock = torch.zeros(L, 2, **make)
        self.counters = torch.zeros(L, len(COUNTERS), dtype=torch.int64, device=device)
        self.settled = torch.zeros(2, dtype=torch.int64, device=device)

    @property
    def device(self) -> torch.device:
        return self.slot_of.device

    def to(self, device) -> SlotTables:
        """A copy on a device."""
        return SlotTables(self.L, self.E, self.slots, device).copy_(self)

    def copy_(self, other: SlotTables) -> SlotTables:
        """Take over all values of tables of the same sizes, in place; ValueError if they have others."""
        if (self.L, self.E, self.slots) != (other.L, other.E, other.slots):
            raise ValueError(f"L, E, slots are {other.L}, {other.E}, {other.slots}; "
                             f"needed: {self.L}, {self.E}, {self.slots}")
        for name in self.FIELDS:
            getattr(self, name).copy_(getattr(other, name))
        return self

    def present(self, layer: int, component: int) -> set[int]:
        """Experts whose component lies in a slot of the layer."""
        return {expert for expert in self.expert_of[layer, component].tolist() if expert >= 0}

    def counts(self) -> dict[str, int]:
        """Counters by name, all layers together."""
        return dict(zip(COUNTERS, self.counters.sum(0).tolist(), strict=True))

    def clear(self) -> None:
        """Nothing lies in any slot any more; clocks and counters go on."""
        self.slot_of.fill_(-1)
        self.expert_of.clamp_(max=FREE)
        self.guessed.zero_()

    def withdraw(self, layer: int, component: int, expert: int) -> None:
        """Take back an admission whose bytes have not begun to cross the link; it counts as never made."""
        bank = Bank(self, layer, component)
        slot = int(bank.slot_of[expert])
        if slot < 0 or not bank.guessed[slot]:
            raise ValueError(f"expert {expert} of layer {layer} has slot {slot} of {NAMES[component]}; needed: a guess")
        bank.add("late", -int(bank.guessed[slot] == JUDGED))
        bank.slot_of[expert], bank.expert_of[slot], bank.guessed[slot] = -1, FREE, 0
        bank.add("fetched_ahead", -1)

    def check(self) -> None:
        """Raise ValueError if the tables contradict each other; waits for the device."""
        own = self if self.device.type == "cpu" else self.to("cpu")
        for bank in range(2 * self.L):
            own._check(*divmod(bank, 2))

    def _check(self, layer: int, component: int) -> None:
        slot_of, expert_of, used, guessed = (getattr(self, name)[layer, component] for name in self.FIELDS[:4])
        count, clock = self.slots[component], int(self.clock[layer, component])
        slot, held = torch.arange(self.C, dtype=torch.int32), expert_of >= 0
        inside = ((expert_of == NO_SLOT) == (slot >= count)) & (expert_of >= NO_SLOT) & (expert_of < self.E)
        inverse = torch.full_like(slot_of, -1)
        inverse[expert_of[held & inside].long()] = slot[held & inside]
        rules = (
            ("expert_of", expert_of, inside.all(), f"-1 to {self.E - 1}, -2 from slot {count} on"),
            ("slot_of", slot_of, bool((slot_of == inverse).all()) and (slot_of >= 0).sum() == held.sum(),
             f"the inverse of expert_of, {expert_of.tolist()}, each expert once"),
            ("used", used, ((used >= 0) & (used <= clock)).all(), f"0 to the clock, {clock}"),
            ("guessed", guessed, ((guessed == 0) | (guessed > 0) & (guessed <= JUDGED) & held).all(),
             "0, or 1 or 2 where an expert lies"),
        )
        for name, value, right, needed in rules:
            if not right:
                raise ValueError(f"{name} of layer {layer}, {NAMES[component]}, is {value.tolist()}; needed: {needed}")


class Ahead:
    """Result of an admission: component c has to fetch expert source[c,m] into slot dest[c,m] for m below count[c].

    source, dest: int32 [2,M], -1 beyond the count; M = max(budget). count: int32 [2]. arrived: int32 [1], the kernel's
    own, how many of its programs are done.
    """

    def __init__(self, budget: Sequence[int], device=None):
        self.source = torch.full((2, max(budget)), -1, dtype=torch.int32, device=device)
        self.dest, self.count = self.source.clone(), torch.zeros(2, dtype=torch.int32, device=device)
        self.arrived = torch.zeros(1, dtype=torch.int32, device=device)

    def fill(self, component: int, taken: list[tuple[int, int]]) -> None:
        """Write (expert, slot) pairs into the lists of a component."""
        for place, (expert, slot) in enumerate(taken):
            self.source[component, place], self.dest[component, place] = expert, slot
        self.count[component] = len(taken)


class Found(Ahead):
    """Result of a look-up of ids [N,K]: slots int32 [2,N,K], -1 for none, and what to fetch, M = N*K."""

    def __init__(self, N: int, K: int, device=None):
        super().__init__((N * K,), device)
        self.slots = torch.full((2, N, K), -1, dtype=torch.int32, device=device)


def lookup(tables: SlotTables, layer: int, ids: Tensor, check: bool = True, judged: range | None = None) -> Found:
    """Look up the routed experts of one forward of a layer and give slots to those that are absent.

    One access per distinct expert. The clock rises by one; hits are marked as used now. Misses, in order of their
    first (token, rank), take the free slot of the lowest number, else the slot least recently used that is not in use
    in this call (ties: the lowest number), whose expert becomes absent. A guessed slot that is used counts as useful,
    one that is evicted before as wasted; guesses made since the last look-up count as in time or late. An id out of
    range has slot -1 and is no access.

    Args:
        tables: on the CPU; changed in place. ids: integers [N,K].
        check: False: misses for which no slot is left have slot -1 and are not counted, as in the kernel.
        judged: experts whose guesses this look-up judges (default: all; of a bank that all layers share, one layer's).

    Raises:
        ValueError: more distinct experts than a bank has slots; the tables are unchanged then.
    """
    (N, K), flat = ids.shape, ids.flatten().tolist()
    wanted = list(dict.fromkeys(expert for expert in flat if 0 <= expert < tables.E))
    if check and len(wanted) > min(tables.slots):
        raise ValueError(f"ids name {len(wanted)} experts; needed: at most {min(tables.slots)}, the slots of a bank")
    found = Found(N, K)
    for component in range(2):
        bank = Bank(tables, layer, component)
        bank.clock[0] += 1
        place = bank.slot_of.tolist()
        in_use, taken = {expert for expert in wanted if place[expert] >= 0}, []
        for expert in in_use:
            bank.use(place[expert])
        bank.judge(judged)
        bank.add("hits", len(in_use))
        for expert in wanted:
            slot = bank.victim(in_use) if expert not in in_use else None
            if slot is not None:
                place[expert] = bank.put(expert, slot, guessed=0)
                in_use.add(expert)
                taken.append((expert, slot))
        bank.add("misses", len(taken))
        places = [place[expert] if expert in in_use else -1 for expert in flat]
        found.slots[component] = torch.tensor(places, dtype=torch.int32).view(N, K)
        found.fill(component, taken)
    return found


def admit(tables: SlotTables, layer: int, ids: Tensor, probabilities: Tensor, threshold: float, budget: Sequence[int],
          control: Tensor | None = None, spared: Sequence[int] = ()) -> Ahead:
    """Choose what to fetch ahead for a layer that is not running, and give it slots.

    Ids in range with probability >= threshold pass (NaN never does). Present ones that pass are kept: marked as used at
    the clock's present value. Absent ones are admitted by falling probability over all rows (ties: first place), each
    once, up to the budget of their component, into the free slot of the lowest number, else the slot least recently
    used whose expert is not among those that pass; where there is none, nothing is admitted. They are marked as used
    now and guessed. Switched off by the control, a call changes nothing but the control.

    Args:
        tables: on the CPU; changed in place. ids: integers [N,G]. probabilities: [N,G], compared in float32.
        budget: most components to admit, of gate/up and of down.
        control: float32[6] of `live.control`, changed in place; None: always on.
        spared: experts that are not evicted either (only here: a bank that all layers share).
    """
    ahead = Ahead(budget)
    if control is None or is_on(control):
        passing = _passing(tables.E, ids, probabilities, threshold)
        for component in range(2):
            bank = Bank(tables, layer, component)
            place, taken = bank.slot_of.tolist(), []
            kept = {expert for expert in passing if place[expert] >= 0}
            for expert in kept:
                bank.used[place[expert]] = bank.clock[0]
            for expert in passing:
                absent = expert not in kept and len(taken) < budget[component]
                slot = bank.victim({*passing, *spared}) if absent else None
                if slot is not None:
                    bank.put(expert, slot, guessed=OPEN)
                    taken.append((expert, slot))
            bank.add("fetched_ahead", len(taken))
            ahead.fill(component, taken)
    if control is not None:
        settle(tables, control)
    return ahead


def _passing(E: int, ids: Tensor, probabilities: Tensor, threshold: float) -> list[int]:
    """Distinct ids that pass, by falling probability, ties in order of their places."""
    values, least = probabilities.float().flatten().tolist(), float(torch.tensor(threshold, dtype=torch.float32))
    pairs = [(value, expert) for value, expert in zip(values, ids.flatten().tolist(), strict=True)
             if 0 <= expert < E and value >= least]
    return list(dict.fromkeys(expert for _, expert in sorted(pairs, key=lambda pair: -pair[0])))


class Bank:
    """Rows of one layer and component, as numpy views that write through: quicker than tensors by far."""

    def __init__(self, tables: SlotTables, layer: int, component: int):
        rows = (getattr(tables, name).numpy()[layer, component] for name in SlotTables.FIELDS[:4])
        self.slot_of, self.expert_of, self.used, self.guessed = rows
        self.clock = tables.clock.numpy()[layer, component : component + 1]
        self.counters = tables.counters.numpy()[layer, component * len(EVENTS) :]

    def add(self, event: str, number: int) -> None:
        self.counters[EVENTS.index(event)] += number

    def use(self, slot: int) -> None:  # the router has asked for what lies there
        self.used[slot] = self.clock[0]
        self.counters[USEFUL] += self.guessed[slot] > 0
        self.counters[IN_TIME] += self.guessed[slot] == OPEN
        self.guessed[slot] = 0

    def judge(self, experts: range | None) -> None:  # guesses that the look-up under way did not ask for
        late = self.guessed == OPEN
        if experts is not None:
            late &= (self.expert_of >= experts.start) & (self.expert_of < experts.stop)
        self.counters[LATE] += late.sum()
        self.guessed[late] = JUDGED

    def victim(self, protected: set[int]) -> int | None:
        """The lowest free slot, else the least recently used one whose expert is not protected, else None."""
        experts, used = self.expert_of.tolist(), self.used.tolist()
        if FREE in experts:
            return experts.index(FREE)
        rest = [slot for slot, expert in enumerate(experts) if expert >= 0 and expert not in protected]
        return min(rest, key=used.__getitem__, default=None)  # of equal ones the first

    def put(self, expert: int, slot: int, guessed: int) -> int:
        """An expert takes the slot, now; who lay there becomes absent. Returns the slot."""
        former = self.expert_of[slot]
        if former >= 0:
            self.slot_of[former] = -1
            self.counters[WASTED] += self.guessed[slot] > 0
            self.counters[LATE] += self.guessed[slot] == OPEN
        self.slot_of[expert], self.expert_of[slot] = slot, expert
        self.used[slot], self.guessed[slot] = self.clock[0], guessed
        return slot
