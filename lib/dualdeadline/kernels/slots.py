"""Slot tables changed on the device: look-up of the routed experts and admission of predicted ones, one launch each.

Rules, results and the control of prefetch are those of the reference functions in `cache/slots.py`, bit by bit. Nothing
is allocated and the host learns nothing, so a CUDA graph can hold both. One program per component: it loads the ids
as a vector, gathers their slots, marks those in use by one scatter, and takes turns only for experts that are absent,
with the slots' ages in registers. Calls that change the same tables must be in stream order; look-ups of other layers
may run beside an admission.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dualdeadline.cache.slots import CALLS, EVENTS, FREE, PROBE, USEFUL, WASTED, WINDOW, Ahead, Found, SlotTables
from dualdeadline.kernels import require, tl, triton

LARGEST = {"pairs": 1024, "slots": 1024, "experts": 2**16}  # that keys of 64 bits and registers hold
RULES = (FREE, PROBE, CALLS, WINDOW, len(EVENTS), USEFUL, WASTED)
PLAIN = ["layer", "row_stride", "rank_stride", "values_row_stride", "values_rank_stride", "most_gate_up", "most_down"]


@triton.jit
def _order(age, slot, expert, taken, RULES: tl.constexpr):
    """Keys of slots: the smallest is taken first. Free ones, by number; then by age, ties by number; others never."""
    never: tl.constexpr = 0x7FFFFFFFFFFFFFFF
    key = tl.where((expert >= 0) & (taken == 0), ((age.to(tl.int64) + 1) << 16) | slot, never)
    return tl.where(expert == RULES[0], slot.to(tl.int64), key)


@triton.jit
def _replace(slot_of_ptr, expert_of_ptr, slot, expert, fresh):
    """Write the experts that came (fresh >= 0) into both tables; who lay in their slots becomes absent."""
    changed = fresh >= 0
    tl.store(slot_of_ptr + expert, -1, mask=changed & (expert >= 0))
    tl.store(slot_of_ptr + fresh, slot, mask=changed)
    tl.store(expert_of_ptr + slot, fresh, mask=changed)


@triton.jit
def _ids(ids_ptr, pair, row_stride, rank_stride, K: tl.constexpr, M: tl.constexpr, E: tl.constexpr):
    """Ids of the pairs (token, rank), -1 where out of range."""
    found = tl.load(ids_ptr + (pair // K) * row_stride + (pair % K) * rank_stride, mask=pair < M, other=-1)
    return tl.where((found >= 0) & (found < E), found, -1).to(tl.int32)


@triton.jit(do_not_specialize=PLAIN)
def lookup_kernel(ids_ptr, slot_of_ptr, expert_of_ptr, used_ptr, guessed_ptr, clock_ptr, counters_ptr, slots_ptr,
                  source_ptr, dest_ptr, count_ptr, layer, row_stride, rank_stride, K: tl.constexpr, M: tl.constexpr,
                  E: tl.constexpr, C: tl.constexpr, PAIRS: tl.constexpr, SLOTS: tl.constexpr, RULES: tl.constexpr):
    """`cache.slots.lookup` of one layer; program c does component c. PAIRS and SLOTS: M and C as powers of two."""
    NONE: tl.constexpr = 0x7FFFFFFF
    NEVER: tl.constexpr = 0x7FFFFFFFFFFFFFFF
    component = tl.program_id(0)
    bank = layer * 2 + component
    slot_of_ptr += bank * E
    expert_of_ptr += bank * C
    used_ptr += bank * C
    guessed_ptr += bank * C
    counters_ptr += bank * RULES[4]
    pair, slot, column = tl.arange(0, PAIRS), tl.arange(0, SLOTS), tl.arange(0, 8)
    ids = _ids(ids_ptr, pair, row_stride, rank_stride, K, M, E)
    clock = tl.load(clock_ptr + bank) + 1
    expert = tl.load(expert_of_ptr + slot, mask=slot < C, other=-2)
    guessed = tl.load(guessed_ptr + slot, mask=slot < C, other=0)
    events = tl.load(counters_ptr + column, mask=column < RULES[4], other=0)
    place = tl.load(slot_of_ptr + ids, mask=ids >= 0, other=-1)
    tl.store(used_ptr + place, clock + place * 0, mask=place >= 0)
    tl.debug_barrier()  # other threads' marks are read below
    used = tl.load(used_ptr + slot, mask=slot < C, other=0)
    in_use = (used == clock).to(tl.int32)
    key = _order(used, slot, expert, in_use, RULES)
    pending = (ids >= 0) & (place < 0)
    fresh, source, dest = tl.full([SLOTS], -1, tl.int32), tl.full([PAIRS], -1, tl.int32), tl.full([PAIRS], -1, tl.int32)
    taken = component * 0
    first = tl.min(tl.where(pending, (pair << 16) | ids, NONE), 0)
    room = tl.min(key, 0)
    while (first < NONE) & (room < NEVER):  # a turn for each distinct miss
        wanted, best = first & 0xFFFF, (room & 0xFFFF).to(tl.int32)
        same = pending & (ids == wanted)
        place = tl.where(same, best, place)
        source, dest = tl.where(pair == taken, wanted, source), tl.where(pair == taken, best, dest)
        fresh, key = tl.where(slot == best, wanted, fresh), tl.where(slot == best, NEVER, key)
        pending = pending & (same == 0)
        taken += 1
        first = tl.min(tl.where(pending, (pair << 16) | ids, NONE), 0)
        room = tl.min(key, 0)
    tl.debug_barrier()  # no thread still has to read what is written below
    _replace(slot_of_ptr, expert_of_ptr, slot, expert, fresh)
    changed = fresh >= 0
    tl.store(used_ptr + slot, clock + slot * 0, mask=changed)
    tl.store(guessed_ptr + slot, slot * 0, mask=(changed | (in_use != 0)) & (guessed != 0))
    useful, wasted = tl.sum(in_use * guessed, 0), tl.sum(tl.where(changed, guessed, 0), 0)
    step = tl.where(column == 0, tl.sum(in_use, 0), tl.where(column == 1, taken, 0))
    step = tl.where(column == RULES[5], useful, tl.where(column == RULES[6], wasted, step))
    tl.store(counters_ptr + column, events + step, mask=column < RULES[4])
    tl.store(clock_ptr + bank, clock)
    tl.store(slots_ptr + component * M + pair, place, mask=pair < M)
    tl.store(source_ptr + component * M + pair, source, mask=pair < M)
    tl.store(dest_ptr + component * M + pair, dest, mask=pair < M)
    tl.store(count_ptr + component, taken)


@triton.jit
def _settle(counters_ptr, settled_ptr, control_ptr, number, L: tl.constexpr, LAYERS: tl.constexpr, RULES: tl.constexpr):
    """`cache.slots._settle`, past the first-level cache, since another program has just counted."""
    bank = tl.arange(0, LAYERS)
    row = counters_ptr + bank * RULES[4]
    useful = tl.sum(tl.load(row + RULES[5], mask=bank < 2 * L, other=0, cache_modifier=".cg"), 0)
    wasted = tl.sum(tl.load(row + RULES[6], mask=bank < 2 * L, other=0, cache_modifier=".cg"), 0)
    new = (useful - tl.load(settled_ptr)).to(tl.float64)
    both = new + (wasted - tl.load(settled_ptr + 1)).to(tl.float64)
    precision, weight = tl.load(control_ptr).to(tl.float64), tl.load(control_ptr + 1).to(tl.float64)
    tl.debug_barrier()
    if both > 0:
        tl.store(control_ptr, ((precision * weight + new) / (weight + both)).to(tl.float32))
        tl.store(control_ptr + 1, tl.minimum(weight + both, RULES[3] + both * 0).to(tl.float32))
    tl.store(control_ptr + 3, (number % RULES[2]).to(tl.float32))
    tl.store(settled_ptr, useful)
    tl.store(settled_ptr + 1, wasted)


@triton.jit(do_not_specialize=PLAIN)
def admit_kernel(ids_ptr, values_ptr, slot_of_ptr, expert_of_ptr, used_ptr, guessed_ptr, clock_ptr, counters_ptr,
                 settled_ptr, control_ptr, source_ptr, dest_ptr, count_ptr, arrived_ptr, threshold, layer, row_stride,
                 rank_stride, values_row_stride, values_rank_stride, most_gate_up, most_down, ROOM: tl.constexpr,
                 L: tl.constexpr, LAYERS: tl.constexpr, K: tl.constexpr, M: tl.constexpr, E: tl.constexpr,
                 C: tl.constexpr, LISTED: tl.constexpr, PAIRS: tl.constexpr, SLOTS: tl.constexpr,
                 RULES: tl.constexpr):
    """`cache.slots.admit` of one layer; program c does component c, the one that ends last updates the control."""
    NONE: tl.constexpr = -0x7FFFFFFFFFFFFFFF
    NEVER: tl.constexpr = 0x7FFFFFFFFFFFFFFF
    MARK: tl.constexpr = 0x7FFFFFFF
    component = tl.program_id(0)
    bank = layer * 2 + component
    slot_of_ptr += bank * E
    expert_of_ptr += bank * C
    used_ptr += bank * C
    guessed_ptr += bank * C
    pair, slot, listed = tl.arange(0, PAIRS), tl.arange(0, SLOTS), tl.arange(0, LISTED)
    number = tl.load(control_ptr + 3).to(tl.int32) + 1
    on = tl.load(control_ptr) >= tl.load(control_ptr + 2)
    most = tl.where(component == 0, most_gate_up, most_down)
    most = tl.where(on, most, tl.minimum(most, 1))
    ids = _ids(ids_ptr, pair, row_stride, rank_stride, K, M, E)
    value = tl.load(values_ptr + (pair // K) * values_row_stride + (pair % K) * values_rank_stride, mask=pair < M,
                    other=0).to(tl.float32)
    passing = (ids >= 0) & (value >= threshold) & (on | (number % RULES[1] == 0))
    clock = tl.load(clock_ptr + bank)
    expert = tl.load(expert_of_ptr + slot, mask=slot < C, other=-2)
    guessed = tl.load(guessed_ptr + slot, mask=slot < C, other=0)
    place = tl.load(slot_of_ptr + ids, mask=passing, other=-1)
    tl.store(used_ptr + place, MARK + place * 0, mask=place >= 0)
    tl.debug_barrier()  # other threads' marks are read below
    used = tl.load(used_ptr + slot, mask=slot < C, other=0)
    kept = used == MARK
    key = _order(used, slot, expert, kept.to(tl.int32), RULES)
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    rising = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)  # ordered as the floats are
    order = (rising << 32) | ((0x7FFF - pair) << 16) | ids
    order = tl.where(passing & (place < 0), order, NONE)
    fresh, source, dest = tl.full([SLOTS], -1, tl.int32), tl.full([LISTED], -1, tl.int32), tl.full([LISTED], -1, tl.int32)
    taken = component * 0
    first, room = tl.max(order, 0), tl.min(key, 0)
    while (taken < most) & (first > NONE) & (room < NEVER):
        wanted, best = (first & 0xFFFF).to(tl.int32), (room & 0xFFFF).to(tl.int32)
        source, dest = tl.where(listed == taken, wanted, source), tl.where(listed == taken, best, dest)
        fresh, key = tl.where(slot == best, wanted, fresh), tl.where(slot == best, NEVER, key)
        order = tl.where(ids == wanted, NONE, order)
        taken += 1
        first, room = tl.max(order, 0), tl.min(key, 0)
    tl.debug_barrier()  # no thread still has to read what is written below
    _replace(slot_of_ptr, expert_of_ptr, slot, expert, fresh)
    changed = fresh >= 0
    tl.store(used_ptr + slot, clock + slot * 0, mask=changed | kept)
    tl.store(guessed_ptr + slot, slot * 0 + 1, mask=changed)
    tl.store(source_ptr + component * ROOM + listed, source, mask=listed < ROOM)
    tl.store(dest_ptr + component * ROOM + listed, dest, mask=listed < ROOM)
    tl.store(count_ptr + component, taken)
    counted = counters_ptr + bank * RULES[4]
    tl.atomic_add(counted + RULES[5] - 1, taken.to(tl.int64), sem="relaxed")
    tl.atomic_add(counted + RULES[6], tl.sum(tl.where(changed, guessed, 0), 0).to(tl.int64), sem="relaxed")
    tl.debug_barrier()  # every thread's stores come before the one thread's release
    if tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu") == 1:
        tl.store(arrived_ptr, 0)
        _settle(counters_ptr, settled_ptr, control_ptr, number, L, LAYERS, RULES)
