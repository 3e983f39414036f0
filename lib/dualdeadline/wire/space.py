"""Designs of a wire format, compared by the bytes they need for the same weights."""

from __future__ import annotations

import heapq

import numpy as np
import pandas as pd
import pyarrow
import torch
from torch import Tensor

from dualdeadline.wire.codec import encode
from dualdeadline.wire.format import BITS

KEPT = 8  # bits of sign and mantissa, which look random


def exponents(tensor: Tensor) -> np.ndarray:
    """How often each exponent occurs `[256]`."""
    words = tensor.detach().cpu().contiguous().flatten().view(torch.int16).numpy().view(np.uint16)
    return np.bincount((words >> 7) & 0xFF, minlength=256)


def entropy(counts: np.ndarray) -> float:
    """Bits per value that no code of single values can go below."""
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log2(share)).sum())


def huffman(counts: np.ndarray) -> float:
    """Bits per value of the best prefix code (Huffman 1952): every merge costs each value below it one bit."""
    heap = [int(count) for count in counts if count]
    if len(heap) < 2:
        return float(len(heap))
    heapq.heapify(heap)
    total = 0
    while len(heap) > 1:
        merged = heapq.heappop(heap) + heapq.heappop(heap)
        total += merged
        heapq.heappush(heap, merged)
    return total / int(counts.sum())


def ranked(counts: np.ndarray, *widths: int) -> float:
    """Bits per value if exponents are coded by rank, wherever they lie: each width's last code leads to the next width,
    the last one's to a patch of 48 bits."""
    order, total, place = np.sort(counts)[::-1], 0, 0
    for width in widths:
        total += order[place:].sum() * width
        place += 2**width - 1
    return float((total + order[place:].sum() * 48) / counts.sum())


def designs(tensor: Tensor) -> pd.DataFrame:
    """DataFrame(design, bits_per_weight, bound) for one bfloat16 tensor; `bound`: computed from the exponents alone,
    without what an implementation adds (tables, block starts, alignment)."""
    counts = exponents(tensor)
    rows = [(f"{bits}-bit runs, 4-bit escapes", encode(tensor, bits).bits_per_weight, False) for bits in BITS]
    rows += [(f"{bits}-bit ranks, 4-bit escapes", KEPT + ranked(counts, bits, 4), True) for bits in BITS]
    rows.append(("2-bit, 3-bit, then 4-bit", KEPT + ranked(counts, 2, 3, 4), True))
    rows += [("Huffman", KEPT + huffman(counts), True), ("entropy", KEPT + entropy(counts), True)]
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    split = np.concatenate([data[0::2], data[1::2]])
    for name in ("zstd", "lz4"):
        for way, bytes in (("", data), (", bytes split", split)):
            size = len(pyarrow.compress(bytes.tobytes(), codec=name, asbytes=True))
            rows.append((f"{name}{way}", 8 * size / tensor.numel(), False))
    return pd.DataFrame(rows, columns=["design", "bits_per_weight", "bound"])

