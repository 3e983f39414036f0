"""Decode steps of what a user could install instead, on the same model: transformers' own experts, and accelerate."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import numpy as np
import torch

from dualdeadline.decode import big
from dualdeadline.engine.captured import CapturedForward
from dualdeadline.overlap.rows import measured

WARMUP = 4


def stock(steps: int, seed: int = 0, **sizes) -> Iterator[tuple[str, list[dict]]]:
    """Everything resident: transformers' experts implementations, then the fastest in a graph, compiled too."""
    model = big.build("cuda", seed=seed, **sizes)
    for name in ("eager", "batched_mm", "grouped_mm"):
        model.set_experts_implementation(name)
        yield f"baseline, {name}", [_row(name, _times(model, steps), way="launched by the host", resident=True)]
    for name, compiled in (("batched_mm", False), ("grouped_mm", False), ("batched_mm", True)):
        model.set_experts_implementation(name)
        captured = CapturedForward(model, compile=compiled)
        try:
            way = "compiled, one CUDA graph" if compiled else "one CUDA graph"
            yield f"baseline, {name}, {way}", [_row(name, _times(model, steps), way=way, resident=True)]
        finally:
            captured.remove()


def accelerate(steps: int, seed: int = 0, **sizes) -> Iterator[tuple[str, list[dict]]]:
    """accelerate's `cpu_offload`: weights cross the link when their module runs. Nothing if not installed."""
    if importlib.util.find_spec("accelerate") is None:  # a user may have it; the study does without
        return
    cpu_offload = importlib.import_module("accelerate").cpu_offload
    model = big.build("cuda", seed=seed, **sizes).cpu()
    model.set_experts_implementation("batched_mm")
    cpu_offload(model, torch.device("cuda"))
    found = _row("accelerate cpu_offload", _times(model, steps, warmup=1), way="launched by the host", resident=False)
    yield "baseline, accelerate", [found]


def _row(variant: str, times_ms: np.ndarray, way: str, resident: bool) -> dict:
    return measured(variant, "baseline_step_ms", "ms", times_ms, {"way": way, "resident": resident})


@torch.inference_mode()
def _times(model, steps: int, warmup: int = WARMUP) -> np.ndarray:
    """Milliseconds of some decode steps behind a short prompt, by CUDA events."""
    from transformers import StaticCache

    held = StaticCache(config=model.config, max_cache_len=big.CONTEXT)
    ids = torch.ones(1, big.PROMPT, dtype=torch.long, device="cuda")
    model(ids, past_key_values=held, use_cache=True)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + warmup + 1)]
    marks[0].record()
    for number, mark in enumerate(marks[1:]):
        place = torch.tensor([[big.PROMPT + number]], device="cuda")
        model(ids[:, :1], position_ids=place, past_key_values=held, use_cache=True)
        mark.record()
    torch.cuda.synchronize()
    return np.array([first.elapsed_time(second) for first, second in zip(marks, marks[1:])][warmup:])
