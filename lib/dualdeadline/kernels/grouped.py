"""Routed experts of more than 8 tokens: one grouped matrix product over rows that were sorted by expert.

`plan` sorts the pairs (flat indices n*K+k) by slot on the device and cuts every expert's rows into blocks, none across
experts; the number of blocks has an upper bound, so nothing waits for the device and a CUDA graph can hold it all. The
blocks of an expert depend on its own rows only: computing some experts now and others later (`only`) gives the same
bits as one launch. Rows come back in the places of their pairs, and `experts.combine` adds them in rank order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dualdeadline.kernels import INTERPRETED, require, tl, triton
from dualdeadline.kernels.experts import MAX_TOP_K, _check_ids, _like, combine


@dataclass(frozen=True)
class GroupedTiles:
    """Rows of a block, columns of one program, elements of one reduction step, warps, steps in flight."""

    rows: int = 16
    columns: int = 64
    block: int = 128
    warps: int = 4
    stages: int = 4

    @classmethod
    def default(cls, pairs: int) -> GroupedTiles:
        """By the number of pairs alone, so that resident and offloaded runs of the same tokens agree."""
        if pairs <= 1024:
            return cls()
        return cls(rows=64, columns=64, block=64) if pairs <= 8192 else cls(rows=128, block=64, warps=8, stages=3)


@dataclass(frozen=True)
class Plan:
    """Pairs sorted by slot, and blocks of them.

    Attributes:
        order: int32[N*K] pairs by slot, those without a valid one last. start: int32[C+2] first place of each slot.
        blocks: int32[B,2] slot (C: no valid slot, C+1: unused) and first place. shape: (N, K). C: slots.
        tiles: how the launches are cut.
    """

    order: Tensor
    start: Tensor
    blocks: Tensor
    shape: tuple[int, int]
    C: int
    tiles: GroupedTiles


def plan(slots: Tensor, C: int, tiles: GroupedTiles | None = None) -> Plan:
    """Sort and cut slots int32[N,K] for banks of C slots, on their device and without waiting for it."""
    if slots.dim() != 2 or slots.dtype != torch.int32 or not 1 <= slots.shape[1] <= MAX_TOP_K:
        raise ValueError(f"slots is {slots.dtype} {tuple(slots.shape)}; needed: int32 [N,K], K up to {MAX_TOP_K}")
    flat, tiles = slots.flatten(), tiles or GroupedTiles.default(slots.numel())
    key = flat.where((flat >= 0) & (flat < C), C).long()
    order = key.argsort(stable=True)
    used = torch.zeros(C + 1, dtype=torch.int64, device=slots.device).scatter_add_(0, key, torch.ones_like(key))
    start = torch.nn.functional.pad(used.cumsum(0), (1, 0))
    ends = ((used + tiles.rows - 1) // tiles.rows).cumsum(0)
    bound = -(-len(flat) // tiles.rows) + min(C + 1, len(flat))
    number = torch.arange(bound, device=slots.device)
    slot = torch.searchsorted(ends, number, right=True)
    safe = slot.clamp(max=C)
    before = torch.nn.functional.pad(ends, (1, 0))[safe]
    blocks = torch.stack((slot, start[safe] + (number - before) * tiles.rows), 1)
    return Plan(order.int(), start.int(), blocks.int(), tuple(slots.shape), C, tiles)


def mask(only: Tensor, C: int) -> Tensor:
    """bool[C] of the slots named in int32 `only`; ids out of range are ignored, a mask is returned as it is."""
    if only.dtype == torch.bool:
        return only
    wanted = torch.zeros(C + 1, dtype=torch.bool, device=only.device)
    wanted[only.where((only >= 0) & (only < C), C).long()] = True
    return wanted[:C]


@triton.jit
def _rows(order_ptr, start_ptr, blocks_ptr, only_ptr, C, ROWS: tl.constexpr, SOME: tl.constexpr):
    """This program's slot (above C: nothing to do), its pairs, and which of its rows exist."""
    slot = tl.load(blocks_ptr + 2 * tl.program_id(0))
    place = tl.load(blocks_ptr + 2 * tl.program_id(0) + 1) + tl.arange(0, ROWS)
    exists = (place < tl.load(start_ptr + tl.minimum(slot, C) + 1)) & (slot <= C)
    if SOME:
        wanted = tl.load(only_ptr + tl.minimum(slot, C - 1)) != 0
        slot = tl.where(wanted | (slot >= C), slot, C + 1)
    pair = tl.load(order_ptr + place, mask=exists, other=0).to(tl.int64)
    return slot, pair, exists


