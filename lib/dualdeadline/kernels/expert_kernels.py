"""The Triton kernels behind experts.py, which says what they compute and launches them.

Symbols in capitals are fixed when a kernel is compiled. `stride` is the distance of two slots in elements, `total` the
number of pairs, `count` how many of them a launch computes (or N). Weights are loaded first, what they are multiplied
with after them, so that the long wait starts as early as it can.
"""

from __future__ import annotations

from dualdeadline.kernels import tl, triton

# what varies from call to call must not lead to a compilation, least of all while a graph is captured
UNSPECIALIZED = ["slots_ptr", "weights_ptr", "pairs_ptr", "count", "total", "C"]


@triton.jit
def _weights(ptr, mask, EVEN: tl.constexpr):
    """Weights are read once: they may leave the caches first."""
    if EVEN:
        value = tl.load(ptr, eviction_policy="evict_first")
    else:
        value = tl.load(ptr, mask=mask, other=0.0, eviction_policy="evict_first")
    return value


@triton.jit
def _fence(ON: tl.constexpr):
    """Keep the compiler from saving registers by loading late: what was loaded above is under way from here on."""
    if ON:
        tl.debug_barrier()


@triton.jit
def _prefetch(ptr, mask):
    """Ask for the 128-byte lines at `ptr` without waiting for them."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l,r",
        [ptr.to(tl.int64), mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _grid_barrier(barrier_ptr, PROGRAMS: tl.constexpr):
    """Wait for all programs. Program 0 adds what makes all arrivals sum to 2^31, so the top bit flips each time."""
    tl.debug_barrier()
    step = tl.where(tl.program_id(0) == 0, 2147483649 - PROGRAMS, 1).to(tl.int32)
    before = tl.atomic_add(barrier_ptr, step, sem="acq_rel", scope="gpu")
    now = before
    while (now ^ before) >= 0:
        now = tl.atomic_add(barrier_ptr, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()


@triton.jit
def _gate_up(x_ptr, bank_ptr, out_ptr, up_ptr, slot, stride, pair, tile, C, H: tl.constexpr, F: tl.constexpr,
             K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr,
             FENCE: tl.constexpr, WIDE: tl.constexpr, PART: tl.constexpr, pair_is_valid):
    """ROWS values of one pair. PART 0: silu(gate) * up; 1: gate, 2: up, in float32."""
    row = tile * ROWS + tl.arange(0, ROWS)
    valid = (slot >= 0) & (slot < C)
    bank_ptr += tl.where(valid, slot, 0).to(tl.int64) * stride
    x_ptr += (pair // K) * H
    gate, up = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS, BLOCK), tl.float32)
    for start in tl.range(0, H, BLOCK * UNROLL, num_stages=STAGES):
        gate_w = ()
        up_w = ()
        for step in tl.static_range(UNROLL):
            h = start + step * BLOCK + tl.arange(0, BLOCK)
            at, inside = row[:, None] * H + h[None, :], (row < F)[:, None] & (h < H)[None, :]
            if PART != 2:
                gate_w = gate_w + (_weights(bank_ptr + at, inside, F % ROWS == 0 and H % (BLOCK * UNROLL) == 0),)
            if PART != 1:
                up_w = up_w + (_weights(bank_ptr + F * H + at, inside,
                                        F % ROWS == 0 and H % (BLOCK * UNROLL) == 0),)
        _fence(FENCE and STAGES == 1)
        for step in tl.static_range(UNROLL):
            h = start + step * BLOCK + tl.arange(0, BLOCK)
            if WIDE:  # each warp loads x for its own rows: no exchange through shared memory
                x = tl.load(x_ptr + row[:, None] * 0 + h[None, :], mask=(row < F)[:, None] & (h < H)[None, :],
                            other=0.0).to(tl.float32)
            else:
                x = tl.load(x_ptr + h, mask=h < H, other=0.0).to(tl.float32)[None, :]
            if PART != 2:
                gate = tl.fma(gate_w[step].to(tl.float32), x, gate)
            if PART != 1:
                up = tl.fma(up_w[step].to(tl.float32), x, up)
    keep = (row < F) & pair_is_valid
    if PART == 0:
        gate_sum, up_sum = tl.sum(gate, 1), tl.sum(up, 1)
        value = tl.where(valid, gate_sum * tl.sigmoid(gate_sum) * up_sum, 0.0)
        tl.store(out_ptr + pair * F + row, value.to(out_ptr.dtype.element_ty), mask=keep)
    elif PART == 1:
        tl.store(out_ptr + pair * F + row, tl.where(valid, tl.sum(gate, 1), 0.0), mask=keep)
    else:
        tl.store(up_ptr + pair * F + row, tl.where(valid, tl.sum(up, 1), 0.0), mask=keep)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def gate_up_kernel(x_ptr, bank_ptr, slots_ptr, pairs_ptr, out_ptr, up_ptr, down_ptr, stride, down_stride, count, total,
                   C, H: tl.constexpr, F: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
                   UNROLL: tl.constexpr, STAGES: tl.constexpr, FENCE: tl.constexpr, WIDE: tl.constexpr,
                   PART: tl.constexpr, LISTED: tl.constexpr, PDL: tl.constexpr, PREFETCH: tl.constexpr):
    """hidden[pair, rows]; neighbouring programs take the same rows of all pairs, so that tokens share them in L2."""
    tile, place = tl.program_id(0) // count, tl.program_id(0) % count
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # not earlier: what starts now may read what this wait made visible
    pair = tl.load(pairs_ptr + place) if LISTED else place
    pair_is_valid = (pair >= 0) & (pair < total)
    pair = tl.where(pair_is_valid, pair, 0)
    slot = tl.load(slots_ptr + pair)
    _gate_up(x_ptr, bank_ptr, out_ptr, up_ptr, slot, stride, pair, tile, C, H, F, K, ROWS, BLOCK, UNROLL, STAGES,
             FENCE, WIDE, PART, pair_is_valid)
    if PREFETCH > 0:
        LINE: tl.constexpr = 1024 // down_ptr.dtype.element_ty.primitive_bitwidth
        LINES: tl.constexpr = 256
        last = tl.num_programs(0) - 1 - tl.program_id(0)
        line = (last // count) * LINES + tl.arange(0, LINES)
        slot = tl.load(slots_ptr + last % count)
        wanted = (line < PREFETCH * F // LINE) & (slot >= 0) & (slot < C)
        if (last // count) * LINES < PREFETCH * F // LINE:
            _prefetch(down_ptr + slot.to(tl.int64) * down_stride + line * LINE, wanted)


@triton.jit
def activate_kernel(gate_ptr, up_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """silu(gate) * up of float32 halves, rounded once, in the arithmetic of the fused kernel."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gate, up = tl.load(gate_ptr + at, mask=at < size), tl.load(up_ptr + at, mask=at < size)
    tl.store(out_ptr + at, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=at < size)


