"""Timing of variants against each other: interleaved in random order, by CUDA events, warm-up dropped."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from tqdm.auto import tqdm

AHEAD_CYCLES = 350_000  # about 0.2 ms at 1.7 GHz: longer than a slow host needs to launch a graph of 50 nodes


@dataclass(frozen=True)
class Variant:
    """Something to time.

    Attributes:
        call: runs it once; the argument counts samples, so that buffers can take turns.
        queued: hand it over while the device is still busy, so that the host's launch is not part of the time.
            Right for graphs, whose place is inside a larger graph; wrong for work that the host issues.
    """

    call: Callable[[int], object]
    queued: bool = False


def interleaved(variants: Mapping[str, Variant], samples: int = 200, warmup: int = 5, seed: int = 0,
                device="cuda", budget_s: float = float("inf")) -> dict[str, np.ndarray]:
    """Milliseconds `[samples]` of each variant; each round runs all of them once, in a new random order.

    Args:
        budget_s: stop after the round in which this is used up (at least 20 rounds); rows then say how many.

    Raises:
        ValueError: no variants, or fewer than 1 sample.
    """
    if not variants or samples < 1:
        raise ValueError(f"{len(variants)} variants, {samples} samples; needed: at least 1 of each")
    device, draw = torch.device(device), np.random.default_rng(seed)
    once = _cuda_ms if device.type == "cuda" else _host_ms
    names, times = list(variants), {name: [] for name in variants}
    begun = time.monotonic()
    for turn in tqdm(range(warmup + samples), desc="timing", unit="round", leave=False, mininterval=1):
        for place in draw.permutation(len(names)):
            spent = once(variants[names[place]], turn, device)
            if turn >= warmup:
                times[names[place]].append(spent)
        if turn >= warmup + 20 and time.monotonic() - begun > budget_s:
            break
    return {name: np.array(found) for name, found in times.items()}


def _cuda_ms(variant: Variant, turn: int, device: torch.device) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if variant.queued:
        torch.cuda._sleep(AHEAD_CYCLES)
    start.record()
    variant.call(turn)
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _host_ms(variant: Variant, turn: int, device: torch.device) -> float:
    start = time.perf_counter()
    variant.call(turn)
    return 1e3 * (time.perf_counter() - start)


def graph(work: Callable[[], None], warm: bool = True) -> Callable[[], None]:
    """`work` as a CUDA graph; returns the replay, which keeps `work` and its buffers.

    Args:
        warm: run it once outside of the graph first, which compiles its kernels.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        if warm:
            work()
    side.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, stream=side):
        work()

    def replay() -> None:
        captured.replay()

    replay.keeps = work  # the graph reads memory that it does not own
    return replay
