"""Files to measure an SSD with: experts of a given size as records and as scattered tensors, of bounded size."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dualdeadline import manifest
from dualdeadline.schedule import COMPONENTS
from dualdeadline.store.layout import Layout, Part, Record, convert
from dualdeadline.store.pages import aligned
from dualdeadline.streams import Shape
from dualdeadline.wire.format import ALIGN, align

SHARES = (14, 1, 1)  # of 16: weights, scales and biases of a projection, where nine tensors make an expert
ROLES = ("gate", "up", "down")


class DrawnExperts:
    """A source of random experts: N(0, 0.02) in bfloat16, as many as asked for."""

    def __init__(self, shape: Shape, count: int, seed: int):
        self.shape, self.L, self.E, self.seed = shape, 1, count, seed

    def __call__(self, number: int, expert: int) -> dict[str, Tensor]:
        """One expert's components."""
        draw, (H, F) = torch.Generator().manual_seed(self.seed * 2**20 + expert), (self.shape.H, self.shape.F)
        flat = torch.empty(3 * H * F).normal_(0, 0.02, generator=draw).to(self.shape.dtype)
        return {"gate_up": flat[: 2 * H * F].view(2 * F, H), "down": flat[2 * H * F :].view(H, F)}

    @property
    def key(self) -> str:
        shape = self.shape
        return manifest.sha256(f"drawn {shape.H} {shape.F} {shape.dtype} {self.E} {self.seed}")


@dataclass(frozen=True)
class Files:
    """The same experts in every layout that is compared.

    Attributes:
        shape: of an expert. raw, coded: records. scattered: a safetensors file of stacked tensors.
    """

    shape: Shape
    raw: Layout
    coded: Layout
    scattered: Path

    @property
    def count(self) -> int:
        return self.raw.E