@triton.jit
def _product(a_ptr, row, w_ptr, column, exists, SIZE: tl.constexpr, COLUMNS_TOTAL: tl.constexpr, ROWS: tl.constexpr,
             COLUMNS: tl.constexpr, BLOCK: tl.constexpr, UP: tl.constexpr, WIDEN: tl.constexpr):
    """a[row] @ w[column].T, and with UP also with w[column + UP].T, summed in float32."""
    first = tl.zeros((ROWS, COLUMNS), tl.float32)
    second = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, SIZE, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        a = tl.load(a_ptr + row[:, None] * SIZE + at[None, :], mask=exists[:, None] & (at < SIZE)[None, :], other=0.0)
        inside = (column < COLUMNS_TOTAL)[None, :] & (at < SIZE)[:, None]
        w_at = w_ptr + column[None, :] * SIZE + at[:, None]
        w = tl.load(w_at, mask=inside, other=0.0)
        if WIDEN:  # the interpreter multiplies bfloat16 by its bits
            a, w = a.to(tl.float32), w.to(tl.float32)
        first = tl.dot(a, w, first, input_precision="ieee")
        if UP > 0:
            w = tl.load(w_at + UP * SIZE, mask=inside, other=0.0)
            if WIDEN:
                w = w.to(tl.float32)
            second = tl.dot(a, w, second, input_precision="ieee")
    return first, second


@triton.jit(do_not_specialize=["C"])
def gate_up_kernel(x_ptr, bank_ptr, order_ptr, start_ptr, blocks_ptr, only_ptr, out_ptr, stride, C, H: tl.constexpr,
                   F: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
                   SOME: tl.constexpr, WIDEN: tl.constexpr):
    """hidden[pair, columns] = silu(gate x) * (up x) for one block of an expert's rows."""
    slot, pair, exists = _rows(order_ptr, start_ptr, blocks_ptr, only_ptr, C, ROWS, SOME)
    if slot >= C:
        return
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    gate, up = _product(x_ptr, pair // K, bank_ptr + slot.to(tl.int64) * stride, column, exists, H, F, ROWS, COLUMNS,
                        BLOCK, F, WIDEN)
    hidden = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + pair[:, None] * F + column[None, :], hidden.to(out_ptr.dtype.element_ty),
             mask=exists[:, None] & (column < F)[None, :])


@triton.jit(do_not_specialize=["C"])
def down_kernel(hidden_ptr, bank_ptr, order_ptr, start_ptr, blocks_ptr, only_ptr, out_ptr, stride, C, H: tl.constexpr,
                F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, SOME: tl.constexpr,
                WIDEN: tl.constexpr):
    """partial[pair, columns] in float32 for one block of rows; zeros for pairs without a valid slot."""
    slot, pair, exists = _rows(order_ptr, start_ptr, blocks_ptr, only_ptr, C, ROWS, SOME)
    if slot > C:
        return
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    partial = tl.zeros((ROWS, COLUMNS), tl.float32)
    if slot < C:
        partial, unused = _product(hidden_ptr, pair, bank_ptr + slot.to(tl.int64) * stride, column, exists, F, H, ROWS,
                                   COLUMNS, BLOCK, 0, WIDEN)
    tl.store(out_ptr + pair[:, None] * H + column[None, :], partial, mask=exists[:, None] & (column < H)[None, :])


