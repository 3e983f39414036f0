"""Many components to wire records, several at a time."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor
from tqdm.auto import tqdm

from dualdeadline.wire.codec import encode
from dualdeadline.wire.format import WireRecord


def encode_many(
    tensors: Iterable[tuple[str, Tensor]], bits: int = 3, workers: int | None = None, total: int | None = None
) -> Iterator[tuple[str, WireRecord]]:
    """Records of named tensors in their order, several at a time, with a progress bar.

    Args:
        workers: threads (default: cores). total: how many tensors there are, for the bar.
    """
    workers = workers or os.cpu_count() or 1
    waiting: list = []
    with ThreadPoolExecutor(workers) as pool, tqdm(total=total, desc="encoding", unit="component", leave=False) as bar:

        def first():
            name, job = waiting.pop(0)
            bar.update()
            return name, job.result()

        for name, tensor in tensors:
            waiting.append((name, pool.submit(encode, tensor, bits)))
            if len(waiting) > 2 * workers:
                yield first()
        while waiting:
            yield first()
