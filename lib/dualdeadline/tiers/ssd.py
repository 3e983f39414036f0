"""What an SSD gives experts: layouts, and what installing one costs.

Frames have a row per setting with ms (median), low and high (20 and 80 %), n, and `cache`: what kept the page cache
out of it; `ssd_rows.rows` makes record rows of any of them.
"""

from __future__ import annotations

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
from dualdeadline.store.installs import Installs
from dualdeadline.store.options import SsdOptions
from dualdeadline.store.pages import Memory, aligned
from dualdeadline.store.tier import Row
from dualdeadline.streams import Shape, bench
from dualdeadline.tiers import ssd_files
from dualdeadline.tiers.plain import DIRECT
from dualdeadline.tiers.ssd_files import Files, Folded

SPREAD = 2**23  # bytes of rows that a variant touches before it comes back to the first
LAYOUTS = ("scattered, serial", "scattered, parallel", "record, serial", "record, raw", "record, encoded")


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
                self.fetching.put(views, slot)
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
    """What reads a layout by name: serial ones read one piece after the other, all others `depth` at a time.

    Args:
        L, E: of the model whose experts the records stand for.

    Raises:
        ValueError: an unknown name.
    """
    if name not in LAYOUTS:
        raise ValueError(f"layout is {name!r}; needed: one of {', '.join(LAYOUTS)}")
    depth = 1 if name.endswith("serial") else depth
    if name.startswith("scattered"):
        return Scattered(files.scattered, depth)
    layout = files.coded if name.endswith("encoded") else files.raw
    return Records(layout if E is None else Folded(layout, L, E), device, depth)


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


def install(shape: Shape, device="cpu", samples: int = 50, seed: int = 0, budget_s: float = 2.0) -> pd.DataFrame:
    """An expert that lies in host memory into its slot: DataFrame(variant, ms, low, high, n, ratio).

    `ratio` is the median over that of one contiguous copy of as many bytes between the same memory. Variants are
    interleaved; rows and slots take turns, in a round each variant has others, so that no cache holds them. A record is
    installed as the engine does it.
    """
    cuda, size = torch.device(device).type == "cuda", shape.component_bytes["expert"]
    turns, memory, slices = max(3, 3 * (SPREAD // size)), Memory(cuda), ssd_files.slices(shape)
    store = Installs(ssd_files.Plan(shape))
    rows = [Row(memory.new(store.layout.largest)) for _ in range(turns)]
    host, flat = [row.data[:size] for row in rows], [aligned(size).to(device) for _ in range(turns)]
    for one in (*host, *flat):
        one.fill_(1)  # pages that were never written are all the same one
    into = [ssd_files.cut(shape, block) for block in flat]
    views = [{part: store.place(row, part, store.layout.parts[part])[0] for part in COMPONENTS} for row in rows]
    ways = {
        "one contiguous copy": lambda turn: flat[turn].copy_(host[turn], non_blocking=True),
        "record, a copy per component": lambda turn: store.put(views[turn], into[turn]),
        f"{len(slices)} slices": lambda turn: _by_slice(host[turn], into[turn], slices),
    }
    variants = {
        name: bench.Variant(lambda turn, way=way, first=number * turns // len(ways): way((turn + first) % turns))
        for number, (name, way) in enumerate(ways.items())
    }
    found = bench.interleaved(variants, samples, seed=seed, device=device, budget_s=budget_s)
    base, out = found["one contiguous copy"], []
    for name, times in found.items():
        low, median, high = np.percentile(times, (20, 50, 80))
        ratio = float(median / np.median(base))
        out.append(dict(variant=name, bytes=size, ms=median, low=low, high=high, n=len(times), ratio=ratio))
    if cuda:
        torch.cuda.synchronize()
    memory.close()
    return pd.DataFrame(out)


def _by_slice(row: Tensor, slot: Mapping[str, Tensor], slices: list[tuple]) -> None:
    begin = 0
    for component, at, size in slices:
        part = slot[component][at]
        part.copy_(row[begin : begin + size].view(part.dtype).view(part.shape), non_blocking=True)
        begin += size
