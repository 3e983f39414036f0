"""Caches the plain way, one slot count at a time: what the one-pass replay is tested and timed against."""

from __future__ import annotations

import numpy as np


def plain_hits(sequence, slots, policy, order) -> np.ndarray:
    """Hits `[n, K]` of one cache over `sequence[n, K]`, by the rules of `dualdeadline.cache`, cold start."""
    sequence = np.asarray(sequence)
    if order == "rank":
        return _run(sequence.reshape(-1, 1), slots, policy).reshape(sequence.shape)
    return _run(sequence, slots, policy)


def _run(groups, slots, policy) -> np.ndarray:
    width = groups.shape[1]
    flat = groups.reshape(-1).tolist()
    resident, count, last = set(), {}, {}
    hit = np.zeros(groups.shape, bool)
    for row, ids in enumerate(groups.tolist()):
        hit[row] = [expert in resident for expert in ids]
        turns = [e for e in ids if e in resident] + [e for e in ids if e not in resident]
        for place, expert in enumerate(ids):
            count[expert], last[expert] = count.get(expert, 0) + 1, row * width + place
        rest = flat[(row + 1) * width :]
        for start in range(0, len(turns), slots):
            wave = turns[start : start + slots]
            spare = sorted(resident - set(wave), key=_order(policy, rest, count, last), reverse=True)
            resident = set(wave) | set(spare[: slots - len(wave)])
    return hit


def _order(policy, rest, count, last):
    """Key by which experts are kept, the larger the longer."""
    if policy == "lru":
        return lambda expert: last[expert]
    if policy == "lfu":
        return lambda expert: (count[expert], last[expert])
    return lambda expert: (-rest.index(expert) if expert in rest else -len(rest), last[expert])
