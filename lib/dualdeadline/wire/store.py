"""All wire records of a model in one file, written once: records at multiples of 4,096 bytes, an index beside it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dualdeadline.wire import appended
from dualdeadline.wire.format import BITS, WireRecord
from dualdeadline.wire.many import encode_many


class Store:
    """Records by name, mapped from a file.

    Args:
        folder: written by `build`. key: hash of the checkpoint that the records must come from.

    Raises:
        FileNotFoundError: no finished store. ValueError: of another checkpoint, format or size.
    """

    def __init__(self, folder: Path, key: str):
        folder = Path(folder)
        said = appended.read(folder, key)
        size = said["bytes"]
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
        head = {"format": appended.FORMAT, "key": key, "bits": bits}

        def blobs(missing: list[str]):
            tensors: Iterable[tuple[str, Tensor]] = ((name, load(name)) for name in missing)
            for name, record in encode_many(tensors, bits, workers, len(missing)):
                yield name, record.data.numpy(), ()

        appended.build(folder, head, names, blobs, _sound)
        return cls(folder, key)


def _sound(data: np.ndarray, place) -> bool:
    """Whether a record in the file is what it was when it was written."""
    try:
        WireRecord(torch.from_numpy(data)).verify()
    except ValueError:
        return False
    return True
