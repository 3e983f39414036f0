"""Times of decode steps: all variants of a prompt in random order, after their logits were found equal."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from dualdeadline.decode.big import Variants
from dualdeadline.decode.cases import Case
from dualdeadline.overlap.rows import measured as overlapped

CHECKED = 12  # steps whose logits are compared with the resident variant's, bit by bit


def check(group: Variants, first: int) -> int:
    """Every variant's logits of some steps against the first one's; how many steps were compared.

    Compiled code adds in another order than the code it was made from, so each has a first one of its own. The first
    steps of each also compile and capture it.

    Raises:
        AssertionError: a bit differs.
    """
    wanted, compared = {}, 0
    for case in group.cases:
        group.rewind(case, first)
        found = torch.stack([group.step(case).clone() for _ in range(CHECKED)])
        assert torch.equal(found, wanted.setdefault(case.compiled, found)), f"{case} changes logits"
        compared += CHECKED
    return compared


def run(group: Variants, spans: Sequence[slice], seed: int = 0, cases: Sequence[Case] | None = None) -> pd.DataFrame:
    """DataFrame(case, prompt, ms, steps, and the tables' counters) of every variant and prompt; `case` is a Case.

    Slots that stay warm have served the last prompt before the first.

    Args:
        cases: to run (default: all).
    """
    draw, found = np.random.default_rng(seed), []
    every = list(group.cases if cases is None else cases)
    for case in every:
        if case.warm:
            group.rewind(case, spans[-1].start)
            _timed(group, case, spans[-1].stop - spans[-1].start)
    for prompt, span in enumerate(tqdm(spans, desc="prompts", leave=False)):
        for place in draw.permutation(len(every)):
            case = every[place]
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


def copies(group: Variants, times: int = 5) -> dict:
    """Record row: GB/s of plain copies of one layer's gate/up weights behind one another, from the raw store."""
    host = group.stores["raw"].sources["gate_up"][0]
    bank = torch.empty_like(host[:1], device=group.device)

    def work() -> None:
        for weights in host:
            bank[0].copy_(weights, non_blocking=True)

    found = [host.nbytes / clocked(group.device, work) / 1e6 for _ in range(times + 1)]
    return overlapped("copy", "link_gbps", "GB/s", found[1:], {"lanes": 0})


def _timed(group: Variants, case: Case, steps: int) -> float:
    """Milliseconds of some steps behind one another."""

    def work() -> None:
        for _ in range(steps):
            group.step(case)

    return clocked(group.device, work)


def clocked(device: torch.device, work: Callable[[], object]) -> float:
    """Milliseconds by CUDA events, by the clock on a CPU."""
    if device.type != "cuda":
        begun = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - begun)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
