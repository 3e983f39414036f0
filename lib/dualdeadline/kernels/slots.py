"""Slot tables changed on the device: look-up of the routed experts and admission of predicted ones, one launch each.

Rules, results and the control of prefetch are those of the reference functions in `cache/slots.py` and
`cache/live.py`, bit by bit. Nothing is allocated and the host learns nothing, so a CUDA graph can hold both. One
program per component: it loads the ids as a vector, gathers their slots, marks those in use by one scatter, and takes
turns only for experts that are absent, with the slots' ages in registers. Calls that change the same tables must be
in stream order; look-ups of other layers may run beside an admission.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dualdeadline.cache import live
from dualdeadline.cache import slots as rules
from dualdeadline.cache.slots import Ahead, Found, SlotTables
from dualdeadline.kernels import require, tl, triton

LARGEST = {"pairs": 1024, "slots": 1024, "experts": 2**16}  # that keys of 64 bits and registers hold
RULES = (  # numbers of the rules, for the kernels
    rules.FREE, live.TRIAL, live.CALLS, live.WINDOW, len(live.EVENTS), live.USEFUL, live.WASTED, live.IN_TIME,
    live.LATE, live.SHORTEST, live.LONGEST, rules.OPEN, rules.JUDGED)
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
    tl.store(used_ptr + place, clock, mask=place >= 0)
    tl.debug_barrier()  # other threads' marks are read below
    used = tl.load(used_ptr + slot, mask=slot < C, other=0)
    in_use = (used == clock).to(tl.int32)
    key = _order(used, slot, expert, in_use, RULES)
    pending = (ids >= 0) & (place < 0)
    fresh = tl.full([SLOTS], -1, tl.int32)
    source, dest = tl.full([PAIRS], -1, tl.int32), tl.full([PAIRS], -1, tl.int32)
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
    tl.store(used_ptr + slot, clock, mask=changed)
    tl.store(guessed_ptr + slot, tl.where(changed | (in_use != 0), 0, RULES[12]), mask=guessed != 0)
    held, fresh_guess = (guessed != 0).to(tl.int32), (guessed == RULES[11]).to(tl.int32)
    useful, wasted = tl.sum(in_use * held, 0), tl.sum(tl.where(changed, held, 0), 0)
    in_time = tl.sum(in_use * fresh_guess, 0)
    # hits and misses are the columns 0 and 1
    step = tl.where(column == 0, tl.sum(in_use, 0), tl.where(column == 1, taken, 0))
    step = tl.where(column == RULES[5], useful, tl.where(column == RULES[6], wasted, step))
    step = tl.where(column == RULES[7], in_time, step)
    step = tl.where(column == RULES[8], tl.sum(fresh_guess, 0) - in_time, step)
    tl.store(counters_ptr + column, events + step, mask=column < RULES[4])
    tl.store(clock_ptr + bank, clock)
    tl.store(slots_ptr + component * M + pair, place, mask=pair < M)
    tl.store(source_ptr + component * M + pair, source, mask=pair < M)
    tl.store(dest_ptr + component * M + pair, dest, mask=pair < M)
    tl.store(count_ptr + component, taken)


@triton.jit
def _settle(counters_ptr, settled_ptr, control_ptr, number, L: tl.constexpr, LAYERS: tl.constexpr, RULES: tl.constexpr):
    """`cache.live.settle`, past the first-level cache, since another program has just counted."""
    bank = tl.arange(0, LAYERS)
    row = counters_ptr + bank * RULES[4]
    in_time = tl.sum(tl.load(row + RULES[7], mask=bank < 2 * L, other=0, cache_modifier=".cg"), 0)
    late = tl.sum(tl.load(row + RULES[8], mask=bank < 2 * L, other=0, cache_modifier=".cg"), 0)
    new = (in_time - tl.load(settled_ptr)).to(tl.float64)
    both = new + (late - tl.load(settled_ptr + 1)).to(tl.float64)
    precision, weight = tl.load(control_ptr), tl.load(control_ptr + 1)
    least, pause, waiting = tl.load(control_ptr + 2), tl.load(control_ptr + 4), tl.load(control_ptr + 5)
    tl.debug_barrier()
    grown = tl.where(both > 0, weight.to(tl.float64) + both, 1.0)
    mean = (precision.to(tl.float64) * weight.to(tl.float64) + new) / grown
    precision = tl.where(both > 0, mean.to(tl.float32), precision)
    weight = tl.where(both > 0, tl.minimum(grown, RULES[3]).to(tl.float32), weight)
    falls = (waiting == 0) & (precision < least)
    earned = (waiting == 0) & (falls == 0) & (weight == RULES[3])
    tl.store(control_ptr, tl.where(waiting == 1, 1.0, precision))
    tl.store(control_ptr + 1, tl.where(waiting == 1, RULES[1], weight))
    tl.store(control_ptr + 3, (number % RULES[2]).to(tl.float32))
    longer = tl.minimum(2 * pause, RULES[10])
    tl.store(control_ptr + 4, tl.where(falls, longer, tl.where(earned, RULES[9], pause)))
    tl.store(control_ptr + 5, tl.where(falls, pause, tl.maximum(waiting - 1, 0.0)))
    tl.store(settled_ptr, in_time)
    tl.store(settled_ptr + 1, late)


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
    own_counters = counters_ptr + bank * RULES[4]
    pair, slot, listed, column = tl.arange(0, PAIRS), tl.arange(0, SLOTS), tl.arange(0, LISTED), tl.arange(0, 8)
    number = tl.load(control_ptr + 3).to(tl.int32) + 1
    most = tl.where(component == 0, most_gate_up, most_down)
    most = tl.where(tl.load(control_ptr + 5) == 0, most, -1)  # -1: this call does nothing
    ids = _ids(ids_ptr, pair, row_stride, rank_stride, K, M, E)
    value = tl.load(values_ptr + (pair // K) * values_row_stride + (pair % K) * values_rank_stride, mask=pair < M,
                    other=0).to(tl.float32)
    passing = (ids >= 0) & (value >= threshold) & (most >= 0)
    clock = tl.load(clock_ptr + bank)
    expert = tl.load(expert_of_ptr + slot, mask=slot < C, other=-2)
    guessed = tl.load(guessed_ptr + slot, mask=slot < C, other=0)
    events = tl.load(own_counters + column, mask=column < RULES[4], other=0)
    place = tl.load(slot_of_ptr + ids, mask=passing, other=-1)
    tl.store(used_ptr + place, MARK, mask=place >= 0)
    tl.debug_barrier()  # other threads' marks are read below
    used = tl.load(used_ptr + slot, mask=slot < C, other=0)
    kept = used == MARK
    key = _order(used, slot, expert, kept.to(tl.int32), RULES)
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    rising = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)  # ordered as the floats are
    order = (rising << 32) | ((0x7FFF - pair) << 16) | ids
    order = tl.where(passing & (place < 0), order, NONE)
    fresh = tl.full([SLOTS], -1, tl.int32)
    source, dest = tl.full([LISTED], -1, tl.int32), tl.full([LISTED], -1, tl.int32)
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
    tl.store(used_ptr + slot, clock, mask=changed | kept)
    tl.store(guessed_ptr + slot, RULES[11], mask=changed)
    tl.store(source_ptr + component * ROOM + listed, source, mask=listed < ROOM)
    tl.store(dest_ptr + component * ROOM + listed, dest, mask=listed < ROOM)
    tl.store(count_ptr + component, taken)
    step = tl.where(column == RULES[5] - 1, taken, 0)
    step = tl.where(column == RULES[6], tl.sum(tl.where(changed & (guessed != 0), 1, 0), 0), step)
    step = tl.where(column == RULES[8], tl.sum(tl.where(changed & (guessed == RULES[11]), 1, 0), 0), step)
    tl.store(own_counters + column, events + step, mask=column < RULES[4])
    tl.debug_barrier()  # every thread's stores come before the one thread's release
    if tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu") == 1:
        tl.store(arrived_ptr, 0)
        _settle(counters_ptr, settled_ptr, control_ptr, number, L, LAYERS, RULES)


def lookup(tables: SlotTables, layer: int, ids: Tensor, out: Found, warps: int | None = None) -> Found:
    """`cache.slots.lookup` on the device, into `out`; returns it.

    Misses for which no slot is left, since ids name more experts than a bank has slots, have slot -1 and are not
    counted: whoever may have as many calls in waves.

    Args:
        ids: int32 or int64 [N,K] on the device of the tables. out: Found(N, K, device).
        warps: of each program (default: 1 for banks of up to 128 slots, else 4).

    Raises:
        ValueError: a layer, shapes, dtypes or devices that do not fit.
        RuntimeError: no GPU and no interpreter.
    """
    require(tables.slot_of)
    pairs, slots = _sizes(tables, layer, ids)
    _same("out.slots", out.slots, (2, *ids.shape), tables)
    lookup_kernel[(2,)](
        ids, tables.slot_of, tables.expert_of, tables.used, tables.guessed, tables.clock, tables.counters, out.slots,
        out.source, out.dest, out.count, layer, ids.stride(0), ids.stride(1), K=ids.shape[1], M=ids.numel(),
        E=tables.E, C=tables.C, PAIRS=pairs, SLOTS=slots, RULES=RULES, num_warps=warps or _warps(slots))
    return out


def admit(tables: SlotTables, layer: int, ids: Tensor, probabilities: Tensor, out: Ahead, threshold: float,
          budget: Sequence[int], control: Tensor, warps: int | None = None) -> Ahead:
    """`cache.slots.admit` on the device, into `out`; returns it. The control's precision and calls are updated at its
    end.

    Args:
        ids: int32 or int64 [N,G], probabilities: floats [N,G], on the device of the tables.
        out: Ahead(budget, device), of this budget or a larger one. budget: of gate/up and of down.
        control: float32[6] on the device, see `cache.slots.control`. warps: as in `lookup`.

    Raises:
        ValueError: a layer, budget, shapes, dtypes or devices that do not fit.
        RuntimeError: no GPU and no interpreter.
    """
    require(tables.slot_of)
    pairs, slots = _sizes(tables, layer, ids)
    room = out.source.shape[1]
    if len(budget) != 2 or min(budget) < 0 or max(budget) > room:
        raise ValueError(f"budget is {tuple(budget)}; needed: 0 to {room}, the length of out, for two components")
    floats = probabilities.is_floating_point()
    if probabilities.shape != ids.shape or probabilities.device != tables.device or not floats:
        raise ValueError(f"probabilities are {probabilities.dtype} {tuple(probabilities.shape)} on "
                         f"{probabilities.device}; needed: floats {tuple(ids.shape)} on {tables.device}")
    _same("out.source", out.source, (2, room), tables)
    _same("control", control, (6,), tables, torch.float32)
    admit_kernel[(2,)](
        ids, probabilities, tables.slot_of, tables.expert_of, tables.used, tables.guessed, tables.clock,
        tables.counters, tables.settled, control, out.source, out.dest, out.count, out.arrived, float(threshold), layer,
        *ids.stride(), *probabilities.stride(), *budget, ROOM=room, L=tables.L, LAYERS=_power(2 * tables.L),
        K=ids.shape[1], M=ids.numel(), E=tables.E, C=tables.C, LISTED=_power(room), PAIRS=pairs, SLOTS=slots,
        RULES=RULES, num_warps=warps or _warps(slots))
    return out


def _sizes(tables: SlotTables, layer: int, ids: Tensor) -> tuple[int, int]:
    """Lengths of the vectors of pairs and of slots, or a ValueError that says what does not fit."""
    if not 0 <= layer < tables.L:
        raise ValueError(f"layer is {layer}; needed: 0 to {tables.L - 1}")
    if ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 2 or ids.device != tables.device:
        raise ValueError(f"ids are {ids.dtype} {tuple(ids.shape)} on {ids.device}; needed: int32 or int64 [N,K] on "
                         f"{tables.device}")
    for name, size in (("pairs", ids.numel()), ("slots", tables.C), ("experts", tables.E)):
        if not 1 <= size <= LARGEST[name]:
            raise ValueError(f"{name} are {size}; needed: 1 to {LARGEST[name]}")
    return _power(ids.numel()), _power(tables.C)


def _same(name: str, tensor: Tensor, shape: tuple, tables: SlotTables, dtype: torch.dtype = torch.int32) -> None:
    if tensor.shape != shape or tensor.dtype != dtype or tensor.device != tables.device or not tensor.is_contiguous():
        raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; needed: contiguous "
                         f"{dtype} {shape} on {tables.device}")


def _power(size: int) -> int:
    """The smallest power of two that is not below size or 8."""
    return max(8, 1 << (size - 1).bit_length()) if size > 0 else 8


def _warps(slots: int) -> int:
    return 1 if slots <= 128 else 4
