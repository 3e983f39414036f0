"""Expert, grouped and fetch kernels in Triton's interpreter against torch; what is claimed bitwise is asserted so.

The interpreter has to be chosen before Triton is imported, so these tests run in one pytest process of their own
(`test_in_the_interpreter`), where this file is collected a second time.
"""

import subprocess
import sys
import types
import warnings

import pytest
import torch
from conftest import passes_interpreted

from dualdeadline import kernels
from dualdeadline.kernels import experts, fetch, grouped
from dualdeadline.kernels.experts import Tiles

if kernels.INTERPRETED:
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    def patch_once(function):
        """The interpreter patches triton.language anew for every nested call; once per module saves half the time."""
        if id(function.__globals__) not in patched:
            patched.add(id(function.__globals__))
            patch(function)
        return types.SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_once

interpreted = pytest.mark.skipif(not kernels.INTERPRETED, reason="runs inside test_in_the_interpreter")
outside = pytest.mark.skipif(kernels.INTERPRETED, reason="runs outside the interpreter")
# few programs: the interpreter takes a millisecond for each handful of operations, whatever their size
SMALL = Tiles(rows=32, block=64, warps=1, down_rows=64, down_block=32, down_warps=1, ranks=2)
WIDE = Tiles(rows=256, block=128, unroll=2, down_rows=256, down_block=128, down_unroll=2, ranks=8)
CASES = [(1, 3, 80, 48, 5, torch.float32, SMALL), (2, 3, 176, 208, 4, torch.bfloat16, WIDE),
         (8, 1, 64, 32, 3, torch.bfloat16, SMALL)]  # N, K, H, F, C


@outside
def test_in_the_interpreter():
    passes_interpreted(__file__)


def draw(N, K, H, F, C, dtype, seed=0, gap=0):
    """x, banks, slots, weights; experts are distinct per token and shared among tokens, slots `gap` elements apart."""
    torch.manual_seed(seed)
    gate_up, down = torch.randn(C, 2 * F, H) * H**-0.5, torch.randn(C, H, F) * F**-0.5
    slots = torch.stack([torch.randperm(C)[:K] for _ in range(N)]).int()
    weights = torch.rand(N, K).softmax(-1)
    return torch.randn(N, H).to(dtype), spread(gate_up, dtype, gap), spread(down, dtype, gap), slots, weights


def spread(bank, dtype, gap):
    """The bank as a view into longer records, as experts lie when both components share one."""
    records = torch.full((len(bank), bank[0].numel() + gap), float("nan"), dtype=dtype)
    view = records[:, : bank[0].numel()].unflatten(1, bank.shape[1:])
    return view.copy_(bank)


def within(found, wanted, bound):
    assert found.shape == wanted.shape and not found.isnan().any()
    assert ((found.float() - wanted).abs() <= bound).all(), ((found.float() - wanted).abs() / bound).max()


@interpreted
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:6])))
def test_stages_are_right_and_fusion_changes_no_bit(case):
    *sizes, dtype, tiles = case
    x, gate_up, down, slots, weights = draw(*sizes, dtype, gap=48)
    in_hidden, in_output = experts.error_bound(x, gate_up, down, slots, weights)
    hidden = experts.gate_up(x, gate_up, slots, tiles=tiles)
    within(hidden, experts.gate_up_reference(x, gate_up, slots), in_hidden)
    halves = experts.gate(x, gate_up, slots, tiles=tiles), experts.up(x, gate_up, slots, tiles=tiles)
    assert halves[0].dtype == torch.float32
    assert torch.equal(experts.activate(*halves, dtype), hidden)

    partial = experts.down(hidden, down, slots, tiles=tiles)
    size = experts.down_reference(hidden.abs(), down.abs(), slots)
    within(partial, experts.down_reference(hidden, down, slots), 2 * sizes[3] * 2**-24 * size + 1e-30)
    apart = experts.combine(partial, weights, dtype=dtype)
    within(apart, experts.experts_reference(x, gate_up, down, slots, weights), in_output)
    assert torch.equal(experts.down_combine(hidden, down, slots, weights, tiles=tiles), apart)
    for kind in (tiles, Tiles(**vars(tiles) | {"down_warps": tiles.warps, "persistent": 1})):
        buffers = experts.workspace(*sizes[:4], dtype)
        buffers.out.fill_(float("nan"))
        found = experts.experts(x, gate_up, down, slots, weights, buffers, kind)
        assert found is buffers.out and torch.equal(found, apart) and torch.equal(buffers.hidden, hidden)