def prepare(folder: Path, shape: Shape, limit_bytes: int, seed: int = 0, tensors: int = 9) -> Files:
    """Make the files, or take those that are there; together up to about three times `limit_bytes`.

    Args:
        limit_bytes: of one layout; the number of experts follows from it, at least 8. tensors: 3 or 9 per expert.
    """
    count = max(8, limit_bytes // shape.component_bytes["expert"])
    source, folder = DrawnExperts(shape, count, seed), Path(folder) / f"{shape.name}-{count}-{seed}"
    layouts = [convert(source, folder / wire, wire, source.key) for wire in ("raw", "coded")]
    path = folder / f"scattered-{tensors}.safetensors"
    if not path.exists():
        scatter(source, path, tensors)
    return Files(shape, *layouts, path)


def pieces(tensors: int) -> tuple[int, ...]:
    """Sixteenths of a projection's rows that each of its tensors holds."""
    if tensors not in (3, 9):
        raise ValueError(f"tensors is {tensors}; needed: 3 (one per projection) or 9 (weights, scales, biases of each)")
    return (16,) if tensors == 3 else SHARES


def scatter(source: DrawnExperts, path: Path, tensors: int) -> None:
    """Write a safetensors file with `tensors` stacked tensors `[experts, rows, columns]`."""
    cuts = {role: [] for role in ROLES}
    for expert in range(source.E):
        found = source(0, expert)
        gate, up = found["gate_up"].chunk(2)
        for role, weights in zip(ROLES, (gate, up, found["down"]), strict=True):
            cuts[role].append(weights)
    shares, stacked = pieces(tensors), {}
    for role, weights in cuts.items():
        whole, begin = torch.stack(weights), 0
        for number, share in enumerate(shares):
            rows = whole.shape[1] * share // 16
            stacked[f"experts.{role}.{number}"] = whole[:, begin : begin + rows].contiguous()
            begin += rows
    with manifest.atomic(path) as temporary:
        save_file(stacked, temporary, {"tensors": str(tensors)})


def slices(shape: Shape, tensors: int = 9) -> list[tuple[str, slice, int]]:
    """Of each of an expert's tensors: component, rows in that component, bytes."""
    found, H, F, size = [], shape.H, shape.F, shape.dtype.itemsize
    for component, base, rows, columns in (("gate_up", 0, F, H), ("gate_up", F, F, H), ("down", 0, H, F)):
        for share in pieces(tensors):
            count = rows * share // 16
            found.append((component, slice(base, base + count), count * columns * size))
            base += count
    return found


class Plan:
    """Where the components of an expert of some size lie in a raw record; what `store.installs` asks of a layout."""

    coded = False

    def __init__(self, shape: Shape):
        gate_up, down = (shape.component_bytes[part] for part in COMPONENTS)
        self.dtype, self.shapes = shape.dtype, {"gate_up": (2 * shape.F, shape.H), "down": (shape.H, shape.F)}
        self.parts = {"gate_up": Part(0, gate_up, ()), "down": Part(align(gate_up, ALIGN), down, ())}
        self.largest = self.parts["down"].start + self.parts["down"].padded


def places(path: Path) -> list[tuple[str, slice, int, int]]:
    """Of each tensor of a scattered file: component, rows in that component, offset in the file, bytes per expert."""
    found, starts = [], _starts(path)
    with safe_open(path, "pt") as opened:
        shapes = {name: opened.get_slice(name).get_shape() for name in opened.keys()}
    begin = dict.fromkeys(ROLES, 0)
    width = sum(shapes[name][1] for name in shapes if ".gate." in name)
    for name in sorted(shapes):
        role = name.split(".")[1]
        rows, base = shapes[name][1], width if role == "up" else 0
        at = slice(base + begin[role], base + begin[role] + rows)
        begin[role] += rows
        start, size = starts[name]
        found.append(("down" if role == "down" else "gate_up", at, start, size // shapes[name][0]))
    return found


def _starts(path: Path) -> dict[str, tuple[int, int]]:
    """Offset and bytes of each tensor, from a safetensors file's header."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    offsets = {name: said["data_offsets"] for name, said in header.items() if name != "__metadata__"}
    return {name: (8 + length + begin, end - begin) for name, (begin, end) in offsets.items()}


class Folded:
    """Records of a bounded file for a model of any size: expert e of layer l is record (l*E + e) mod their number.

    Has what `store.fetching.Fetching` asks of a layout.
    """

    def __init__(self, layout: Layout, L: int, E: int):
        self.layout, self.L, self.E = layout, L, E
        self.path, self.coded, self.largest = layout.path, layout.coded, layout.largest
        self.dtype, self.shapes, self.part_bytes = layout.dtype, layout.shapes, layout.part_bytes

    def row(self, number: int, expert: int) -> int:
        return (number * self.E + expert) % self.layout.E

    def record(self, number: int, expert: int) -> Record:
        return self.layout.record(0, self.row(number, expert))


def slots(shape: Shape, count: int, device) -> list[dict[str, Tensor]]:
    """Empty slots of a device; on a CPU where a file can be read into them directly."""
    on_cpu, found = torch.device(device).type == "cpu", []
    for _ in range(count):
        raw = {part: aligned(shape.component_bytes[part]) for part in COMPONENTS}
        found.append(_typed(shape, raw if on_cpu else {part: value.to(device) for part, value in raw.items()}))
    return found


def cut(shape: Shape, block: Tensor) -> dict[str, Tensor]:
    """A slot in one block of bytes."""
    return _typed(shape, dict(zip(COMPONENTS, block.split([shape.component_bytes[part] for part in COMPONENTS]))))


def _typed(shape: Shape, raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
    sizes = {"gate_up": (2 * shape.F, shape.H), "down": (shape.H, shape.F)}
    return {part: raw[part].view(shape.dtype).view(sizes[part]) for part in COMPONENTS}


def same(slot: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    """Whether a slot holds an expert, bit by bit."""
    return all(torch.equal(slot[part].cpu(), wanted[part]) for part in COMPONENTS)


def check(fetch, files: Files, rows: Sequence[int], into: Sequence[Mapping[str, Tensor]], seed: int = 0) -> None:
    """Fetch some experts and compare every bit.

    Raises:
        AssertionError: a bit differs.
    """
    fetch(0, rows, into)
    source = DrawnExperts(files.shape, files.count, seed)
    for row, slot in zip(rows, into, strict=True):
        assert same(slot, source(0, row)), f"expert {row} of {files.raw.folder} arrived with other bits"
