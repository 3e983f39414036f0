"""Expert caches replayed over routes: LRU, LFU, Belady's optimum, and caches kept by a predictor.

Rules. A call starts cold. Order "rank": one access per routed id, in token then rank order; a miss inserts
and evicts one expert. Order "token": all K ids of a token and layer are looked up at once and pinned until
computed, which is what an engine does; recency within a token follows rank. With fewer slots than K a token
runs in waves: resident ids first, then the misses in rank order, at most C at a time, each wave evicting from
the one before it. LRU evicts the least recently used; LFU the least often used, counts surviving eviction and
ties going to the least recent; Belady the one used again last. Replayed is not measured: no time passes here.
"""

from __future__ import annotations

import numpy as np

from dualdeadline.cache.lanes import Lanes, lanes
from dualdeadline.cache.plain import ordered_dict_lru
from dualdeadline.cache.prefetch import Prefetch, Replay, prefetch_replay
from dualdeadline.cache.stack import MISS, keys, lru_depths, priority_depths
from dualdeadline.cache.waves import wave_hits

__all__ = [
    "MISS", "ORDERS", "POLICIES", "Prefetch", "Replay", "curve", "depths", "hit_rate", "hits", "ordered_dict_lru",
    "prefetch_replay", "prompt_curve",
]
POLICIES = ("lru", "lfu", "belady")
ORDERS = ("rank", "token")
SCOPES = ("layer", "pool")
STARTS = ("cold", "warm")


def depths(routes, policy="lru", order="rank", prompt=None, scope="layer", experts=None) -> np.ndarray:
    """Smallest number of slots at which each access hits, `[T, L, K]`; `MISS` for first uses.

    Args:
        routes: `[T, L, K]` expert ids in rank order, tokens in decode order; numpy or torch.
        prompt: `[T]` prompt of each token, rows of a prompt contiguous: the cache is emptied where it
            changes. None: kept throughout (warm).
        scope: "layer", one cache per layer, or "pool", one cache for all layers, accessed layer by layer.
        experts: E; default the largest id + 1.

    With order "token" a depth below K says K: waves are not a stack algorithm, `hits` and `curve` run them.
    """
    routes, prompt, experts = check(routes, policy, order, prompt, scope, experts)
    return _depths(routes, policy, order, prompt, scope, experts)


def hits(routes, slots, policy="lru", order="rank", prompt=None, scope="layer", experts=None) -> np.ndarray:
    """Whether each access hits, bool `[T, L, K]`. Arguments as `depths`; `slots` per layer (a pool: of all).

    Raises:
        ValueError: slots below 1, unknown policy, order or scope, or routes that are none.
    """
    routes, prompt, experts = check(routes, policy, order, prompt, scope, experts)
    if isinstance(slots, bool) or int(slots) != slots or slots < 1:
        raise ValueError(f"slots is {slots!r}; needed: a whole number of at least 1")
    if order == "token" and slots < routes.shape[2]:
        return _waves(routes, policy, prompt, scope, experts, [int(slots)])[0]
    return _depths(routes, policy, order, prompt, scope, experts) <= slots


def hit_rate(routes, slots, policy="lru", order="rank", prompt=None, scope="layer", experts=None):
    """Share of accesses that hit, `[L]`. Arguments and errors as `hits`."""
    return hits(routes, slots, policy, order, prompt, scope, experts).mean((0, 2))


def curve(routes, policy="lru", order="rank", scope="layer", prompt=None, experts=None) -> np.ndarray:
    """Hit rate of each layer at every slot count in one pass: `[L, E]` (a pool: `[L, L*E]`); column C-1 is
    C slots. Arguments and errors as `depths`."""
    layers = np.broadcast_to(np.arange(np.shape(routes)[1]), np.shape(routes)[:2])
    return _rates(*check(routes, policy, order, prompt, scope, experts), policy, order, scope, layers)


def prompt_curve(routes, prompt, policy="lru", order="rank", scope="layer", start="cold", experts=None):
    """Hit rate of each prompt, all layers together, at every slot count: `[prompts, E]` (a pool: `[.., L*E]`).

    `start` "cold" empties the cache for each prompt of `prompt[T]`; "warm" keeps it. Prompts in order of their
    numbers, everything else as `curve`.
    """
    if start not in STARTS:
        raise ValueError(f"start is {start!r}; needed: one of {', '.join(STARTS)}")
    routes, given, experts = check(routes, policy, order, prompt, scope, experts)
    own = np.broadcast_to(np.unique(given, return_inverse=True)[1][:, None], routes.shape[:2])
    return _rates(routes, given if start == "cold" else None, experts, policy, order, scope, own)


