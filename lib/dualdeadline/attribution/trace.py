"""Steps that are CUDA graphs: the kernels of a trace, and what the gaps between them wait for.

A graph's branches may run in any stream, so kernels are told apart by name, order and number of programs, not by
stream. Of the kernels that are not ours those before a layer's look-up (before its products where nothing is looked up)
are its attention and, from the last product before a top-k on, its router. The embedding and the sum behind the experts
of one layer so count as attention of the next one.
"""

from __future__ import annotations

import functools
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from dualdeadline.attribution import parts
from dualdeadline.attribution.watched import merged

WARMUP = 4  # the first step of its kind compiles, the second is captured
AHEAD_CYCLES, MARK_CYCLES = 40_000_000, 2_000  # about 20 ms for the host to get ahead, and the shortest mark
LINK, DECODE, LOOKUP, MARK = "fetch_kernel", "decode_kernel", "lookup_kernel", "spin_kernel"
GUIDE = ("mlp_kernel", "gate_kernel", "admit_kernel")
FIRST = ("gate_up_kernel", "persistent_kernel")  # of a layer's products
EXPERTS = (*FIRST, "down_kernel", "down_combine_kernel", "combine_kernel", "activate_kernel")
TOP_K = re.compile("top_?k|sort", re.IGNORECASE)
PRODUCT = re.compile("gemm|gemv|nvjet|cutlass|split_?k|dot_kernel|_mm_|_mm$|matmul", re.IGNORECASE)
REDUCE = re.compile("split_?k|reduce", re.IGNORECASE)
COPIES = 2  # of what the router asked for, per layer: one for each component


@dataclass(frozen=True)
class Kernel:
    """One kernel, copy or fill of a trace: name, milliseconds from anywhere, programs of its launch (0: none)."""

    name: str
    start: float
    end: float
    programs: int = 0

    def named(self, *names: str) -> bool:
        """Whether it is one of our kernels: Triton may append what it specialised for."""
        return any(re.match(rf"{name}(_\d.*)?$", self.name) for name in names)


def graph(
    step: Callable[[], object], layers: int, steps: int, case: str, horizon: int = 1, plain: int | None = None
) -> pd.DataFrame:
    """Parts of `steps` calls of `step`, each one decode step in a CUDA graph.

    Args:
        layers: MoE layers of a step. horizon: of guesses, if there are any. plain: as in `host`.

    Returns:
        DataFrame(case, part, ms, low, high, n), see the package.

    Raises:
        RuntimeError: no GPU, or a trace without kernels. ValueError, AssertionError: as `split` and `parts.frame`.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("no GPU is visible to torch; needed: one, graphs are CUDA graphs")
    for _ in range(WARMUP):
        step()
    alone = _timed(step, steps if plain is None else plain)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            measured = _timed(step, steps)
        found.export_chrome_trace(str(path))
        kernels = read(json.loads(path.read_text()))
    if not kernels:
        raise RuntimeError("the trace holds no kernels; needed: a driver that lets this user profile")
    return parts.frame(case, split(kernels, layers, horizon, decodes()), measured, alone)


def variants(group, first: int, steps: int) -> pd.DataFrame:
    """`graph` of every case of a decode study.

    Args:
        group: `decode.big.Variants`, on a GPU. first: recorded step to begin with.
    """
    found = []
    for case in group.cases:
        group.rewind(case, first)
        name = f"{case.slots} slots, {case.wire}, {case.schedule}, {case.name}"
        found.append(graph(functools.partial(group.step, case), group.spec.L, steps, name, group.recorded.horizon))
    return pd.concat(found, ignore_index=True)


def _timed(step: Callable[[], object], steps: int) -> np.ndarray:
    """Milliseconds of each step by CUDA events, a mark before and behind each; the host is ahead of the device."""
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(steps)]
    torch.cuda.synchronize()
    torch.cuda._sleep(AHEAD_CYCLES)
    for begin, end in marks:
        torch.cuda._sleep(MARK_CYCLES)
        begin.record()
        step()
        end.record()
    torch.cuda._sleep(MARK_CYCLES)
    torch.cuda.synchronize()
    return np.array([begin.elapsed_time(end) for begin, end in marks])


def read(trace: Mapping) -> list[Kernel]:
    """What ran on the device, in order of its start, from a trace in Chrome's format (microseconds)."""
    found = []
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            begin, grid = float(event["ts"]), event.get("args", {}).get("grid", [0])
            programs = int(np.prod([int(size) for size in grid]))
            found.append((event["name"], begin, begin + float(event["dur"]), programs))
    zero = min((begin for _, begin, *_ in found), default=0.0)
    return sorted(
        (Kernel(name, (begin - zero) / 1e3, (end - zero) / 1e3, count) for name, begin, end, count in found),
        key=lambda kernel: kernel.start,
    )


def decodes() -> dict[int, str]:
    """What a decode kernel of so many programs is for: installs, guesses, or a fetch in itself."""
    from dualdeadline.engine import crossing

    return {
        crossing.HOST_DECODE_PROGRAMS: "link",
        crossing.AHEAD_PROGRAMS: "guess",
        crossing.DECODE_PROGRAMS: "install",
    }


def split(
    kernels: Sequence[Kernel], layers: int, horizon: int = 1, decode: Mapping[int, str] | None = None
) -> list[Counter]:
    """Milliseconds by part of each step between two marks.

    Args:
        kernels: in order of their start, with marks. layers, horizon: as in `graph`.
        decode: as `decodes` gives it; a decode of other programs is an install.

    Raises:
        ValueError: no two marks, or a step that does not have the products of so many layers.
    """
    marks = [kernel for kernel in kernels if MARK in kernel.name]
    found = []
    for first, last in zip(marks, marks[1:]):
        inside = [kernel for kernel in kernels if first.end <= kernel.start < last.start and MARK not in kernel.name]
        if inside:  # nothing lies between the mark that lets the host get ahead and the first step's own
            found.append(_Step(inside, layers, horizon, decode or {}).parts(first.end, last.start))
    if not found:
        raise ValueError(f"{len(marks)} marks ({MARK}), no kernels between them; needed: a mark around every step")
    return found


