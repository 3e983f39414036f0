"""A file of records, opened for reads past the page cache; it says when it is no longer the one that was opened."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from dualdeadline.store.layout import Record
from dualdeadline.wire.format import ALIGN

ReadFunction = Callable[[int, Sequence, int], int]  # as os.preadv: descriptor, buffers, offset -> bytes read


class ReplacedError(RuntimeError):
    """The file of the records is not the one that was opened."""


class RecordFile:
    """Records as `layout.convert` writes them.

    Args:
        direct: try O_DIRECT. read: what reads, for tests that let it fail.

    Attributes:
        kind: "direct", or "buffered (why)".
    """

    def __init__(self, path: Path, direct: bool = True, read: ReadFunction | None = None):
        self.path, self.read, self.kind = Path(path), read or os.preadv, "direct"
        self.descriptor = self._open(direct)
        self.identity = _identity(os.fstat(self.descriptor))

    def _open(self, direct: bool) -> int:
        if not direct:
            self.kind = "buffered (asked for)"
        elif not hasattr(os, "O_DIRECT"):
            self.kind = "buffered (this system has no O_DIRECT)"
        else:
            try:
                return os.open(self.path, os.O_RDONLY | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.kind = "buffered (the file system refuses O_DIRECT)"
        return os.open(self.path, os.O_RDONLY)

    def same(self, record: Record) -> None:
        """Check that the file is the one that was opened, before a record is read.

        Raises:
            ReplacedError: it is not.
        """
        try:
            now = _identity(os.stat(self.path))
        except FileNotFoundError:
            now = None
        if now != self.identity or _identity(os.fstat(self.descriptor)) != self.identity:
            raise ReplacedError(
                f"{self.path} was replaced or altered before {record.name} was read: device, inode, size, time are "
                f"{now}; needed: {self.identity}, those of the file that was opened"
            )

    def fill(self, record: Record, parts: Mapping[str, np.ndarray]) -> None:
        """Read components of a record, in as few calls as the system takes.

        Raises:
            OSError: they cannot be read, or not whole.
        """
        for run in record.runs(parts):
            buffers = [parts[name] for name in run]
            at, left = record.start + record.parts[run[0]].start, sum(view.nbytes for view in buffers)
            while left:
                count = self._some(buffers, at)
                if count <= 0 or (count % ALIGN and self.kind == "direct"):
                    raise OSError(errno.EIO, f"short read: {count} of {left} bytes at {at}")
                buffers, at, left = _rest(buffers, count), at + count, left - count

    def _some(self, buffers: Sequence, at: int) -> int:
        try:
            count = self.read(self.descriptor, buffers, at)
        except OSError as error:
            if error.errno != errno.EINVAL or self.kind != "direct":
                raise
            self.kind = "buffered (a direct read was refused: EINVAL)"
            other = os.open(self.path, os.O_RDONLY)
            os.dup2(other, self.descriptor)
            os.close(other)
            count = self.read(self.descriptor, buffers, at)
        if self.kind != "direct":
            os.posix_fadvise(self.descriptor, at, count, os.POSIX_FADV_DONTNEED)
        return count

    def close(self) -> None:
        os.close(self.descriptor)


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _rest(views: list[np.ndarray], count: int) -> list[np.ndarray]:
    """What of the buffers is not filled yet."""
    found = []
    for view in views:
        taken = min(count, view.nbytes)
        count -= taken
        if taken < view.nbytes:
            found.append(view[taken:])
    return found
