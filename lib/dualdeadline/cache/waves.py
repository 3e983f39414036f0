"""Caches with fewer slots than a token needs: its experts take turns."""

from __future__ import annotations

import numpy as np


def wave_hits(ids: np.ndarray, after: np.ndarray, slots: list[int]) -> np.ndarray:
    """Hits `[len(slots), S, K, R]` of caches with `slots` < K over `ids[S, K, R]`.

    A token's experts run in waves of C: the resident ones first (they hit), then the misses in rank order. A
    full wave replaces the whole cache, so what a token leaves behind is its last wave, and of the wave before
    it as many as fit, by the keys `after[S, K, R]` (smaller is kept).
    """
    steps, k, lanes = ids.shape
    room = np.asarray(slots)[:, None, None]
    last = (k - 1) // room * room  # turn at which the last wave begins
    ids, after = (np.ascontiguousarray(array.transpose(0, 2, 1)) for array in (ids, after))
    place = np.argsort(np.argsort(after, axis=2, kind="stable"), axis=2, kind="stable")
    left = np.zeros((len(room), lanes, k), bool)  # which of the previous token's experts are resident
    hit = np.zeros((len(room), steps, lanes, k), bool)
    for step in range(steps):
        now = hit[:, step]
        if step:
            same = ids[step][:, :, None] == ids[step - 1][:, None, :]
            now[:] = (same & left[:, :, None, :]).any(3)
        resident = now.cumsum(2, dtype=np.int8)
        turn = np.where(now, resident - 1, resident[:, :, -1:] + np.arange(k) - resident)
        before = (turn >= last - room) & (turn < last)
        better = place[step][:, :, None] > place[step][:, None, :]
        rank = (better & before[:, :, None, :]).sum(3, dtype=np.int8)
        left = (turn >= last) | (before & (rank < room - (k - last)))
    return hit.transpose(0, 1, 3, 2)
