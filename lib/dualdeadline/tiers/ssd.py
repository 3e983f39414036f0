"""What an SSD gives: reads by size and depth, layouts of an expert, and what installing one costs.

Frames have a row per setting with ms (median), low and high (20 and 80 %), n, and `cache`: what kept the page cache
out of it; `ssd_rows.rows` makes record rows of any of them.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from dualdeadline.schedule import COMPONENTS
from dualdeadline.store import pages
from dualdeadline.store.fetching import Fetching
from dualdeadline.store.options import SsdOptions
from dualdeadline.store.pages import Memory
from dualdeadline.streams import bench
from dualdeadline.tiers import ssd_files
from dualdeadline.tiers.ssd_files import Files, Folded

LAYOUTS = ("scattered, serial", "scattered, parallel", "record, raw", "record, encoded")
DIRECT = "O_DIRECT, past the page cache"


class Scattered:
    """An expert's tensors one by one through the page cache, each then written to its slice of the slot.

    Args:
        path: of `ssd_files.scatter`. threads: that read; 1: one tensor after the other.
    """

    def __init__(self, path: Path, threads: int):
        self.path, self.places = Path(path), ssd_files.places(path)
        self.descriptor = os.open(path, os.O_RDONLY)
        self.pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def fetch(self, number: int, rows: Sequence[int], into: Sequence[Mapping[str, Tensor]]) -> None:
        """Read some experts into slots."""
        work = [(row, slot, place) for row, slot in zip(rows, into, strict=True) for place in self.places]
        if self.pool:
            list(self.pool.map(lambda job: self._one(*job), work))
        else:
            for job in work:
                self._one(*job)

    def _one(self, row: int, slot: Mapping[str, Tensor], place: tuple) -> None:
        component, at, start, size = place
        data = os.pread(self.descriptor, size, start + row * size)
        piece = torch.frombuffer(bytearray(data), dtype=slot[component].dtype)
        slot[component][at].copy_(piece.view(-1, slot[component].shape[1]))

    def drop(self) -> str:
        """Empty the page cache of the file; what did that."""
        return pages.drop(self.path).how

    @property
    def nbytes(self) -> int:
        """Of one expert."""
        return sum(place[3] for place in self.places)

    def close(self) -> None:
        os.close(self.descriptor)
        if self.pool:
            self.pool.shutdown()


class Records:
    """Experts of a file of records, read as the engine reads them."""

    def __init__(self, layout, device, depth: int, direct: bool = True):
        memory = Memory(torch.device(device).type == "cuda")
        self.fetching = Fetching(layout, SsdOptions(depth=depth, direct=direct), memory)

    def fetch(self, number: int, rows: Sequence[int], into: Sequence[Mapping[str, Tensor]]) -> None:
        """Read some experts into slots; on a GPU until they have arrived."""
        self.fetching.begin(number, list(zip(rows, into, strict=True)))
        for row, slot in zip(rows, into, strict=True):
            with self.fetching.fetched(number, row, slot) as views:
                for part, view in views.items():
                    self.fetching.put(part, view, slot[part])
        if self.fetching.pinned:
            torch.cuda.current_stream().synchronize()

    def drop(self) -> str:
        """What keeps the page cache out of it."""
        kind = self.fetching.reader.path_kind
        return DIRECT if kind == "direct" else f"{kind}; posix_fadvise DONTNEED behind each read"

    @property
    def nbytes(self) -> int:
        """Of one expert, padding included."""
        return self.fetching.layout.largest

    def close(self) -> None:
        self.fetching.reader.close()
        self.fetching.memory.close()


def open_layout(name: str, files: Files, device="cpu", depth: int = 8, L: int = 1, E: int | None = None):
    """What reads a layout by name; L, E: of the model whose experts the records stand for.

    Raises:
        ValueError: an unknown name.
    """
    if name not in LAYOUTS:
        raise ValueError(f"layout is {name!r}; needed: one of {', '.join(LAYOUTS)}")
    if name.startswith("scattered"):
        return Scattered(files.scattered, depth if name.endswith("parallel") else 1)
    layout = files.coded if name.endswith("encoded") else files.raw
    return Records(layout if E is None else Folded(layout, L, E), device, depth)


def sweep(path: Path, sizes: Sequence[int], depths: Sequence[int], limit_bytes: int, seed: int = 0) -> pd.DataFrame:
    """Direct reads at random places of a file: DataFrame(size_bytes, depth, ms, low, high, n, gbps, cache).

    Args:
        path: a file of records. limit_bytes: read per setting, at most (at least 4 reads).

    Raises:
        OSError: the file system refuses O_DIRECT.
    """
    found, length, draw = [], os.path.getsize(path), np.random.default_rng(seed)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    settings = [(size, depth) for size in sizes if size <= length for depth in depths]
    for place in tqdm(draw.permutation(len(settings)), desc="reads", leave=False):
        size, depth = settings[place]
        count = max(4, depth, limit_bytes // size)
        starts = draw.integers(0, (length - size) // pages.PAGE + 1, count) * pages.PAGE
        ms, seconds = _timed_reads(descriptor, size, depth, starts.tolist())
        low, median, high = np.percentile(ms, (20, 50, 80))
        row = dict(size_bytes=size, depth=depth, ms=median, low=low, high=high, n=count)
        found.append(row | {"gbps": count * size / seconds / 1e9, "cache": DIRECT})
    os.close(descriptor)
    return pd.DataFrame(found).sort_values(["size_bytes", "depth"], ignore_index=True)


def _timed_reads(descriptor: int, size: int, depth: int, starts: list[int]) -> tuple[list[float], float]:
    """Milliseconds of each read, and seconds of all, with `depth` of them in flight."""
    buffers = [mmap.mmap(-1, size) for _ in range(depth)]
    for buffer in buffers:
        buffer[:] = bytes(size)  # pages that were never written would be made in the time of a read
    free = list(buffers)

    def one(start: int) -> float:
        buffer, begun = free.pop(), time.perf_counter()
        if os.preadv(descriptor, [buffer], start) != size:
            raise OSError(f"short read of {size} bytes at {start}")
        free.append(buffer)
        return 1e3 * (time.perf_counter() - begun)

    with ThreadPoolExecutor(depth) as pool:
        begun = time.perf_counter()
        ms = list(pool.map(one, starts))
        seconds = time.perf_counter() - begun
    for buffer in buffers:
        buffer.close()
    return ms, seconds


def burst_gbps(path: Path, size: int, depth: int, draw: np.random.Generator, count: int = 16) -> float:
    """Rate of a few direct reads of a size at random places, nothing done with them."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        starts = draw.integers(0, os.path.getsize(path) // size, count) * size
        return count * size / _timed_reads(descriptor, size, depth, starts.tolist())[1] / 1e9
    finally:
        os.close(descriptor)


