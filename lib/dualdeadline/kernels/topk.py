"""The largest K of a router's scores in one small launch; torch's own top-k and sort take a tenth of a decode layer."""

from __future__ import annotations

import torch
from torch import Tensor, library

from dualdeadline.kernels import INTERPRETED, require, tl, triton

MOST = {"rows": 8, "scores": 1024, "k": 64}  # above, torch's own is the better choice


@triton.jit
def topk_kernel(scores_ptr, values_ptr, ids_ptr, stride, E: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """One row per program: K times the largest key; equal scores in ascending id, NaN first as in torch."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    score = tl.load(scores_ptr + row * stride + at, mask=at < E, other=0.0).to(tl.float32)
    bits = score.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # integers in the order of the numbers
    order = tl.where(score != score, 0x7FFFFFFF, order)
    order = tl.where(score == 0.0, 0, order)
    key = order.to(tl.int64) * BLOCK + (BLOCK - 1 - at)
    lowest = tl.full([BLOCK], -(2**62), tl.int64)
    key = tl.where(at < E, key, lowest)
    for rank in range(K):
        best = tl.max(key, 0)
        found = key == best
        tl.store(ids_ptr + row * K + rank, tl.max(tl.where(found, at, 0), 0).to(tl.int64))
        value = tl.sum(tl.where(found, score, 0.0), 0)
        tl.store(values_ptr + row * K + rank, value.to(values_ptr.dtype.element_ty))
        key = tl.where(found, lowest, key)


def topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values [N,K] and ids int64 [N,K] of the largest k of scores [N,E], largest first; of equal ones the lowest id.

    Raises:
        ValueError: sizes above MOST, or k above E. RuntimeError: no GPU and no interpreter.
    """
    require(scores)
    if scores.dim() != 2 or not scores.is_floating_point() or not fits(*scores.shape, k):
        raise ValueError(f"scores are {scores.dtype} {tuple(scores.shape)}, k is {k}; needed: floats [N,E] and k of at "
                         f"most {MOST['rows']} rows, {MOST['scores']} scores, {MOST['k']} and E")
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    N, E = scores.shape
    values, ids = scores.new_empty(N, k), scores.new_empty(N, k, dtype=torch.int64)
    topk_kernel[(N,)](scores, values, ids, scores.stride(0), E, k, triton.next_power_of_2(E), num_warps=1)
    return values, ids


def fits(rows: int, E: int, k: int) -> bool:
    """Whether `topk` takes such sizes."""
    return 1 <= rows <= MOST["rows"] and 1 <= k <= min(E, MOST["k"]) and E <= MOST["scores"]


@library.custom_op("dualdeadline::topk", mutates_args=())
def topk_op(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`topk` for compiled code."""
    return topk(scores, k)


@topk_op.register_fake
def _(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = (scores.shape[0], k)
    return scores.new_empty(shape), scores.new_empty(shape, dtype=torch.int64)


def replace(graph) -> int:
    """Put `topk` where a compiled graph calls torch's on few rows of a GPU; how many were replaced."""
    replaced = 0
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.topk.default):
        scores, k, *rest = node.args
        dim, largest, ranked = (*rest, -1, True, True)[0], *(*rest[1:], True, True)[:2]
        found = scores.meta["val"]
        if found.dim() != 2 or dim not in (-1, 1) or not (largest and ranked) or not found.is_floating_point():
            continue
        if (found.device.type == "cuda" or INTERPRETED) and fits(*found.shape, k):
            node.target, node.args, node.kwargs = torch.ops.dualdeadline.topk.default, (scores, k), {}
            replaced += 1
    return replaced
