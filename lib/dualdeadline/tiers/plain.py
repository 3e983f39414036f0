"""What a disk gives by itself: direct reads at random places of a file, nothing done with the bytes."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from dualdeadline.store import pages

DIRECT = "O_DIRECT, past the page cache"


class Plain:
    """A plain loop of direct reads of one size.

    Args:
        path: a file of records. size: bytes of a read, a multiple of 4,096. depth: reads in flight.
        into: `depth` or more pieces of memory, each as the buffers of one read (default: its own). On a virtual machine
            the same read can take twice as long into other memory, so that a comparison has to use the same.

    Raises:
        OSError: the file system refuses O_DIRECT.
    """

    def __init__(self, path: Path, size: int, depth: int, seed: int = 0, into: Sequence[Sequence] | None = None):
        self.size, self.length, self.draw = size, os.path.getsize(path), np.random.default_rng(seed)
        self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self.free = list(into or ([pages.as_bytes(pages.aligned(size))] for _ in range(depth)))[::-1]
        for buffer in itertools.chain(*self.free):
            buffer[:] = 0  # pages that were never written would be made in the time of a read
        self.pool = ThreadPoolExecutor(depth)
        list(self.pool.map(time.sleep, [0.001] * depth))  # its threads are there

    def _one(self, start: int) -> float:
        buffer, begun = self.free.pop(), time.perf_counter()
        try:
            if os.preadv(self.descriptor, buffer, start) != self.size:
                raise OSError(f"short read of {self.size} bytes at {start}")
        finally:
            self.free.append(buffer)
        return 1e3 * (time.perf_counter() - begun)

    def read(self, count: int, step: int = 0) -> tuple[list[float], float]:
        """Milliseconds of each of some reads, and of all; one alone is made by the caller.

        Args:
            step: places are multiples of it (default: of the size).
        """
        step = step or self.size
        starts = (self.draw.integers(0, (self.length - self.size) // step + 1, count) * step).tolist()
        begun = time.perf_counter()
        ms = list(self.pool.map(self._one, starts)) if count > 1 else [self._one(start) for start in starts]
        return ms, 1e3 * (time.perf_counter() - begun)

    def gbps(self, count: int = 16) -> float:
        """Rate of some reads, as many in flight as the depth says."""
        return count * self.size / self.read(count)[1] / 1e6

    def close(self) -> None:
        self.pool.shutdown()
        os.close(self.descriptor)


def sweep(path: Path, sizes: Sequence[int], depths: Sequence[int], limit_bytes: int, seed: int = 0) -> pd.DataFrame:
    """Direct reads at random places of a file: DataFrame(size_bytes, depth, ms, low, high, n, gbps, cache).

    Args:
        path: a file of records. limit_bytes: read per setting, at most (at least 4 reads).

    Raises:
        OSError: the file system refuses O_DIRECT.
    """
    found, length, draw = [], os.path.getsize(path), np.random.default_rng(seed)
    settings = [(size, depth) for size in sizes if size <= length for depth in depths]
    for place in tqdm(draw.permutation(len(settings)), desc="reads", leave=False):
        size, depth = settings[place]
        count = max(4, depth, limit_bytes // size)
        reads = Plain(path, size, depth, seed + int(place))
        ms, whole_ms = reads.read(count, pages.PAGE)
        reads.close()
        low, median, high = np.percentile(ms, (20, 50, 80))
        row = dict(size_bytes=size, depth=depth, ms=median, low=low, high=high, n=count)
        found.append(row | {"gbps": count * size / whole_ms / 1e6, "cache": DIRECT})
    return pd.DataFrame(found).sort_values(["size_bytes", "depth"], ignore_index=True)
