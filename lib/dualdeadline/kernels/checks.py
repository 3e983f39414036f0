"""Checks of the kernels at awkward sizes that a notebook can show: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import torch

from dualdeadline.kernels import experts, fetch


def check_experts(H: int, F: int, count: int, tokens: int, top_k: int, device="cpu", seed: int = 0) -> dict:
    """Expert kernels against themselves cut apart, and against the float32 reference.

    Args:
        count: experts in the bank.

    Returns:
        dict(bitwise, error, bound): whether all ways give equal bits; the largest error of the output, and its bound
        at that element.
    """
    draw = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16
    x = torch.randn(tokens, H, generator=draw).to(device, dtype)
    bank = (torch.randn(count, 2 * F, H, generator=draw) / H**0.5).to(device, dtype)
    down_bank = (torch.randn(count, H, F, generator=draw) / F**0.5).to(device, dtype)
    slots = torch.rand(tokens, count, generator=draw).topk(top_k).indices.int().to(device)
    weights = torch.rand(tokens, top_k, generator=draw).softmax(-1).to(device, dtype)
    hidden = experts.gate_up(x, bank, slots)
    apart = experts.activate(experts.gate(x, bank, slots), experts.up(x, bank, slots), dtype)
    single = torch.zeros_like(hidden)
    for pair in reversed(range(tokens * top_k)):
        experts.gate_up(x, bank, slots, single, torch.tensor([pair], dtype=torch.int32, device=device))
    out = experts.experts(x, bank, down_bank, slots, weights)
    later = experts.combine(experts.down(hidden, down_bank, slots), weights)
    bitwise = torch.equal(hidden, apart) and torch.equal(hidden, single) and torch.equal(out, later)
    wide = experts.experts_reference(x, bank, down_bank, slots, weights)
    bound = experts.error_bound(x, bank, down_bank, slots, weights)[1]
    error = (out.cpu().float() - wide).abs()
    worst = int((error / bound).argmax())
    return {"bitwise": bitwise, "error": float(error.flatten()[worst]), "bound": float(bound.flatten()[worst])}


def check_fetch(device="cpu", seed: int = 0) -> dict[str, bool]:
    """A fetch of random bytes: what was named is there, the rest is as it was, ids out of range do nothing."""
    draw = torch.Generator().manual_seed(seed)
    host = torch.randint(-(2**31), 2**31 - 1, (6, 96), generator=draw, dtype=torch.int32)
    host = fetch.pin(host) if device != "cpu" else host
    bank = torch.full((4, 96), 7, dtype=torch.int32, device=device)
    ids = torch.tensor([5, 2, 99], dtype=torch.int32, device=device)
    slots = torch.tensor([0, 3, 1], dtype=torch.int32, device=device)
    fetch.fetch(host, bank, ids, slots, torch.tensor([3], dtype=torch.int32, device=device), programs=2)
    there = bank.cpu()
    return {"fetched": torch.equal(there[[0, 3]], host[[5, 2]]), "others kept": bool((there[2] == 7).all()),
            "ids out of range skipped": bool((there[1] == 7).all())}
