"""The small top-k kernel against torch's own, and where compiled code takes it."""

import pytest
import torch
from conftest import passes_interpreted

from dualdeadline import kernels
from dualdeadline.kernels import topk

interpreted = pytest.mark.skipif(not kernels.INTERPRETED, reason="runs inside test_in_the_interpreter")


@pytest.mark.skipif(kernels.INTERPRETED, reason="runs outside the interpreter")
def test_in_the_interpreter():
    passes_interpreted(__file__)


@interpreted
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("rows, E, k", ((1, 64, 8), (8, 256, 8), (3, 60, 4), (2, 7, 7), (1, 1, 1)))
def test_values_and_ids_are_those_of_torch(rows, E, k, dtype):
    scores = torch.randn(rows, E, generator=torch.Generator().manual_seed(E))
    scores = (scores.argsort(1).float() - E // 2).to(dtype)  # all different, also in bfloat16
    values, ids = topk.topk(scores, k)
    wanted = scores.topk(k)
    assert torch.equal(values, wanted.values) and torch.equal(ids, wanted.indices) and values.dtype == dtype


@interpreted
def test_equal_scores_in_ascending_id_infinities_and_nan_as_torch_orders_them():
    scores = torch.tensor([[0.0, 2.0, -0.0, 2.0, float("-inf"), float("inf"), float("nan"), -1.0]])
    values, ids = topk.topk(scores, 8)
    assert ids.tolist() == [[6, 5, 1, 3, 0, 2, 7, 4]]
    assert values[0, 0].isnan() and torch.equal(values[0, 1:], scores.topk(8).values[0, 1:])


@interpreted
def test_rows_need_not_lie_behind_one_another():
    wide = torch.randn(4, 2, 16, generator=torch.Generator().manual_seed(0))
    for scores in (wide[:, 1], wide[:, 0].T.contiguous().T):
        assert torch.equal(topk.topk(scores, 2)[1], scores.topk(2).indices)


@interpreted
@pytest.mark.parametrize("shape, k", (((9, 8), 2), ((1, 2048), 2), ((1, 8), 9), ((8,), 1)))
def test_what_does_not_fit_is_named(shape, k):
    with pytest.raises(ValueError, match="needed: floats"):
        topk.topk(torch.zeros(shape), k)
    with pytest.raises(ValueError, match="torch.int64"):
        topk.topk(torch.zeros(1, 8, dtype=torch.int64), 1)


@interpreted
def test_compiled_code_takes_it_for_few_rows_only():
    from dualdeadline.engine import compiled

    def route(scores):
        values, ids = torch.softmax(scores, -1).topk(4, dim=-1)
        return values / values.sum(-1, keepdim=True), ids, scores.topk(2, dim=0).values

    calls = []
    kept, topk.topk_kernel = topk.topk_kernel, Spy(topk.topk_kernel, calls)
    try:
        fast = torch.compile(route, dynamic=False, options=compiled.options())
        for rows in (2, 9):
            scores = torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows))
            found, wanted = fast(scores), route(scores)
            assert torch.equal(found[1], wanted[1]) and torch.allclose(found[0], wanted[0])
            assert torch.equal(found[2], wanted[2])
    finally:
        topk.topk_kernel = kept
    assert calls == [(2,)]


class Spy:
    """Notes the grids of a kernel's launches."""

    def __init__(self, kernel, calls):
        self.kernel, self.calls = kernel, calls

    def __getitem__(self, grid):
        self.calls.append(grid)
        return self.kernel[grid]
