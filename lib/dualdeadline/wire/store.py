"""All wire records of a model in one file, written once: records at multiples of 4,096 bytes, an index beside it."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dualdeadline import manifest
from dualdeadline.wire.format import ALIGN, BITS, WireRecord
from dualdeadline.wire.many import encode_many

FORMAT = 1


class Store:
    """Records by name, mapped from a file.

    Args:
        folder: written by `build`. key: hash of the checkpoint that the records must come from.

    Raises:
        FileNotFoundError: no finished store. ValueError: of another checkpoint, format or size.
    """

    def __init__(self, folder: Path, key: str):
        folder = Path(folder)
        if not (folder / "store.json").exists():
            raise FileNotFoundError(f"{folder} holds no finished store; needed: Store.build")
        said = json.loads((folder / "store.json").read_text())
        if said["format"] != FORMAT or said["key"] != key:
            raise ValueError(f"{folder} has format {said['format']} and key {said['key']}; needed: {FORMAT} and {key}")
        size = os.path.getsize(folder / "records.bin")
        if size != said["bytes"]:
            raise ValueError(f"{folder / 'records.bin'} has {size} bytes; needed: {said['bytes']} (truncated?)")
        self.index = {name: tuple(place) for name, place in said["records"].items()}
        self.data = np.memmap(folder / "records.bin", np.uint8, "r") if size else np.empty(0, np.uint8)
        self.folder, self.bytes, self.bits = folder, size, said["bits"]

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, name: str) -> WireRecord:
        """A verified record, copied out of the file.

        Raises:
            KeyError: no such name. ValueError: it is damaged; the text names it.
        """
        start, size = self.index[name]
        data = torch.from_numpy(self.data[start : start + size].copy())
        return WireRecord(data).verify(f"record {name!r} of {self.folder}")

    @classmethod
    def build(
        cls, folder: Path, key: str, names: Iterable[str], load, bits: int = 3, workers: int | None = None
    ) -> Store:
        """Encode what is not there yet, and open the store; a killed build goes on where it stopped.

        Builds of one folder wait for each other. A store that already has all the names is opened as it is, more names
        are added to it.

        Args:
            key: hash of the checkpoint, as `manifest.file_sha256` gives it. names: of the components, in order.
            load: name -> Tensor; called only for names that are not there. bits: of the wire format's first code.

        Raises:
            ValueError: a name that comes twice, other bits than 2 to 4, or a folder with the finished store of another
                checkpoint or of other bits, which stays as it is.
        """
        folder, names = Path(folder), list(names)
        if len(set(names)) < len(names) or bits not in BITS:
            raise ValueError(
                f"{len(names)} names, {len(set(names))} of them different, bits {bits}; "
                f"needed: each once, bits of {BITS}"
            )
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            done, end = _known(folder, key, bits)
            if (folder / "store.json").exists() and set(names) <= set(done):
                return cls(folder, key)
            _extend(folder, key, bits, [name for name in names if name not in done], load, done, end, workers)
        return cls(folder, key)


def _extend(folder: Path, key: str, bits: int, names: list[str], load, done: dict, end: int, workers) -> None:
    """Append records to what is known, journal each, and write the index last."""
    lines = [_head(key, bits), *({"name": name, "place": place} for name, place in done.items())]
    manifest.write_text(folder / "journal.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    (folder / "store.json").unlink(missing_ok=True)  # the journal knows all that it said
    with open(folder / "records.bin", "r+b" if end else "wb") as data, open(folder / "journal.jsonl", "a") as journal:
        data.truncate(end)
        data.seek(end)
        tensors: Iterable[tuple[str, Tensor]] = ((name, load(name)) for name in names)
        for name, record in encode_many(tensors, bits, workers, len(names)):
            data.write(record.data.numpy())
            data.flush()
            done[name] = (end, record.nbytes)
            end += record.nbytes
            journal.write(json.dumps({"name": name, "place": done[name]}) + "\n")
            journal.flush()
        os.fsync(data.fileno())
    said = _head(key, bits) | {"bytes": end, "align": ALIGN, "records": done}
    manifest.write_text(folder / "store.json", json.dumps(said))
    (folder / "journal.jsonl").unlink()


def _head(key: str, bits: int) -> dict:
    return {"format": FORMAT, "key": key, "bits": bits}


def _known(folder: Path, key: str, bits: int) -> tuple[dict, int]:
    """Records that lie there sound, of a finished store or of a killed build, and where they end.

    Raises:
        ValueError: the finished store of something else.
    """
    said = json.loads((folder / "store.json").read_text()) if (folder / "store.json").exists() else None
    if said and {name: said.get(name) for name in _head(key, bits)} != _head(key, bits):
        wanted = _head(key, bits)
        raise ValueError(
            f"{folder} holds the records of {({name: said.get(name) for name in wanted})}; needed: "
            f"{wanted}, or another folder"
        )
    size = os.path.getsize(folder / "records.bin") if (folder / "records.bin").exists() else 0
    listed = list(said["records"].items()) if said else _journalled(folder, key, bits)
    if said and said["bytes"] == size:
        return {name: tuple(place) for name, place in listed}, size
    done, end = {}, 0
    for name, (start, length) in listed:
        if start != end or start + length > size or not _sound(folder / "records.bin", start, length):
            break
        done[name], end = (start, length), start + length
    (folder / "store.json").unlink(missing_ok=True)
    return done, end


def _journalled(folder: Path, key: str, bits: int) -> list[tuple[str, list[int]]]:
    """Names and places in the journal of a killed build of the same kind; a torn last line counts for nothing."""
    path, found = folder / "journal.jsonl", []
    lines = path.read_text().splitlines() if path.exists() else []
    if not lines or lines[0] != json.dumps(_head(key, bits)):
        return found
    for line in lines[1:]:
        try:
            said = json.loads(line)
        except json.JSONDecodeError:
            break
        found.append((said["name"], said["place"]))
    return found


def _sound(path: Path, start: int, length: int) -> bool:
    """Whether a record in the file is what it was when it was written."""
    try:
        WireRecord(torch.from_numpy(np.fromfile(path, np.uint8, length, offset=start))).verify()
    except ValueError:
        return False
    return True