def gate_up(x: Tensor, bank: Tensor, plan: Plan, only: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """hidden [N,K,F] = silu(gate x) * (up x) in x's dtype, in the places of the pairs.

    Args:
        x: tokens [N,H]. bank: gate/up [C,2F,H]. plan: from `plan`.
        only: slots to compute, int32 ids or bool[C] (all); others stay as they are. out: written in place.

    Raises:
        ValueError: what does not fit, by name. RuntimeError: no GPU and no interpreter.
    """
    (N, K), (rows, H) = plan.shape, _sizes(x, bank, plan)
    if rows % 2:
        raise ValueError(f"the gate_up bank has {rows} rows; needed: as many for gate as for up")
    _like(x, "x", (N, H))
    out = torch.empty(N, K, rows // 2, dtype=x.dtype, device=x.device) if out is None else out
    _like(out, "out", (N, K, rows // 2), x.dtype)
    grid, before, after, options = _cut(rows // 2, plan, bank, only)
    gate_up_kernel[grid](x, bank, *before, out, bank.stride(0), plan.C, H, rows // 2, K, *after, **options)
    return out


def down(hidden: Tensor, bank: Tensor, plan: Plan, only: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """partial [N,K,H] in float32, without routing weights. Arguments and errors as for `gate_up`."""
    (N, K), (H, F) = plan.shape, _sizes(hidden, bank, plan)
    _like(hidden, "hidden", (N, K, F))
    out = torch.empty(N, K, H, dtype=torch.float32, device=hidden.device) if out is None else out
    _like(out, "out", (N, K, H), torch.float32)
    grid, before, after, options = _cut(H, plan, bank, only)
    down_kernel[grid](hidden, bank, *before, out, bank.stride(0), plan.C, H, F, *after, **options)
    return out


def experts(x: Tensor, gate_up_bank: Tensor, down_bank: Tensor, slots: Tensor, weights: Tensor,
            tiles: GroupedTiles | None = None, check: bool | None = None) -> Tensor:
    """Output [N,H] of the routed experts, any number of tokens; arguments as for `experts.experts`."""
    if check or (check is None and x.device.type == "cpu"):
        _check_ids(slots, len(gate_up_bank), None)
    found = plan(slots, len(gate_up_bank), tiles)
    partial = down(gate_up(x, gate_up_bank, found), down_bank, found)
    return combine(partial, weights, dtype=x.dtype)


def _cut(columns: int, plan: Plan, bank: Tensor, only: Tensor | None):
    """Grid, the arguments that both kernels share, before and after their own, and launch options."""
    tiles = plan.tiles
    wanted = plan.order if only is None else mask(only, plan.C)
    if only is not None and (wanted.shape != (plan.C,) or wanted.device != bank.device):
        raise ValueError(f"only is {only.dtype} {tuple(only.shape)} on {only.device}; needed: int32 ids or "
                         f"bool[{plan.C}] on {bank.device}")
    before = plan.order, plan.start, plan.blocks, wanted
    after = tiles.rows, tiles.columns, tiles.block, only is not None, INTERPRETED
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages, "enable_fp_fusion": False}
    return (len(plan.blocks), triton.cdiv(columns, tiles.columns)), before, after, options


def _sizes(inputs: Tensor, bank: Tensor, plan: Plan) -> tuple[int, int]:
    """Rows and columns of a slot, or an error that names what does not fit."""
    require(inputs)
    if bank.dim() != 3 or len(bank) != plan.C or not bank[0].is_contiguous() or bank.dtype != inputs.dtype:
        raise ValueError(f"the bank is {bank.dtype} {tuple(bank.shape)}, strides {bank.stride()}; needed: "
                         f"{plan.C} slots of {inputs.dtype}, contiguous within a slot")
    if inputs.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"dtype is {inputs.dtype}; needed: torch.bfloat16 or torch.float32")
    if bank.shape[1] % 16 or bank.shape[2] % 16 or bank.stride(0) % 16:
        raise ValueError(f"a slot is {tuple(bank.shape[1:])}, slots are {bank.stride(0)} elements apart; "
                         f"needed: multiples of 16")
    return bank.shape[1], bank.shape[2]
