"""Stall arithmetic of the original study, replayed from measured times; nothing here is measured.

The original counts, per routed token and layer, the time the link still needs once the router has spoken. It
compares experts copied whole ("monolithic") with gate/up copied first and downs behind gate/up compute
("staged"). `published_stall` repeats it to the last digit; its options change one assumption at a time.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

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


def windows_for(count: int, predictor_ms: float, horizon: int = 1) -> np.ndarray:
    """`windows` of the published layers for a model with `count` layers; with another number of layers than the
    published model's, every layer gets the mean of the published windows."""
    window = windows(published()["layers"], predictor_ms, horizon)
    if count == len(window):
        return window
    mean = np.full(count, window[horizon:].mean())
    mean[:horizon] = 0.0
    return mean


@dataclass(frozen=True)
class Coverage:
    """What a predictor has to offer for N routed tokens and layers.

    Attributes:
        found: `[N, E+1]` missing experts among the n best scored, n = 0..E.
        missing: `[N]` routed experts that no cache holds.
        layer: `[N]` layer of each row.
    """

    found: np.ndarray
    missing: np.ndarray
    layer: np.ndarray


def coverage(scores, routes, layer, resident=None) -> Coverage:
    """Coverage of `scores[N, E]` for `routes[N, K]` in `layer[N]`; `resident[N, E]`: experts in a cache.

    NaN scores count as the worst. Raises ValueError for shapes that do not fit or no row.
    """
    scores, routes, layer = np.asarray(scores, np.float32), np.asarray(routes), np.asarray(layer)
    n, experts = scores.shape if scores.ndim == 2 else (0, 0)
    if not n or routes.ndim != 2 or len(routes) != n or layer.shape != (n,):
        raise ValueError(f"scores {scores.shape}, routes {routes.shape}, layer {layer.shape}; needed: (N, E), "
                         "(N, K), (N,) with N of at least 1")
    wanted = np.zeros((n, experts), bool)
    np.put_along_axis(wanted, routes.astype(np.intp), True, 1)
    scores = np.where(np.isnan(scores), -np.inf, scores)
    if resident is not None:
        wanted &= ~np.asarray(resident, bool)
        scores = np.where(resident, -np.inf, scores)
    order = np.argsort(-scores, axis=1, kind="stable")
    found = np.zeros((n, experts + 1), np.int32)
    found[:, 1:] = np.cumsum(np.take_along_axis(wanted, order, 1), axis=1)
    return Coverage(found, wanted.sum(1), layer)


def mean_coverage(recall: dict, top_k: int, layers) -> Coverage:
    """Coverage of a predictor of which only the mean recall is known, one row for each of `layers`.

    Args:
        recall: budget -> mean recall; straight lines in between, from no recall at budget 0.
    """
    known = sorted((int(budget), share) for budget, share in recall.items())
    places, shares = zip((0, 0.0), *known)
    found = top_k * np.interp(np.arange(places[-1] + 1), places, shares)
    layers = np.asarray(layers)
    return Coverage(np.tile(found, (len(layers), 1)), np.full(len(layers), top_k), layers)


def published_stall(
    scores, routes, layer, window_ms, transfer: TransferModel, bytes, gate_up_compute_ms, budgets,
    resident=None, **options,
) -> pd.DataFrame:
    """Mean stall per token and layer under the original's arithmetic.

    `budget` counts whole-expert bytes: monolithic may hold `budget` experts, staged floor(budget * full /
    gate_up) gate/ups. Ready are the best-scored experts, min(that, floor(window / copy)) of them. Monolithic
    then waits for every other routed expert; staged for every other gate/up, and for the downs as far as they
    take longer than the gate/up products: max(0, K * down - gate_up_compute).

    Args:
        scores: `[N, E]`.   routes: `[N, K]`.   layer: `[N]`, layer of each row.   numpy or torch.
        window_ms: `[L]`, net of predictor time.
        bytes: dict(gate_up, down, full).
        gate_up_compute_ms: gate/up products of K experts.
        budgets: whole numbers, at least 0.
        resident: bool `[N, E]`, experts in a cache: neither copied nor waited for (None: no cache).
        options: `link_once`, `partial`, `group` of `stall`.

    Returns:
        DataFrame(budget, monolithic_ms, staged_ms), means over N.

    Raises:
        ValueError: shapes that do not fit, no row, a budget that is no whole number or below 0.
    """
    covered = coverage(scores, routes, layer, resident)
    return stall(covered, window_ms, transfer, bytes, gate_up_compute_ms, budgets, **options)


def stall(
    covered: Coverage, window_ms, transfer: TransferModel, bytes, gate_up_compute_ms, budgets,
    link_once=False, partial=False, group=None,
) -> pd.DataFrame:
    """`published_stall` of a coverage, with one assumption or another changed.

    Args:
        link_once: take the downs that the previous layer moves under its gate/up products off staged's window;
            the original lets them and the prefetch use the same milliseconds.
        partial: count the copied part of an unfinished copy instead of whole copies only.
        group: `[N]` whole numbers: means per group, in a first column `group`, instead of over all rows.
    """
    window = _window(window_ms, covered.layer)
    full, gate_up, down = (transfer.ms(bytes[part]) for part in ("full", "gate_up", "down"))
    downs = covered.missing * down
    hidden = np.minimum(downs, gate_up_compute_ms).mean() if link_once else 0.0
    tail = np.maximum(downs - gate_up_compute_ms, 0)
    parts = []
    for budget in budgets:
        if int(budget) != budget or budget < 0:
            raise ValueError(f"budget is {budget!r}; needed: a whole number of experts, at least 0")
        limit = int(budget) * bytes["full"] // bytes["gate_up"]
        whole = covered.missing - _ready(covered.found, window / full, int(budget), partial)
        first = covered.missing - _ready(covered.found, np.maximum(window - hidden, 0) / gate_up, limit, partial)
        rows = {"monolithic_ms": whole * full, "staged_ms": first * gate_up + tail}
        groups = np.zeros(len(window), int) if group is None else np.asarray(group)
        means = pd.DataFrame(rows).groupby(groups).mean().rename_axis("group").reset_index()
        parts.append(means.assign(budget=int(budget)))
    columns = ["budget", "monolithic_ms", "staged_ms"]
    return pd.concat(parts, ignore_index=True)[columns if group is None else ["group", *columns]]


def _window(window_ms, layer: np.ndarray) -> np.ndarray:
    window_ms = np.asarray(window_ms, float)
    if layer.min() < 0 or layer.max() >= len(window_ms):
        raise ValueError(f"layers {layer.min()} to {layer.max()}; needed: 0 to {len(window_ms) - 1}, as windows")
    return window_ms[layer]


def _ready(found: np.ndarray, copies: np.ndarray, limit: int, partial: bool) -> np.ndarray:
    """Missing experts `[N]` that `copies[N]` copies, at most `limit`, have brought in time."""
    most = found.shape[1] - 1
    copies = np.minimum(copies, min(limit, most))
    done = np.floor(copies).astype(int)
    row = np.arange(len(found))
    ready = found[row, done]
    if partial:
        ready = ready + (copies - done) * (found[row, np.minimum(done + 1, most)] - ready)
    return ready