def _rates(routes, prompt, experts, policy, order, scope, group) -> np.ndarray:
    """Hit rates `[groups, slots]` of accesses that belong to `group[T, L]`."""
    layers, k = routes.shape[1:]
    slots = experts * (layers if scope == "pool" else 1)
    depth = np.minimum(_depths(routes, policy, order, prompt, scope, experts), slots + 1)
    groups = int(group.max()) + 1
    count = np.bincount((depth + group[..., None] * (slots + 2)).ravel(), minlength=groups * (slots + 2))
    total = np.bincount(group.ravel(), minlength=groups)[:, None] * k
    rate = np.cumsum(count.reshape(groups, -1)[:, 1 : slots + 1], axis=1) / total
    if order == "token":
        few = _waves(routes, policy, prompt, scope, experts, range(1, min(k, slots + 1)))
        for column, hit in enumerate(few):
            rate[:, column] = np.bincount(group.ravel(), hit.sum(2).ravel(), groups) / total[:, 0]
    return rate


def check(routes, policy, order, prompt=None, scope="layer", experts=None):
    """Arguments as numpy arrays, or a ValueError that says what is wrong with them."""
    rules = ("policy", policy, POLICIES), ("order", order, ORDERS), ("scope", scope, SCOPES)
    for name, value, known in rules:
        if value not in known:
            raise ValueError(f"{name} is {value!r}; needed: one of {', '.join(known)}")
    routes = np.asarray(routes)
    if routes.ndim != 3 or not routes.size or routes.dtype.kind not in "iu":
        raise ValueError(f"routes is {routes.dtype} {list(routes.shape)}; needed: whole numbers [T, L, K]")
    found = int(routes.max()) + 1
    experts = found if experts is None else experts
    if routes.min() < 0 or found > experts:
        raise ValueError(f"routes hold ids {routes.min()} to {found - 1}; needed: 0 to {experts - 1}")
    if experts * (routes.shape[1] if scope == "pool" else 1) >= 2**31:
        raise ValueError(f"{experts} experts in {routes.shape[1]} layers; needed: below {2**31} in one cache")
    if order == "token" and (np.diff(np.sort(routes, axis=2), axis=2) == 0).any():
        raise ValueError('a token names an expert twice; needed for order "token": K different ids')
    return routes, None if prompt is None else np.asarray(prompt), experts


def sequences(routes, prompt, scope, experts) -> Lanes:
    """Lanes of one cache each: a layer's, or with scope "pool" all layers' one after another."""
    if scope == "layer":
        return lanes(routes, prompt, experts)
    tokens, layers, k = routes.shape
    relabelled = routes.astype(np.int32) + np.arange(layers)[:, None] * experts
    prompt = None if prompt is None else np.repeat(prompt, layers)
    return lanes(relabelled.reshape(tokens * layers, 1, k), prompt, layers * experts)


def _depths(routes, policy, order, prompt, scope, experts) -> np.ndarray:
    run = sequences(routes, prompt, scope, experts)
    steps, k, width = run.ids.shape
    ids, group = run.ids.reshape(steps * k, width), k if order == "token" else 1
    if policy == "lru":
        depth = lru_depths(ids, group, run.experts)
    else:
        depth = priority_depths(ids, policy, group, run.experts)
    depth = np.maximum(depth, group)
    rows = len(routes) * (routes.shape[1] if scope == "pool" else 1)
    return run.restore(depth.reshape(run.ids.shape), rows).reshape(routes.shape)


def _waves(routes, policy, prompt, scope, experts, slots) -> list[np.ndarray]:
    """Hits `[T, L, K]` for each of `slots`, all below K, order "token"."""
    if scope == "pool" and routes.shape[1] > 1:
        return [np.zeros(routes.shape, bool)] * len(slots)  # each layer's K experts drive out all others
    run = sequences(routes, prompt, scope, experts)
    after = keys(run.ids.reshape(-1, run.ids.shape[2]), policy)[1].reshape(run.ids.shape)
    return [run.restore(hit, len(routes)) for hit in wave_hits(run.ids, after, list(slots))]
