"""GPU decode of wire records into slots: from device staging, or straight from pinned host memory.

Which records, and into which slots, is read on the device, so a CUDA graph can hold the decode. A program takes one
block of 2,048 values at a time: bit planes give eight codes per byte, a scan counts the escapes before each byte, and
two tables of the record's header turn codes into exponents. Layout: `wire.format`; torch reference: `wire.decode`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dualdeadline.kernels import INTERPRETED, require, tl, triton
from dualdeadline.wire import format as layout

FIELDS = tuple(layout.WORDS.index(name) for name in ("bits", "base", "zero", "low", "patch_count", "patches"))
HOST_PROGRAMS = 264  # of all records together, where the link is the limit
DEVICE_PROGRAMS = 1056  # of a launch whose programs share the blocks: 8 for each multiprocessor of an H200; not tuned


@triton.jit
def _bytes_of(nibble):
    """Four bits as four bytes of 0 or 1."""
    return (nibble * 0x204081) & 0x01010101


@triton.jit
def _some_bit(codes, BITS: tl.constexpr):
    """Four bytes of 1 where a byte of `codes` is not 0, else 0."""
    found = codes | (codes >> 1)
    if BITS > 2:
        found |= codes >> 2
    if BITS > 3:
        found |= codes >> 3
    return found & 0x01010101


@triton.jit
def _shuffle(low, high, UPPER: tl.constexpr, ASM: tl.constexpr):
    """Two 16-bit values from bytes 0 and 1 (UPPER: 2 and 3) of their low and high halves."""
    if ASM:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, 0x7362 if UPPER else 0x5140], tl.int32, True, 1
        )
    SHIFT: tl.constexpr = 16 if UPPER else 0
    first = ((low >> SHIFT) & 0xFF) | (((high >> SHIFT) & 0xFF) << 8)
    second = ((low >> (SHIFT + 8)) & 0xFF) | (((high >> (SHIFT + 8)) & 0xFF) << 8)
    return first | (second << 16)


@triton.jit
def _values(kept, exponent, ASM: tl.constexpr):
    """Four values as a 64-bit word from four bytes of sign and mantissa and four of exponents."""
    low = ((exponent & 0x01010101) << 7) | (kept & 0x7F7F7F7F)
    high = (kept & ~0x7F7F7F7F) | ((exponent >> 1) & 0x7F7F7F7F)
    first, second = _shuffle(low, high, False, ASM), _shuffle(low, high, True, ASM)
    return first.to(tl.uint32, bitcast=True).to(tl.int64) | (second.to(tl.int64) << 32)


@triton.jit
def _record(bytes_ptr, words_ptr, longs_ptr, out_ptr, row, slot, stride, out_stride, quads, blocks, first_block, step,
            BITS: tl.constexpr, BLOCK: tl.constexpr, HEADER: tl.constexpr, FIELDS: tl.constexpr, ASM: tl.constexpr):
    """out[slot] = every `step`th block of record `row`, from `first_block` on; nothing if it has other bits.

    Records come as bytes, 32-bit and 64-bit words, slots as `quads` 64-bit words of four values; `stride` counts bytes,
    `out_stride` 64-bit words. A line is eight values: a byte of each bit plane, and two words of four bytes for all
    that is computed about them. Raw and coded records take the same way without a branch, so that all loads of a block
    start together.
    """
    LINES: tl.constexpr = BLOCK // 8
    LAST: tl.constexpr = 2**BITS - 1
    SIZE: tl.constexpr = BLOCK + BITS * LINES
    body = (HEADER + 4 * blocks + 15) // 16 * 16
    far_off = row.to(tl.int64) * stride
    record, word, long = bytes_ptr + far_off, words_ptr + far_off // 4, longs_ptr + far_off // 8
    out_row = out_ptr + slot.to(tl.int64) * out_stride
    width = tl.load(word + FIELDS[0])
    last = tl.where((width == BITS) | (width == 0), blocks, 0)
    coded = width != 0
    base, zero, low = tl.load(word + FIELDS[1]), tl.load(word + FIELDS[2]), tl.load(word + FIELDS[3])
    full, gap, run = base * 0x01010101, base + zero, LAST - zero
    ones = tl.where(zero != 0, 0, 0x01010101)  # whether exponent 0 stands in place 0 of the run
    line = tl.arange(0, LINES)
    half = line[:, None] * 2 + tl.arange(0, 2)[None, :]
    for block in range(first_block, last, step):
        start = tl.load(word + HEADER // 4 + block)
        inside = block * (BLOCK // 4) + half < quads
        raw = tl.load(long + HEADER // 8 + block * (BLOCK // 4) + half, mask=inside & (coded == 0), other=0)
        planes = record + body + block * SIZE
        kept = tl.load(long + (body + block * SIZE + BITS * LINES) // 8 + line, mask=coded, other=0)
        escaped = tl.full([LINES], 255, tl.int32)
        code_a, code_b = tl.zeros([LINES], tl.int32), tl.zeros([LINES], tl.int32)
        for plane in tl.static_range(BITS):
            packed = tl.load(planes + plane * LINES + line, mask=coded, other=0).to(tl.int32)
            escaped &= packed
            code_a |= _bytes_of(packed & 15) << plane
            code_b |= _bytes_of(packed >> 4) << plane
        # escapes: how many before each line, and the line's own as four-bit codes of one word
        twos = escaped - ((escaped >> 1) & 0x55)
        fours = (twos & 0x33) + ((twos >> 2) & 0x33)
        mine = (fours + (fours >> 4)) & 15
        first = tl.where(start < 0, -1 - start, start) + tl.cumsum(mine, 0) - mine
        at = word + (body + blocks * SIZE) // 4 + (first >> 3)
        near = tl.load(at, mask=escaped != 0, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
        far = tl.load(at + 1, mask=escaped != 0, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
        names = ((near | (far << 32)) >> ((first & 7) * 4).to(tl.uint64)).to(tl.uint32).to(tl.int32, bitcast=True)
        mark_a, mark_b = _bytes_of(escaped & 15), _bytes_of(escaped >> 4)
        left = mark_a.to(tl.int64) | (mark_b.to(tl.int64) << 32)
        named = tl.zeros([LINES], tl.int64)
        for turn in range(0, tl.max(mine, 0)):  # the next escape of every line that has one left
            lowest = left & -left
            exponent = low + (names & 15)
            exponent += tl.where(exponent >= gap, run, 0)
            named += lowest * (exponent & 255).to(tl.int64)
            left ^= lowest
            names = names >> 4
        keep_a = ((_some_bit(code_a, BITS) | ones) & ~mark_a) * 255
        keep_b = ((_some_bit(code_b, BITS) | ones) & ~mark_b) * 255
        power_a = ((code_a + full) & keep_a) | named.to(tl.int32)
        power_b = ((code_b + full) & keep_b) | (named >> 32).to(tl.int32)
        value = tl.join(_values(kept.to(tl.int32), power_a, ASM), _values((kept >> 32).to(tl.int32), power_b, ASM))
        out = out_row + block * (BLOCK // 4)
        tl.store(out + half, tl.where(coded, value, raw), mask=inside)
        if coded & (start < 0):  # a value of this block is patched
            many, place = tl.load(word + FIELDS[4]), tl.load(word + FIELDS[5])
            tl.debug_barrier()  # the patch must come after the value that it replaces
            halves, halves_out = word.to(tl.pointer_type(tl.int16)), out.to(tl.pointer_type(tl.int16))
            for begin in range(0, many, 128):
                listing = begin + tl.arange(0, 128)
                spot = tl.load(word + place // 4 + listing, mask=listing < many, other=-1) - block * BLOCK
                own = (spot >= 0) & (spot < BLOCK)
                patch = tl.load(halves + place // 2 + many * 2 + listing, mask=own, other=0)
                tl.store(halves_out + spot, patch, mask=own)


@triton.jit(do_not_specialize=["rows_ptr", "slots_ptr", "count_ptr", "rows", "slots", "listed"])
def decode_kernel(
    bytes_ptr,
    words_ptr,
    longs_ptr,
    out_ptr,
    rows_ptr,
    slots_ptr,
    count_ptr,
    stride,
    out_stride,
    rows,
    slots,
    listed,
    quads,
    SPREAD: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADER: tl.constexpr,
    FIELDS: tl.constexpr,
    ASM: tl.constexpr,
):
    """out[slots[m]] = the values of record rows[m] for the first `count_ptr[0]` m; see `_record` for the units.

    Programs (m, p) take the blocks of record m in turn. SPREAD: programs p take all blocks of all wanted records in
    turn, record after record, and read a record's header once.
    """
    wanted, blocks = tl.load(count_ptr), (quads * 4 + BLOCK - 1) // BLOCK
    if SPREAD:
        step = tl.num_programs(0)
        for item in range(0, tl.minimum(wanted, listed)):
            first = (tl.program_id(0) + step - item * blocks % step) % step
            row, slot = tl.load(rows_ptr + item), tl.load(slots_ptr + item)
            if (first < blocks) & (row >= 0) & (row < rows) & (slot >= 0) & (slot < slots):
                _record(bytes_ptr, words_ptr, longs_ptr, out_ptr, row, slot, stride, out_stride, quads, blocks, first,
                        step, BITS, BLOCK, HEADER, FIELDS, ASM)
    else:
        item = tl.program_id(0)
        row, slot = tl.load(rows_ptr + item), tl.load(slots_ptr + item)
        if (item < wanted) & (row >= 0) & (row < rows) & (slot >= 0) & (slot < slots):
            _record(bytes_ptr, words_ptr, longs_ptr, out_ptr, row, slot, stride, out_stride, quads, blocks,
                    tl.program_id(1), tl.num_programs(1), BITS, BLOCK, HEADER, FIELDS, ASM)


def decode(
    records: Tensor,
    bank: Tensor,
    rows: Tensor,
    slots: Tensor,
    count: Tensor,
    bits: int = 3,
    programs: int | None = None,
    warps: int = 4,
    spread: bool = False,
) -> Tensor:
    """Decode records[rows[m]] into bank[slots[m]] for m below count[0]; returns the bank.

    An id out of range or a record of other bits is skipped, a count above M is M. Records are trusted: verify them when
    they are loaded.

    Args:
        records: uint8 `[R, stride]` on the device or in pinned host memory, each of bfloat16 values as many as a slot
            has, coded with `bits` or raw. bank: bfloat16 slots [C,...], contiguous.
        rows, slots: int32[M] on the device. count: int32[1] on the device.
        programs: of each record (default: one per block; from host memory as few as fill the link). With `spread`: of
            the launch (default: as many as the device runs at a time; from host memory as few as fill the link).
        warps: of each program.
        spread: all programs share the blocks of all wanted records, so that few wanted of many listed are read as fast
            as many. The bits are the same.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, or host memory that is not pinned.
        RuntimeError: no GPU and no interpreter.
    """
    require(bank)
    _check(records, bank, rows, slots, count, bits)
    size = bank[0].numel()
    blocks = -(-size // layout.BLOCK)
    on_host = records.device != bank.device
    if programs is None and spread:
        programs = HOST_PROGRAMS if on_host else DEVICE_PROGRAMS
    elif programs is None:
        programs = -(-HOST_PROGRAMS // max(1, len(rows))) if on_host else blocks
    grid = (max(1, min(programs, blocks * len(rows))),) if spread else (len(rows), min(programs, blocks))
    decode_kernel[grid](
        records,
        records.view(torch.int32),
        records.view(torch.int64),
        bank.flatten(1).view(torch.int64),
        rows,
        slots,
        count,
        records.stride(0),
        bank.stride(0) // 4,
        len(records),
        len(bank),
        len(rows),
        size // 4,
        SPREAD=spread,
        BITS=bits,
        BLOCK=layout.BLOCK,
        HEADER=layout.HEADER,
        FIELDS=FIELDS,
        ASM=not INTERPRETED,
        num_warps=warps,
    )
    return bank


def _check(records: Tensor, bank: Tensor, rows: Tensor, slots: Tensor, count: Tensor, bits: int) -> None:
    if records.dtype != torch.uint8 or records.dim() != 2 or records.stride(1) != 1 or records.stride(0) % 16:
        raise ValueError(
            f"records are {records.dtype} {tuple(records.shape)}, strides {records.stride()}; needed: "
            "uint8 [R, stride], rows of multiples of 16 bytes"
        )
    if records.device != bank.device and not (records.device.type == "cpu" and records.is_pinned()):
        raise ValueError(f"records are on {records.device}, not pinned; needed: {bank.device}, or pinned host memory")
    if bank.dtype != torch.bfloat16 or bank.dim() < 2 or not len(bank) or not bank[0].is_contiguous():
        raise ValueError(f"bank is {bank.dtype} {tuple(bank.shape)}; needed: contiguous bfloat16 slots [C,...]")
    if bank[0].numel() % 8 or bank.stride(0) % 8 or bank.data_ptr() % 16:
        raise ValueError(
            f"bank has slots of {bank[0].numel()} values, {bank.stride(0)} apart; needed: multiples of 8, "
            "aligned to 16 bytes"
        )
    if bits not in layout.BITS:
        raise ValueError(f"bits is {bits}; needed: one of {layout.BITS}")
    for name, ids in (("rows", rows), ("slots", slots), ("count", count)):
        if ids.dtype != torch.int32 or ids.dim() != 1 or ids.device != bank.device:
            raise ValueError(
                f"{name} is {ids.dtype} {tuple(ids.shape)} on {ids.device}; needed: int32 of one dimension "
                f"on {bank.device}"
            )
    if len(rows) != len(slots) or len(count) != 1:
        raise ValueError(f"lengths are {len(rows)}, {len(slots)}, {len(count)}; needed: M, M, 1")


def decode_record(record: layout.WireRecord, device) -> Tensor:
    """One record's tensor on a GPU: the record crosses the link and is decoded there; raw ones only cross."""
    data = record.data.to(device)
    if record.raw:
        size = record.header["count"] * record.dtype.itemsize
        return data[layout.HEADER : layout.HEADER + size].clone().view(record.dtype).view(record.shape)
    count = record.header["count"]
    bank = torch.empty(1, layout.align(count, layout.BLOCK), dtype=torch.bfloat16, device=device)
    zero, one = (torch.tensor([number], dtype=torch.int32, device=device) for number in (0, 1))
    return decode(data[None], bank, zero, zero, one, record.header["bits"])[0, :count].view(record.shape)
