"""Times of decode steps: all variants of a prompt in random order, after their logits were found equal."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from dualdeadline.decode.big import Variants
from dualdeadline.decode.cases import Case

CHECKED = 12  # steps whose logits are compared with the resident variant's, bit by bit


def check(groups: Sequence[Variants], first: int) -> int:
    """Every variant's logits of some steps against the first one's; how many steps were compared.

    The first steps of each also compile and capture it.

    Raises:
        AssertionError: a bit differs.
    """
    wanted, compared = None, 0
    for group, case in _all(groups):
        group.rewind(case, first)
        found = torch.stack([group.step(case).clone() for _ in range(CHECKED)])
        wanted = found if wanted is None else wanted
        assert torch.equal(found, wanted), f"{case} changes logits"
        compared += CHECKED
    return compared


def run(groups: Sequence[Variants], spans: Sequence[slice], seed: int = 0) -> pd.DataFrame:
    """DataFrame(case, prompt, ms, steps, and the tables' counters) of every variant and prompt; `case` is a Case."""
    draw, found = np.random.default_rng(seed), []
    every = _all(groups)
    for prompt, span in enumerate(tqdm(spans, desc="prompts", leave=False)):
        for place in draw.permutation(len(every)):
            group, case = every[place]
            before = group.counts(case)
            group.rewind(case, span.start)
            ms = _timed(group, case, span.stop - span.start)
            after = group.counts(case)
            counts = {name: after[name] - before[name] for name in after}
            found.append(
                {"case": case, "prompt": prompt, "ms": ms / (span.stop - span.start), "steps": span.stop - span.start}
                | counts
            )
    return pd.DataFrame(found)


def _timed(group: Variants, case: Case, steps: int) -> float:
    """Milliseconds of some steps behind one another, by CUDA events (by the clock on a CPU)."""
    if group.device.type != "cuda":
        begun = time.perf_counter()
        for _ in range(steps):
            group.step(case)
        return 1e3 * (time.perf_counter() - begun)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(steps):
        group.step(case)
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _all(groups: Sequence[Variants]) -> list[tuple[Variants, Case]]:
    return [(group, case) for group in groups for case in group.cases]
