"""Stall arithmetic of the original study, replayed from measured times; nothing here is measured.

The original counts, per routed token and layer, the time the link still needs once the router has spoken. It
compares experts copied whole ("monolithic") with gate/up copied first and downs behind gate/up compute
("staged"). `published_stall` repeats it to the last digit; its options change one assumption at a time.
"""

from __future__ import annotations

import json

import numpy as np
import pandas as pd

from dualdeadline import paths
from dualdeadline.cost import TransferModel


def published() -> dict:
    """The original study's published times, bytes and results for OLMoE on an H200 (source named inside)."""
    return json.loads((paths.MANIFESTS / "published_olmoe.json").read_text(encoding="utf-8"))


def windows(layers: list[dict], predictor_ms: float, horizon: int = 1) -> np.ndarray:
    """Prefetch window before each layer, `[L]` ms: from the router of `horizon` layers back to its own.

    Args:
        layers: per layer `pre_moe_p50_ms` (up to and with its router) and `moe_and_residual_p50_ms`.
        predictor_ms: time of the predictor, taken off. Layers below `horizon` have no window.
    """
    if horizon < 1 or predictor_ms < 0:
        raise ValueError(f"horizon is {horizon}, predictor_ms {predictor_ms}; needed: at least 1, at least 0")
    before = np.array([layer["pre_moe_p50_ms"] for layer in layers])
    after = np.array([layer["moe_and_residual_p50_ms"] for layer in layers])
    step = np.r_[0.0, np.cumsum(after[:-1] + before[1:])]  # router to router
    window = np.zeros(len(layers))
    window[horizon:] = np.maximum(step[horizon:] - step[:-horizon] - predictor_ms, 0.0)
    return window


def published_stall(
    scores, routes, layer, window_ms, transfer: TransferModel, bytes, gate_up_compute_ms, budgets,
    resident=None, link_once=False, partial=False,
) -> pd.DataFrame:
    """Mean stall per token and layer under the original's arithmetic.

    `budget` counts whole-expert bytes: monolithic may hold `budget` experts, staged floor(budget * full /
    gate_up) gate/ups. Ready are the best-scored experts, min(that, floor(window / copy)) of them. Monolithic then
    waits for every other routed expert; staged for every other gate/up, and for the downs as far as they take
    longer than the gate/up products: max(0, K * down - gate_up_compute).

    Args:
        scores: `[N, E]`.   routes: `[N, K]`.   layer: `[N]`, layer of each row.   numpy or torch.
        window_ms: `[L]`, net of predictor time.
        bytes: dict(gate_up, down, full).
        gate_up_compute_ms: gate/up products of K experts.
        budgets: whole numbers, at least 0.
        resident: bool `[N, E]`, experts in a cache: neither copied nor waited for (None: no cache).
        link_once: take the downs that the previous layer moves under its gate/up products off staged's window;
            the original lets them and the prefetch use the same milliseconds.
        partial: count the copied part of an unfinished copy instead of whole copies.

    Returns:
        DataFrame(budget, monolithic_ms, staged_ms), means over N.

    Raises:
        ValueError: shapes that do not fit, no row, a budget that is no whole number or below 0.
    """
    counts = _covered(scores, routes, layer, window_ms, resident)
    return _stall(*counts, transfer, bytes, gate_up_compute_ms, budgets, link_once, partial)


def recall_stall(
    recall: dict, top_k, window_ms, transfer: TransferModel, bytes, gate_up_compute_ms, budgets,
    link_once=False, partial=False,
) -> pd.DataFrame:
    """`published_stall` for a predictor of which only the mean recall is known, layers weighted evenly.

    Args:
        recall: budget -> mean recall; straight lines in between, from no recall at budget 0.
        window_ms: `[L]`, one row per layer. Everything else as `published_stall`.
    """
    known = sorted((int(budget), share) for budget, share in recall.items())
    places, shares = zip((0, 0.0), *known)
    window = np.asarray(window_ms, float)
    covered = np.tile(top_k * np.interp(np.arange(places[-1] + 1), places, shares), (len(window), 1))
    missing = np.full(len(window), top_k)
    return _stall(covered, missing, window, transfer, bytes, gate_up_compute_ms, budgets, link_once, partial)


def _stall(covered, missing, window, transfer, bytes, gate_up_compute_ms, budgets, link_once, partial):
    """The table of `published_stall` from counts as `_covered` gives them."""
    full, gate_up, down = (transfer.ms(bytes[part]) for part in ("full", "gate_up", "down"))
    downs = missing * down
    hidden = np.minimum(downs, gate_up_compute_ms).mean() if link_once else 0.0
    rows = []
    for budget in budgets:
        if int(budget) != budget or budget < 0:
            raise ValueError(f"budget is {budget!r}; needed: a whole number of experts, at least 0")
        limit = int(budget) * bytes["full"] // bytes["gate_up"]
        whole = _ready(covered, window / full, int(budget), partial)
        first = _ready(covered, np.maximum(window - hidden, 0) / gate_up, limit, partial)
        tail = np.maximum(downs - gate_up_compute_ms, 0)
        monolithic, staged = (missing - whole) * full, (missing - first) * gate_up + tail
        rows.append((int(budget), monolithic.mean(), staged.mean()))
    return pd.DataFrame(rows, columns=["budget", "monolithic_ms", "staged_ms"])


def _covered(scores, routes, layer, window_ms, resident):
    """Routed and missing experts among the n best scored, `[N, E+1]` for n = 0..E; missing `[N]`; windows `[N]`."""
    scores, routes, layer = np.asarray(scores, np.float32), np.asarray(routes), np.asarray(layer)
    window_ms = np.asarray(window_ms, float)
    n, experts = scores.shape if scores.ndim == 2 else (0, 0)
    if not n or routes.ndim != 2 or len(routes) != n or layer.shape != (n,):
        raise ValueError(f"scores {scores.shape}, routes {routes.shape}, layer {layer.shape}; needed: (N, E), "
                         "(N, K), (N,) with N of at least 1")
    if layer.min() < 0 or layer.max() >= len(window_ms):
        raise ValueError(f"layers {layer.min()} to {layer.max()}; needed: 0 to {len(window_ms) - 1}, as windows")
    wanted = np.zeros((n, experts), bool)
    np.put_along_axis(wanted, routes.astype(np.intp), True, 1)
    scores = np.where(np.isnan(scores), -np.inf, scores)
    if resident is not None:
        resident = np.asarray(resident, bool)
        wanted &= ~resident
        scores = np.where(resident, -np.inf, scores)
    order = np.argsort(-scores, axis=1, kind="stable")
    covered = np.zeros((n, experts + 1))
    covered[:, 1:] = np.cumsum(np.take_along_axis(wanted, order, 1), axis=1)
    return covered, wanted.sum(1), window_ms[layer]


def _ready(covered: np.ndarray, copies: np.ndarray, limit: int, partial: bool) -> np.ndarray:
    """Missing experts `[N]` that `copies[N]` copies, at most `limit`, have brought in time."""
    copies = np.minimum(copies, min(limit, covered.shape[1] - 1))
    done = np.floor(copies).astype(int)
    row = np.arange(len(covered))
    ready = covered[row, done]
    if partial:
        ready = ready + (copies - done) * (covered[row, np.minimum(done + 1, covered.shape[1] - 1)] - ready)
    return ready
