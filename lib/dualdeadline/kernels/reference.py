"""What the expert kernels are checked against: float32 references with an error bound, and plain eager torch.

Functions named `*_reference` compute in float32 on the CPU and round nothing; `torch_*` follow the loop of
transformers' `OlmoeExperts` operation by operation, in the dtype of the model.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dualdeadline.kernels import INTERPRETED

# relative error of one rounding; Triton's interpreter truncates to bfloat16 where a GPU rounds to nearest
ROUNDING = {torch.bfloat16: 2.0**-7 if INTERPRETED else 2.0**-8, torch.float32: 2.0**-24}
SUM = 2.0**-24  # float32, for each addition of a dot product
SIGMOID = 2.0**-20  # relative error of exp2.approx and the division after it, generously


def _gather(bank: Tensor, slots: Tensor) -> Tensor:
    """Float32 copies of the slots' components [N,K,...]; zeros where a slot is out of range."""
    bank, slots = bank.detach(), slots.long().to(bank.device)
    valid = (slots >= 0) & (slots < len(bank))
    chosen = bank[slots.where(valid, 0)].cpu().float()
    return chosen.where(valid.cpu()[..., None, None], torch.tensor(0.0))


def gate_up_reference(x: Tensor, bank: Tensor, slots: Tensor) -> Tensor:
    """silu(gate x) * (up x) of every pair [N,K,F], float32 on the CPU."""
    halves = torch.einsum("nkrh,nh->nkr", _gather(bank, slots), x.cpu().float())
    gate, up = halves.chunk(2, -1)
    return F.silu(gate) * up


def down_reference(hidden: Tensor, bank: Tensor, slots: Tensor) -> Tensor:
    """down of every pair [N,K,H], float32 on the CPU."""
    return torch.einsum("nkhf,nkf->nkh", _gather(bank, slots), hidden.cpu().float())


def combine_reference(partial: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum over ranks [N,H], float32 on the CPU."""
    return torch.einsum("nk,nkh->nh", weights.cpu().float(), partial.cpu().float())


def experts_reference(x: Tensor, gate_up_bank: Tensor, down_bank: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    """Output [N,H] of the routed experts, float32 on the CPU."""
    hidden = gate_up_reference(x, gate_up_bank, slots)
    return combine_reference(down_reference(hidden, down_bank, slots), weights)


def error_bound(x: Tensor, gate_up_bank: Tensor, down_bank: Tensor, slots: Tensor, weights: Tensor):
    """How far kernels may be from the references, element by element: for hidden [N,K,F] and for the output [N,H].

    A float32 dot product of n terms is wrong by at most n 2^-24 sum |a b|, here twice: kernel and reference both
    round. silu changes by at most 1.1 per unit. hidden is rounded once, the output once, and both errors of hidden
    pass through |down|. float32 keeps its own, smaller rounding.
    """
    x, bank = x.detach().cpu(), _gather(gate_up_bank, slots)
    dtype, H = x.dtype, x.shape[-1]
    gate, up = torch.einsum("nkrh,nh->nkr", bank, x.float()).chunk(2, -1)
    size = torch.einsum("nkrh,nh->nkr", bank.abs(), x.float().abs()).chunk(2, -1)
    hidden = F.silu(gate) * up
    sums = 2 * H * SUM * (1.1 * size[0] * up.abs() + F.silu(gate).abs() * size[1])
    in_hidden = 1.01 * sums + (ROUNDING[dtype] + SIGMOID) * hidden.abs() + 1e-30
    down, scale = _gather(down_bank, slots).abs(), weights.detach().cpu().float().abs()
    inside = torch.einsum("nkhf,nkf->nkh", down, in_hidden + 2 * hidden.shape[-1] * SUM * hidden.abs())
    output = experts_reference(x, gate_up_bank, down_bank, slots, weights)
    passed = torch.einsum("nk,nkh->nh", scale, inside)
    adding = 2 * slots.shape[1] * SUM * combine_reference(down_reference(hidden, down_bank, slots).abs(), scale)
    return in_hidden, 1.01 * (passed + adding) + ROUNDING[dtype] * (output.abs() + passed) + 1e-30


def torch_gate_up(x: Tensor, weight: Tensor) -> Tensor:
    """hidden [N,F] of one expert in eager torch: x [N,H], weight [2F,H]."""
    gate, up = F.linear(x, weight).chunk(2, dim=-1)
    return F.silu(gate) * up


def torch_down(hidden: Tensor, weight: Tensor) -> Tensor:
    """[N,H] of one expert in eager torch: hidden [N,F], weight [H,F]."""
    return F.linear(hidden, weight)


def torch_experts(x: Tensor, gate_up_bank: Tensor, down_bank: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    """Routed experts [N,H] as transformers' eager loop computes them, expert after expert in ascending slot.

    Waits for the device, as the original does; a slot out of range counts as an expert whose output is zero.
    """
    out = torch.zeros_like(x)
    for slot in slots.unique().tolist():
        if 0 <= slot < len(down_bank):
            rank, token = torch.where(slots.t() == slot)
            y = torch_down(torch_gate_up(x[token], gate_up_bank[slot]), down_bank[slot])
            out.index_add_(0, token, (y * weights[token, rank, None]).to(out.dtype))
    return out


def check_finite(bank: Tensor, component: str = "bank", chunk: int = 16) -> None:
    """Refuse weights that are not finite.

    Args:
        bank: [C, rows, columns]; gate/up is told apart when `component` is "gate_up". chunk: slots looked at at once.

    Raises:
        ValueError: names the first such expert, its component and element.
    """
    for start in range(0, len(bank), chunk):
        bad = ~torch.isfinite(bank[start : start + chunk])
        if bad.any():
            slot, row, column = bad.nonzero()[0].tolist()
            name = component if component != "gate_up" else ("gate", "up")[row * 2 >= bank.shape[1]]
            value = bank[start + slot, row, column].item()
            raise ValueError(f"{name} of expert {start + slot} is {value} at [{row}, {column}] of {component}; "
                             f"needed: finite weights")