@interpreted
def test_the_reduction_tile_not_the_rows_decides_the_bits():
    x, gate_up, down, slots, weights = draw(1, 3, 208, 80, 5, torch.float32)

    def run(**changes):
        return experts.experts(x, gate_up, down, slots, weights, tiles=Tiles(**vars(SMALL) | changes))

    assert torch.equal(run(), run(rows=128, down_rows=128, ranks=4, unroll=2, down_unroll=4, fence=False))
    assert not torch.equal(run(), run(block=256, down_block=256))


@interpreted
def test_a_pair_does_not_depend_on_its_company(dtype=torch.bfloat16):
    N, K, H, F, C = 3, 2, 80, 48, 4
    x, gate_up, down, slots, weights = draw(N, K, H, F, C, dtype)
    whole = experts.gate_up(x, gate_up, slots, tiles=SMALL)
    partial = experts.down(whole, down, slots, tiles=SMALL)
    hidden, pieces = torch.full_like(whole, float("nan")), torch.full_like(partial, float("nan"))
    order = torch.randperm(N * K).int()
    for pairs in (order[:1], order[1:4], order[4:4], order[4:]):
        experts.gate_up(x, gate_up, slots, hidden, pairs, SMALL)
        experts.down(hidden, down, slots, pieces, pairs, SMALL)
    assert torch.equal(hidden, whole) and torch.equal(pieces, partial)
    for token in range(N):
        alone = experts.gate_up(x[token : token + 1], gate_up, slots[token : token + 1], tiles=SMALL)
        assert torch.equal(alone[0], whole[token])
    one = torch.full_like(whole, float("nan"))
    experts.gate_up(x, gate_up, slots, one, order[:1], SMALL)
    assert one.isnan().flatten(0, 1).any(1).sum() == N * K - 1  # the others are left as they were


@interpreted
def test_ranks_are_added_in_order_by_fused_multiply_adds():
    torch.manual_seed(0)
    partial, weights = torch.randn(2, 5, 48), torch.rand(2, 5)
    total = torch.zeros(2, 48)
    for rank in range(5):
        # the interpreter multiplies and adds in float32, one after the other
        total = weights[:, rank, None] * partial[:, rank] + total
    assert torch.equal(experts.combine(partial, weights), total)
    other = experts.combine(partial.flip(1).contiguous(), weights.flip(1).contiguous())
    assert not torch.equal(other, total)
    assert experts.combine(partial, weights.bfloat16()).dtype == torch.bfloat16


@interpreted
def test_a_slot_out_of_range_counts_as_zero_and_is_never_read():
    x, gate_up, down, slots, weights = draw(2, 2, 64, 32, 4, torch.float32)
    clean = slots.clone()
    for bad, tiles in ((-1, SMALL), (2**31 - 1, Tiles(**vars(SMALL) | {"persistent": 1}))):
        slots[1, 1] = bad
        hidden = experts.gate_up(x, gate_up, slots, tiles=SMALL, check=False)
        assert (hidden[1, 1] == 0).all() and (hidden[0] != 0).any()
        assert (experts.down(torch.ones_like(hidden), down, slots, tiles=SMALL, check=False)[1, 1] == 0).all()
        without = weights.clone()
        without[1, 1] = 0
        found = experts.experts(x, gate_up, down, slots, weights, tiles=tiles, check=False)
        assert torch.equal(found, experts.experts(x, gate_up, down, clean, without, tiles=SMALL))
        reference = experts.experts_reference(x, gate_up, down, slots, weights)
        torch.testing.assert_close(found, reference, atol=1e-5, rtol=1e-5)
        with pytest.raises(ValueError, match="slots run from"):
            experts.experts(x, gate_up, down, slots, weights)
        found = grouped.experts(x, gate_up, down, slots, weights, check=False)
        torch.testing.assert_close(found, reference, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="pairs run from"):
        experts.gate_up(x, gate_up, clean, pairs=torch.tensor([4], dtype=torch.int32))
    hidden = torch.full((2, 2, 32), float("nan"))
    experts.gate_up(x, gate_up, clean, hidden, torch.tensor([-1, 4, 2], dtype=torch.int32), SMALL, check=False)
    assert hidden.flatten(0, 1).isnan().any(1).tolist() == [True, True, False, True]


@interpreted
@pytest.mark.parametrize("case", [(9, 3, 80, 48, 4, torch.bfloat16), (29, 1, 48, 80, 3, torch.float32)],
                         ids=["9 tokens", "29 tokens"])