def layouts(
    files: Files, device="cpu", at_once: int = 4, repeats: int = 3, depth: int = 8, seed: int = 0
) -> pd.DataFrame:
    """Cold experts into slots: DataFrame(layout, bytes, ms per expert, low, high, n, gbps, disk_gbps, cache).

    Every layout first fetches some experts whose bits are compared. Then all take turns in random order; the page cache
    is emptied before each turn.

    Args:
        at_once: experts that a layer misses together. depth: reads in flight, and threads of the parallel one.
    """
    draw, into = np.random.default_rng(seed), ssd_files.slots(files.shape, at_once, device)
    readers = {name: open_layout(name, files, device, depth) for name in LAYOUTS}
    times, cache = {name: [] for name in LAYOUTS}, {}
    for name, reader in readers.items():
        ssd_files.check(reader.fetch, files, list(range(at_once)), into, seed)
    for _ in tqdm(range(repeats), desc="layouts", leave=False):
        for place in draw.permutation(len(LAYOUTS)):
            name = LAYOUTS[place]
            cache[name] = readers[name].drop()
            rows, begun = draw.permutation(files.count)[:at_once].tolist(), time.perf_counter()
            readers[name].fetch(0, rows, into)
            times[name].append(1e3 * (time.perf_counter() - begun) / at_once)
    out = []
    for name, reader in readers.items():
        low, median, high = np.percentile(times[name], (20, 50, 80))
        row = dict(layout=name, bytes=reader.nbytes, ms=median, low=low, high=high, n=repeats, cache=cache[name])
        weights = files.shape.component_bytes["expert"]
        out.append(row | {"gbps": weights / median / 1e6, "disk_gbps": reader.nbytes / median / 1e6})
        reader.close()
    return pd.DataFrame(out)


def install(files: Files, device="cpu", samples: int = 50, seed: int = 0, budget_s: float = 2.0) -> pd.DataFrame:
    """An expert that lies in host memory into its slot: DataFrame(variant, ms, low, high, n, ratio).

    `ratio` is the median over that of one contiguous copy of as many bytes. Variants are interleaved; rows and slots
    take turns, so that no cache holds them.
    """
    shape, cuda = files.shape, torch.device(device).type == "cuda"
    size, turns, memory = shape.component_bytes["expert"], 8, Memory(cuda)
    host = [memory.new(size) for _ in range(turns)]
    into, flat = ssd_files.slots(shape, turns, device), [torch.empty(size, dtype=torch.uint8) for _ in range(turns)]
    flat = [value.to(device) for value in flat]
    places = ssd_files.places(files.scattered)
    variants = {
        "one contiguous copy": lambda turn: flat[turn % turns].copy_(host[turn % turns], non_blocking=True),
        "record, a copy per component": lambda turn: _by_component(host[turn % turns], into[turn % turns]),
        f"{len(places)} slices": lambda turn: _by_slice(host[turn % turns], into[turn % turns], places),
    }
    timed = {name: bench.Variant(call) for name, call in variants.items()}
    found = bench.interleaved(timed, samples, seed=seed, device=device, budget_s=budget_s)
    base, out = found["one contiguous copy"], []
    for name, times in found.items():
        low, median, high = np.percentile(times, (20, 50, 80))
        ratio = float(median / np.median(base))
        out.append(dict(variant=name, bytes=size, ms=median, low=low, high=high, n=len(times), ratio=ratio))
    if cuda:
        torch.cuda.synchronize()
    memory.close()
    return pd.DataFrame(out)


def _by_component(row: Tensor, slot: Mapping[str, Tensor]) -> None:
    begin = 0
    for part in COMPONENTS:
        end = begin + slot[part].nbytes
        slot[part].view(-1).view(torch.uint8).copy_(row[begin:end], non_blocking=True)
        begin = end


def _by_slice(row: Tensor, slot: Mapping[str, Tensor], places: list[tuple]) -> None:
    begin = 0
    for component, at, _, size in places:
        part = slot[component][at]
        part.copy_(row[begin : begin + size].view(part.dtype).view(part.shape), non_blocking=True)
        begin += size
