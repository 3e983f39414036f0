"""Reads records past the page cache: O_DIRECT into aligned memory, several at a time, each verified.

One read per record or component: preadv scatters a record's components straight to where each belongs. Threads keep up
to `depth` reads in flight; what the router asked for goes before what was guessed. Who waits for a read that nobody
has begun makes it himself: waking a thread takes as long as a small read. A read that fails, is cut short or does not
match its checksums is made once more; then the run stops with the name of the record.
"""

from __future__ import annotations

import heapq
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from dualdeadline.store.file import ReadFunction, RecordFile, ReplacedError
from dualdeadline.store.layout import PIECE, Record, bad_piece
from dualdeadline.store.pages import checksum
from dualdeadline.task import Task
from dualdeadline.wire.format import ALIGN

DEPTH = 8  # reads in flight; what notebook 10 sweeps
ATTEMPTS = 2  # of one read
ALONE = 4  # pieces of 1 MiB that the reading thread sums itself: about as long as others take to begin
LOOK_S = 1e-3  # after which the file is looked at again while reads follow one another
FADE = 0.9  # weight of the past in the running mean of read times


class Read(Task):
    """A read that was handed in; `result()` waits for it, or makes it, and raises what went wrong."""

    def __init__(self, reader: Reader, record: Record, parts: Mapping[str, np.ndarray], urgent: bool):
        super().__init__()
        self.reader, self.record, self.parts, self.urgent = reader, record, dict(parts), urgent

    def result(self, timeout_s: float | None = None) -> None:
        while not self.done and self.reader.help(self):
            pass
        super().result(timeout_s)


