"""Single copies, single kernels, single launches: all that calibrates a cost model, and the floors."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pandas as pd
import torch

from dualdeadline import kernels, streams
from dualdeadline.cost import CostModel, TransferModel, work_bytes
from dualdeadline.schedule import DECODES, Compute, Copy, Schedule
from dualdeadline.streams.bench import Variant, graph, interleaved

MIB = 2**20
TURNS = 4  # places in host memory that take turns
TRAIN = 5  # copies in a train: the first pays for a silent link, the others follow one another
STAGES = ("gate_up", "down", "combine", "down_combine")
REPEATS = 16  # launches of one stage in a graph; their mean includes the gap between kernels


def copies(
    sizes_mib=(0.5, 1, 2, 4, 6, 8, 12, 16, 32, 64),
    samples: int = 50,
    device="cuda",
    graphs: bool = True,
    host_gib: int = 2,
    seed: int = 0,
) -> pd.DataFrame:
    """Pinned host to device copies of each size, alone and in trains.

    Args:
        graphs: in a CUDA graph; else issued by the host one after the other.
        host_gib: host memory from which pieces are drawn; a model's experts do not fit into translation caches.

    Returns:
        DataFrame(size_bytes, alone_ms, behind_ms, n): medians over n samples; behind = a copy that follows another.
    """
    host = kernels.fetch.pin(torch.empty(host_gib << 30, dtype=torch.uint8))
    there = torch.empty(TRAIN, int(max(sizes_mib) * MIB), dtype=torch.uint8, device=device)
    draw, variants = np.random.default_rng(seed), {}
    for size in sizes_mib:
        for count in (1, TRAIN):
            size_bytes = int(size * MIB)
            starts = draw.integers(0, (len(host) - size_bytes) // 4096, (TURNS, count)) * 4096
            variants[size, count] = _trains(there, host, size_bytes, starts, graphs)
    times = {key: np.median(found) for key, found in interleaved(variants, samples, device=device).items()}
    rows = [
        (int(size * MIB), times[size, 1], (times[size, TRAIN] - times[size, 1]) / (TRAIN - 1), samples)
        for size in sizes_mib
    ]
    return pd.DataFrame(rows, columns=["size_bytes", "alone_ms", "behind_ms", "n"])


def _trains(there, host, size: int, starts: np.ndarray, graphs: bool) -> Variant:
    """Copies from `starts[turn]`, one train of them each turn."""
    side = torch.cuda.Stream()
    pieces = [[host[start : start + size] for start in turn] for turn in starts.tolist()]

    def work(turn: int) -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for place, piece in enumerate(pieces[turn]):
                there[place, :size].copy_(piece, non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)

    if graphs:
        replays = [graph(lambda turn=turn: work(turn)) for turn in range(len(pieces))]
        return Variant(lambda turn: replays[turn % len(replays)](), queued=True)
    return Variant(lambda turn: work(turn % len(pieces)))


def installs(size_bytes: int, writes=(1, 3, 9), samples: int = 100, device="cuda") -> pd.DataFrame:
    """Installing one expert of `size_bytes` in 1, 3 or 9 writes: over the link, and from a staging buffer.

    The writes are equal slices, each to its own tensor as in a checkpoint's layout. DataFrame(path, writes, ms,
    low, high, n).
    """
    sources = {
        "link": torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True),
        "device": torch.empty(size_bytes, dtype=torch.uint8, device=device),
    }
    variants = {}
    for path, source in sources.items():
        for count in writes:
            parts = source.tensor_split(count)
            slots = [torch.empty_like(part, device=device) for part in parts]

            def install(turn, parts=parts, slots=slots) -> None:
                for slot, part in zip(slots, parts):
                    slot.copy_(part, non_blocking=True)

            variants[path, count] = Variant(install)
    found = interleaved(variants, samples, device=device)
    rows = [(*key, *np.percentile(times, (50, 20, 80)), len(times)) for key, times in found.items()]
    return pd.DataFrame(rows, columns=["path", "writes", "ms", "low", "high", "n"])


def calibrate(work, transfers: pd.DataFrame, graphs: bool, samples: int = 30) -> CostModel:
    """Cost model of a `Work` from trains of copies, single stages of its kernels, and launches.

    Args:
        transfers: result of `copies` in CUDA graphs: what the link and the device need. The host's share is timed here.
        graphs: whether the schedules will run in CUDA graphs, where the host has no share.

    Raises:
        ValueError: a work of one layer: stages of the first wait for a copy of another.
    """
    if work.layers < 2:
        raise ValueError(f"the work has {work.layers} layer; needed: at least 2 to calibrate")
    bytes = work.shape.component_bytes
    behind = TransferModel.fit(transfers.size_bytes, np.maximum(transfers.behind_ms, 0))
    silent = float(np.median(np.maximum(transfers.alone_ms - transfers.behind_ms, 0)))
    stages = _stages(work, bytes, samples)
    handoff = _handoff(work, bytes, stages, samples)
    host = {} if graphs else _host(work)
    return CostModel(
        behind, stages, bytes, silent_ms=silent, handoff_ms=handoff, committed=streams.CudaLanes.committed, **host
    )


def _stages(work, bytes, samples: int) -> dict[str, TransferModel]:
    """Each stage's time as a line in the weight bytes it reads, from launches for 1 expert up to all of them."""
    count = len(work.experts(0))
    numbers = sorted({1, max(1, count // 2), count})
    variants = {}
    for stage in STAGES:
        for number in numbers if stage in ("gate_up", "down") else [count]:
            variants[stage, number] = Variant(_launches(work, stage, number), queued=True)
    found = {
        key: np.median(times) / REPEATS for key, times in interleaved(variants, samples, device=work.device).items()
    }
    lines = {}
    for stage in STAGES:
        points = [(work_bytes(stage, number, bytes), ms) for (name, number), ms in found.items() if name == stage]
        sizes, times = zip(*points)
        lines[stage] = TransferModel.fit(sizes, times) if len(set(sizes)) > 1 else TransferModel(times[0], 0.0)
    return lines


def decoding(work, cost: CostModel, samples: int = 30) -> CostModel:
    """`cost` with the decode of encoded pieces in a CUDA graph: one line in the bytes that appear.

    Raises:
        ValueError: the work has no encoded experts.
    """
    bytes, variants = work.shape.component_bytes, {}
    work.encoded.staging.copy_(work.encoded.host)
    rows = [divmod(row, work.shape.E) for row in list(work.packed.place)[:REPEATS]]
    for stage in DECODES:
        ops = [Compute(layer, stage, (expert,)) for layer, expert in rows]
        replay = graph(lambda ops=ops: [work.compute(op) for op in ops])
        variants[stage] = Variant(lambda turn, replay=replay: replay(), queued=True)
    found = interleaved(variants, samples, device=work.device)
    times = [np.median(found[stage]) / len(rows) for stage in DECODES]
    line = TransferModel.fit([work_bytes(stage, 1, bytes) for stage in DECODES], times)
    return replace(cost, stages=dict(cost.stages) | dict.fromkeys(DECODES, line))


def _launches(work, stage: str, number: int) -> Callable[[int], None]:
    ops = []
    for turn in range(REPEATS):
        layer, experts = turn % work.layers, work.experts(turn % work.layers)
        first = turn // work.layers * number % len(experts)  # others each time, as far as there are any
        ops.append(Compute(layer, stage, tuple(sorted((experts + experts)[first : first + number]))))
        work.stages.prepare(layer, ops[-1].experts)

    def some() -> None:
        for op in ops:
            work.compute(op)

    replay = graph(some)
    return lambda turn: replay()


def _handoff(work, bytes, stages, samples: int) -> float:
    """From the end of a copy to the start of the kernel that waits for it: their chain less its two parts."""
    first = work.experts(0)[:1]
    there = frozenset({(0, first[0], "down")})
    copy = Copy(0, first[0], "gate_up", bytes["gate_up"])
    chain = Schedule("chain", (copy, Compute(0, "gate_up", first, (0,))), there)
    alone = Schedule("alone", (copy,), there)
    replays = {name: streams.capture(plan, work) for name, plan in (("chain", chain), ("alone", alone))}
    variants = {name: Variant(lambda turn, replay=replay: replay(), queued=True) for name, replay in replays.items()}
    found = {name: np.median(times) for name, times in interleaved(variants, samples, device=work.device).items()}
    return max(0.0, float(found["chain"] - found["alone"]) - stages["gate_up"].ms(bytes["gate_up"]))


def _host(work) -> dict:
    """Host milliseconds to issue a copy, to launch each stage for 1 and for all experts, and to learn a verdict."""
    experts, bytes = work.experts(0), work.shape.component_bytes["down"]
    copies = [Copy(0, expert, "down", bytes) for expert in experts]
    there = frozenset((0, expert, "gate_up") for expert in experts)
    issue = _issue_ms(work, Schedule("copies", tuple(copies), there))
    launches = {}
    for stage in STAGES:
        spent = {number: _issue_ms(work, repeated(work, stage, experts[:number])) for number in {1, len(experts)}}
        launches[stage] = TransferModel.fit(*zip(*spent.items())) if len(spent) > 1 else TransferModel(spent[1], 0.0)
    if work.before:
        launches["before"] = TransferModel(_issue_ms(work, repeated(work, "before", ())), 0.0)
    event = torch.cuda.Event()
    return {"issue_ms": issue, "launches": launches, "sync_ms": _each(lambda: (event.record(), event.synchronize()))}


def repeated(work, stage: str, experts: tuple[int, ...]) -> Schedule:
    """One stage of the first layer eight times, each waiting for the same copy, as in a schedule for its own."""
    there = frozenset((0, expert, part) for expert in experts for part in ("gate_up", "down"))
    ops = [Copy(1, 0, "down", work.shape.component_bytes["down"])]
    ops += [Compute(0, "gate_up", experts)] if stage in ("down", "down_combine", "combine") else []
    ops += [Compute(0, "down", experts)] if stage == "combine" else []
    return Schedule(stage, (*ops, *[Compute(0, stage, experts, (0,))] * 8), there)


def _issue_ms(work, plan: Schedule) -> float:
    """Host milliseconds that `streams.issue` takes for one operation of a schedule of equal ones."""
    work.prepare(plan)
    lanes = streams.CudaLanes(work.device)
    whole = _each(lambda: streams.issue(plan, work, lanes), 10)
    lanes.close()
    return whole / len(plan.ops)


def _each(job: Callable[[], object], repeats: int = 30) -> float:
    """Host milliseconds of one call, with an idle device at the start of each."""
    spent = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        job()
        spent.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return 1e3 * float(np.median(spent))
