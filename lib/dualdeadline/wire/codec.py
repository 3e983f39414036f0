"""Components to wire records and back, on the CPU."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from dualdeadline.wire.format import (
    BITS,
    BLOCK,
    DIMS,
    DTYPES,
    HEADER,
    MAGIC,
    SHAPE,
    VERSION,
    WORDS,
    Codes,
    WireRecord,
    align,
    block_bytes,
    checksum,
    header_sum,
    layout,
)

CHUNK = 256 * BLOCK  # values worked on at a time: near a core's cache, long enough for threads not to wait for Python
SAMPLE = 1 << 18  # values from which tables are chosen
ESCAPED = 15  # nibble of a patched value
MOST_PATCHES = 4096  # a block with a patch reads the whole list of them
LARGEST = 2**31 - 2**24  # bytes of a tensor; offsets in a record are 32 bits wide


def encode(tensor: Tensor, bits: int = 3) -> WireRecord:
    """A component as a wire record.

    Args:
        tensor: any shape of at most 8 dimensions; bfloat16 is coded, float16 and float32 travel raw.
        bits: width of the first code, 2 to 4.

    Raises:
        ValueError: another dtype (quantised weights are small already), too many bytes or dimensions, other bits.
    """
    _check(tensor, bits)
    values = tensor.detach().resolve_neg().cpu().contiguous().flatten()
    if tensor.dtype is not torch.bfloat16:
        return _raw(tensor, values.view(torch.uint8).numpy())
    words = values.view(torch.int16).numpy().view(np.uint16)
    sizes = layout(len(words), bits, 0, 0)
    raw_size = layout(2 * len(words), 0, 0, 0)["bytes"]
    if sizes["bytes"] >= raw_size:
        return _raw(tensor, words.view(np.uint8))
    data = torch.empty(raw_size, dtype=torch.uint8)  # a record is smaller or raw; what is not touched costs nothing
    body = data.numpy()[sizes["body"] : sizes["escapes"]].reshape(-1, block_bytes(bits))
    coder = _Coder(choose(words, bits))
    step = CHUNK // BLOCK
    found = [
        coder.code(words[row * BLOCK : (row + step) * BLOCK], body[row : row + step])
        for row in range(0, len(body), step)
    ]
    nibbles, lengths = (np.concatenate(parts) for parts in zip(*found))
    patched = np.flatnonzero(nibbles == ESCAPED)
    sizes = layout(len(words), bits, len(nibbles), len(patched))
    if sizes["bytes"] >= raw_size or len(patched) > MOST_PATCHES:
        return _raw(tensor, words.view(np.uint8))
    return _assemble(tensor, words, data[: sizes["bytes"]], coder, nibbles, lengths, patched, sizes)


def _check(tensor: Tensor, bits: int) -> None:
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        raise ValueError(f"tensor is {tensor.layout} on {tensor.device}; needed: a dense tensor with values")
    if tensor.dtype not in DTYPES.values():
        raise ValueError(
            f"dtype is {tensor.dtype}; needed: bfloat16, float16 or float32 (quantised weights have no "
            "exponents to save)"
        )
    if (
        tensor.numel() * tensor.element_size() > LARGEST
        or tensor.dim() > DIMS
        or max(tensor.shape, default=0) > LARGEST
    ):
        raise ValueError(
            f"tensor {tuple(tensor.shape)} of {tensor.numel() * tensor.element_size()} bytes; needed: at "
            f"most {LARGEST} bytes and {DIMS} dimensions"
        )
    if bits not in BITS or isinstance(bits, float):
        raise ValueError(f"bits is {bits!r}; needed: one of {BITS}")


def choose(words: np.ndarray, bits: int) -> Codes:
    """The commonest run of exponents, exponent 0 instead of its first place if that is commoner, and the escapes."""
    step = max(1, len(words) // SAMPLE)
    counts = np.bincount((words[::step] >> 7) & 0xFF, minlength=256)
    last = 2**bits - 1
    runs = np.convolve(counts, np.ones(last, int), "valid")
    shorter = np.convolve(counts, np.ones(last - 1, int), "valid")
    base, zero = int(runs.argmax()), 0
    with_zero = shorter[1:] + counts[0]  # place 0 for exponent 0, then the run that starts one later
    if with_zero.max() > runs.max():
        base, zero = int(with_zero.argmax()), 1
    around = np.convolve(counts, np.ones(ESCAPED + last - zero, int))  # [i] ends at exponent i
    lows = np.arange(max(0, base + zero - ESCAPED), base + zero + 1)
    ends = lows + ESCAPED + last - zero - 1
    return Codes(bits, base, zero, int(lows[around[np.minimum(ends, len(around) - 1)].argmax()]))


class _Coder:
    """Codes chunks by the same rule, in the same buffers."""

    def __init__(self, codes: Codes):
        self.codes = codes
        first, second = codes.exponents()
        second = second[second < 256]
        self.nibble = np.full(256, ESCAPED, np.uint8)
        self.nibble[second] = np.arange(len(second))
        self.named = self.nibble < ESCAPED
        self.named[first[first < 256]] = True
        self.last = np.full(CHUNK, codes.last, np.uint8)  # an array: numpy is slow at the minimum with a number
        self.wide, self.wider = np.empty((2, CHUNK), np.uint16)
        self.places, self.exponent, self.kept = np.empty((3, CHUNK), np.uint8)

    def code(self, words: np.ndarray, body: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Fill the blocks of one chunk; its escapes as nibbles [n], and how many each block has."""
        count, full = len(words), len(body) * BLOCK
        wide, wider = self.wide[:count], self.wider[:count]
        code, exponent, kept = self.places[:full], self.exponent[:count], self.kept[:full]
        np.copyto(exponent, np.right_shift(words, 7, out=wide), casting="unsafe")
        self._ranks(exponent, code[:count])
        np.bitwise_and(words, 0x807F, out=wide)
        np.copyto(kept[:count], np.bitwise_or(wide, np.right_shift(wide, 8, out=wider), out=wide), casting="unsafe")
        code[count:], kept[count:] = 0, 0  # behind the last value
        width = BLOCK // 8
        for place in range(self.codes.bits):
            plane = np.packbits(code & (1 << place), bitorder="little")
            body[:, place * width : (place + 1) * width] = plane.reshape(-1, width)
        body[:, self.codes.bits * width :] = kept.reshape(-1, BLOCK)
        where = np.flatnonzero(code == self.codes.last)
        return self.nibble[exponent[where]], np.diff(np.searchsorted(where, np.arange(0, full + 1, BLOCK)))

    def _ranks(self, exponent: np.ndarray, out: np.ndarray) -> None:
        """Place of each exponent in the run, its length where it is not there."""
        np.minimum(np.subtract(exponent, self.codes.base, out=out), self.last[: len(out)], out=out)
        if self.codes.zero:
            out[exponent == self.codes.base] = self.codes.last
            out[exponent == 0] = 0


