"""Memory at multiples of 4,096 bytes, sums of what lies there, and what of a file lies in the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash
from torch import Tensor

from dualdeadline.wire.format import ALIGN

PAGE = mmap.PAGESIZE
BLOCK = 256 * 2**20  # bytes mapped at a time to ask about residency


class Memory:
    """Host memory for reads past the page cache; pinned in place where a GPU takes part, until `close`."""

    def __init__(self, pinned: bool = False):
        self.pinned = pinned
        self._registered: list[int] = []
        self._release = weakref.finalize(self, _unregister, self._registered)

    def new(self, size: int) -> Tensor:
        """Zeros, uint8 `[size]`, that start at a multiple of 4,096 bytes.

        Raises:
            RuntimeError: the memory cannot be pinned.
        """
        found = aligned(size)
        if self.pinned and size:
            error = torch.cuda.cudart().cudaHostRegister(found.data_ptr(), size, 0)
            if int(error):
                raise RuntimeError(
                    f"{size} bytes of host memory cannot be pinned (cudaHostRegister: {error}); needed: `ulimit -l` "
                    "of at least that size"
                )
            self._registered.append(found.data_ptr())
        return found

    def close(self) -> None:
        """Release pinned pages; nothing may read them any more."""
        _unregister(self._registered)


def _unregister(registered: list[int]) -> None:
    while registered:
        torch.cuda.cudart().cudaHostUnregister(registered.pop())


def aligned(size: int) -> Tensor:
    """Zeros, uint8 `[size]`, that start at a multiple of 4,096 bytes, as their storage does: torch asks there whether
    a tensor is pinned."""
    if size == 0:
        return torch.zeros(0, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, -(-size // ALIGN) * ALIGN), dtype=torch.uint8, count=size)


def is_aligned(tensor: Tensor) -> bool:
    """Whether O_DIRECT can read into all of a tensor."""
    size = tensor.numel() * tensor.element_size()
    return tensor.is_contiguous() and tensor.data_ptr() % ALIGN == 0 and size % ALIGN == 0


def as_bytes(tensor: Tensor) -> np.ndarray:
    """The memory of a contiguous tensor on the CPU as bytes, without a copy."""
    return tensor.view(-1).view(torch.uint8).numpy()


def checksum(data: np.ndarray) -> int:
    """XXH3-64 of bytes: five to ten times as fast as CRC-32, which took as long as an SSD takes for the same bytes."""
    return xxhash.xxh3_64_intdigest(data)


@dataclass(frozen=True)
class Dropped:
    """What dropping a file from the page cache did.

    Attributes:
        before, after: share of its pages that were resident (None: the kernel does not say).
        how: for a record: what dropped the cache, and what proves it.
    """

    before: float | None
    after: float | None
    how: str

    @property
    def proven(self) -> bool:
        return self.after == 0.0


def drop(path: Path) -> Dropped:
    """Write a file back and drop it from the page cache with posix_fadvise; mincore says whether that worked."""
    before = resident(path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    after = resident(path)
    seen = "mincore is not available" if after is None else f"mincore: {after:.1%} of the pages left"
    return Dropped(before, after, f"posix_fadvise DONTNEED; {seen}")


def resident(path: Path) -> float | None:
    """Share of a file's pages in the page cache; None where the kernel does not say."""
    size = os.path.getsize(path)
    if not size:
        return 0.0
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "mincore"):
        return None
    found = 0
    with open(path, "rb") as file:
        for start in range(0, size, BLOCK):
            count = _resident(libc, file.fileno(), start, min(BLOCK, size - start))
            if count is None:
                return None
            found += count
    return found / -(-size // PAGE)


def _resident(libc, descriptor: int, start: int, length: int) -> int | None:
    flags = np.zeros(-(-length // PAGE), np.uint8)
    # private: a writable buffer is what ctypes needs for an address; nothing is written or read
    with mmap.mmap(descriptor, length, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE, offset=start) as mapped:
        view = (ctypes.c_char * length).from_buffer(mapped)
        error = libc.mincore(
            ctypes.c_void_p(ctypes.addressof(view)),
            ctypes.c_size_t(length),
            flags.ctypes.data_as(ctypes.POINTER(ctypes.c_ubyte)),
        )
        del view
    return None if error else int((flags & 1).sum())
