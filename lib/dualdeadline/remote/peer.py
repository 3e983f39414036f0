"""Another GPU's memory as a tier: one expert's components from its memory into slots, in the cost model's form.

Two ways: the copy engines, or a kernel of the GPU that needs the weights reads the other one's memory, as it reads host
memory for the pinned tier, so that a CUDA graph can hold the fetch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from dualdeadline.cost import TransferModel
from dualdeadline.kernels import INTERPRETED
from dualdeadline.kernels import fetch as kernel
from dualdeadline.streams import OLMOE, Shape
from dualdeadline.streams.bench import Variant, interleaved

ENGINE, KERNEL = "copy engine", "kernel reads"
PARTS = ("down", "gate_up", "expert")
DEPTHS = (1, 2, 4, 8)  # copies that follow one another
TURNS = 4  # sets of rows that take turns
SPREAD = 2**30  # bytes of the other memory that rows are drawn from, so that no cache holds them


def why_not(to: int = 0, source: int = 1) -> str:
    """Why no copy between two GPUs can be measured here; "" if one can."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2 or to == source or max(to, source) >= count:
        return f"{count} GPUs are visible, copies go from {source} to {to}; needed: two different ones"
    return ""


def copies(
    shape: Shape = OLMOE,
    depths: Sequence[int] = DEPTHS,
    samples: int = 50,
    to: str = "cuda:0",
    source: str = "cuda:1",
    spread: int = SPREAD,
    seed: int = 0,
) -> pd.DataFrame:
    """Components from one device's memory into slots of another, some one after the other; bytes compared first.

    Args:
        shape: of an expert. depths: pieces of a train. to, source: devices (both "cpu" only to try it out).
        spread: bytes of the source that rows are drawn from.

    Returns:
        DataFrame(way, part, size_bytes, depth, ms, low, high, n, direct): of whole trains; direct: the devices reach
        each other's memory without the host, which the kernel needs.

    Raises:
        RuntimeError: fewer than two GPUs.
    """
    to, source = torch.device(to), torch.device(source)
    on_cpu = to.type == source.type == "cpu"
    if not on_cpu and (reason := why_not(to.index, source.index)):
        raise RuntimeError(reason)
    direct = on_cpu or torch.cuda.can_device_access_peer(to.index, source.index)
    _open(to, source)
    draw, variants, keys = np.random.default_rng(seed), {}, []
    for part in PARTS:
        size = shape.component_bytes[part]
        away = torch.randint(0, 256, (max(TURNS * max(depths), spread // size), size), dtype=torch.uint8, device=source)
        slots = torch.zeros(max(depths), size, dtype=torch.uint8, device=to)
        for depth in depths:
            rows = [draw.permutation(len(away))[:depth].tolist() for _ in range(TURNS)]
            ways = {ENGINE: _by_engine(away, slots, rows)}
            if direct and (INTERPRETED or not on_cpu):
                ways[KERNEL] = _by_kernel(away, slots, rows)
            for way, call in ways.items():
                _check(call, away, slots, rows)
                keys.append((way, part, size, depth))
                variants[keys[-1]] = Variant(call, queued=True)
    out = []
    for key, ms in interleaved(variants, samples, seed=seed, device=to).items():
        low, median, high = np.percentile(ms, (20, 50, 80))
        out.append((*key, median, low, high, len(ms), direct))
    return pd.DataFrame(out, columns=["way", "part", "size_bytes", "depth", "ms", "low", "high", "n", "direct"])


def _open(to: torch.device, source: torch.device) -> None:
    """Open the direct way between two devices, which torch does at the first copy of a direction and kernels need."""
    for end, other in ((to, source), (source, to)):
        torch.ones(1, device=end).copy_(torch.zeros(1, device=other))


def _by_engine(away: Tensor, slots: Tensor, rows: list[list[int]]) -> Callable[[int], None]:
    pieces = [[away[row] for row in turn] for turn in rows]

    def call(turn: int) -> None:
        for place, piece in enumerate(pieces[turn % TURNS]):
            slots[place].copy_(piece, non_blocking=True)

    return call


def _by_kernel(away: Tensor, slots: Tensor, rows: list[list[int]]) -> Callable[[int], None]:
    wanted = [torch.tensor(turn, dtype=torch.int32, device=slots.device) for turn in rows]
    places = torch.arange(len(rows[0]), dtype=torch.int32, device=slots.device)
    count = torch.tensor([len(rows[0])], dtype=torch.int32, device=slots.device)
    return lambda turn: kernel.fetch(away, slots, wanted[turn % TURNS], places, count)


def _check(call: Callable[[int], None], away: Tensor, slots: Tensor, rows: list[list[int]]) -> None:
    for turn, wanted in enumerate(rows):
        slots.zero_()
        call(turn)
        assert torch.equal(slots[: len(wanted)].cpu(), away[wanted].cpu()), f"rows {wanted} arrived changed"


def lines(found: pd.DataFrame) -> dict[str, TransferModel]:
    """By way, the line through pieces that follow one another, as the cost model takes it.

    Raises:
        ValueError: fewer than two depths or sizes.
    """
    out = {}
    for way, part in found.groupby("way", sort=False):
        ends = [group.sort_values("depth").iloc[[0, -1]] for _, group in part.groupby("size_bytes")]
        if any(both.depth.nunique() < 2 for both in ends):
            raise ValueError(f"{way} has depths {sorted(set(part.depth))}; needed: two different ones of each size")
        behind = [both.ms.diff().iloc[1] / both.depth.diff().iloc[1] for both in ends]
        out[way] = TransferModel.fit([both.size_bytes.iloc[0] for both in ends], np.maximum(behind, 0.0))
    return out


def records(found: pd.DataFrame) -> list[dict]:
    """Record rows: `peer_copy_ms` and `peer_copy_gbps` of each way, part and depth, and the lines' rates."""
    out = []
    for row in found.itertuples():
        config = dict(part=row.part, size_bytes=row.size_bytes, depth=row.depth, direct=bool(row.direct))
        common = dict(variant=row.way, kind="measured", n=row.n, config=config)
        ends = dict(low=row.low, high=row.high)
        out.append(common | dict(metric="peer_copy_ms", median=row.ms, unit="ms") | ends)
        gbps = row.depth * row.size_bytes / row.ms / 1e6
        out.append(common | dict(metric="peer_copy_gbps", median=gbps, unit="GB/s"))
    return out


def none(reason: str) -> list[dict]:
    """A record row that says why nothing was measured."""
    return [
        dict(variant="none", metric="peer_ways", median=0, unit="ways", kind="measured", n=1, config={"why": reason})
    ]
