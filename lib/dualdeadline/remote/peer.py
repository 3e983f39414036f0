"""Another GPU's memory as a tier: copies of one expert's components from cuda:1 to cuda:0, in the cost model's form."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch

from dualdeadline.cost import TransferModel
from dualdeadline.streams.bench import Variant, interleaved
from dualdeadline.streams.probes import MIB, TRAIN, TURNS

SIZES_MIB = (4, 8, 12)  # OLMoE: down, gate/up, both
SOURCE_GIB = 1  # from which pieces are drawn, so that no cache holds them


def copies(
    sizes_mib: Sequence[float] = SIZES_MIB, samples: int = 50, to: int = 0, source: int = 1, seed: int = 0
) -> pd.DataFrame:
    """Copies between two GPUs, alone and in trains, by CUDA events; what arrived is compared first.

    Args:
        sizes_mib: of one copy. to, source: GPUs.

    Returns:
        DataFrame(size_bytes, alone_ms, behind_ms, n, direct): medians over n samples; behind = a copy that follows
        another; direct: the GPUs reach each other's memory (NVLink or PCIe) without the host.

    Raises:
        RuntimeError: fewer than two GPUs.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2 or to == source or max(to, source) >= count:
        raise RuntimeError(f"{count} GPUs are visible, copies go from {source} to {to}; needed: two different ones")
    direct, draw = torch.cuda.can_device_access_peer(to, source), np.random.default_rng(seed)
    with torch.cuda.device(to):
        there = torch.empty(TRAIN, int(max(sizes_mib) * MIB), dtype=torch.uint8, device=f"cuda:{to}")
        away = torch.randint(0, 256, (SOURCE_GIB << 30,), dtype=torch.uint8, device=f"cuda:{source}")
        variants = {}
        for size in sizes_mib:
            for length in (1, TRAIN):
                size_bytes = int(size * MIB)
                starts = draw.integers(0, (len(away) - size_bytes) // 4096, (TURNS, length)) * 4096
                variants[size, length] = _trains(there, away, size_bytes, starts)
        times = interleaved(variants, samples, device=f"cuda:{to}")
    rows = []
    for size in sizes_mib:
        alone, train = (float(np.median(times[size, length])) for length in (1, TRAIN))
        rows.append((int(size * MIB), alone, (train - alone) / (TRAIN - 1), samples, direct))
    return pd.DataFrame(rows, columns=["size_bytes", "alone_ms", "behind_ms", "n", "direct"])


def _trains(there: torch.Tensor, away: torch.Tensor, size: int, starts: np.ndarray) -> Variant:
    """One train of copies each turn, in the current stream's order; the host is ahead of the device."""
    pieces = [[away[start : start + size] for start in turn] for turn in starts.tolist()]

    def work(turn: int) -> None:
        for place, piece in enumerate(pieces[turn % len(pieces)]):
            there[place, :size].copy_(piece, non_blocking=True)

    for turn in range(len(pieces)):
        work(turn)
        for place, piece in enumerate(pieces[turn]):
            assert torch.equal(there[place, :size].cpu(), piece.cpu()), f"a copy of {size} bytes arrives changed"
    return Variant(work, queued=True)


def model(found: pd.DataFrame) -> TransferModel:
    """The line through copies that follow one another, as the cost model takes it.

    Raises:
        ValueError: fewer than two sizes.
    """
    return TransferModel.fit(found.size_bytes, found.behind_ms)


def records(found: pd.DataFrame) -> list[dict]:
    """Record rows: `peer_copy_ms` and `peer_copy_gbps` of each size, alone and behind another copy."""
    out = []
    for row in found.itertuples():
        config = {"size_mib": row.size_bytes / MIB, "direct": bool(row.direct)}
        for name, ms in (("alone", row.alone_ms), ("behind", row.behind_ms)):
            common = dict(variant=name, kind="measured", n=row.n, config=config)
            out.append(common | dict(metric="peer_copy_ms", median=ms, unit="ms"))
            out.append(common | dict(metric="peer_copy_gbps", median=row.size_bytes / ms / 1e6, unit="GB/s"))
    return out
