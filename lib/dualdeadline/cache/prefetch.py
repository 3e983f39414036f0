"""Caches that a predictor fills ahead of the router, and caches that keep what it predicts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dualdeadline.cache.lanes import Lanes, spread, steps
from dualdeadline.cache.stack import keys

POLICIES = ("lru", "lfu", "predicted")


@dataclass(frozen=True)
class Prefetch:
    """Outcome of a replay with prefetch.

    Attributes:
        hits: bool `[T, L, K]`, resident when the router spoke, prefetched ones included.
        useful, wasted: `[T, L]` copies issued ahead that the router then asked for, or not.
        resident: bool `[T, L, E]`, what each cache held before it was filled ahead.
    """

    hits: np.ndarray
    useful: np.ndarray
    wasted: np.ndarray
    resident: np.ndarray

    @property
    def hit_rate(self) -> np.ndarray:
        """Share of accesses that hit, `[L]`."""
        return self.hits.mean((0, 2))

    @property
    def precision(self) -> float:
        """Share of the copies issued ahead that were asked for (nan: none was issued)."""
        issued = self.useful.sum() + self.wasted.sum()
        return float(self.useful.sum() / issued) if issued else float("nan")


def prefetch_replay(
    routes, scores, slots, budget, policy="lru", threshold=None, prompt=None, charged=True, decay=0.5
) -> Prefetch:
    """Replay one cache per layer, order "token", that copies predicted experts before the router speaks.

    Before a layer routes, the experts among its max(K, budget) best scores that are not resident are copied,
    best first, at most `budget` of them. They take slots of their layer's cache: speculation is charged. A
    wrong guess is the next to go, since it keeps the key of its last real use.

    Args:
        routes: `[T, L, K]` ids in rank order.
        scores: `[T, L-h, E]` for the layers h..L-1, seen h layers earlier; layers below h copy nothing ahead.
        slots: slots per layer, at least K.
        budget: most copies ahead per token and layer; 0: none.
        policy: lru, lfu, or "predicted": the smallest score goes first, averaged over tokens with weight
            `decay` for the past (layers below h score what they routed).
        threshold: least score that is worth a copy (None: any).
        prompt: `[T]`, the cache is emptied where it changes (None: kept).
        charged: False puts copies into free space outside the cache, as the original study counts.

    Raises:
        ValueError: shapes that do not fit, unknown policy, fewer slots than K, budget below 0.
    """
    return Replay(routes, scores, prompt).run(slots, budget, policy, threshold, charged, decay)


class Replay:
    """`prefetch_replay` of the same routes and scores with several settings: what they share is made once."""

    def __init__(self, routes, scores, prompt=None):
        routes = np.asarray(routes)
        scores = _checked(routes, scores)
        self.tokens, self.layers, self.k = routes.shape
        token = steps(None if prompt is None else np.asarray(prompt), self.tokens)
        self.lanes = Lanes(spread(routes.astype(np.int16), token, 0), token, scores.shape[2])
        self.predicted = spread(scores, token, -np.inf).transpose(0, 2, 1)
        self.members = [_members(ids.T, self.predicted.shape[1:]) for ids in self.lanes.ids]
        self._best: dict[int, list[np.ndarray]] = {}
        self._after: dict[str, np.ndarray] = {}

    def best(self, width: int) -> list[np.ndarray]:
        """`_best` of every step."""
        if width not in self._best:
            self._best[width] = [_best(scores, width) for scores in self.predicted]
        return self._best[width]

    def after(self, policy: str) -> np.ndarray:
        """Keys `[S, K, R]` that accesses leave behind, larger is kept."""
        if policy not in self._after:
            steps, k, lanes = self.lanes.ids.shape
            after = keys(self.lanes.ids.reshape(steps * k, lanes), policy)[1]
            self._after[policy] = (steps * k - after.astype(float)).reshape(steps, k, lanes)
        return self._after[policy]

    def run(self, slots, budget, policy="lru", threshold=None, charged=True, decay=0.5) -> Prefetch:
        """Arguments and errors as `prefetch_replay`."""
        _check(policy, slots, budget, self.k)
        return _replay(self, slots, budget, policy, threshold, charged, decay)


def _replay(shared: Replay, slots, budget, policy, threshold, charged, decay) -> Prefetch:
    run, predicted, tokens, k = shared.lanes, shared.predicted, shared.tokens, shared.k
    caches = _Caches(shared, slots, policy, decay)
    best = shared.best(min(max(k, budget), slots)) if budget else None
    shape = (*predicted.shape[:2], run.experts)
    before, fresh = np.zeros((2, *shape), bool)
    hit = np.zeros((*shape[:2], k), bool)
    for step in range(len(predicted)):
        before[step] = caches.resident
        caches.look(predicted[step])
        if budget:
            fresh[step] = _worth(best[step], predicted[step], caches.resident, budget, threshold)
            if charged:
                caches.admit(fresh[step], _members(best[step], shape[1:]))
        now = run.ids[step].T
        hit[step] = np.take_along_axis(caches.resident | fresh[step], now, 1)
        caches.use(step, now)
    useful = np.take_along_axis(fresh, run.ids.transpose(0, 2, 1), 2).sum(2)
    counts = np.stack([useful, fresh.sum(2) - useful], axis=1)
    useful, wasted = run.restore(counts, tokens).transpose(2, 0, 1)
    return Prefetch(run.restore(hit.transpose(0, 2, 1), tokens), useful, wasted,
                    run.restore(before.transpose(0, 2, 1), tokens))


class _Caches:
    """One cache per lane in lock step, order "token": keys `[R, E]` (larger is kept) and who is resident."""

    def __init__(self, shared: Replay, slots: int, policy: str, decay: float):
        run, lanes = shared.lanes, shared.lanes.ids.shape[2]
        self.members = shared.members
        self.slots, self.decay, self.lane = slots, decay, np.arange(lanes)[:, None]
        self.resident = np.zeros((lanes, run.experts), bool)
        self.average = np.zeros((lanes, run.experts)) if policy == "predicted" else None
        self.apart = -1e-9 * np.arange(1, run.experts + 1)  # keys must differ: of equal ones the last id goes
        self.key = np.tile(self.apart, (lanes, 1))
        if policy != "predicted":
            self.after = shared.after(policy)

    def admit(self, wanted: np.ndarray, pinned: np.ndarray) -> None:
        """Make `wanted` resident, evicting the smallest keys that are not `pinned` (both bool `[R, E]`)."""
        self.resident |= wanted
        excess = self.resident.sum(1) - self.slots
        over = np.flatnonzero(excess > 0)
        key = np.where(self.resident[over] & ~pinned[over], self.key[over], np.inf)
        last = np.take_along_axis(np.sort(key, axis=1), excess[over, None] - 1, 1)
        self.resident[over] &= key > last

    def look(self, predicted: np.ndarray) -> None:
        """Take in the predictions `[R, E]` of this step, before anything is evicted for it."""
        if self.average is not None:
            self.unseen = ~np.isfinite(predicted)
            self.average = self.decay * self.average + (1 - self.decay) * np.where(self.unseen, 0, predicted)
            self.key = self.average + self.apart

    def use(self, step: int, now: np.ndarray) -> None:
        """Load what the router asks for, `now[R, K]`, then note its use."""
        used = self.members[step]
        self.admit(used, used)
        if self.average is None:
            self.key[self.lane, now] = self.after[step].T
        else:
            self.average = self.average + (1 - self.decay) * (used & self.unseen)
            self.key = self.average + self.apart


def _members(ids: np.ndarray, shape: tuple) -> np.ndarray:
    """Bool `[R, E]` of ids `[R, X]`."""
    members = np.zeros(shape, bool)
    np.put_along_axis(members, ids.astype(np.intp), True, 1)
    return members


def _best(scores: np.ndarray, width: int) -> np.ndarray:
    """Ids `[R, width]` of the best scores `[R, E]`, best first, ties to the lower id.

    Score and id go into one whole number each: sorting those is several times quicker than a stable argsort.
    """
    bits = (scores + np.float32(0)).view(np.int32)  # + 0: no negative zero
    rising = (bits ^ (bits >> 31 & 0x7FFFFFFF)).astype(np.int64)
    experts = scores.shape[1]
    return np.sort(-rising * experts + np.arange(experts), axis=1)[:, :width] % experts


def _worth(best, scores, resident, budget, threshold) -> np.ndarray:
    """Bool `[R, E]`: the first `budget` of `best` that are not resident and score enough."""
    score = np.take_along_axis(scores, best, 1)
    missing = ~np.take_along_axis(resident, best, 1) & (score > -np.inf)
    if threshold is not None:
        missing &= score >= threshold
    worth = np.zeros(resident.shape, bool)
    np.put_along_axis(worth, best, missing & (missing.cumsum(1) <= budget), 1)
    return worth


def _check(policy: str, slots: int, budget: int, k: int) -> None:
    if policy not in POLICIES:
        raise ValueError(f"policy is {policy!r}; needed: one of {', '.join(POLICIES)}")
    if slots < k or budget < 0:
        raise ValueError(f"slots is {slots}, budget {budget}; needed: at least K={k}, and at least 0")


def _checked(routes, scores) -> np.ndarray:
    """Scores `[T, L, E]` as float32, -inf for layers below the horizon and for NaN."""
    scores = np.asarray(scores, np.float32)
    tokens, layers, _ = np.shape(routes)
    if scores.ndim != 3 or len(scores) != tokens or not 1 <= scores.shape[1] <= layers:
        raise ValueError(f"scores have shape {scores.shape}; needed: ({tokens}, {layers} or fewer, E)")
    if int(np.max(routes)) >= scores.shape[2]:
        raise ValueError(f"routes name expert {int(np.max(routes))}, scores know {scores.shape[2]}")
    full = np.full((tokens, layers, scores.shape[2]), -np.inf, np.float32)
    full[:, layers - scores.shape[1] :] = np.where(np.isnan(scores), -np.inf, scores)
    return full
