"""What stands where in a wire record.

A bfloat16 value is a sign, 8 bits of exponent and 7 of mantissa. Sign and mantissa look random and travel as they are,
a byte each; the exponents of nearly all values of a component are a few neighbours, and travel as codes of `bits` bits:
their place in the commonest run of 2^bits - 1 exponents (one place may stand for exponent 0 instead, for pruned
weights). The last code means that a 4-bit code of the 15 exponents around that run stands in the list of escapes, and
that list's last code that the value itself stands in the list of patches.

    header    512 bytes, little-endian int32 words (the names below)
    starts    int32 per block of 2,048 values: escapes before it; -1 - that if it holds a patched value
    body      per block: `bits` bit planes of 256 bytes, then 2,048 bytes of sign and mantissa
    escapes   4 bits each, low half first
    patches   int32 positions, ascending, then their 16-bit values

Blocks have one size, so every program of a GPU finds its own bytes at once; sections start at multiples of 16 bytes and
a record ends at a multiple of 4,096, so that records read from a file with O_DIRECT. A component that would not get
smaller, and every dtype but bfloat16, travels raw behind the same header.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

BLOCK = 2048  # values
BITS = (2, 3, 4)  # widths of the first code that can be written
HEADER = 512  # bytes
ALIGN = 4096  # bytes; records end at a multiple
MAGIC = (0x49574444, 0x00004552)  # "DDWIRE" and two zeros
VERSION = 1
DTYPES = {1: torch.bfloat16, 2: torch.float16, 3: torch.float32}
DIMS = 8  # dimensions of a tensor at most
# int32 words of the header
WORDS = (
    "magic0",
    "magic1",
    "version",
    "dtype",
    "bits",
    "dims",
    "count",
    "bytes",
    "starts",
    "body",
    "escapes",
    "patches",
    "patch_count",
    "escape_count",
    "base",
    "zero",
    "low",
    "payload_sum",
    "header_sum",
)
SHAPE = 24  # word where the shape starts
SLACK = 8  # bytes behind the escapes that a kernel may read


@dataclass(frozen=True)
class WireRecord:
    """One component as it crosses the link.

    Attributes:
        data: uint8 `[nbytes]` on the CPU.
    """

    data: Tensor

    @property
    def nbytes(self) -> int:
        """All bytes that cross the link, header and padding included."""
        return self.data.numel()

    @property
    def header(self) -> dict[str, int]:
        """The header's words by name."""
        return dict(zip(WORDS, self.words().tolist()))

    def words(self) -> np.ndarray:
        """The header as int32 `[128]`."""
        return self.data[:HEADER].numpy().view(np.int32)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.words()[SHAPE : SHAPE + self.header["dims"]].tolist())

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.header["dtype"]]

    @property
    def raw(self) -> bool:
        """Whether the values travel as they are."""
        return self.header["bits"] == 0

    @property
    def bits_per_weight(self) -> float:
        """Bits of the record per value; inf if there is none."""
        count = self.header["count"]
        return 8 * self.nbytes / count if count else float("inf")

    def verify(self, name: str = "record") -> WireRecord:
        """Itself, if header and checksums are right.

        Raises:
            ValueError: too short, foreign, of another version, truncated or altered; the text names `name`.
        """
        data = self.data
        if data.dtype != torch.uint8 or data.dim() != 1 or not data.is_contiguous() or data.device.type != "cpu":
            raise ValueError(
                f"{name} is {data.dtype} {tuple(data.shape)} on {data.device}, strides {data.stride()}; "
                "needed: contiguous uint8 of one dimension on the CPU"
            )
        if self.data.numel() < HEADER:
            raise ValueError(f"{name} has {self.data.numel()} bytes; needed: at least a header of {HEADER}")
        found = self.header
        if (found["magic0"], found["magic1"]) != MAGIC:
            raise ValueError(f"{name} is no wire record: it starts with {bytes(self.data[:8].tolist())!r}")
        if found["version"] != VERSION:
            raise ValueError(f"{name} has version {found['version']}; needed: {VERSION}")
        if found["header_sum"] != header_sum(self.words()):
            raise ValueError(f"{name} has an altered header; needed: checksum {found['header_sum'] & 0xFFFFFFFF:08x}")
        if found["bytes"] != self.nbytes:
            raise ValueError(f"{name} has {self.nbytes} bytes; needed: {found['bytes']} (truncated, or glued to more)")
        if found["payload_sum"] != checksum(self.data[HEADER:].numpy()):
            raise ValueError(f"{name} is altered: its payload does not match its checksum")
        wrong = self._impossible()
        if wrong:
            raise ValueError(f"{name} is no record that `encode` writes: {wrong}")
        return self

    def _impossible(self) -> str:
        """What in the header or in the lists cannot be; empty if all can."""
        found, words, last = self.header, self.words(), 2 ** max(0, self.header["bits"]) - 1
        if found["dtype"] not in DTYPES or found["bits"] not in (0, *BITS) or not 0 <= found["dims"] <= DIMS:
            return f"dtype {found['dtype']}, bits {found['bits']}, dimensions {found['dims']}"
        shape = words[SHAPE : SHAPE + found["dims"]].tolist()
        if min(shape, default=0) < 0 or math.prod(shape) != found["count"]:
            return f"shape {shape}, {found['count']} values"
        count = found["count"] if found["bits"] else found["count"] * DTYPES[found["dtype"]].itemsize
        sizes = layout(count, found["bits"], found["escape_count"], found["patch_count"])
        if min(found["escape_count"], found["patch_count"]) < 0 or any(found[key] != sizes[key] for key in sizes):
            return "sections do not lie where they should"
        if not found["bits"]:
            return ""
        if found["dtype"] != 1 or not (
            0 <= found["base"] <= 256 - last
            and found["zero"] in (0, 1)
            and 0 <= found["low"] <= found["base"] + found["zero"]
        ):
            return f"base {found['base']}, zero {found['zero']}, low {found['low']}"
        data = self.data.numpy()
        starts = data[found["starts"] : found["starts"] + 4 * (align(count, BLOCK) // BLOCK)].view(np.int32)
        starts = np.append(np.where(starts < 0, -1 - starts, starts), found["escape_count"])
        at = data[found["patches"] : found["patches"] + 4 * found["patch_count"]].view(np.int32)
        if starts[0] != 0 or (np.diff(starts) < 0).any() or (np.diff(at) <= 0).any():
            return "the lists of escapes or patches are out of order"
        return "" if not len(at) or (at[0] >= 0 and at[-1] < count) else "a patch lies outside of the tensor"


def checksum(data: np.ndarray) -> int:
    """CRC-32 of bytes as a signed 32-bit number."""
    return int(np.uint32(zlib.crc32(data)).astype(np.int32))


def header_sum(words: np.ndarray) -> int:
    """CRC-32 of a header with its own place at 0."""
    words = words.copy()
    words[WORDS.index("header_sum")] = 0
    return checksum(words.view(np.uint8))


def align(size: int, to: int = 16) -> int:
    """The next multiple of `to`."""
    return -(-size // to) * to


def block_bytes(bits: int) -> int:
    """Bytes of one block in the body."""
    return BLOCK + bits * BLOCK // 8


def layout(count: int, bits: int, escapes: int, patches: int) -> dict[str, int]:
    """Byte offsets of the sections and the whole size (`bytes`) of a coded record; raw at `bits` 0."""
    if bits == 0:
        return {"starts": 0, "body": HEADER, "escapes": 0, "patches": 0, "bytes": align(HEADER + count, ALIGN)}
    blocks = align(count, BLOCK) // BLOCK
    found = {"starts": HEADER, "body": align(HEADER + 4 * blocks)}
    found["escapes"] = found["body"] + blocks * block_bytes(bits)
    found["patches"] = align(found["escapes"] + (escapes + 1) // 2 + SLACK)
    return found | {"bytes": align(found["patches"] + 6 * patches, ALIGN)}


@dataclass(frozen=True)
class Codes:
    """Which exponent each code stands for.

    Attributes:
        bits: width of the first code. base: exponent of its place 0. zero: 1 if place 0 stands for exponent 0 instead.
        low: smallest exponent that an escape can name; escapes skip the run.
    """

    bits: int
    base: int
    zero: int
    low: int

    @property
    def last(self) -> int:
        """The first code that means an escape."""
        return 2**self.bits - 1

    def exponents(self) -> tuple[np.ndarray, np.ndarray]:
        """Exponent of each place of the run, and of each escape's code; above 255 where there is none."""
        first = self.base + np.arange(self.last)
        second = self.low + np.arange(15)
        second[second >= self.base + self.zero] += self.last - self.zero
        return np.where((np.arange(self.last) == 0) & (self.zero == 1), 0, first), second
