"""The routed experts in Triton: only the K products per token, gathered and fused; no host synchronisation.

Bytes per token and layer at E = 64, H = 128: about 10 KB instead of the 70 KB that the dense form moves, and E/K
times fewer operations. Slots (token, rank) are sorted by expert; a program takes rows of one expert. Forward writes
each slot's output and adds a token's K slots; backward recomputes gate and up, keeps weight gradients of its rows in
registers and adds them once. H and F are powers of two from 16 on.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from dualdeadline.pretrain import model

ROWS = 64  # rows of one product
REPEAT = 16  # row blocks of one backward program: weight gradients are added to memory once per 1024 rows


@triton.jit
def forward_kernel(x_ptr, weight_ptr, gate_up_ptr, down_ptr, order_ptr, start_ptr, block_ptr, out_ptr,
                   H: tl.constexpr, F: tl.constexpr, E: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """out[slot, :] = weight * down(silu(gate x) * up x) for the slots of one expert."""
    expert = tl.load(block_ptr + 2 * tl.program_id(0))
    if expert >= E:
        return
    row = tl.load(block_ptr + 2 * tl.program_id(0) + 1) + tl.arange(0, BLOCK)
    valid = row < tl.load(start_ptr + expert + 1)
    h, f = tl.arange(0, H), tl.arange(0, F)
    slot = tl.load(order_ptr + row, mask=valid, other=0)
    token = (slot // K).to(tl.int64)
    x = tl.load(x_ptr + token[:, None] * H + h[None, :], mask=valid[:, None], other=0.0)
    weight = tl.load(weight_ptr + slot, mask=valid, other=0.0).to(tl.float32)
    rows_gate = gate_up_ptr + expert * 2 * F * H + f[None, :] * H + h[:, None]
    gate = tl.dot(x, tl.load(rows_gate))
    up = tl.dot(x, tl.load(rows_gate + F * H))
    hidden = (gate * tl.sigmoid(gate) * up * weight[:, None]).to(x.dtype)
    down = tl.load(down_ptr + expert * H * F + h[None, :] * F + f[:, None])
    out = tl.dot(hidden, down)
    tl.store(out_ptr + row[:, None].to(tl.int64) * H + h[None, :], out.to(x.dtype), mask=valid[:, None])


@triton.jit
def backward_kernel(x_ptr, weight_ptr, gate_up_ptr, down_ptr, order_ptr, start_ptr, block_ptr, grad_ptr,
                    dx_ptr, dweight_ptr, dgate_up_ptr, ddown_ptr,
                    H: tl.constexpr, F: tl.constexpr, E: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
                    REPEAT: tl.constexpr):
    """Gradients of the slots' inputs and weights (stored) and of one expert's matrices (added, float32)."""
    expert = tl.load(block_ptr + 2 * tl.program_id(0))
    if expert >= E:
        return
    first = tl.load(block_ptr + 2 * tl.program_id(0) + 1)
    end = tl.load(start_ptr + expert + 1)
    h, f = tl.arange(0, H), tl.arange(0, F)
    by_row = expert * 2 * F * H + f[:, None] * H + h[None, :]
    gate_w, up_w = tl.load(gate_up_ptr + by_row), tl.load(gate_up_ptr + by_row + F * H)  # [F, H]
    down_w = tl.load(down_ptr + expert * H * F + h[:, None] * F + f[None, :])  # [H, F]
    # gradients are kept as [H, F]: H rows are enough for the wide tensor-core instruction, F rows are not
    dgate_w, dup_w = tl.zeros((H, F), tl.float32), tl.zeros((H, F), tl.float32)
    ddown_w = tl.zeros((H, F), tl.float32)
    for step in range(REPEAT):
        row = first + step * BLOCK + tl.arange(0, BLOCK)
        valid = row < end
        slot = tl.load(order_ptr + row, mask=valid, other=0)
        token = (slot // K).to(tl.int64)
        x = tl.load(x_ptr + token[:, None] * H + h[None, :], mask=valid[:, None], other=0.0)
        dy = tl.load(grad_ptr + token[:, None] * H + h[None, :], mask=valid[:, None], other=0.0)
        weight = tl.load(weight_ptr + slot, mask=valid, other=0.0).to(tl.float32)
        gate, up = tl.dot(x, tl.trans(gate_w)), tl.dot(x, tl.trans(up_w))
        sigmoid = tl.sigmoid(gate)
        active = gate * sigmoid
        back = tl.dot(dy, down_w)  # gradient of weight * hidden
        tl.store(dweight_ptr + slot, tl.sum(back * active * up, 1), mask=valid)
        back *= weight[:, None]
        dup = (back * active).to(x.dtype)
        dgate = (back * up * sigmoid * (1 + gate * (1 - sigmoid))).to(x.dtype)
        dx = tl.dot(dgate, gate_w)
        dx = tl.dot(dup, up_w, dx)
        tl.store(dx_ptr + row[:, None].to(tl.int64) * H + h[None, :], dx.to(x.dtype), mask=valid[:, None])
        dgate_w = tl.dot(tl.trans(x), dgate, dgate_w)
        dup_w = tl.dot(tl.trans(x), dup, dup_w)
        ddown_w = tl.dot(tl.trans(dy), (active * up * weight[:, None]).to(x.dtype), ddown_w)
    by_width = h[:, None] * F + f[None, :]
    tl.atomic_add(dgate_up_ptr + expert * 2 * F * H + by_width, dgate_w, sem="relaxed")
    tl.atomic_add(dgate_up_ptr + (expert * 2 + 1) * F * H + by_width, dup_w, sem="relaxed")
    tl.atomic_add(ddown_ptr + expert * F * H + by_width, ddown_w, sem="relaxed")


@triton.jit
def gather_kernel(slots_ptr, place_ptr, out_ptr, N, H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """out[n, :] = sum over k of slots[place[n, k], :], float32 sum."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid, h = row < N, tl.arange(0, H)
    total = tl.zeros((BLOCK, H), tl.float32)
    for k in tl.static_range(K):
        place = tl.load(place_ptr + row * K + k, mask=valid, other=0).to(tl.int64)
        slot = tl.load(slots_ptr + place[:, None] * H + h[None, :], mask=valid[:, None], other=0.0)
        total += slot.to(tl.float32)
    tl.store(out_ptr + row[:, None].to(tl.int64) * H + h[None, :], total.to(out_ptr.dtype.element_ty),
             mask=valid[:, None])