@triton.jit
def _down_tiles(bank_ptr, row, start, H: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
                EVEN: tl.constexpr, wanted):
    """UNROLL weight tiles [ROWS, BLOCK] of one expert, from column `start` on."""
    tiles = ()
    for step in tl.static_range(UNROLL):
        f = start + step * BLOCK + tl.arange(0, BLOCK)
        inside = (row < H)[:, None] & (f < F)[None, :] & wanted
        tiles = tiles + (_weights(bank_ptr + row[:, None] * F + f[None, :], inside, EVEN),)
    return tiles


@triton.jit
def _multiply(tiles, first: tl.constexpr, hidden_ptr, row, start, total, H: tl.constexpr, F: tl.constexpr,
              BLOCK: tl.constexpr, UNROLL: tl.constexpr, WIDE: tl.constexpr):
    """total + tiles[first:] * hidden, element by element; with WIDE each row loads its own copy of hidden."""
    for step in tl.static_range(UNROLL):
        f = start + step * BLOCK + tl.arange(0, BLOCK)
        if WIDE:
            h = tl.load(hidden_ptr + row[:, None] * 0 + f[None, :], mask=(row < H)[:, None] & (f < F)[None, :],
                        other=0.0).to(tl.float32)
        else:
            h = tl.load(hidden_ptr + f, mask=f < F, other=0.0).to(tl.float32)[None, :]
        total = tl.fma(tiles[first + step].to(tl.float32), h, total)
    return total


