"""The device code of predictor.py. PHASE 0 does both phases with a counter between them, 1 and 2 only the one."""

from __future__ import annotations

from dualdeadline.kernels import tl, triton

OWN, GIVEN, FROM_IDS = 1, 2, 3  # TOLD, where it comes from: rows of the router, its logits, the ids; 0: not needed


@triton.jit
def _sane(x):
    """NaN and infinities as 0 and the rest bounded, in float32."""
    x = x.to(tl.float32)
    x = tl.where(tl.abs(x) <= 3.4028235e38, x, 0.0)
    return tl.minimum(tl.maximum(x, -1e9), 1e9)


@triton.jit
def _centred(x, e, E: tl.constexpr):
    """x [BLOCK_E] less its mean over the E experts; 0 beyond them."""
    return tl.where(e < E, x - tl.sum(tl.where(e < E, x, 0.0), 0) / E, 0.0)


@triton.jit
def _ordered(logits, correction_ptr, place, mask, CORRECTED: tl.constexpr):
    """Logits as `RouterAhead.order` gives them."""
    if CORRECTED:
        correction = tl.load(correction_ptr + place, mask=mask, other=0.0)
        logits = tl.log(tl.maximum(tl.sigmoid(logits) + correction, 1e-6))
    return logits


@triton.jit
def _collect(work_ptr, e, PARTS: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr):
    """Sum [BLOCK_E] of PARTS partial rows, in a fixed order. Past the L1 cache: other programs wrote them."""
    total = tl.zeros([CHUNK, BLOCK_E], tl.float32)
    for first in tl.static_range(0, PARTS, CHUNK):
        row = first + tl.arange(0, CHUNK)
        mask = (row < PARTS)[:, None] & (e < E)[None, :]
        total += tl.load(work_ptr + row[:, None] * E + e[None, :], mask=mask, other=0.0, cache_modifier=".cg")
    return tl.sum(total, 0)


@triton.jit
def _choose(logits, e, slope, offset, ids_ptr, probability_ptr, E: tl.constexpr, ROUTED: tl.constexpr,
            TOP: tl.constexpr, ROUNDS: tl.constexpr):
    """Store the TOP largest of `logits` and their probabilities: margin to the cut after ROUTED, then Platt's curve.

    ROUNDS 0: an expert's rank is how many beat it, all pairs at once. Else ROUNDS maxima, one after another, of
    64-bit keys: the float's bits in integer order, then the lower id first.
    """
    # the cut lies between the last two of the ROUTED + 1 largest
    LAST: tl.constexpr = ROUTED if ROUTED < E else E - 1
    value = tl.where(e < E, _sane(logits), float("-inf"))
    if ROUNDS == 0:
        beats = (value[None, :] > value[:, None]) | ((value[None, :] == value[:, None]) & (e[None, :] < e[:, None]))
        rank = tl.sum(beats.to(tl.int32), 1)
        cut = 0.5 * tl.sum(tl.where((rank == LAST) | (rank == LAST - 1), value, 0.0), 0)
        probability = tl.sigmoid((value - cut) * slope + offset)
        tl.store(ids_ptr + rank, e, mask=(rank < TOP) & (e < E))
        tl.store(probability_ptr + rank, probability, mask=(rank < TOP) & (e < E))
    else:
        SLOTS: tl.constexpr = triton.next_power_of_2(ROUNDS)
        slot = tl.arange(0, SLOTS)
        bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
        key = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | (0xFFFF - e).to(tl.int64)
        best = tl.full([SLOTS], 0, tl.int64)
        for place in tl.static_range(ROUNDS):
            largest = tl.max(key, 0)
            best = tl.where(slot == place, largest, best)
            key = tl.where(key == largest, -0x7FFFFFFFFFFFFFFF, key)
        bits = (best >> 32).to(tl.int32)
        value = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        cut = 0.5 * tl.sum(tl.where((slot == LAST) | (slot == LAST - 1), value, 0.0), 0)
        tl.store(ids_ptr + slot, (0xFFFF - (best & 0xFFFF)).to(tl.int32), mask=slot < TOP)
        tl.store(probability_ptr + slot, tl.sigmoid((value - cut) * slope + offset), mask=slot < TOP)