def plan(index, experts: int):
    """Slots sorted by expert: order[N*K] (a slot is K times its token plus its rank), place[N, K], start[E+1]."""
    kind = torch.uint8 if experts <= 256 else torch.int32  # one radix pass instead of four
    sorted_ids, order = torch.sort(index.flatten().to(kind), stable=True)
    number = torch.arange(len(order), dtype=torch.int32, device=index.device)
    place = torch.empty_like(number).index_copy_(0, order, number).view(index.shape)
    edges = torch.arange(experts + 1, dtype=torch.int32, device=index.device)
    return order.int(), place, torch.searchsorted(sorted_ids.int(), edges, out_int32=True)


def tables(start, slots: int):
    """The row blocks of forward and backward programs, from the first slot of each expert start[E+1]."""
    return blocks(start, slots, ROWS), blocks(start, slots, ROWS * REPEAT)


def blocks(start, slots: int, size: int):
    """Row blocks of at most `size` slots, none across experts: (expert, first slot), E where unused."""
    experts = start.shape[0] - 1
    ends = ((start.diff() + size - 1) // size).cumsum(0)
    number = torch.arange(-(-slots // size) + experts, device=start.device)
    expert = (ends[None, :] <= number[:, None]).sum(1)
    safe = expert.clamp(max=experts - 1)
    before = F.pad(ends, (1, 0))[safe]
    return torch.stack((expert, start[safe] + (number - before) * size), 1).to(torch.int32)


class Experts(torch.autograd.Function):
    """Routed experts of x[N, H] with weights[N, K] of the experts index[N, K] -> [N, H]."""

    @staticmethod
    def forward(ctx, x, weights, index, gate_up, down, make_tables=tables):
        x, weights, (experts, double, width) = x.contiguous(), weights.contiguous(), gate_up.shape
        order, place, start = plan(index, experts)
        slots = torch.empty(len(order), width, dtype=x.dtype, device=x.device)
        work, back = make_tables(start, len(order))
        forward_kernel[(len(work),)](x, weights, gate_up, down, order, start, work, slots,
                                     width, double // 2, experts, index.shape[1], ROWS, num_warps=4)
        ctx.save_for_backward(x, weights, gate_up, down, order, place, start, back)
        return gathered(slots, place)

    @staticmethod
    def backward(ctx, grad):
        x, weights, gate_up, down, order, place, start, work = ctx.saved_tensors
        experts, double, width = gate_up.shape
        slots = torch.empty(len(order), width, dtype=x.dtype, device=x.device)
        dweight = torch.empty(weights.shape, dtype=torch.float32, device=x.device)
        dgate_up = torch.zeros(experts, 2, width, double // 2, dtype=torch.float32, device=x.device)
        ddown = torch.zeros(down.shape, dtype=torch.float32, device=x.device)
        grad = grad.contiguous().to(x.dtype)
        backward_kernel[(len(work),)](x, weights, gate_up, down, order, start, work, grad, slots, dweight,
                                      dgate_up, ddown, width, double // 2, experts, place.shape[1], ROWS, REPEAT,
                                      num_warps=4, num_stages=2)
        dgate_up = dgate_up.transpose(2, 3).reshape(gate_up.shape)
        return gathered(slots, place), dweight.to(weights.dtype), None, dgate_up, ddown, None


def gathered(slots, place):
    """Sum of each token's slots; slots[N*K, H], place[N, K] -> [N, H]."""
    rows, top_k = place.shape
    out = torch.empty(rows, slots.shape[1], dtype=slots.dtype, device=slots.device)
    gather_kernel[(triton.cdiv(rows, 32),)](slots, place, out, rows, slots.shape[1], top_k, 32)
    return out


def agreement(router, gate_up, down, top_k: int, dtype, rows: int = 5000) -> dict:
    """Relative distance of these experts from the dense ones in float32, outputs and gradients, same routes.

    Args:
        router[E, H], gate_up[E, 2F, H], down[E, H, F]: of one layer. dtype: what the sparse form computes in.

    Raises:
        ArithmeticError: further apart than bfloat16 explains.
    """
    x = torch.randn(rows, router.shape[1], device=router.device).to(dtype)
    weights, index, *_ = model.route(x, router.detach(), top_k, dtype)
    found = []
    for work, at in ((Experts.apply, dtype), (model.dense_experts, torch.float32)):
        given = [x.to(at), weights.float(), gate_up.to(at), down.to(at)]
        given = [value.detach().clone().requires_grad_() for value in given]
        out = work(given[0], given[1], index, *given[2:])
        (out.float() * torch.linspace(-1, 1, out.shape[1], device=x.device)).sum().backward()
        found.append([out.detach().float()] + [value.grad.float() for value in given])
    names = ("out", "x", "weights", "gate_up", "down")
    apart = {name: ((a - b).norm() / b.norm()).item() for name, a, b in zip(names, *found, strict=True)}
    if not all(value < 0.02 for value in apart.values()):
        raise ArithmeticError(f"sparse and dense experts disagree: {apart}; needed: at most 0.02 each")
    return {name: round(value, 6) for name, value in apart.items()}