class _Step:
    """One step's kernels by what they are for."""

    def __init__(self, kernels: Sequence[Kernel], layers: int, horizon: int, decode: Mapping[int, str]):
        self.layers = layers
        link, self.ahead, self.guide, self.rest, self.install = [], [], [], [], set()
        for kernel in kernels:
            role = decode.get(kernel.programs, "install") if kernel.named(DECODE) else ""
            if kernel.named(LINK) or role == "link":
                link.append(kernel)
            elif kernel.named(*GUIDE):
                self.guide.append(kernel)
            elif role == "guess":
                self.ahead.append(kernel)
            else:
                self.rest.append(kernel)
                self.install |= {kernel} if role == "install" else set()
        self.demand = self._asked(link, horizon)
        self.ahead += [kernel for kernel in link if kernel not in self.demand]
        self.begins = [place for place, kernel in enumerate(self.rest) if kernel.named(LOOKUP)]
        self.looked = bool(self.begins)
        firsts = [place for place, kernel in enumerate(self.rest) if kernel.named(*FIRST)]
        self.begins = self.begins or firsts
        if len(firsts) != layers or len(self.begins) != layers:
            raise ValueError(
                f"a step has {len(firsts)} products and {len(self.begins)} look-ups or products; needed: "
                f"{layers}, one for each MoE layer (steps in graphs, up to 8 tokens)"
            )
        self.ends = [
            max(
                place for place, kernel in enumerate(self.rest) if kernel.named(*EXPERTS) and begin <= place < following
            )
            for begin, following in zip(self.begins, [*self.begins[1:], len(self.rest)])
        ]

    def _asked(self, link: list[Kernel], horizon: int) -> set[Kernel]:
        """The crossings that the router asked for: in order two of each layer, then what was guessed behind them."""
        guessing = max(0, self.layers - horizon)
        more, left = divmod(len(link) - COPIES * self.layers, guessing) if guessing and link else (0, 0)
        if not link:
            return set()
        if left or more < 0:
            raise ValueError(
                f"a step has {len(link)} fetches for {self.layers} layers, horizon {horizon}; needed: "
                f"{COPIES} of each layer and equally many guessed ones of {guessing}"
            )
        asked, place = set(), 0
        for number in range(self.layers):
            asked |= set(link[place : place + COPIES])
            place += COPIES + (more if number < guessing else 0)
        return asked

    def parts(self, begin: float, end: float) -> Counter:
        """All time between two marks, by part."""
        found, now, names = Counter(), begin, self._names()
        demand, ahead, guide = (_spans(kernels) for kernels in (self.demand, self.ahead, self.guide))
        joined = self.ends[-1] + 1  # the first kernel behind the last layer waits for every stream
        for place, kernel in enumerate(self.rest):
            if kernel.start > now:
                gap = [(now, kernel.start)]
                if place == joined or kernel in self.install or kernel.named(LOOKUP, *EXPERTS):
                    for part, spans in (("demand wait", demand), ("late prefetch wait", ahead), ("prediction", guide)):
                        spent, gap = _take(gap, spans)
                        found[part] += spent
                found["launch gaps"] += sum(last - first for first, last in gap)
            found[names[place]] += max(0.0, kernel.end - max(now, kernel.start))
            now = max(now, kernel.end)
        found["launch gaps"] += max(0.0, end - now)
        return found

    def _names(self) -> list[str]:
        """The part of each kernel that is not on the link and does not guess."""
        names, before = ["other"] * len(self.rest), 0
        for begin, end in zip(self.begins, self.ends):
            router = _router(self.rest[before:begin])
            names[before:begin] = ["attention"] * router + ["router"] * (begin - before - router)
            for place in range(begin, end + 1):
                kernel = self.rest[place]
                names[place] = (
                    "install"
                    if kernel in self.install
                    else (
                        "look-up"
                        if kernel.named(LOOKUP)
                        else "expert compute" if kernel.named(*EXPERTS) else "prediction" if self.guide else "look-up"
                    )
                )
            before = end + 1
        return names


def _router(kernels: Sequence[Kernel]) -> int:
    """Place of the router's first kernel among those between two layers' experts; behind all if none is found."""
    top = next((place for place, kernel in enumerate(kernels) if TOP_K.search(kernel.name)), None)
    if top is None:
        return len(kernels)
    product = next((place for place in range(top - 1, -1, -1) if PRODUCT.search(kernels[place].name)), top)
    while product > 0 and REDUCE.search(kernels[product].name) and PRODUCT.search(kernels[product - 1].name):
        product -= 1
    return product


def _spans(kernels: Iterable[Kernel]) -> list[tuple[float, float]]:
    return merged([(kernel.start, kernel.end) for kernel in kernels])


def _take(gaps: list[tuple[float, float]], spans: list[tuple[float, float]]) -> tuple[float, list[tuple[float, float]]]:
    """How much of some gaps lies in `spans`, and what is left of the gaps."""
    taken, left = 0.0, []
    for begin, end in gaps:
        for first, last in spans:
            if last > begin and first < end:
                if first > begin:
                    left.append((begin, first))
                taken += min(end, last) - max(begin, first)
                begin = min(end, last)
        if end > begin:
            left.append((begin, end))
    return taken, left