def test_grouped_is_right_and_each_expert_alone_gives_the_same_bits(case):
    *sizes, dtype = case
    C = sizes[-1]
    x, gate_up, down, slots, weights = draw(*case, gap=16)
    tiles = grouped.GroupedTiles(rows=16, columns=64, block=32)
    in_hidden, in_output = experts.error_bound(x, gate_up, down, slots, weights)
    plan = grouped.plan(slots, C, tiles)
    hidden = grouped.gate_up(x, gate_up, plan)
    within(hidden, experts.gate_up_reference(x, gate_up, slots), in_hidden)
    partial = grouped.down(hidden, down, plan)
    found = grouped.experts(x, gate_up, down, slots, weights, tiles)
    assert torch.equal(found, experts.combine(partial, weights, dtype=dtype))
    within(found, experts.experts_reference(x, gate_up, down, slots, weights), in_output)
    handed_over = experts.experts(x, gate_up, down, slots, weights)
    assert torch.equal(handed_over, grouped.experts(x, gate_up, down, slots, weights))

    staged, pieces = torch.full_like(hidden, float("nan")), torch.full_like(partial, float("nan"))
    groups = [torch.tensor([2], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)]
    groups += [torch.tensor([0, 1, C + 3, -1], dtype=torch.int32), torch.zeros(C, dtype=torch.bool)]
    for only in groups:
        grouped.gate_up(x, gate_up, plan, only, staged)
        grouped.down(staged, down, plan, only, pieces)
        assert torch.equal(grouped.mask(only, C).nonzero()[:, 0], only[(only >= 0) & (only < C)].long().sort()[0]
                           if only.dtype != torch.bool else only.nonzero()[:, 0])
    assert torch.equal(staged, hidden) and torch.equal(pieces, partial)


@outside
def test_plan_cuts_rows_by_expert():
    slots = torch.tensor([[3, 0], [3, 9], [3, -1], [3, 0]], dtype=torch.int32)
    plan = grouped.plan(slots, 5, grouped.GroupedTiles(rows=2))
    assert plan.order.tolist() == [1, 7, 0, 2, 4, 6, 3, 5]
    assert plan.start.tolist() == [0, 2, 2, 2, 6, 6, 8]
    used = plan.blocks[plan.blocks[:, 0] <= 5].tolist()
    assert used == [[0, 0], [3, 2], [3, 4], [5, 6]] and len(plan.blocks) == 4 + 6
    full = grouped.plan(torch.arange(48, dtype=torch.int32).view(24, 2), 48, grouped.GroupedTiles(rows=16))
    assert (full.blocks[:, 0] < 48).sum() == 48
    assert grouped.GroupedTiles.default(64) != grouped.GroupedTiles.default(8192)


@interpreted
@pytest.mark.parametrize(("gap", "unroll", "programs"), [(0, 1, 1), (24, 2, 3)])
def test_fetch_copies_any_bytes(gap, unroll, programs):
    torch.manual_seed(0)
    host = torch.randint(-2**15, 2**15, (6, 40 * 24 + gap), dtype=torch.int16)  # NaN payloads and subnormals too
    bank = torch.zeros(4, 40 * 24 + 2 * gap, dtype=torch.int16)
    sources = host[:, : 40 * 24].unflatten(1, (40, 24)).view(torch.bfloat16)
    slots = bank[:, : 40 * 24].unflatten(1, (40, 24)).view(torch.bfloat16)
    assert sources.isnan().any()

    def ids(*values):
        return torch.tensor(values, dtype=torch.int32)

    fetch.fetch(sources, slots, ids(5, 6, 0, -1, 3, 2, 1), ids(2, 1, 0, 1, 4, -1, 3), ids(6), programs, 1, unroll)
    wanted = torch.zeros_like(bank)
    wanted[2, : 40 * 24], wanted[0, : 40 * 24] = host[5, : 40 * 24], host[0, : 40 * 24]
    assert torch.equal(bank, wanted)
    fetch.fetch(sources, slots, ids(4), ids(1), ids(0), programs, 1, unroll)
    assert torch.equal(bank, wanted)
    fetch.fetch(sources, slots, ids(4), ids(1), ids(99), programs, 1, unroll)
    wanted[1, : 40 * 24] = host[4, : 40 * 24]
    assert torch.equal(bank, wanted)


