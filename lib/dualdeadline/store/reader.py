"""Reads records past the page cache: O_DIRECT into aligned memory, several at a time, each verified.

One read per record or component: preadv scatters a record's components straight to where each belongs. Threads keep up
to `depth` reads in flight; what the router asked for goes before what was guessed. A read that fails, is cut short or
does not match its checksums is made once more; then the run stops with the name of the record.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from dualdeadline.store.layout import PIECE, Record, bad_piece
from dualdeadline.wire.format import ALIGN, checksum

DEPTH = 8  # reads in flight; what notebook 10 sweeps
ATTEMPTS = 2  # of one read
FADE = 0.9  # weight of the past in the running mean of read times
ReadFunction = Callable[[int, Sequence, int], int]  # as os.preadv: descriptor, buffers, offset -> bytes read


class ReplacedError(RuntimeError):
    """The file of the records is not the one that was opened."""


class Read:
    """A read that was handed in; `result()` waits for it and raises what went wrong."""

    def __init__(self, record: Record, parts: Mapping[str, np.ndarray], urgent: bool):
        self.record, self.parts, self.urgent, self.future = record, dict(parts), urgent, Future()

    def result(self) -> None:
        self.future.result()

    @property
    def done(self) -> bool:
        return self.future.done()


class Reader:
    """Reads of one file.

    Args:
        path: records as `layout.convert` writes them. depth: reads in flight.
        direct: try O_DIRECT. read: what reads, for tests that let it fail.
        verify: False only to measure what sums cost.

    Attributes:
        path_kind: "direct", or "buffered (why)". counts: reads, bytes, retries.
        ms: running mean of the time of one read (None: none yet).
    """

    def __init__(
        self, path: Path, depth: int = DEPTH, direct: bool = True, read: ReadFunction | None = None, verify: bool = True
    ):
        if not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
            raise ValueError(f"depth is {depth!r}; needed: a whole number above 0")
        self.file, self.read, self.depth, self.verify = Path(path), read or os.preadv, depth, verify
        self.path_kind, self.counts, self.ms = "direct", Counter(), None
        self.descriptor = self._open(direct)
        self.identity = _identity(os.fstat(self.descriptor))
        self._queue: list[tuple[bool, int, Read]] = []
        self._turn, self._closed = itertools.count(), False
        # taken itself, and news by a queue: an interrupted caller of threading.Condition can keep its lock for ever, or
        # let a later notification go astray
        self._lock, self._news = threading.RLock(), SimpleQueue()
        self._rest = threading.Condition(self._lock)  # notified by the reading threads only
        self._running, self._left = 0, depth
        self._sums = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="dualdeadline-sums")
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(depth)]
        for thread in self._threads:
            thread.start()

    def _open(self, direct: bool) -> int:
        if not direct:
            self.path_kind = "buffered (asked for)"
        elif not hasattr(os, "O_DIRECT"):
            self.path_kind = "buffered (this system has no O_DIRECT)"
        else:
            try:
                return os.open(self.file, os.O_RDONLY | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.path_kind = "buffered (the file system refuses O_DIRECT)"
        return os.open(self.file, os.O_RDONLY)

    def submit(self, record: Record, parts: Mapping[str, np.ndarray], urgent: bool = True) -> Read:
        """Hand in the read of one or both components of a record.

        Args:
            parts: by component, memory of its padded length, at a multiple of 4,096 bytes. urgent: before all others.
        """
        for name, memory in parts.items():
            if memory.nbytes != record.parts[name].padded or memory.ctypes.data % ALIGN:
                raise ValueError(
                    f"memory for {name} of {record.name} has {memory.nbytes} bytes at {memory.ctypes.data}; needed: "
                    f"{record.parts[name].padded} at a multiple of {ALIGN}"
                )
        found = Read(record, parts, urgent)
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the reader of {self.file} is closed")
            heapq.heappush(self._queue, (not urgent, next(self._turn), found))
        self._news.put(None)
        return found

    def hurry(self, read: Read) -> None:
        """A guess was right: if its read has not begun, it goes before the other guesses."""
        with self._lock:
            if not read.urgent and any(waiting is read for _, _, waiting in self._queue):
                read.urgent = True
                self._queue = [(not one.urgent, turn, one) for _, turn, one in self._queue]
                heapq.heapify(self._queue)

    def cancel(self, read: Read) -> bool:
        """Whether a read had not begun and now never will."""
        return read.future.cancel()  # whoever takes it from the queue drops it

    def settle(self) -> None:
        """Drop what has not begun and wait for what has: memory that was handed in is free again."""
        with self._lock:
            for _, _, waiting in self._queue:
                waiting.future.cancel()
            self._queue = []
            self._rest.wait_for(lambda: not self._running)

    def close(self) -> None:
        """Wait for what has begun, and end the threads; they close the file."""
        if self._closed:
            return
        self.settle()
        self.leave()
        for thread in self._threads:
            thread.join()

    def leave(self) -> None:
        """As `close`, but waits for nothing: also for a garbage collector, in whatever thread."""
        with self._lock:
            for _, _, waiting in self._queue:
                waiting.future.cancel()
            self._queue, self._closed = [], True
        for _ in range(self.depth):
            self._news.put(None)

    def _work(self) -> None:
        while not self._closed:
            self._news.get()
            while (read := self._next()) is not None:
                try:
                    self._serve(read)
                    outcome = None
                except BaseException as error:
                    outcome = error
                with self._lock:
                    self._running -= 1
                    self._rest.notify_all()
                read.future.set_exception(outcome) if outcome else read.future.set_result(None)
        with self._lock:
            self._left -= 1
            if not self._left:  # the last one turns off the light
                self._sums.shutdown(wait=False)
                os.close(self.descriptor)

    def _next(self) -> Read | None:
        """The next read that nobody cancelled; from now on it runs."""
        with self._lock:
            while self._queue:
                read = heapq.heappop(self._queue)[2]
                if read.future.set_running_or_notify_cancel():
                    self._running += 1
                    return read
        return None

    def _serve(self, read: Read) -> None:
        """Read and verify, at most twice."""
        for attempt in range(ATTEMPTS):
            begun = time.perf_counter()
            try:
                self._same_file(read.record)
                self._fill(read)
                if self.verify:
                    self._verify(read)
                break
            except ReplacedError:
                raise
            except (OSError, ValueError) as error:
                if attempt + 1 == ATTEMPTS:
                    raise _named(error, read.record, self.file) from error
                self.counts["retries"] += 1
        spent = 1e3 * (time.perf_counter() - begun)
        with self._lock:
            self.ms = spent if self.ms is None else FADE * self.ms + (1 - FADE) * spent
            self.counts["reads"] += 1
            self.counts["bytes"] += sum(memory.nbytes for memory in read.parts.values())

    def _same_file(self, record: Record) -> None:
        try:
            now = _identity(os.stat(self.file))
        except FileNotFoundError:
            now = None
        if now != self.identity or _identity(os.fstat(self.descriptor)) != self.identity:
            raise ReplacedError(
                f"{self.file} was replaced or altered before {record.name} was read: device, inode, size, time are "
                f"{now}; needed: {self.identity}, those of the file that was opened"
            )

    def _fill(self, read: Read) -> None:
        """All bytes of a read, in as few calls as the system takes."""
        wanted = sorted(read.parts, key=lambda name: read.record.parts[name].start)
        for run in _runs(read.record, wanted):
            buffers = [read.parts[name] for name in run]
            at, left = read.record.start + read.record.parts[run[0]].start, sum(view.nbytes for view in buffers)
            while left:
                count = self._some(buffers, at)
                if count <= 0 or (count % ALIGN and self.path_kind == "direct"):
                    raise OSError(errno.EIO, f"short read: {count} of {left} bytes at {at}")
                buffers, at, left = _rest(buffers, count), at + count, left - count

    def _some(self, buffers: Sequence, at: int) -> int:
        try:
            count = self.read(self.descriptor, buffers, at)
        except OSError as error:
            if error.errno != errno.EINVAL or self.path_kind != "direct":
                raise
            self.path_kind = "buffered (a direct read was refused: EINVAL)"
            other = os.open(self.file, os.O_RDONLY)
            os.dup2(other, self.descriptor)
            os.close(other)
            count = self.read(self.descriptor, buffers, at)
        if self.path_kind != "direct":
            os.posix_fadvise(self.descriptor, at, count, os.POSIX_FADV_DONTNEED)
        return count

    def _verify(self, read: Read) -> None:
        """CRC-32 of every piece, on all cores."""
        jobs = []
        for name, memory in read.parts.items():
            for number, wanted in enumerate(read.record.parts[name].sums):
                piece = memory[number * PIECE : (number + 1) * PIECE]
                jobs.append((name, number, wanted, piece))
        first, *others = jobs
        waiting = [self._sums.submit(checksum, job[3]) for job in others]
        found = [checksum(first[3]), *(job.result() for job in waiting)]
        for (name, number, wanted, _), got in zip(jobs, found, strict=True):
            if got != wanted:
                raise ValueError(bad_piece(read.record.name, name, self.file, number, got, wanted))


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _named(error: Exception, record: Record, path: Path) -> Exception:
    """The same error with the name of the record."""
    if isinstance(error, OSError):
        return OSError(error.errno, f"{record.name} of {path} cannot be read, tried {ATTEMPTS} times: {error}")
    return error


def _runs(record: Record, names: list[str]) -> list[list[str]]:
    """Components that lie one behind the other in the file, together."""
    runs: list[list[str]] = []
    for name in names:
        part = record.parts[name]
        last = record.parts[runs[-1][-1]] if runs else None
        if last and last.start + last.padded == part.start:
            runs[-1].append(name)
        else:
            runs.append([name])
    return runs


def _rest(views: list[np.ndarray], count: int) -> list[np.ndarray]:
    """What of the buffers is not filled yet."""
    found = []
    for view in views:
        taken = min(count, view.nbytes)
        count -= taken
        if taken < view.nbytes:
            found.append(view[taken:])
    return found
