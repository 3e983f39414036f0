"""Speed of the wire format on a GPU: decode from device staging and from pinned host memory; record rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from dualdeadline import wire
from dualdeadline.kernels import fetch
from dualdeadline.kernels import wire as kernel
from dualdeadline.overlap.rows import measured
from dualdeadline.streams import Shape
from dualdeadline.streams.bench import Variant, graph, interleaved

DISTINCT = 16  # records and slots that take turns: more than the L2 cache holds


def everything(
    shape: Shape, bits: Sequence[int], programs: Sequence[int], samples: int, seed: int = 0
) -> Iterator[tuple[str, list[dict]]]:
    """Parts of all that this module times, as (name, rows), each after a check of every bit."""
    for piece in ("gate_up", "down"):
        banks = {width: Records(shape, piece, width, seed) for width in bits}
        yield f"decode, {piece}", decodes(banks, samples)
        yield f"zero-copy decode, {piece}", zero_copies(banks, programs, samples // 4)


class Records:
    """Records of random weights N(0, 0.02) of one component, in pinned host memory and on the device.

    Raises:
        AssertionError: the device's decode differs from the weights in a bit.
    """

    def __init__(self, shape: Shape, piece: str, bits: int, seed: int = 0):
        draw = torch.Generator().manual_seed(seed)
        count = shape.component_bytes[piece] // shape.dtype.itemsize
        base = [(torch.randn(count, generator=draw) * 0.02).to(shape.dtype) for _ in range(2)]
        tensors = [base[turn % 2].roll(turn) for turn in range(DISTINCT)]
        records = [record for _, record in wire.encode_many(((str(n), t) for n, t in enumerate(tensors)), bits)]
        self.bits, self.bytes = bits, max(record.nbytes for record in records)
        self.raw_bytes = tensors[0].nbytes
        host = torch.zeros(DISTINCT, self.bytes, dtype=torch.uint8)
        for row, record in zip(host, records):
            row[: record.nbytes] = record.data
        self.host, self.device = fetch.pin(host), host.cuda()
        self.bank = torch.empty(DISTINCT, count, dtype=shape.dtype, device="cuda")
        self.all = torch.arange(DISTINCT, dtype=torch.int32, device="cuda")
        for source in (self.device, self.host):
            self.bank.zero_()
            kernel.decode(source, self.bank, self.all, self.all, self.number(DISTINCT), bits)
            for found, tensor in zip(self.bank, tensors):
                assert torch.equal(found.cpu().view(torch.int16), tensor.view(torch.int16)), f"{bits} bits: not equal"

    def number(self, count: int):
        return torch.tensor([count], dtype=torch.int32, device="cuda")

    def chain(self, source, each: int, programs: int | None = None, warps: int = 4):
        """All records decoded, `each` of them by one launch, in a graph."""
        parts, count = self.all.split(each), self.number(each)
        return graph(
            lambda: [kernel.decode(source, self.bank, part, part, count, self.bits, programs, warps) for part in parts]
        )


def decodes(banks: dict[int, Records], samples: int, warps: Sequence[int] = (2, 4, 8)) -> list[dict]:
    """Rows of the decode from device memory: one record by one launch, and all by one.

    A program takes one block, or as many as leave each multiprocessor eight programs.
    """
    variants = {}
    few = 8 * torch.cuda.get_device_properties("cuda").multi_processor_count
    for bits, bank in banks.items():
        for each in (1, DISTINCT):
            for some in warps:
                for programs in (None, few // each):
                    replay = bank.chain(bank.device, each, programs, some)
                    variants[bits, each, some, programs or 0] = Variant(
                        lambda turn, replay=replay: replay(), queued=True
                    )
    rows = []
    for (bits, each, some, programs), times in interleaved(variants, samples).items():
        config = {
            "bits": bits,
            "records": each,
            "warps": some,
            "programs": programs,
            "raw_bytes": banks[bits].raw_bytes,
        }
        rows.append(measured("device", "decode_ms", "ms", times / (DISTINCT // each), config))
        rate = DISTINCT * banks[bits].raw_bytes / times / 1e6
        rows.append(measured("device", "decode_gbps", "GB/s", rate, config))
    return rows


def zero_copies(banks: dict[int, Records], programs: Sequence[int], samples: int) -> list[dict]:
    """Rows of the decode that reads pinned host memory itself: output per second, which no link limits."""
    variants = {}
    for bits, bank in banks.items():
        for some in programs:
            replay = bank.chain(bank.host, DISTINCT, some)
            variants[bits, some] = Variant(lambda turn, replay=replay: replay(), queued=True)
    rows = []
    for (bits, some), times in interleaved(variants, samples).items():
        config = {"bits": bits, "programs": some, "raw_bytes": banks[bits].raw_bytes}
        rate = DISTINCT * banks[bits].raw_bytes / times / 1e6
        rows.append(measured("pinned host", "decode_gbps", "GB/s", rate, config))
    return rows