@triton.jit(do_not_specialize=UNSPECIALIZED)
def down_kernel(hidden_ptr, bank_ptr, slots_ptr, pairs_ptr, out_ptr, stride, count, total, C, H: tl.constexpr,
                F: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr,
                FENCE: tl.constexpr, WIDE: tl.constexpr, LISTED: tl.constexpr):
    """partial[pair, rows] in float32, without routing weights."""
    tile, place = tl.program_id(0) // count, tl.program_id(0) % count
    pair = tl.load(pairs_ptr + place) if LISTED else place
    pair_is_valid = (pair >= 0) & (pair < total)
    pair = tl.where(pair_is_valid, pair, 0)
    slot, row = tl.load(slots_ptr + pair), tile * ROWS + tl.arange(0, ROWS)
    valid = (slot >= 0) & (slot < C)
    bank_ptr += tl.where(valid, slot, 0).to(tl.int64) * stride
    partial = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in tl.range(0, F, BLOCK * UNROLL, num_stages=STAGES):
        tiles = _down_tiles(bank_ptr, row, start, H, F, BLOCK, UNROLL, H % ROWS == 0 and F % (BLOCK * UNROLL) == 0,
                            True)
        _fence(FENCE and STAGES == 1)
        partial = _multiply(tiles, 0, hidden_ptr + pair * F, row, start, partial, H, F, BLOCK, UNROLL, WIDE)
    value = tl.where(valid, tl.sum(partial, 1), 0.0)
    tl.store(out_ptr + pair.to(tl.int64) * H + row, value, mask=(row < H) & pair_is_valid)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def combine_kernel(partial_ptr, weights_ptr, out_ptr, H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """out[n, :] = partial[n, 0, :] * weights[n, 0] + partial[n, 1, :] * weights[n, 1] + ..., in this order."""
    token, h = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    out = tl.zeros((BLOCK,), tl.float32)
    for rank in range(K):
        weight = tl.load(weights_ptr + token * K + rank).to(tl.float32)
        out = tl.fma(weight, tl.load(partial_ptr + (token * K + rank) * H + h, mask=h < H, other=0.0), out)
    tl.store(out_ptr + token * H + h, out.to(out_ptr.dtype.element_ty), mask=h < H)


@triton.jit
def _slots(slots_ptr, token, first: tl.constexpr, last: tl.constexpr, K: tl.constexpr):
    """A token's slots of ranks first to last-1: all asked for before the first address is needed."""
    slots = ()
    for rank in tl.static_range(first, last):
        slots = slots + (tl.load(slots_ptr + token * K + rank),)
    return slots


@triton.jit
def _rank_tiles(bank_ptr, slots, row, start, stride, C, COUNT: tl.constexpr, H: tl.constexpr, F: tl.constexpr,
                BLOCK: tl.constexpr, UNROLL: tl.constexpr, EVEN: tl.constexpr, wanted):
    """The tiles of COUNT ranks, one rank after the other."""
    tiles = ()
    for rank in tl.static_range(COUNT):
        slot = tl.where((slots[rank] >= 0) & (slots[rank] < C), slots[rank], 0).to(tl.int64)
        tiles = tiles + _down_tiles(bank_ptr + slot * stride, row, start, H, F, BLOCK, UNROLL, EVEN, wanted)
    return tiles


@triton.jit
def _down_combine(hidden_ptr, bank_ptr, slots_ptr, weights_ptr, out_ptr, ready, token, row, stride, C,
                  H: tl.constexpr, F: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
                  RANKS: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr, FENCE: tl.constexpr,
                  WIDE: tl.constexpr, READY: tl.constexpr, EVEN: tl.constexpr):
    """out[token, row] over all ranks; with READY the first tiles of the first RANKS were loaded by the caller."""
    out = tl.zeros((ROWS,), tl.float32)
    for first in tl.static_range(0, K, RANKS):
        slots = _slots(slots_ptr, token, first, min(first + RANKS, K), K)
        weights = ()
        partials = ()
        for rank in tl.static_range(first, min(first + RANKS, K)):
            weights = weights + (tl.load(weights_ptr + token * K + rank).to(tl.float32),)
            partials = partials + (tl.zeros((ROWS, BLOCK), tl.float32),)
        base = hidden_ptr + (token * K + first) * F
        if READY and first == 0:
            partials = _multiply_ranks(ready, base, row, 0, partials, min(RANKS, K), H, F, BLOCK, UNROLL, WIDE)
        for start in tl.range(BLOCK * UNROLL if READY and first == 0 else 0, F, BLOCK * UNROLL, num_stages=STAGES):
            tiles = _rank_tiles(bank_ptr, slots, row, start, stride, C, min(RANKS, K - first), H, F, BLOCK, UNROLL,
                                EVEN, True)
            _fence(FENCE and STAGES == 1)
            partials = _multiply_ranks(tiles, base, row, start, partials, min(RANKS, K - first), H, F, BLOCK, UNROLL,
                                       WIDE)
        for rank in tl.static_range(min(RANKS, K - first)):
            valid = (slots[rank] >= 0) & (slots[rank] < C)
            out = tl.fma(weights[rank], tl.where(valid, tl.sum(partials[rank], 1), 0.0), out)
    tl.store(out_ptr + token * H + row, out.to(out_ptr.dtype.element_ty), mask=row < H)


@triton.jit
def _multiply_ranks(tiles, hidden_ptr, row, start, partials, COUNT: tl.constexpr, H: tl.constexpr, F: tl.constexpr,
                    BLOCK: tl.constexpr, UNROLL: tl.constexpr, WIDE: tl.constexpr):
    """`_multiply` for each of COUNT ranks."""
    added = ()
    for rank in tl.static_range(COUNT):
        added = added + (_multiply(tiles, rank * UNROLL, hidden_ptr + rank * F, row, start, partials[rank], H, F, BLOCK,
                                   UNROLL, WIDE),)
    return added


@triton.jit(do_not_specialize=UNSPECIALIZED)
def down_combine_kernel(hidden_ptr, bank_ptr, slots_ptr, weights_ptr, out_ptr, stride, count, C, H: tl.constexpr,
                        F: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
                        RANKS: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr, FENCE: tl.constexpr,
                        WIDE: tl.constexpr, PDL: tl.constexpr):
    """Rows of one token's output: down of all its experts, added in rank order. `count` is N."""
    token = tl.program_id(0) % count
    row = (tl.program_id(0) // count) * ROWS + tl.arange(0, ROWS)
    EVEN: tl.constexpr = H % ROWS == 0 and F % (BLOCK * UNROLL) == 0
    ready = ()
    if PDL:  # gate/up waited for whatever wrote the slots, so they are visible here before its own end is
        slots = _slots(slots_ptr, token, 0, min(RANKS, K), K)
        ready = _rank_tiles(bank_ptr, slots, row, 0, stride, C, min(RANKS, K), H, F, BLOCK, UNROLL, EVEN, True)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    _down_combine(hidden_ptr, bank_ptr, slots_ptr, weights_ptr, out_ptr, ready, token, row, stride, C, H, F, K, ROWS,
                  BLOCK, RANKS, UNROLL, STAGES, FENCE, WIDE, PDL, EVEN)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def persistent_kernel(x_ptr, gate_up_ptr, down_ptr, slots_ptr, weights_ptr, hidden_ptr, out_ptr, barrier_ptr, stride,
                      down_stride, C, N: tl.constexpr, H: tl.constexpr, F: tl.constexpr, K: tl.constexpr,
                      PAIRS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DOWN_ROWS: tl.constexpr,
                      DOWN_BLOCK: tl.constexpr, RANKS: tl.constexpr, UNROLL: tl.constexpr, DOWN_UNROLL: tl.constexpr,
                      STAGES: tl.constexpr, FENCE: tl.constexpr, WIDE: tl.constexpr, DOWN_WIDE: tl.constexpr,
                      PREFETCH: tl.constexpr, PROGRAMS: tl.constexpr):
    """Both stages in one launch of PROGRAMS co-resident programs; down's first tiles are loaded before the barrier."""
    program, known = tl.program_id(0), tl.arange(0, PAIRS)
    slots = tl.load(slots_ptr + known, mask=known < N * K, other=-1)
    for work in tl.range(program, N * K * tl.cdiv(F, ROWS), PROGRAMS, num_stages=STAGES):
        pair = work % (N * K)
        slot = tl.sum(tl.where(known == pair, slots, 0), 0)  # not loaded again: addresses must be known early
        _gate_up(x_ptr, gate_up_ptr, hidden_ptr, hidden_ptr, slot, stride, pair, work // (N * K), C, H, F, K, ROWS,
                 BLOCK, UNROLL, STAGES, FENCE, WIDE, 0, True)
    tiles: tl.constexpr = N * ((H + DOWN_ROWS - 1) // DOWN_ROWS)
    COUNT: tl.constexpr = min(RANKS, K)
    rows = tl.arange(0, DOWN_ROWS)
    first_slots = _slots(slots_ptr, program % N, 0, COUNT, K)
    ready = _rank_tiles(down_ptr, first_slots, (program // N) * DOWN_ROWS + rows, 0, down_stride, C, COUNT, H, F,
                        DOWN_BLOCK, DOWN_UNROLL, False, True)
    LINE: tl.constexpr = 1024 // down_ptr.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = triton.next_power_of_2((DOWN_ROWS * F + LINE - 1) // LINE)
    for ahead in tl.static_range(1, PREFETCH + 1):
        work, line = program + ahead * PROGRAMS, tl.arange(0, LINES) * LINE
        coming = _slots(slots_ptr, work % N, 0, COUNT, K)
        for rank in tl.static_range(COUNT):
            wanted = (line < DOWN_ROWS * F) & (work < tiles) & (coming[rank] >= 0) & (coming[rank] < C)
            _prefetch(down_ptr + coming[rank].to(tl.int64) * down_stride + (work // N) * DOWN_ROWS * F + line, wanted)
    if PROGRAMS > 1:
        _grid_barrier(barrier_ptr, PROGRAMS)
    for work in tl.range(program, tiles, PROGRAMS):
        following = work + PROGRAMS
        next_slots = _slots(slots_ptr, following % N, 0, COUNT, K)
        upcoming = _rank_tiles(down_ptr, next_slots, (following // N) * DOWN_ROWS + rows, 0, down_stride, C, COUNT, H,
                               F, DOWN_BLOCK, DOWN_UNROLL, False, following < tiles)
        _fence(FENCE)
        _down_combine(hidden_ptr, down_ptr, slots_ptr, weights_ptr, out_ptr, ready, work % N,
                      (work // N) * DOWN_ROWS + rows, down_stride, C, H, F, K, DOWN_ROWS, DOWN_BLOCK, RANKS,
                      DOWN_UNROLL, 1, FENCE, DOWN_WIDE, True, False)
        ready = upcoming
