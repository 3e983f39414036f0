"""What traces look like: repetition, expert load, reuse between neighbours, and what capturing costs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import torch

from dualdeadline import models
from dualdeadline.corpus import Prompt
from dualdeadline.traces.capture import Capture
from dualdeadline.traces.collection import special_tokens
from dualdeadline.traces.decode import Session, decode, fitting_threads
from dualdeadline.traces.sampling import Sampling
from dualdeadline.traces.store import Trace


def repetition(trace: Trace, n: int = 4) -> pd.DataFrame:
    """Per prompt: id, source, tokens, and the share of its n-grams that occurred earlier in the same prompt.

    A loop fakes locality: 0 means that no n-gram came twice, 0.9 that nine in ten repeat an earlier one. A
    prompt with fewer than n tokens has no share (NaN).
    """
    parts = torch.split(trace.tokens, trace.lengths.tolist())
    found = []
    for name, source, tokens in zip(trace.prompt_ids, trace.source, parts, strict=True):
        grams = list(zip(*(tokens[i:].tolist() for i in range(n)), strict=False))
        share = 1 - len(set(grams)) / len(grams) if grams else np.nan
        found.append({"id": name, "source": source, "tokens": len(tokens), "repeated": share})
    return pd.DataFrame(found)


def expert_load(trace: Trace) -> torch.Tensor:
    """[L,E] share of a layer's routed slots that each expert takes; rows sum to one."""
    _, layers, _ = trace.routes.shape
    counts = torch.stack([torch.bincount(trace.routes[:, layer].flatten(), minlength=trace.num_experts)
                          for layer in range(layers)])
    return counts / counts.sum(1, keepdim=True)


def reuse_by_token(trace: Trace) -> tuple[torch.Tensor, torch.Tensor]:
    """[N,L] share of a token's experts that the previous token of its prompt used too, and prompt[N].

    N counts the tokens that have a previous one.
    """
    later = trace.prompt[1:] == trace.prompt[:-1]
    now, before = trace.routes[1:][later], trace.routes[:-1][later]
    shares = (now.unsqueeze(-1) == before.unsqueeze(-2)).any(-1).float().mean(-1)
    return shares, trace.prompt[1:][later]


def reuse(trace: Trace) -> torch.Tensor:
    """[L] mean over tokens of `reuse_by_token`."""
    return reuse_by_token(trace)[0].mean(0)


def chance_reuse(trace: Trace) -> torch.Tensor:
    """[L] the same share for two unrelated tokens: what uneven expert load alone gives (K/E when even)."""
    return (expert_load(trace) ** 2).sum(1) * trace.routes.shape[-1]


def check_capture(
    model, tokenizer, prompts: Sequence[Prompt], new_tokens: int, sampling: Sampling | None = None,
) -> int:
    """Decode the prompts with and without capture; the number of tokens, which are all equal.

    Raises:
        AssertionError: capturing changed a token.
    """
    stops, pad = special_tokens(model, tokenizer)
    ids = [models.encode(tokenizer, prompt.text) for prompt in prompts]
    runs = [
        decode(model, spec, ids, [prompt.id for prompt in prompts], new_tokens, sampling, stops, pad)
        for spec in (None, models.describe(model))
    ]
    for prompt, plain, captured in zip(prompts, *runs, strict=True):
        assert torch.equal(plain.tokens, captured.tokens), f"capturing changed the tokens of prompt {prompt.id}"
    return sum(len(result.tokens) for result in runs[0])


@torch.inference_mode()
def overhead(
    model, tokenizer, prompts: Sequence[Prompt], steps: int = 40, warmup: int = 8, seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> pd.DataFrame:
    """Time single decode steps of one batch with and without capture.

    Two equal sessions advance side by side, one captured; which goes first is drawn anew at each step, so
    that drift and caches fall on both alike.

    Args:
        clock: seconds; `time.thread_time` leaves out what other programs take of a busy CPU (small models only,
            since those decode on one thread).

    Returns:
        One row per step after warm-up: plain_ms, captured_ms (device synchronised).
    """
    ids = [models.encode(tokenizer, prompt.text) for prompt in prompts]
    pad = special_tokens(model, tokenizer)[1]
    captures = {"plain": None, "captured": Capture(models.describe(model), steps + warmup)}
    with fitting_threads(model):
        sessions = {name: Session(model, ids, pad, steps + warmup) for name in captures}
    draw, rows = random.Random(seed), []
    with fitting_threads(model):
        for _ in range(steps + warmup):
            order = list(captures)
            draw.shuffle(order)
            tokens = sessions["plain"].logits.argmax(-1)
            rows.append({f"{name}_ms": _timed(sessions[name], captures[name], tokens, clock) for name in order})
    return pd.DataFrame(rows[warmup:])[["plain_ms", "captured_ms"]]


def _timed(session: Session, capture: Capture | None, tokens: torch.Tensor, clock) -> float:
    if capture:
        capture.__enter__()
    _synchronise(session)
    start = clock()
    session.step(tokens)
    if capture:
        capture.take()
    _synchronise(session)
    taken = (clock() - start) * 1e3
    if capture:
        capture.__exit__()
    return taken


def _synchronise(session: Session) -> None:
    if session.device.type == "cuda":
        torch.cuda.synchronize()
