"""Checks of the kernels at awkward sizes that a notebook can show: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import torch

from dualdeadline import wire
from dualdeadline.kernels import experts, fetch
from dualdeadline.kernels import wire as wire_kernel


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


def check_wire(device="cpu", seed: int = 0) -> dict[str, bool]:
    """Decode of coded, pruned, patched and raw records into slots, of every width; ids out of range do nothing."""
    draw, count = torch.Generator().manual_seed(seed), 8 * wire.BLOCK + 8
    normal = torch.randn(count, generator=draw) * 0.02
    odd = normal.bfloat16()
    odd[::97], odd[5::997], odd[7::997] = 1e30, float("nan"), 1e-30
    pruned = (normal * torch.randint(0, 2, (count,), generator=draw)).bfloat16()
    noise = torch.randint(-(2**15), 2**15, (count,), generator=draw, dtype=torch.int16).view(torch.bfloat16)
    tensors = [normal.bfloat16(), odd, pruned, noise]
    coded, equal, kept = [], [], []
    ids = [torch.tensor(places, dtype=torch.int32, device=device) for places in ([0, 1, 2, 3, 9], [3, 0, 5, 2, 1], [5])]
    for bits in wire.BITS:
        records = [wire.encode(tensor, bits) for tensor in tensors]
        coded += [not record.raw for record in records[:3]]
        rows = torch.zeros(len(records), max(record.nbytes for record in records), dtype=torch.uint8)
        for row, record in zip(rows, records):
            row[: record.nbytes] = record.data
        bank = torch.full((6, count), 7.0, dtype=torch.bfloat16, device=device)
        wire_kernel.decode(rows.to(device), bank, *ids, bits)
        there = bank.cpu()
        equal += [torch.equal(there[slot].view(torch.int16), tensor.view(torch.int16))
                  for slot, tensor in zip((3, 0, 5, 2), tensors)]
        kept.append(bool((there[[1, 4]] == 7).all()))
    return {"all but noise coded": all(coded), "equal bits": all(equal), "other slots kept": all(kept)}
