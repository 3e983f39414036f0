"""The small top-k kernel against torch's own, and where compiled code takes it."""

import pytest
import torch
from conftest import passes_interpreted
from torch.fx.experimental.proxy_tensor import make_fx

from dualdeadline import kernels
from dualdeadline.engine import compiled
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
    def route(scores):
        values, ids = torch.softmax(scores, -1).topk(4, dim=-1)
        return values / values.sum(-1, keepdim=True), ids, scores.topk(2, dim=0).values

    calls = []
    kept, topk.topk_kernel = topk.topk_kernel, Spy(topk.topk_kernel, calls)
    try:
        for rows, replaced in ((2, 1), (9, 0)):
            scores = torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows))
            traced = make_fx(route, tracing_mode="fake")(scores)
            assert topk.replace(traced.graph) == replaced
            traced.recompile()
            found, wanted = traced(scores), route(scores)
            assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    finally:
        topk.topk_kernel = kept
    assert calls == [(2,)]
    assert compiled.options()["post_grad_custom_post_pass"].uuid()


class Spy:
    """Notes the grids of a kernel's launches."""

    def __init__(self, kernel, calls):
        self.kernel, self.calls = kernel, calls

    def __getitem__(self, grid):
        self.calls.append(grid)
        return self.kernel[grid]
