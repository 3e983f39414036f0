"""Records appended to one file, once: locked, journalled, resumed after a kill; the index is written last."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from dualdeadline import manifest
from dualdeadline.wire.format import ALIGN

FORMAT = 1
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
Blob = tuple[str, np.ndarray, tuple]  # name, bytes, and what else the index says of it


def build(
    folder: Path,
    head: dict,
    names: Sequence[str],
    blobs: Callable[[list[str]], Iterable[Blob]],
    sound: Callable[[np.ndarray, Sequence], bool],
) -> None:
    """Append what is not there yet; a killed build goes on where it stopped.

    Builds of one folder wait for each other. A folder that already has all the names stays as it is, more names are
    added to it.

    Args:
        head: what all records share; a finished folder of another head is refused, an unfinished one begun anew.
        blobs: missing names -> their records in that order, each a multiple of 4,096 bytes. sound: whether bytes from
            the file are what the index says of them.

    Raises:
        ValueError: the folder holds something else. OSError: the disk is full; what is there serves the next build.
    """
    if _finished(folder, head, names):  # nothing to write, so that a read-only folder serves as well
        return
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done, end = _known(folder, head, sound)
        missing = [name for name in names if name not in done]
        if missing or not (folder / "store.json").exists():
            _extend(folder, head, blobs(missing), len(missing), done, end)


def _finished(folder: Path, head: dict, names: Sequence[str]) -> bool:
    """Whether a folder holds all of it, whole."""
    path = folder / "records.bin"
    if not (folder / "store.json").exists() or not path.exists():
        return False
    said = _said(folder)
    whole = said["bytes"] == os.path.getsize(path) and set(names) <= set(said["records"])
    return whole and {name: said.get(name) for name in head} == head


def read(folder: Path, key: str | None) -> dict:
    """What a finished folder says of its records; `key` None: of whatever checkpoint.

    Raises:
        FileNotFoundError: none, or unfinished. ValueError: of another checkpoint, format or size.
    """
    if not (folder / "store.json").exists():
        raise FileNotFoundError(f"{folder} holds no finished store; needed: Store.build")
    said = _said(folder)
    if said["format"] != FORMAT or key not in (None, said["key"]):
        raise ValueError(f"{folder} has format {said['format']} and key {said['key']}; needed: {FORMAT} and {key}")
    size = os.path.getsize(folder / "records.bin")
    if size != said["bytes"]:
        raise ValueError(f"{folder / 'records.bin'} has {size} bytes; needed: {said['bytes']} (truncated?)")
    return said


def _said(folder: Path) -> dict:
    """What the index of a finished folder says."""
    try:
        said = json.loads((folder / "store.json").read_text())
        missing = {"format", "key", "bytes", "records"} - set(said)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{folder / 'store.json'} is damaged ({error}); needed: JSON as it was written") from error
    if missing or not isinstance(said, dict):
        raise ValueError(f"{folder / 'store.json'} lacks {sorted(missing)}; needed: as it was written")
    return said


def _extend(folder: Path, head: dict, blobs: Iterable[Blob], count: int, done: dict, end: int) -> None:
    """Append records to what is known, journal each, and write the index last."""
    lines = [head, *({"name": name, "place": place} for name, place in done.items())]
    manifest.write_text(folder / "journal.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    (folder / "store.json").unlink(missing_ok=True)  # the journal knows all that it said
    before = len(done)
    with open(folder / "records.bin", "r+b" if end else "wb", 0) as data, open(
        folder / "journal.jsonl", "a"
    ) as journal:
        data.truncate(end)
        data.seek(end)
        try:
            for name, blob, more in blobs:
                _write(data, blob)
                done[name] = (end, len(blob), *more)
                end += len(blob)
                journal.write(json.dumps({"name": name, "place": done[name]}) + "\n")
                journal.flush()
            os.fsync(data.fileno())
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise OSError(
                error.errno,
                f"{folder}: no room after {len(done) - before} of {count} records ({os.strerror(error.errno)}); "
                f"needed: about {_needed(end, len(done), before + count)} more bytes, then the same call goes on",
            ) from error
    manifest.write_text(folder / "store.json", json.dumps(head | {"bytes": end, "align": ALIGN, "records": done}))
    (folder / "journal.jsonl").unlink()


def _needed(end: int, done: int, total: int) -> int:
    return (total - done) * (end // done if done else ALIGN)


def _write(data, blob: np.ndarray) -> None:
    """All bytes of a record; a raw file may take fewer at a time."""
    view = memoryview(blob).cast("B")
    while len(view):
        view = view[data.write(view) :]


def _known(folder: Path, head: dict, sound) -> tuple[dict, int]:
    """Records that lie there sound, of a finished folder or of a killed build, and where they end.

    Raises:
        ValueError: the finished folder of something else.
    """
    path = folder / "records.bin"
    said = _said(folder) if (folder / "store.json").exists() else None
    if said and {name: said.get(name) for name in head} != head:
        raise ValueError(
            f"{folder} holds the records of {({name: said.get(name) for name in head})}; needed: {head}, "
            f"or another folder"
        )
    size = os.path.getsize(path) if path.exists() else 0
    listed = list(said["records"].items()) if said else _journalled(folder, head)
    if said and said["bytes"] == size:
        return {name: tuple(place) for name, place in listed}, size
    done, end = {}, 0
    for name, place in listed:
        start, length = place[:2]
        if start != end or start + length > size:
            break
        if not sound(np.fromfile(path, np.uint8, length, offset=start), place):
            break
        done[name], end = tuple(place), start + length
    (folder / "store.json").unlink(missing_ok=True)
    return done, end


def _journalled(folder: Path, head: dict) -> list[tuple[str, list]]:
    """Names and places in the journal of a killed build of the same kind; a torn last line counts for nothing."""
    path, found = folder / "journal.jsonl", []
    lines = path.read_text().splitlines() if path.exists() else []
    if not lines or lines[0] != json.dumps(head):
        return found
    for line in lines[1:]:
        try:
            said = json.loads(line)
        except json.JSONDecodeError:
            break
        found.append((said["name"], said["place"]))
    return found