def _assemble(tensor, words, data, coder: _Coder, nibbles, lengths, patched, sizes) -> WireRecord:
    """Everything but the body, which stands there already."""
    out = data.numpy()
    before = np.cumsum(lengths) - lengths
    starts = before.astype(np.int32)
    owners = np.unique(np.searchsorted(before + lengths, patched, side="right"))  # blocks of the patched escapes
    starts[owners] = -1 - starts[owners]
    end = sizes["starts"] + starts.nbytes
    out[sizes["starts"] : end], out[end : sizes["body"]] = starts.view(np.uint8), 0
    padded = np.append(nibbles, np.zeros(len(nibbles) % 2, np.uint8))
    at = _positions(words, coder.named, owners) if len(patched) else np.empty(0, np.int64)
    out[sizes["escapes"] :] = 0
    out[sizes["escapes"] : sizes["escapes"] + len(padded) // 2] = padded[0::2] | padded[1::2] << 4
    tail = np.concatenate([at.astype(np.int32).view(np.uint8), words[at].view(np.uint8)])
    out[sizes["patches"] : sizes["patches"] + len(tail)] = tail
    counts = {"patch_count": len(patched), "escape_count": len(nibbles)}
    return _finish(tensor, data, sizes | counts | vars(coder.codes))


def _positions(words: np.ndarray, named: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """Positions of the values in these blocks whose exponent no code names."""
    rows = [
        block * BLOCK + np.flatnonzero(~named[words[block * BLOCK : (block + 1) * BLOCK] >> 7 & 0xFF])
        for block in blocks
    ]
    return np.concatenate(rows)


def _raw(tensor: Tensor, payload: np.ndarray) -> WireRecord:
    sizes = layout(len(payload), 0, 0, 0)
    data = torch.zeros(sizes["bytes"], dtype=torch.uint8)
    data[HEADER : HEADER + len(payload)] = torch.from_numpy(payload)
    return _finish(tensor, data, sizes | dict(bits=0, patch_count=0, escape_count=0, base=0, zero=0, low=0))


def _finish(tensor: Tensor, data: Tensor, sizes: dict) -> WireRecord:
    """Write the header."""
    words = np.zeros(HEADER // 4, np.int32)
    kind = next(code for code, dtype in DTYPES.items() if dtype is tensor.dtype)
    found = (
        dict(
            magic0=MAGIC[0],
            magic1=MAGIC[1],
            version=VERSION,
            dtype=kind,
            dims=tensor.dim(),
            count=tensor.numel(),
            payload_sum=checksum(data[HEADER:].numpy()),
            header_sum=0,
        )
        | sizes
    )
    words[: len(WORDS)] = [found[name] for name in WORDS]
    words[SHAPE : SHAPE + tensor.dim()] = tensor.shape
    words[WORDS.index("header_sum")] = header_sum(words)
    data[:HEADER] = torch.from_numpy(words.view(np.uint8))
    return WireRecord(data)


def decode(record: WireRecord | Tensor, device=None, threads: int | None = None, verify: bool = True) -> Tensor:
    """The tensor of a record, bit by bit.

    Args:
        record: or its bytes, uint8. device: where the tensor is wanted; on a GPU the record crosses the link and is
            decoded there.
        threads: for decoding on the CPU (default: cores, at most 8). verify: check header and checksum first.

    Raises:
        ValueError: damaged, truncated or foreign bytes.
    """
    record = record if isinstance(record, WireRecord) else WireRecord(record)
    record = record.verify() if verify else record
    device = torch.device("cpu" if device is None else device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {device}; needed: the CPU or a CUDA device")
    if device.type == "cuda":
        from dualdeadline.kernels import wire as kernel

        return kernel.decode_record(record, device)
    found, data = record.header, record.data.numpy()
    if record.raw:
        size = found["count"] * record.dtype.itemsize
        return record.data[HEADER : HEADER + size].clone().view(record.dtype).view(record.shape)
    count, bits = found["count"], found["bits"]
    blocks = align(count, BLOCK) // BLOCK
    starts = data[found["starts"] : found["starts"] + 4 * blocks].view(np.int32)
    starts = np.append(np.where(starts < 0, -1 - starts, starts), found["escape_count"])
    body = data[found["body"] : found["escapes"]].reshape(blocks, block_bytes(bits))
    packed = data[found["escapes"] : found["escapes"] + (found["escape_count"] + 1) // 2]
    codes = Codes(bits, found["base"], found["zero"], found["low"])
    out = np.empty(blocks * BLOCK, np.uint16)
    threads = max(1, min(threads or min(8, os.cpu_count() or 1), blocks // 64))
    ends = [blocks * turn // threads for turn in range(threads + 1)]

    def work(turn: int) -> None:
        for row in range(ends[turn], ends[turn + 1], CHUNK // BLOCK):
            rows = slice(row, min(row + CHUNK // BLOCK, ends[turn + 1]))
            nibbles = _unpack(packed, starts[rows.start], starts[rows.stop])
            _restore(body[rows], nibbles, codes, out[rows.start * BLOCK : rows.stop * BLOCK])

    if threads == 1:
        work(0)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, range(threads)))
    at, end = found["patches"], found["patches"] + 4 * found["patch_count"]
    out[data[at:end].view(np.int32)] = data[end : end + 2 * found["patch_count"]].view(np.uint16)
    return torch.from_numpy(out[:count].view(np.int16)).view(torch.bfloat16).view(record.shape)


def _unpack(packed: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Nibbles from `start` to `stop`."""
    part = packed[start // 2 : (stop + 1) // 2]
    both = np.stack([part & 15, part >> 4], 1).reshape(-1)
    return both[start % 2 : start % 2 + stop - start]


def _restore(body: np.ndarray, nibbles: np.ndarray, codes: Codes, out: np.ndarray) -> None:
    """Values of some blocks, as 16-bit words; patched ones are left wrong."""
    width, bits = BLOCK // 8, codes.bits
    code = np.unpackbits(body[:, :width].reshape(-1), bitorder="little")
    for place in range(1, bits):
        plane = np.unpackbits(body[:, place * width : (place + 1) * width].reshape(-1), bitorder="little")
        code |= np.left_shift(plane, place, out=plane)
    np.left_shift(code, 7, out=out, dtype=np.uint16)
    out += np.uint16(codes.base << 7)
    if codes.zero:
        out[code == 0] = 0
    out[np.flatnonzero(code == codes.last)] = np.append(codes.exponents()[1] << 7, 0).astype(np.uint16)[nibbles]
    kept = body[:, bits * width :].reshape(-1).astype(np.uint16)
    out |= kept & 0x7F
    kept &= 0x80
    out |= np.left_shift(kept, 8, out=kept)
