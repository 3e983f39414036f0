"""Routed experts of up to 8 tokens, `down(silu(gate x) * up x)`, in Triton; torch references from reference.py.

A *bank* holds one component of many experts, first dimension the slot: gate/up [C, 2F, H] (gate rows first), down
[C, H, F]. `slots` int32[N,K] names the slot of token n's k-th expert, `weights` [N,K] its routing weight, and a *pair*
is the flat index n*K+k. A slot outside 0..C-1 is never read: such a pair counts as an expert whose output is zero.

Every dot product adds in float32 by explicit fused multiply-adds in an order that depends on `Tiles` only, never on
other pairs of the launch, so these are equal bit by bit: gate and up apart or fused; pair by pair or all at once;
down then combine, or `down_combine`; two launches or the persistent one. Bytes decide the time: one token reads K whole
experts, 96 MiB for OLMoE, and hardly anything else.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from dualdeadline.kernels import INTERPRETED, require, triton
from dualdeadline.kernels.expert_kernels import (
    activate_kernel, combine_kernel, down_combine_kernel, down_kernel, gate_up_kernel, persistent_kernel)
from dualdeadline.kernels.reference import (  # noqa: F401  (to be used through here)
    check_finite, combine_reference, down_reference, error_bound, experts_reference, gate_up_reference,
    torch_down, torch_experts, torch_gate_up)

MAX_TOKENS = 8  # above, `grouped` multiplies matrices
MAX_TOP_K = 64


@dataclass(frozen=True)
class Tiles:
    """How the launches are cut; `block`, `warps` and their `down_` forms decide the order of additions, nothing else.

    Attributes:
        rows, block, warps: gate and up rows of one program, elements of H of one reduction tile, warps.
        down_rows, down_block, down_warps: the same for down, with elements of F.
        ranks: experts of a token whose tiles `down_combine` loads at once.
        unroll, down_unroll: reduction tiles that are loaded before the first of them is used. fence: hold the
            compiler to that. stages: such sets in flight through shared memory (1: registers).
        pdl: programmatic dependent launch, down loads its first tile while gate/up still runs (Hopper or newer).
        persistent: programs per multiprocessor of the one-launch form, a grid barrier between the stages; 0: off.
        prefetch: down rows of each expert that gate/up's last programs bring into L2; 0: off.

    For equal bits a tile should give each thread at least 8 values: `rows * block >= 256 * warps`.
    """

    rows: int = 2
    block: int = 2048
    warps: int = 4
    down_rows: int = 2
    down_block: int = 1024
    down_warps: int = 4
    ranks: int = 8
    unroll: int = 1
    down_unroll: int = 1
    fence: bool = True
    stages: int = 1
    pdl: bool = False
    persistent: int = 0
    prefetch: int = 0

    @classmethod
    def default(cls, H: int, F: int, N: int = 1) -> Tiles:
        """The fastest of a sweep at H 2048 and F 1024 or 512 on an H200, cut down where rows are shorter.

        Gate/up takes a whole row at once, down a warp per row and few experts at a time; down starts early.
        """
        block, down_block = min(2048, _power_of_2(H)), min(256, _power_of_2(F))
        return cls(rows=max(1, 1024 // block), block=block, down_rows=max(4, 1024 // down_block), down_block=down_block,
                   ranks=2, unroll=1, down_unroll=min(4, _power_of_2(F) // down_block), pdl=True)

    def __post_init__(self):
        sizes = (self.rows, self.block, self.warps, self.down_rows, self.down_block, self.down_warps, self.ranks,
                 self.unroll, self.down_unroll)
        if any(size < 1 or size & (size - 1) for size in sizes):
            raise ValueError(f"tile sizes are {sizes}; needed: powers of 2")
        if self.persistent and (self.pdl or self.warps != self.down_warps):
            raise ValueError("a persistent launch is one kernel; needed: pdl off and warps equal to down_warps")


@dataclass(frozen=True)
class Workspace:
    """Buffers of `experts` for N tokens: hidden [N,K,F], out [N,H], the counter of the grid barrier int32[1]."""

    hidden: Tensor
    out: Tensor
    barrier: Tensor


def workspace(N: int, K: int, H: int, F: int, dtype: torch.dtype, device="cpu", barrier: bool = True) -> Workspace:
    """Allocate what one call of `experts` writes; a call into a CUDA graph needs one that outlives the graph.

    Only persistent launches need the barrier; setting it to zero is a launch of its own.
    """
    return Workspace(torch.empty(N, K, F, dtype=dtype, device=device), torch.empty(N, H, dtype=dtype, device=device),
                     torch.zeros(int(barrier), dtype=torch.int32, device=device))


_buffers = workspace  # `experts` has an argument of that name


def gate_up(x: Tensor, bank: Tensor, slots: Tensor, out: Tensor | None = None, pairs: Tensor | None = None,
            tiles: Tiles | None = None, check: bool | None = None) -> Tensor:
    """hidden [N,K,F] = silu(gate x) * (up x) in x's dtype; sums in float32, the product is rounded once.

    Args:
        x: tokens [N,H]. bank: gate/up [C,2F,H]. slots: int32 or int64 [N,K].
        out: written in place; nothing is allocated then. pairs: int32, the pairs to compute (all); others stay.
        tiles: cut of the launch. check: look for slots out of range, which waits for the device (on a CPU only).

    Raises:
        ValueError: what does not fit, by name. RuntimeError: no GPU and no interpreter.
    """
    return _gate_up_launch(x, bank, slots, out, pairs, tiles, check, part=0)


def gate(x: Tensor, bank: Tensor, slots: Tensor, out: Tensor | None = None, tiles: Tiles | None = None) -> Tensor:
    """gate x alone [N,K,F] in float32, by the arithmetic of `gate_up`."""
    return _gate_up_launch(x, bank, slots, out, None, tiles, None, part=1)


def up(x: Tensor, bank: Tensor, slots: Tensor, out: Tensor | None = None, tiles: Tiles | None = None) -> Tensor:
    """up x alone [N,K,F] in float32, by the arithmetic of `gate_up`."""
    return _gate_up_launch(x, bank, slots, out, None, tiles, None, part=2)


def activate(gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor:
    """silu(gate) * up of float32 tensors, rounded once to `dtype`."""
    require(gate)
    out = torch.empty(gate.shape, dtype=dtype, device=gate.device)
    activate_kernel[(triton.cdiv(gate.numel(), 1024),)](gate, up, out, gate.numel(), 1024, enable_fp_fusion=False)
    return out


def _gate_up_launch(x, bank, slots, out, pairs, tiles, check, part, pdl=False, down_bank=None):
    N, K, H, F = _validate(x, bank, slots, "gate_up", pairs, check)
    tiles = tiles or Tiles.default(H, F, N)
    if out is None:
        out = torch.empty(N, K, F, dtype=torch.float32 if part else x.dtype, device=x.device)
    _like(out, "out", (N, K, F), torch.float32 if part else x.dtype)
    count = N * K if pairs is None else len(pairs)
    if count == 0:
        return out
    next_bank = bank if down_bank is None else down_bank
    prefetch = 0 if down_bank is None or INTERPRETED else min(tiles.prefetch, H)
    options = {"launch_pdl": True} if pdl else {}
    gate_up_kernel[(triton.cdiv(F, tiles.rows) * count,)](
        x, bank, slots, slots if pairs is None else pairs, out, out, next_bank, bank.stride(0), next_bank.stride(0),
        count, N * K, len(bank), H, F, K, tiles.rows, tiles.block, tiles.unroll, tiles.stages,
        tiles.fence, tiles.block < 256 * tiles.warps, part, pairs is not None, pdl, prefetch, num_warps=tiles.warps,
        enable_fp_fusion=False, **options)
    return out


def down(hidden: Tensor, bank: Tensor, slots: Tensor, out: Tensor | None = None, pairs: Tensor | None = None,
         tiles: Tiles | None = None, check: bool | None = None) -> Tensor:
    """partial [N,K,H] in float32: down of every pair, without routing weights. Arguments as for `gate_up`."""
    N, K, H, F = _validate(hidden, bank, slots, "down", pairs, check)
    tiles = tiles or Tiles.default(H, F, N)
    out = torch.empty(N, K, H, dtype=torch.float32, device=hidden.device) if out is None else out
    _like(out, "out", (N, K, H), torch.float32)
    count = N * K if pairs is None else len(pairs)
    if count:
        down_kernel[(triton.cdiv(H, tiles.down_rows) * count,)](
            hidden, bank, slots, slots if pairs is None else pairs, out, bank.stride(0), count, N * K, len(bank), H, F,
            tiles.down_rows, tiles.down_block, tiles.down_unroll, tiles.stages,
            tiles.fence, tiles.down_block < 256 * tiles.down_warps, pairs is not None, num_warps=tiles.down_warps,
            enable_fp_fusion=False)
    return out


def combine(partial: Tensor, weights: Tensor, out: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """[N,H]: fused multiply-adds of weights [N,K] and partial [N,K,H] in rank order, rounded once to `dtype`.

    Without `out` and `dtype` the result has the dtype of the weights.
    """
    require(partial)
    N, K, H = partial.shape
    _like(weights, "weights", (N, K))
    out = torch.empty(N, H, dtype=dtype or weights.dtype, device=partial.device) if out is None else out
    _like(out, "out", (N, H), dtype)
    block = min(1024, _power_of_2(H))
    combine_kernel[(N, triton.cdiv(H, block))](partial, weights, out, H, K, block, enable_fp_fusion=False)
    return out


def down_combine(hidden: Tensor, bank: Tensor, slots: Tensor, weights: Tensor, out: Tensor | None = None,
                 tiles: Tiles | None = None, check: bool | None = None, pdl: bool = False) -> Tensor:
    """[N,H] in hidden's dtype in one launch, bit by bit what `down` and then `combine` give.

    With `pdl` the launch may start before the one ahead of it has ended; that must be `experts`' own gate/up.
    """
    N, K, H, F = _validate(hidden, bank, slots, "down", None, check)
    tiles = tiles or Tiles.default(H, F, N)
    _like(weights, "weights", (N, K))
    out = torch.empty(N, H, dtype=hidden.dtype, device=hidden.device) if out is None else out
    _like(out, "out", (N, H), hidden.dtype)
    options = {"launch_pdl": True} if pdl else {}
    down_combine_kernel[(triton.cdiv(H, tiles.down_rows) * N,)](
        hidden, bank, slots, weights, out, bank.stride(0), N, len(bank), H, F, K, tiles.down_rows, tiles.down_block,
        tiles.ranks, tiles.down_unroll, tiles.stages, tiles.fence, tiles.down_block < 256 * tiles.down_warps, pdl,
        num_warps=tiles.down_warps, enable_fp_fusion=False, **options)
    return out


def experts(x: Tensor, gate_up_bank: Tensor, down_bank: Tensor, slots: Tensor, weights: Tensor,
            workspace: Workspace | None = None, tiles: Tiles | None = None, check: bool | None = None) -> Tensor:
    """Output [N,H] of the routed experts, all of which are in the banks; above 8 tokens by `grouped.experts`.

    With a workspace nothing is allocated and its `out` is returned. Arguments and errors as for `gate_up`.
    """
    if len(x) > MAX_TOKENS:
        from dualdeadline.kernels import grouped  # it imports this module

        return grouped.experts(x, gate_up_bank, down_bank, slots, weights, check=check)
    N, K, H, F = _validate(x, gate_up_bank, slots, "gate_up", None, check)
    tiles = tiles or Tiles.default(H, F, N)
    buffers = workspace or _buffers(N, K, H, F, x.dtype, x.device, tiles.persistent > 0)
    if tiles.persistent:
        _persistent_launch(x, gate_up_bank, down_bank, slots, weights, buffers, tiles, (N, K, H, F))
    else:
        pdl = tiles.pdl and starts_early(x.device)
        _gate_up_launch(x, gate_up_bank, slots, buffers.hidden, None, tiles, False, 0, pdl, down_bank)
        down_combine(buffers.hidden, down_bank, slots, weights, buffers.out, tiles, False, pdl)
    return buffers.out


def _persistent_launch(x, gate_up_bank, down_bank, slots, weights, buffers, tiles, sizes):
    N, K, H, F = sizes
    _validate(buffers.hidden, down_bank, slots, "down", None, False)
    _like(weights, "weights", (N, K))
    _like(buffers.out, "out", (N, H), x.dtype)
    # the interpreter runs one program after the other, so only a single one gets past a barrier
    programs = 1 if INTERPRETED else tiles.persistent * multiprocessors(x.device)
    prefetch = 0 if INTERPRETED else triton.cdiv(tiles.prefetch * N, tiles.down_rows * programs)
    persistent_kernel[(programs,)](
        x, gate_up_bank, down_bank, slots, weights, buffers.hidden, buffers.out, buffers.barrier,
        gate_up_bank.stride(0), down_bank.stride(0), len(down_bank), N, H, F, K, _power_of_2(N * K), tiles.rows,
        tiles.block, tiles.down_rows, tiles.down_block, tiles.ranks, tiles.unroll,
        tiles.down_unroll, tiles.stages, tiles.fence, tiles.block < 256 * tiles.warps,
        tiles.down_block < 256 * tiles.warps, prefetch, programs,
        num_warps=tiles.warps, enable_fp_fusion=False, launch_cooperative_grid=True)


@functools.lru_cache
def starts_early(device: torch.device) -> bool:
    """Whether the GPU knows programmatic dependent launch (compute capability 9.0 or newer)."""
    return not INTERPRETED and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.lru_cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def _power_of_2(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _like(tensor: Tensor, name: str, shape: tuple, dtype: torch.dtype | None = None) -> None:
    if tuple(tensor.shape) != shape or not tensor.is_contiguous() or dtype not in (None, tensor.dtype):
        raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}; "
                         f"needed: contiguous {shape} of {dtype or 'any dtype'}")


def _validate(inputs, bank, slots, component, pairs, check, max_tokens=MAX_TOKENS):
    """(N, K, H, F) of one stage's arguments, or an error that names what does not fit."""
    require(inputs)
    kinds = (torch.int32, torch.int64) if max_tokens == MAX_TOKENS else (torch.int32,)
    if slots.dim() != 2 or slots.dtype not in kinds or not slots.is_contiguous():
        named = " or ".join(str(kind).removeprefix("torch.") for kind in kinds)
        raise ValueError(f"slots is {slots.dtype} {tuple(slots.shape)}; needed: contiguous {named} [N,K]")
    if bank.dim() != 3 or len(bank) == 0 or not bank[0].is_contiguous() or bank.dtype != inputs.dtype:
        raise ValueError(f"the {component} bank is {bank.dtype} {tuple(bank.shape)}, strides {bank.stride()}; needed: "
                         f"{inputs.dtype} of three dimensions, contiguous within a slot")
    if inputs.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"dtype is {inputs.dtype}; needed: torch.bfloat16 or torch.float32")
    (N, K), (C, rows, width) = slots.shape, bank.shape
    H, F = (width, rows // 2) if component == "gate_up" else (rows, width)
    if H % 16 or F % 16 or bank.stride(0) % 16 or (component == "gate_up" and rows % 2):
        raise ValueError(f"H is {H}, F is {F}, a slot is {bank.stride(0)} elements; needed: multiples of 16")
    _like(inputs, "x" if component == "gate_up" else "hidden", (N, H) if component == "gate_up" else (N, K, F))
    if not 1 <= N <= max_tokens or not 1 <= K <= MAX_TOP_K:
        raise ValueError(f"N is {N}, K is {K}; needed: 1 to {max_tokens} tokens, 1 to {MAX_TOP_K} experts")
    if pairs is not None and (pairs.dtype != torch.int32 or pairs.dim() != 1 or not pairs.is_contiguous()):
        raise ValueError(f"pairs is {pairs.dtype} {tuple(pairs.shape)}; needed: contiguous int32 of one dimension")
    if any(tensor is not None and tensor.device != inputs.device for tensor in (bank, slots, pairs)):
        raise ValueError(f"devices differ from {inputs.device}; needed: bank, slots and pairs where the tokens are")
    if check or (check is None and inputs.device.type == "cpu"):
        _check_ids(slots, C, pairs)
    return N, K, H, F


def _check_ids(slots, C, pairs) -> None:
    if pairs is not None and pairs.numel() and not 0 <= int(pairs.min()) <= int(pairs.max()) < slots.numel():
        raise ValueError(f"pairs run from {int(pairs.min())} to {int(pairs.max())}; needed: 0 to {slots.numel() - 1}")
    used = slots.flatten() if pairs is None else slots.flatten()[pairs.long()]
    if used.numel() and not 0 <= int(used.min()) <= int(used.max()) < C:
        raise ValueError(f"slots run from {int(used.min())} to {int(used.max())}; needed: 0 to {C - 1}")
