"""One record per expert in one file: contiguous, at a multiple of 4,096 bytes, each component at one of its own.

    records.bin   records of all experts, layer by layer; a record is gate/up, zeros up to a multiple of 4,096 bytes,
                  down, zeros; a component is its weights as they are, or a wire record
    store.json    written last: key of the experts, sizes, and per record where it lies and XXH3-64 of its pieces
                  of 1 MiB (pieces begin anew with each component, so that one can be read and verified alone)

A conversion can be killed at any time and goes on where it stopped; without `store.json` no reader opens the folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm.auto import tqdm

from dualdeadline import wire
from dualdeadline.schedule import COMPONENTS
from dualdeadline.store import sources
from dualdeadline.store.pages import aligned, as_bytes, checksum, drop
from dualdeadline.store.pinned import BITS, WIRES
from dualdeadline.wire import appended
from dualdeadline.wire.format import ALIGN, align

PIECE = 2**20  # bytes under one checksum
SUMS = "XXH3-64"


@dataclass(frozen=True)
class Part:
    """A component inside its record.

    Attributes:
        start: in the record. nbytes: without padding. sums: XXH3-64 of each piece, padding included.
    """

    start: int
    nbytes: int
    sums: tuple[int, ...]

    @property
    def padded(self) -> int:
        return align(self.nbytes, ALIGN)


@dataclass(frozen=True)
class Record:
    """One expert in the file: where it starts, how long it is, and its parts by component."""

    name: str
    start: int
    nbytes: int
    parts: dict[str, Part]

    def verify(self, data: np.ndarray, component: str, path: Path) -> None:
        """Check a component's bytes, padding included.

        Raises:
            ValueError: they are not those that were written; the text names the record.
        """
        for number, wanted in enumerate(self.parts[component].sums):
            found = checksum(data[number * PIECE : (number + 1) * PIECE])
            if found != wanted:
                raise ValueError(bad_piece(self.name, component, path, number, found, wanted))

    def runs(self, components: Iterable[str]) -> list[list[str]]:
        """Those components that lie one behind the other in the file, together."""
        runs: list[list[str]] = []
        for name in sorted(components, key=lambda name: self.parts[name].start):
            last = self.parts[runs[-1][-1]] if runs else None
            if last and last.start + last.padded == self.parts[name].start:
                runs[-1].append(name)
            else:
                runs.append([name])
        return runs


def bad_piece(name: str, component: str, path: Path, number: int, found: int, wanted: int) -> str:
    """What to say of bytes that are not those that were written."""
    return (
        f"record {name} of {path} is altered: MiB {number} of {component} has {SUMS} {found:016x}; needed: "
        f"{wanted:016x}. Convert again into an empty folder"
    )


class Layout:
    """The index of a finished folder.

    Args:
        folder: written by `convert`. key: of the experts (`sources.key`); None: any.

    Attributes:
        path: of the records. coded: whether components are wire records. L, E: layers and experts. dtype: of weights.
        shapes: by component, of one expert. largest: bytes of the longest record;
        part_bytes of the longest component by its name.

    Raises:
        FileNotFoundError: no finished conversion. ValueError: of other experts, another format, or truncated.
    """

    def __init__(self, folder: Path, key: str | None = None):
        self.folder = Path(folder)
        self.path = self.folder / "records.bin"
        said = appended.read(self.folder, key)
        if "layers" not in said:
            raise ValueError(f"{self.folder} holds no experts' records; needed: a folder of store.layout.convert")
        if said.get("sums") != SUMS:
            raise ValueError(
                f"{self.folder} has sums of kind {said.get('sums', 'CRC-32')}; needed: {SUMS}, converted into an "
                "empty folder"
            )
        self.key, self.coded, self.L, self.E = said["key"], said["wire"] == "coded", said["layers"], said["experts"]
        self.dtype = getattr(torch, said["dtype"])
        self.shapes = {part: tuple(shape) for part, shape in zip(COMPONENTS, said["shapes"], strict=True)}
        self.nbytes = said["bytes"]
        self.records = {name: _record(name, place) for name, place in said["records"].items()}
        missing = {record_name(n, e) for n in range(self.L) for e in range(self.E)} - set(self.records)
        if missing:
            raise ValueError(f"{self.folder} lacks {len(missing)} records, {min(missing)} among them; needed: all")
        self.largest = max(record.nbytes for record in self.records.values())
        self.part_bytes = {
            part: max(record.parts[part].nbytes for record in self.records.values()) for part in COMPONENTS
        }

    def record(self, number: int, expert: int) -> Record:
        return self.records[record_name(number, expert)]


def record_name(number: int, expert: int) -> str:
    return f"layer {number} expert {expert}"


def convert(
    source: sources.ModelExperts | sources.CheckpointExperts,
    folder: Path,
    wire: str = "raw",
    key: str | None = None,
    workers: int | None = None,
) -> Layout:
    """Write all experts, or what of them is missing, and open the folder; what is finished is only opened.

    Args:
        source: a model's or a checkpoint's experts. wire: raw or coded. key: of the source, if it is known already.
        workers: threads that encode and sum (default: cores).

    Raises:
        ValueError: an unknown wire format, bfloat16 missing for coded, or a folder with other experts.
        OSError: the disk is full; the text says how much is needed, and the same call goes on later.
    """
    folder, first = Path(folder), source(0, 0)
    if wire not in WIRES:
        raise ValueError(f"wire is {wire!r}; needed: one of {', '.join(WIRES)}")
    if wire == "coded" and first["down"].dtype != torch.bfloat16:
        raise ValueError(f"wire is 'coded' and experts are {first['down'].dtype}; needed: bfloat16")
    head = {
        "format": appended.FORMAT,
        "key": key or sources.key(source),
        "wire": wire,
        "bits": BITS if wire == "coded" else 0,
        "piece": PIECE,
        "sums": SUMS,
        "layers": source.L,
        "experts": source.E,
        "dtype": str(first["down"].dtype).removeprefix("torch."),
        "shapes": [list(first[part].shape) for part in COMPONENTS],
    }
    pairs = {record_name(n, e): (n, e) for n in range(source.L) for e in range(source.E)}
    appended.build(folder, head, list(pairs), lambda names: _blobs(source, names, pairs, wire, workers), _sound)
    layout = Layout(folder, head["key"])
    drop(layout.path)
    return layout


def _blobs(source, names: Sequence[str], pairs: dict, wire: str, workers: int | None) -> Iterator[appended.Blob]:
    """Records in order, some made ahead by threads."""
    workers = workers or os.cpu_count() or 1
    with ThreadPoolExecutor(workers) as pool, tqdm(total=len(names), desc="records", unit="expert", leave=False) as bar:
        waiting = []
        for name in names:
            waiting.append((name, pool.submit(_blob, source, *pairs[name], wire)))
            if len(waiting) > 2 * workers:
                yield _first(waiting, bar)
        while waiting:
            yield _first(waiting, bar)


def _first(waiting: list, bar) -> appended.Blob:
    name, job = waiting.pop(0)
    bar.update()
    return name, *job.result()


def _blob(source, number: int, expert: int, wire_name: str) -> tuple[np.ndarray, tuple]:
    """Bytes of a record, and what the index says of each component: start, bytes, sums."""
    components, pieces = source(number, expert), []
    for part in COMPONENTS:
        weights = components[part]
        pieces.append(wire.encode(weights, BITS).data.numpy() if wire_name == "coded" else as_bytes(weights))
    starts = [0, align(len(pieces[0]), ALIGN)]
    record = as_bytes(aligned(starts[1] + align(len(pieces[1]), ALIGN)))
    more = []
    for start, piece in zip(starts, pieces, strict=True):
        record[start : start + len(piece)] = piece
        padded = record[start : start + align(len(piece), ALIGN)]
        sums = [checksum(padded[at : at + PIECE]) for at in range(0, len(padded), PIECE)]
        more.append([start, len(piece), sums])
    return record, tuple(more)


def _record(name: str, place: Sequence) -> Record:
    start, nbytes, *parts = place
    found = {part: Part(at, size, tuple(sums)) for part, (at, size, sums) in zip(COMPONENTS, parts, strict=True)}
    return Record(name, start, nbytes, found)


def _sound(data: np.ndarray, place: Sequence) -> bool:
    """Whether bytes in the file are what they were when they were written."""
    record = _record("record", place)
    try:
        for name, part in record.parts.items():
            record.verify(data[part.start : part.start + part.padded], name, Path())
    except ValueError:
        return False
    return True