@triton.jit
def _arrived_last(count_ptr, PROGRAMS: tl.constexpr):
    """True in the program that finds all others' stores done; it sets the counter back."""
    tl.debug_barrier()  # every thread's stores come before the one thread's release
    last = tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu") == PROGRAMS - 1
    if last:
        tl.store(count_ptr, 0)
    return last


@triton.jit
def _wait(EARLY: tl.constexpr):
    """Launched early: wait for the preceding kernel's results. Weights may be loaded before, nothing else."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit(do_not_specialize=["layer", "target"])
def mlp_kernel(state_ptr, weight_ptr, place_ptr, out_ptr, out_bias_ptr, slope_ptr, offset_ptr, work_ptr, count_ptr,
               ids_ptr, probability_ptr, layer, target, H: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr,
               ROUTED: tl.constexpr, TOP: tl.constexpr, ROWS: tl.constexpr, PROGRAMS: tl.constexpr,
               BLOCK_H: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr, ROUNDS: tl.constexpr,
               PHASE: tl.constexpr, EARLY: tl.constexpr):
    """SharedMLP: LayerNorm, hidden rows with GELU, their share of the logits; the last program adds and chooses."""
    pid, n = tl.program_id(0), tl.program_id(1)
    e = tl.arange(0, BLOCK_E)
    slope, offset = tl.load(slope_ptr + layer), tl.load(offset_ptr + layer)
    work_ptr += n * PROGRAMS * E
    if PHASE != 2:
        row, h = pid * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_H)
        inside = (row < WIDTH)[:, None]
        weight = tl.load(weight_ptr + row[:, None] * H + h[None, :], mask=inside & (h < H)[None, :], other=0.0)
        out = tl.load(out_ptr + row[:, None] * E + e[None, :], mask=inside & (e < E)[None, :], other=0.0)
        place = tl.load(place_ptr + target * WIDTH + row, mask=row < WIDTH, other=0.0)
        part = tl.load(out_bias_ptr + e, mask=(e < E) & (pid == 0), other=0.0)
        _wait(EARLY)
        x = _sane(tl.load(state_ptr + n * H + h, mask=h < H, other=0.0))
        x = tl.where(h < H, x - tl.sum(x, 0) / H, 0.0)
        scale = tl.rsqrt(tl.sum(x * x, 0) / H + 1e-5)  # torch's layer_norm
        hidden = tl.sum(weight.to(tl.float32) * x[None, :], 1) * scale + place
        hidden = 0.5 * hidden * (1 + tl.erf(hidden * 0.7071067811865476))
        part += tl.sum(hidden[:, None] * out.to(tl.float32), 0)
        tl.store(work_ptr + pid * E + e, part, mask=e < E)
    else:
        _wait(EARLY)
    last = PHASE == 2
    if PHASE == 0:
        last = _arrived_last(count_ptr + n, PROGRAMS)
    if last:
        logits = _collect(work_ptr, e, PROGRAMS, E, BLOCK_E, CHUNK)
        at = (layer * tl.num_programs(1) + n) * TOP
        _choose(logits, e, slope, offset, ids_ptr + at, probability_ptr + at, E, ROUTED, TOP, ROUNDS)


@triton.jit
def _features(factor_ptr, told_ptr, ahead_ptr, mean_ptr, work_ptr, layer, target, keep, e, L: tl.constexpr,
              E: tl.constexpr, REMEMBERS: tl.constexpr):
    """What needs no product: a row of gains of gate-ahead, and a partial row from memory, whose means move on."""
    mask = e < E
    factor_ptr += layer * 6 * E + e
    total = tl.load(factor_ptr + E, mask=mask, other=0.0)
    if REMEMBERS:
        told = tl.load(told_ptr + target * E + e, mask=mask, other=0.0)
        ahead = tl.load(ahead_ptr + target * E + e, mask=mask, other=0.0)
        mean_ptr += target * 2 * E + e
        mean_told = keep * tl.load(mean_ptr, mask=mask, other=0.0) + (1 - keep) * told
        mean_ahead = keep * tl.load(mean_ptr + E, mask=mask, other=0.0) + (1 - keep) * ahead
        tl.store(mean_ptr, mean_told, mask=mask)
        tl.store(mean_ptr + E, mean_ahead, mask=mask)
        total += told * tl.load(factor_ptr + 2 * E, mask=mask, other=0.0)
        total += ahead * tl.load(factor_ptr + 3 * E, mask=mask, other=0.0)
        total += mean_told * tl.load(factor_ptr + 4 * E, mask=mask, other=0.0)
        total += mean_ahead * tl.load(factor_ptr + 5 * E, mask=mask, other=0.0)
    tl.store(work_ptr + 2 * E + e, tl.load(factor_ptr, mask=mask, other=0.0), mask=mask)
    tl.store(work_ptr + 3 * E + e, total, mask=mask)


@triton.jit
def _told(logits_ptr, routed_ptr, bias_ptr, correction_ptr, scale, layer, e, E: tl.constexpr, ROUTED: tl.constexpr,
          BLOCK_K: tl.constexpr, TOLD: tl.constexpr, CORRECTED: tl.constexpr):
    """What the router that ran last said, centred [BLOCK_E]: its logits at unit scale, or the ids it chose."""
    if TOLD == 2:
        bias = tl.load(bias_ptr + layer * E + e, mask=e < E, other=0.0)
        said = (_sane(tl.load(logits_ptr + e, mask=e < E, other=0.0)) - bias) * scale + bias
        said = _ordered(said, correction_ptr, layer * E + e, e < E, CORRECTED)
    else:
        k = tl.arange(0, BLOCK_K)
        chosen = tl.load(routed_ptr + k, mask=k < ROUTED, other=-1)
        said = tl.max((chosen[:, None] == e[None, :]).to(tl.float32), 0)
    return _centred(said, e, E)


@triton.jit(do_not_specialize=["layer", "target", "ran"])
def gate_kernel(state_ptr, logits_ptr, routed_ptr, rows_ptr, bias_ptr, correction_ptr, inverse_ptr, up_ptr, factor_ptr,
                slope_ptr, offset_ptr, memory_ptr, told_ptr, ahead_ptr, mean_ptr, work_ptr, count_ptr, ids_ptr,
                probability_ptr, layer, target, ran, keep, eps, L: tl.constexpr, H: tl.constexpr, E: tl.constexpr,
                RANK: tl.constexpr, ROUTED: tl.constexpr, TOP: tl.constexpr, ROWS: tl.constexpr, GATES: tl.constexpr,
                OWNS: tl.constexpr, SAME: tl.constexpr, PAST: tl.constexpr, PROGRAMS: tl.constexpr,
                WORK: tl.constexpr, TOLD: tl.constexpr, PREDICT: tl.constexpr, STORE: tl.constexpr,
                REMEMBERS: tl.constexpr, CORRECTED: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_E: tl.constexpr,
                BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, ROUNDS: tl.constexpr, PHASE: tl.constexpr,
                EARLY: tl.constexpr):
    """ResidualGate and GateAhead. Programs, in order: GATES with rows of the target's router, OWNS of the layer's own,
    SAME with rows of `down` for the source state, PAST for the remembered one, and one for all that has no product.
    """
    pid, n = tl.program_id(0), tl.program_id(1)
    e, h = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_H)
    OWN_FROM: tl.constexpr = GATES
    SAME_FROM: tl.constexpr = GATES + OWNS
    PAST_FROM: tl.constexpr = GATES + OWNS + SAME
    PARTS: tl.constexpr = SAME + PAST
    work_ptr += n * WORK * E
    told_ptr += n * L * E
    ahead_ptr += n * L * E
    memory_ptr += n * L * H
    slope, offset = 0.0, 0.0
    if PREDICT:
        slope, offset = tl.load(slope_ptr + layer), tl.load(offset_ptr + layer)
    if PHASE != 2:
        is_gate = pid < SAME_FROM
        start = tl.where(pid >= OWN_FROM, OWN_FROM, 0)
        start = tl.where(pid >= SAME_FROM, SAME_FROM, start)
        start = tl.where(pid >= PAST_FROM, PAST_FROM, start)
        own = (pid - start) * ROWS + tl.arange(0, ROWS)  # row within its matrix
        size = tl.where(is_gate, E, tl.where(pid < PROGRAMS - 1, RANK, 0))
        gate = tl.where(pid >= OWN_FROM, layer, target) * E
        down = L * E + tl.where((pid >= PAST_FROM) & (SAME > 0), RANK, 0)
        row = tl.where(is_gate, gate, down) + own
        inside = own < size
        weight = tl.load(rows_ptr + row.to(tl.int64)[:, None] * H + h[None, :],
                         mask=inside[:, None] & (h < H)[None, :], other=0.0)
        up_mask = (inside & (pid >= SAME_FROM))[:, None] & (e < E)[None, :]
        up = tl.load(up_ptr + (layer * RANK + own)[:, None] * E + e[None, :], mask=up_mask, other=0.0)
        bias = tl.load(bias_ptr + row, mask=inside & is_gate, other=0.0)
    inverse = tl.load(inverse_ptr + layer * H + h, mask=h < H, other=0.0)
    _wait(EARLY)
    unit = _sane(tl.load(state_ptr + n * H + h, mask=h < H, other=0.0)) * inverse
    scale = tl.rsqrt(tl.sum(unit * unit, 0) / H + eps)
    unit *= scale
    if PHASE != 2:
        past = pid >= PAST_FROM
        x = tl.load(memory_ptr + target * H + h, mask=(h < H) & past & (PAST > 0), other=0.0)
        dot = tl.sum(weight.to(tl.float32) * tl.where(past, x, unit)[None, :], 1)
        if is_gate:
            said = _ordered(dot + bias, correction_ptr, row, inside, CORRECTED)
            tl.store(work_ptr + tl.where(pid >= OWN_FROM, E, 0) + own, said, mask=inside)
        elif pid < PROGRAMS - 1:
            part = tl.sum(dot[:, None] * up.to(tl.float32), 0)
            tl.store(work_ptr + (4 + pid - SAME_FROM) * E + e, part, mask=e < E)
        else:
            if PREDICT:
                _features(factor_ptr, told_ptr, ahead_ptr, mean_ptr + n * L * 2 * E, work_ptr, layer, target, keep, e,
                          L, E, REMEMBERS)
            if TOLD > 1:
                said = _told(logits_ptr + n * E, routed_ptr + n * ROUTED, bias_ptr, correction_ptr, scale, layer, e, E,
                             ROUTED, BLOCK_K, TOLD, CORRECTED)
                tl.store(told_ptr + ran * E + e, said, mask=e < E)
    last = PHASE == 2
    if PHASE == 0:
        last = _arrived_last(count_ptr + n, PROGRAMS)
    if last:
        if PREDICT:
            raw = tl.load(work_ptr + e, mask=e < E, other=0.0, cache_modifier=".cg")
            gain = tl.load(work_ptr + 2 * E + e, mask=e < E, other=0.0, cache_modifier=".cg")
            ahead = _centred(raw, e, E)
            logits = ahead * gain + _collect(work_ptr + 3 * E, e, PARTS + 1, E, BLOCK_E, CHUNK)
            at = (layer * tl.num_programs(1) + n) * TOP
            _choose(logits, e, slope, offset, ids_ptr + at, probability_ptr + at, E, ROUTED, TOP, ROUNDS)
            if REMEMBERS:
                tl.store(ahead_ptr + target * E + e, ahead, mask=e < E)
        if TOLD == 1:
            own_raw = tl.load(work_ptr + E + e, mask=e < E, other=0.0, cache_modifier=".cg")
            tl.store(told_ptr + ran * E + e, _centred(own_raw, e, E), mask=e < E)
        if STORE:  # last, because at horizon 0 other programs read what this replaces
            tl.store(memory_ptr + layer * H + h, unit, mask=h < H)