@interpreted
def test_what_does_not_fit_is_named():
    x, gate_up, down, slots, weights = draw(2, 3, 64, 32, 4, torch.float32)
    hidden = torch.zeros(2, 3, 32)
    cases = {
        "slots is torch.int16": lambda: experts.gate_up(x, gate_up, slots.short()),
        "needed: torch.float32 of three": lambda: experts.gate_up(x, gate_up.bfloat16(), slots),
        "contiguous within a slot": lambda: experts.gate_up(x, gate_up.transpose(1, 2), slots),
        "dtype is torch.float16": lambda: experts.gate_up(x.half(), gate_up.half(), slots),
        "F is 24": lambda: experts.gate_up(x, gate_up[:, :48].contiguous(), slots),
        r"x is .*\(1, 64\)": lambda: experts.gate_up(x[:1], gate_up, slots),
        r"hidden is .*\(2, 3, 32\)": lambda: experts.down(hidden, down[:, :, :16].contiguous(), slots),
        "N is 9": lambda: experts.gate_up(torch.zeros(9, 64), gate_up, torch.zeros(9, 3, dtype=torch.int32)),
        "K is 65": lambda: experts.gate_up(x, gate_up, torch.zeros(2, 65, dtype=torch.int32)),
        "pairs is torch.int64": lambda: experts.gate_up(x, gate_up, slots, pairs=torch.tensor([0])),
        "out is": lambda: experts.gate_up(x, gate_up, slots, out=hidden.double()),
        "weights is": lambda: experts.down_combine(hidden, down, slots, weights[:, :2]),
        "powers of 2": lambda: Tiles(rows=3),
        "persistent": lambda: Tiles(persistent=1, pdl=True),
        "int32 .N,K.": lambda: grouped.plan(slots.long(), 4),
        "needed: 4 slots": lambda: grouped.gate_up(x, gate_up[:3], grouped.plan(slots, 4)),
        "only is": lambda: grouped.gate_up(x, gate_up, grouped.plan(slots, 4), torch.ones(3, dtype=torch.bool)),
        "source_ids is": lambda: fetch.fetch(down, down.clone(), slots.long()[0], slots[0], slots[0, :1]),
        "lengths are 3, 3, 3": lambda: fetch.fetch(down, down.clone(), slots[0], slots[0], slots[0]),
        "same shape": lambda: fetch.fetch(down, gate_up, slots[0], slots[0], slots[0, :1]),
        "slots of 8 bytes": lambda: fetch.fetch(down[:, :1, :2], down, slots[0], slots[0], slots[0, :1]),
    }
    for message, call in cases.items():
        with pytest.raises(ValueError, match=message):
            call()


@outside
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_eager_torch_is_transformers_loop(dtype):
    from transformers import OlmoeConfig
    from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

    x, gate_up, down, slots, weights = draw(7, 3, 64, 32, 6, dtype)
    config = OlmoeConfig(hidden_size=64, intermediate_size=32, num_experts=6, num_experts_per_tok=3)
    module = OlmoeExperts(config).to(dtype)
    module.gate_up_proj.data, module.down_proj.data = gate_up, down
    wanted = module(x, slots.long(), weights.to(dtype)).detach()
    assert torch.equal(experts.torch_experts(x, gate_up, down, slots, weights.to(dtype)), wanted)
    bound = experts.error_bound(x.float(), gate_up.float(), down.float(), slots, weights)[1]
    if dtype == torch.float32:
        within(wanted, experts.experts_reference(x, gate_up, down, slots, weights), bound)


@outside
def test_weights_that_are_not_finite_are_named():
    bank = torch.zeros(20, 8, 4)
    experts.check_finite(bank, "gate_up")
    bank[17, 5, 2] = float("inf")
    with pytest.raises(ValueError, match=r"up of expert 17 is inf at \[5, 2\]"):
        experts.check_finite(bank, "gate_up")
    bank[3, 1, 0] = float("nan")
    with pytest.raises(ValueError, match=r"gate of expert 3 is nan"):
        experts.check_finite(bank, "gate_up")
    with pytest.raises(ValueError, match="down of expert 3"):
        experts.check_finite(bank, "down", chunk=1)


@outside
@pytest.mark.skipif(torch.cuda.is_available(), reason="says why a machine without a GPU cannot run the kernels")
def test_without_a_gpu_the_reason_is_given():
    x, gate_up, down, slots, weights = draw(2, 3, 64, 32, 4, torch.float32)
    assert "TRITON_INTERPRET=1" in kernels.available()
    ids = slots[0]
    for call in (lambda: experts.experts(x, gate_up, down, slots, weights),
                 lambda: grouped.gate_up(x, gate_up, grouped.plan(slots, 4)),
                 lambda: experts.combine(torch.zeros(2, 3, 64), weights),
                 lambda: fetch.fetch(down, down.clone(), ids, ids, ids[:1])):
        with pytest.raises(RuntimeError, match="no GPU is visible"):
            call()


@outside
def test_without_triton_the_package_still_imports():
    code = """
import sys
sys.modules["triton"] = None
from dualdeadline import kernels
from dualdeadline.kernels import experts
import torch
assert "triton is not installed" in kernels.available()
bank = torch.ones(2, 32, 16)
assert experts.torch_gate_up(torch.ones(1, 16), bank[0]).shape == (1, 16)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@outside
@pytest.mark.skipif(torch.cuda.is_available(), reason="memory can be pinned")
def test_memory_that_cannot_be_pinned_warns_once(monkeypatch):
    monkeypatch.setattr(fetch, "_warned", False)
    tensor = torch.ones(4)
    with pytest.warns(UserWarning, match="fetch is not possible"):
        assert fetch.pin(tensor) is tensor
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fetch.pin(tensor) is tensor
