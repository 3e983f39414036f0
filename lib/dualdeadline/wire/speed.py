"""What notebook 08 measures of the codec, as record rows, and its checks; `gpu` measures the kernels."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from dualdeadline import models
from dualdeadline.overlap.rows import measured
from dualdeadline.streams import Shape
from dualdeadline.wire import space
from dualdeadline.wire.codec import decode, encode
from dualdeadline.wire.format import HEADER, WireRecord
from dualdeadline.wire.many import encode_many


def normal(count: int, seed: int = 0) -> Tensor:
    """Weights N(0, 0.02) in bfloat16 `[count]`."""
    return (torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 0.02).bfloat16()


def student(count: int, seed: int = 0) -> Tensor:
    """Weights of Student's t with 5 degrees of freedom, scaled by 0.02, in bfloat16 `[count]`: heavier tails."""
    draw = np.random.default_rng(seed).standard_t(5, count)
    return torch.from_numpy(draw.astype(np.float32) * 0.02).bfloat16()


def weights_of(key: str) -> Tensor:
    """All expert weights of a model, flat, in bfloat16."""
    network, _ = models.load(key, device="cpu")
    found = [
        part.detach().flatten() for layer in models.describe(network).layers for part in layer.experts.parameters()
    ]
    return torch.cat(found).bfloat16()


def design_rows(weights: Mapping[str, Tensor]) -> list[dict]:
    """Rows `bits_per_weight` of every design for each tensor."""
    return [
        dict(
            variant=row.design,
            metric="bits_per_weight",
            unit="bits",
            kind="measured",
            median=row.bits_per_weight,
            n=tensor.numel(),
            config={"weights": name, "bound": bool(row.bound)},
        )
        for name, tensor in weights.items()
        for row in space.designs(tensor).itertuples()
    ]


def check_codec(seed: int = 0) -> dict[str, int]:
    """Tensors of all kinds there and back, and records with one wrong bit or byte too few: counts of each."""
    draw = torch.Generator().manual_seed(seed)
    some = torch.randint(-(2**15), 2**15, (40_001,), generator=draw, dtype=torch.int16).view(torch.bfloat16)
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-40, -3e38]).bfloat16()
    pruned = normal(60_000, seed) * torch.randint(0, 2, (60_000,), generator=draw)
    tensors = [
        some,
        special,
        normal(50_001, seed).view(3, -1),
        pruned,
        torch.full((70_000,), 0.5).bfloat16(),
        some[:0],
        torch.randn(300, generator=draw),
        torch.randn(300, generator=draw).half(),
    ]
    records = [encode(tensor) for tensor in tensors]
    equal = sum(
        torch.equal(decode(record).view(torch.uint8), tensor.contiguous().view(torch.uint8))
        for record, tensor in zip(records, tensors)
    )
    good = encode(normal(50_000, seed))
    damaged = [good.data[:-1], good.data[HEADER:], good.data[:100]]
    for place in (20, HEADER, HEADER + 9_000, good.header["escapes"]):
        wrong = good.data.clone()
        wrong[place] ^= 1
        damaged.append(wrong)
    refused = 0
    for data in damaged:
        try:
            decode(WireRecord(data))
        except ValueError:
            refused += 1
    return {
        "tensors": len(tensors),
        "equal": equal,
        "raw": sum(record.raw for record in records),
        "damaged": len(damaged),
        "refused": refused,
    }


def cpu_rows(shape: Shape, bits: int, repeats: int, seed: int = 0) -> list[dict]:
    """Rows of encoding several experts and of decoding one component, MB/s of weights."""
    gate_up = shape.component_bytes["gate_up"] // 2
    tensors = [(str(number), normal(gate_up, seed + number)) for number in range(6)]
    bytes = sum(tensor.nbytes for _, tensor in tensors)
    encoded, decoded = [], []
    for _ in range(repeats + 1):  # the first warms up
        start = time.perf_counter()
        records = [record for _, record in encode_many(tensors, bits, total=len(tensors))]
        encoded.append(bytes / (time.perf_counter() - start) / 1e6)
        start = time.perf_counter()
        for record in records:
            decode(record, verify=False)
        decoded.append(bytes / (time.perf_counter() - start) / 1e6)
    config = {"bits": bits, "cores": os.cpu_count(), "bytes": bytes}
    return [
        measured("encode", "encode_mbps", "MB/s", encoded[1:], config),
        measured("decode on the CPU", "decode_mbps", "MB/s", decoded[1:], config),
    ]