class Reader:
    """Reads of one file.

    Args:
        path: records as `layout.convert` writes them. depth: reads in flight (one more while
            who waits makes one).
        direct: try O_DIRECT. read: what reads, for tests that let it fail.
        verify: False only to measure what sums cost.

    Attributes:
        counts: reads, bytes, retries. ms: running mean of the time of one read (None: none yet).
    """

    def __init__(
        self, path: Path, depth: int = DEPTH, direct: bool = True, read: ReadFunction | None = None, verify: bool = True
    ):
        if not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
            raise ValueError(f"depth is {depth!r}; needed: a whole number above 0")
        self.file, self.depth, self.verify = RecordFile(path, direct, read), depth, verify
        self.counts, self.ms = Counter(), None
        self._queue: list[tuple[bool, int, Read]] = []
        self._turn, self._closed = itertools.count(), False
        # a lock that is taken itself, and news by a queue: an interrupted caller of threading.Condition can keep its
        # lock for ever, or let a later notification go astray
        self._lock, self._news = threading.RLock(), SimpleQueue()
        self._running: set[Read] = set()
        self._left, self._looked = depth, 0.0
        self._sums = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="dualdeadline-sums")
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(depth)]
        for thread in self._threads:
            thread.start()

    @property
    def path_kind(self) -> str:
        """ "direct", or "buffered (why)"."""
        return self.file.kind

    def submit(self, record: Record, parts: Mapping[str, np.ndarray], urgent: bool = True, wake: bool = True) -> Read:
        """Hand in the read of one or both components of a record.

        Args:
            parts: by component, memory of its padded length, at a multiple of 4,096 bytes. urgent: before all others.
            wake: a thread; False if the caller is about to wait for this or another read, and so will make one.
        """
        for name, memory in parts.items():
            if memory.nbytes != record.parts[name].padded or memory.ctypes.data % ALIGN:
                raise ValueError(
                    f"memory for {name} of {record.name} has {memory.nbytes} bytes at {memory.ctypes.data}; needed: "
                    f"{record.parts[name].padded} at a multiple of {ALIGN}"
                )
        found = Read(self, record, parts, urgent)
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the reader of {self.file.path} is closed")
            heapq.heappush(self._queue, (not urgent, next(self._turn), found))
        if wake:
            self._news.put(None)
        return found

    def hurry(self, read: Read) -> None:
        """A guess was right: if its read has not begun, it goes before the other guesses."""
        with self._lock:
            if not read.urgent and any(waiting is read for _, _, waiting in self._queue):
                read.urgent = True
                self._queue = [(not one.urgent, turn, one) for _, turn, one in self._queue]
                heapq.heapify(self._queue)

    def help(self, read: Read) -> bool:
        """Make a read here and now, or if somebody has begun it, another that was asked for; whether there was one, and
        not too many are in flight."""
        with self._lock:
            if self._closed or len(self._running) >= self.depth:
                return False
            if not read.claim():
                read = next(
                    (
                        one
                        for guess, _, one in sorted(self._queue, key=lambda entry: entry[:2])
                        if not guess and one.claim()
                    ),
                    None,
                )
            if read is None:
                return False
            first = self._first()
            # an interrupted main thread could not take its word back, and is not reading any more when it settles
            if threading.current_thread() is not threading.main_thread():
                self._running.add(read)
        self._finish(read, first)
        return True

    def cancel(self, read: Read) -> bool:
        """Whether a read had not begun and now never will."""
        return read.cancel()  # whoever takes it from the queue drops it

    def settle(self) -> None:
        """Drop what has not begun and wait for what has: memory that was handed in is free again."""
        with self._lock:
            for _, _, waiting in self._queue:
                waiting.cancel()
            self._queue = []
            running = list(self._running)
        for read in running:
            read.wait()

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
                waiting.cancel()
            self._queue, self._closed = [], True
        for _ in range(self.depth):
            self._news.put(None)

    def _work(self) -> None:
        while not self._closed:
            self._news.get()
            while (found := self._next()) is not None:
                self._finish(*found)
        with self._lock:
            self._left -= 1
            last, running = not self._left, list(self._running)
        if last:  # it turns off the light
            for read in running:  # somebody may be helping
                read.wait()
            self._sums.shutdown(wait=False)
            self.file.close()

    def _next(self) -> tuple[Read, bool] | None:
        """The next read that nobody cancelled or began; from now on it runs. Whether to look at the file first."""
        with self._lock:
            while self._queue:
                read = heapq.heappop(self._queue)[2]
                if read.claim():
                    first = self._first()
                    self._running.add(read)
                    return read, first
        return None

    def _first(self) -> bool:
        """Whether a read that is about to run is the first since none was in flight, or for a while."""
        now = time.perf_counter()
        if self._running and now - self._looked < LOOK_S:
            return False
        self._looked = now
        return True

    def _finish(self, read: Read, look: bool) -> None:
        """Make a read that was claimed, and say how it ended."""
        try:
            self._serve(read, look)
            outcome = None
        except BaseException as error:
            outcome = error
        with self._lock:
            self._running.discard(read)
        read.finish(outcome)

    def _serve(self, read: Read, look: bool) -> None:
        """Read and verify, at most twice.

        Args:
            look: at the file first, whether it is still the one that was opened.
        """
        for attempt in range(ATTEMPTS):
            begun = time.perf_counter()
            try:
                if look or attempt:
                    self.file.same(read.record)
                self.file.fill(read.record, read.parts)
                if self.verify:
                    self._verify(read)
                break
            except ReplacedError:
                raise
            except (OSError, ValueError) as error:
                if attempt + 1 == ATTEMPTS:
                    raise _named(error, read.record, self.file.path) from error
                self.counts["retries"] += 1
        spent = 1e3 * (time.perf_counter() - begun)
        with self._lock:
            self.ms = spent if self.ms is None else FADE * self.ms + (1 - FADE) * spent
            self.counts["reads"] += 1
            self.counts["bytes"] += sum(memory.nbytes for memory in read.parts.values())

    def _verify(self, read: Read) -> None:
        """Sum of every piece; of a large record on all cores, as a layer may wait for this one alone."""
        jobs = []
        for name, memory in read.parts.items():
            for number, wanted in enumerate(read.record.parts[name].sums):
                piece = memory[number * PIECE : (number + 1) * PIECE]
                jobs.append((name, number, wanted, piece))
        pieces = [job[3] for job in jobs]
        found = map(checksum, pieces) if len(jobs) <= ALONE else self._sums.map(checksum, pieces)
        for (name, number, wanted, _), got in zip(jobs, found, strict=True):
            if got != wanted:
                raise ValueError(bad_piece(read.record.name, name, self.file.path, number, got, wanted))


def _named(error: Exception, record: Record, path: Path) -> Exception:
    """The same error with the name of the record."""
    if isinstance(error, OSError):
        return OSError(error.errno, f"{record.name} of {path} cannot be read, tried {ATTEMPTS} times: {error}")
    return error
