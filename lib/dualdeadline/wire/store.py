"""All wire records of a model in one file, written once: records at multiples of 4,096 bytes, an index beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dualdeadline import manifest
from dualdeadline.wire.many import encode_many
from dualdeadline.wire.format import ALIGN, WireRecord

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

        Args:
            key: hash of the checkpoint, as `manifest.file_sha256` gives it. names: of the components, in order.
            load: name -> Tensor; called only for names that are not there. bits: of the wire format's first code.

        Raises:
            ValueError: a name that comes twice.
        """
        folder, names = Path(folder), list(names)
        if len(set(names)) < len(names):
            raise ValueError(f"{len(names)} names, {len(set(names))} of them different; needed: each once")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            found = cls(folder, key)
            if list(found.index) == names and found.bits == bits:
                return found
        except (FileNotFoundError, ValueError, KeyError, json.JSONDecodeError):
            pass
        (folder / "store.json").unlink(missing_ok=True)  # what it says is over once the records change
        done, end = _journal(folder, key, bits, names)
        rest = [name for name in names if name not in done]
        with open(folder / "records.bin", "r+b" if end else "wb") as data, open(
            folder / "journal.jsonl", "a"
        ) as journal:
            data.truncate(end)
            data.seek(end)
            tensors: Iterable[tuple[str, Tensor]] = ((name, load(name)) for name in rest)
            for name, record in encode_many(tensors, bits, workers, len(rest)):
                data.write(record.data.numpy())
                data.flush()
                done[name] = (end, record.nbytes)
                end += record.nbytes
                journal.write(json.dumps({"name": name, "place": done[name]}) + "\n")
                journal.flush()
            os.fsync(data.fileno())
        said = {
            "format": FORMAT,
            "key": key,
            "bits": bits,
            "bytes": end,
            "align": ALIGN,
            "records": {name: done[name] for name in names},
        }
        manifest.write_text(folder / "store.json", json.dumps(said))
        (folder / "journal.jsonl").unlink()
        return cls(folder, key)


def _journal(folder: Path, key: str, bits: int, names: list[str]) -> tuple[dict, int]:
    """What an unfinished build of the same components has written, and where it ends; starts a new one if none has."""
    path, head = folder / "journal.jsonl", {"key": key, "bits": bits, "format": FORMAT}
    done, end = {}, 0
    if path.exists() and (folder / "records.bin").exists():
        lines = path.read_text().splitlines()
        size = os.path.getsize(folder / "records.bin")
        if lines and lines[0] == json.dumps(head):
            for line in lines[1:]:
                try:
                    said = json.loads(line)
                except json.JSONDecodeError:  # the last line of a killed build
                    break
                start, length = said["place"]
                if start != end or start + length > size or said["name"] not in names:
                    break
                done[said["name"]], end = (start, length), start + length
    lines = [head, *({"name": name, "place": place} for name, place in done.items())]
    manifest.write_text(path, "".join(json.dumps(line) + "\n" for line in lines))
    return done, end
