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

BODY, ESCAPES, PATCHES, PATCHED, MODE = (
    layout.WORDS.index(name) for name in ("body", "escapes", "patches", "patch_count", "bits"))


@triton.jit(do_not_specialize=["rows_ptr", "slots_ptr", "count_ptr", "rows", "slots", "listed"])
def decode_kernel(bytes_ptr, halves_ptr, words_ptr, out_ptr, rows_ptr, slots_ptr, count_ptr, stride, out_stride, rows,
                  slots, listed, count, BITS: tl.constexpr, BLOCK: tl.constexpr, HEADER: tl.constexpr,
                  BODY: tl.constexpr, ESCAPES: tl.constexpr, PATCHES: tl.constexpr, PATCHED: tl.constexpr,
                  MODE: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """out[slots[m]] = the values of record rows[m] for the first `count_ptr[0]` m; programs take blocks in turn.

    The records are given three times, as bytes, 16-bit and 32-bit words; `stride` counts bytes.
    """
    ROWS: tl.constexpr = BLOCK // 8
    wanted = tl.minimum(tl.load(count_ptr), listed)
    blocks = (count + BLOCK - 1) // BLOCK
    eight = tl.arange(0, 8)
    place = tl.arange(0, ROWS)[:, None] * 8 + eight[None, :]
    for work in range(tl.program_id(0), wanted * blocks, tl.num_programs(0)):
        item, block = work // blocks, work % blocks
        row, slot = tl.load(rows_ptr + item), tl.load(slots_ptr + item)
        valid = (row >= 0) & (row < rows) & (slot >= 0) & (slot < slots)
        row, slot = tl.where(valid, row, 0).to(tl.int64), tl.where(valid, slot, 0).to(tl.int64)
        record, half, word = bytes_ptr + row * stride, halves_ptr + row * (stride // 2), words_ptr + row * (stride // 4)
        out = out_ptr + slot * out_stride + block * BLOCK
        inside = (place < count - block * BLOCK) & valid
        if tl.load(word + MODE) == 0:
            raw = half + HEADER // 2 + block * BLOCK + place
            tl.store(out + place, tl.load(raw, mask=inside, other=0), mask=inside)
        else:
            start = tl.load(word + HEADER // 4 + block)
            body = record + tl.load(word + BODY) + block * (BLOCK + BITS * ROWS)
            kept = tl.load(body + BITS * ROWS + place).to(tl.int32)
            code = tl.zeros([ROWS, 8], tl.int32)
            escaped = tl.full([ROWS], 255, tl.int32)
            for plane in tl.static_range(BITS):
                packed = tl.load(body + plane * ROWS + tl.arange(0, ROWS)).to(tl.int32)
                escaped &= packed
                code |= ((packed[:, None] >> eight[None, :]) & 1) << plane
            escape = (escaped[:, None] >> eight[None, :]) & 1
            inner = tl.cumsum(escape, 1)
            total = tl.sum(escape, 1)
            before = tl.where(start < 0, -1 - start, start) + tl.cumsum(total, 0) - total
            nth = before[:, None] + inner - escape
            pair = tl.load(record + tl.load(word + ESCAPES) + (nth >> 1), mask=escape != 0, other=0).to(tl.int32)
            nibble = (pair >> ((nth & 1) * 4)) & 15
            table = tl.where(escape != 0, SECOND * 2 + nibble, FIRST * 2 + code)
            exponent = tl.load(half + table).to(tl.int32)
            value = exponent | (kept & 0x7F) | ((kept & 0x80) << 8)
            tl.store(out + place, value.to(tl.int16), mask=inside)
            if start < 0:  # a value of this block is patched
                many, first = tl.load(word + PATCHED), tl.load(word + PATCHES)
                tl.debug_barrier()  # the patch must come after the value that it replaces
                for base in range(0, many, 128):
                    listing = base + tl.arange(0, 128)
                    at = tl.load(word + first // 4 + listing, mask=listing < many, other=-1) - block * BLOCK
                    mine = (at >= 0) & (at < BLOCK) & valid
                    patch = tl.load(half + first // 2 + many * 2 + listing, mask=mine, other=0)
                    tl.store(out + at, patch, mask=mine)


def decode(records: Tensor, bank: Tensor, rows: Tensor, slots: Tensor, count: Tensor, bits: int = 3,
           programs: int | None = None, warps: int = 4) -> Tensor:
    """Decode records[rows[m]] into bank[slots[m]] for m below count[0]; returns the bank.

    An id out of range skips its record, a count above M is M. Records are trusted: verify them when they are loaded.

    Args:
        records: uint8 `[R, stride]` on the device or in pinned host memory, each of bfloat16 values as many as a slot
            has, coded with `bits` or raw. bank: bfloat16 slots [C,...], contiguous.
        rows, slots: int32[M] on the device. count: int32[1] on the device.
        programs: of the launch (default: one per block of all M records; 32 from host memory).
        warps: of each program.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, or host memory that is not pinned.
        RuntimeError: no GPU and no interpreter.
    """
    require(bank)
    _check(records, bank, rows, slots, count, bits)
    size = bank[0].numel()
    blocks = -(-size // layout.BLOCK)
    if programs is None:
        programs = max(1, len(rows) * blocks) if records.device == bank.device and not INTERPRETED else 32
    decode_kernel[(programs,)](
        records, records.view(torch.int16), records.view(torch.int32), bank.view(torch.int16), rows, slots, count,
        records.stride(0), bank.stride(0), len(records), len(bank), len(rows), size, BITS=bits, BLOCK=layout.BLOCK,
        HEADER=layout.HEADER, BODY=BODY, ESCAPES=ESCAPES, PATCHES=PATCHES, PATCHED=PATCHED, MODE=MODE,
        FIRST=layout.FIRST, SECOND=layout.SECOND, num_warps=warps)
    return bank


def _check(records: Tensor, bank: Tensor, rows: Tensor, slots: Tensor, count: Tensor, bits: int) -> None:
    if records.dtype != torch.uint8 or records.dim() != 2 or records.stride(1) != 1 or records.stride(0) % 16:
        raise ValueError(f"records are {records.dtype} {tuple(records.shape)}, strides {records.stride()}; needed: "
                         "uint8 [R, stride], rows of multiples of 16 bytes")
    if records.device != bank.device and not (records.device.type == "cpu" and records.is_pinned()):
        raise ValueError(f"records are on {records.device}, not pinned; needed: {bank.device}, or pinned host memory")
    if bank.dtype != torch.bfloat16 or bank.dim() < 2 or not len(bank) or not bank[0].is_contiguous():
        raise ValueError(f"bank is {bank.dtype} {tuple(bank.shape)}; needed: contiguous bfloat16 slots [C,...]")
    if bits not in layout.BITS:
        raise ValueError(f"bits is {bits}; needed: one of {layout.BITS}")
    for name, ids in (("rows", rows), ("slots", slots), ("count", count)):
        if ids.dtype != torch.int32 or ids.dim() != 1 or ids.device != bank.device:
            raise ValueError(f"{name} is {ids.dtype} {tuple(ids.shape)} on {ids.device}; needed: int32 of one dimension "
                             f"on {bank.device}")
    if len(rows) != len(slots) or len(count) != 1:
        raise ValueError(f"lengths are {len(rows)}, {len(slots)}, {len(count)}; needed: M, M, 1")


def decode_record(record: layout.WireRecord, device) -> Tensor:
    """One record's tensor on a GPU: the record crosses the link and is decoded there; raw ones only cross."""
    data = record.data.to(device)
    if record.raw:
        size = record.header["count"] * record.dtype.itemsize
        return data[layout.HEADER : layout.HEADER + size].clone().view(record.dtype).view(record.shape)
    bank = torch.empty(1, record.header["count"], dtype=torch.bfloat16, device=device)
    zero, one = (torch.tensor([number], dtype=torch.int32, device=device) for number in (0, 1))
    return decode(data[None], bank, zero, zero, one, record.header["bits"])[0].view(record.shape)
