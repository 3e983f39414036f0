"""Stack depths: one pass over the accesses gives the hits at every slot count.

LRU, LFU with counts that survive eviction, and Belady's optimum are stack algorithms: the content of a cache
with C slots is part of the content with C+1, because each ranks experts by a key that does not depend on C
(Mattson, Gecsei, Slutz and Traiger, "Evaluation techniques for storage hierarchies", IBM Systems Journal
9(2), 1970). An access hits in C slots exactly if its expert's depth in that stack is at most C.

Accesses come in groups of `group` that are looked up together and pinned until all of them are in: one access
(order "rank") or the K of a token (order "token", where depths hold for C >= K only).
"""

from __future__ import annotations

import math

import numpy as np

from dualdeadline.cache.lanes import neighbours

MISS = np.int32(2**30)  # depth of a first use: deeper than any cache
FEW_LANES = 48  # below it numpy's loop over columns is quicker than vector steps over lanes (measured)
WORKING_SET = 2**17  # elements of one vector step; int16 arrays of this size stay in a second-level cache


def keys(ids: np.ndarray, policy: str) -> tuple[np.ndarray, np.ndarray]:
    """Replacement keys (smaller is kept) of every access of `ids[n, R]`: before it and after it.

    Keys lie in 0..n-1 and are unique within a lane, so a key also names its expert. After: n means not used
    again (only the optimum knows). Before: -2 marks a first use, whose key is in no stack.
    """
    n = len(ids)
    small = np.int16 if n < 2**15 - 2 else np.int32
    earlier, later, count = neighbours(ids)
    place = np.arange(n, dtype=np.int64)[:, None]
    if policy == "belady":
        return np.where(earlier >= 0, place, -2).astype(small), later.astype(small)
    value = np.broadcast_to(place, ids.shape) if policy == "lru" else count * np.int64(n) + place
    rank = np.empty(ids.shape, small)
    np.put_along_axis(rank, np.argsort(-value, axis=0), np.broadcast_to(place.astype(small), ids.shape), 0)
    before = np.take_along_axis(rank, np.maximum(earlier, 0), 0)
    return np.where(earlier >= 0, before, small(-2)), rank


def priority_depths(ids: np.ndarray, policy: str, group: int, experts: int) -> np.ndarray:
    """Depth `[n, R]` of every access of `ids[n, R]` in Mattson's priority stack of any policy (1: on top).

    A push carries the worst expert met so far down to the first hole; at each level the better of the carried
    and the resident one stays. What is carried is the running maximum of the keys: one vector step for all
    lanes. All experts of a group leave holes first and are pinned on top while the group is pushed.
    """
    before, after = keys(ids, policy)
    n, lanes = ids.shape
    side = math.isqrt(experts - 1) + 1
    stack = np.full((-(-experts // side) * side, lanes), n, after.dtype)
    carried = np.empty_like(stack)
    places = np.arange(1, len(stack) + 1, dtype=np.float32)
    depth = np.empty((n, lanes), np.int32)
    for start in range(0, n, group):
        holes = np.zeros(stack.shape, bool)
        for access in range(start, start + group):
            found = stack == before[access]
            depth[access] = places @ found.astype(np.float32)
            holes |= found
        stack[holes] = n + 1
        for _ in range(group):
            running_maximum(stack, side, carried)
            np.minimum(stack[1:], carried[:-1], out=stack[1:])
            stack[0] = -1
        stack[:group] = after[start : start + group]
    return np.where(depth > 0, depth, MISS)


def running_maximum(values: np.ndarray, side: int, out: np.ndarray) -> None:
    """Running maximum of `values[E, R]` along axis 0 into `out`; `side` divides E.

    numpy's own goes down one column at a time; with many lanes it is quicker to run it in E/side blocks side by
    side and then to pass each block's last row on, both in vector steps over the lanes.
    """
    if values.shape[1] < FEW_LANES:
        np.maximum.accumulate(values, axis=0, out=out)
        return
    values, out = (array.reshape(-1, side, array.shape[1]) for array in (values, out))
    out[:, 0] = values[:, 0]
    for row in range(1, side):
        np.maximum(out[:, row - 1], values[:, row], out=out[:, row])
    for block in range(1, len(out)):
        np.maximum(out[block], out[block - 1, -1], out=out[block])


def lru_depths(ids: np.ndarray, group: int, experts: int) -> np.ndarray:
    """Depth `[n, R]` of every access of `ids[n, R]` under LRU: 1 + experts used since its own last use.

    The state of LRU at any point is the last use of each expert, so a long sequence is cut into chunks that
    run side by side, each from the state where it begins.
    """
    n, lanes = ids.shape
    chunks = max(1, min(WORKING_SET // (experts * lanes), n // (8 * group)))
    length = -(-n // (chunks * group)) * group
    cut = np.full((chunks * length, lanes), experts, np.intp)
    cut[:n] = ids
    cut = cut.reshape(chunks, length, lanes).transpose(1, 0, 2).reshape(length, -1)
    small = np.int16 if chunks * length < 2**15 - 1 else np.int32
    last, never = _chunk_starts(cut, chunks, experts).astype(small), -chunks * length - 1
    lane, depth = np.arange(cut.shape[1]), np.empty(cut.shape, np.int32)
    cells = last.reshape(-1)  # one flat index is quicker than two
    for start in range(0, length, group):
        now = cut[start : start + group] * len(lane) + lane
        own = cells[now]
        for access in range(group):
            depth[start + access] = _count(last > own[access])
        depth[start : start + group][own <= never] = MISS
        cells[now] = np.arange(start, start + group, dtype=small)[:, None]
    return depth.reshape(length, chunks, lanes).transpose(1, 0, 2).reshape(-1, lanes)[:n]


def _chunk_starts(cut: np.ndarray, chunks: int, experts: int) -> np.ndarray:
    """Last uses `[E+1, R]` when each chunk begins, counted from there (so below 0); below
    -chunks * length: none yet."""
    length, lanes = cut.shape
    last = np.full((experts + 1) * lanes, -1, np.int32)
    for access in range(length):
        last[cut[access] * lanes + np.arange(lanes)] = access
    begin = np.arange(chunks, dtype=np.int32)[:, None] * length
    none = -2 * chunks * length
    last = last.reshape(experts + 1, chunks, -1)
    last = np.maximum.accumulate(np.where(last < 0, none, last + begin), axis=1)
    start = np.full(last.shape, none, np.int32)
    start[:, 1:] = last[:, :-1] - begin[1:]
    return np.maximum(start, -chunks * length - 1).reshape(experts + 1, lanes)


def _count(flags: np.ndarray) -> np.ndarray:
    """1 + number of flags set per column; bytes are added as bytes, 254 rows at a time, which vectorises."""
    count = np.ones(flags.shape[1], np.int32)
    for row in range(0, len(flags), 254):
        count += flags[row : row + 254].view(np.uint8).sum(0, dtype=np.uint8)
    return count
