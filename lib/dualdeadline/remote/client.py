"""The caller's side of a worker: one connection, made again when it breaks, and the unanswered request replayed.

A request is a pure function of what it carries, so that asking twice gives the same bits. What comes back is used only
if number, tag, experts, shape and dtype are those that were asked for; anything else ends the connection.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dualdeadline.remote import frames, keys

PARTS = ("serialise", "wire", "queue", "compute", "deserialise")  # of a round trip
GARBAGE = 3  # answers in a row that are none, after which a worker is not asked again
LONGEST_S = 1.0  # between two attempts


class RemoteError(ConnectionError):
    """A worker that cannot be reached, or whose answers cannot be used."""


def parse(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[::1]:port".

    Raises:
        ValueError: anything else.
    """
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ValueError(f"remote is {address!r}; needed: 'host:port', as the worker says when it starts")
    return host.strip("[]"), int(port)


class Client:
    """Asks a worker; one request at a time.

    Args:
        address: "host:port". token_file: shared with the worker.
        timeout_s: for an answer. patience_s: for connecting again, with pauses that double from `pause_s`.
        dial: makes a connected socket; default: TCP to the address.

    Attributes:
        counts: round_trips, retries, bytes_sent, bytes_received. parts_ms: of all round trips, by `PARTS`.

    Raises:
        RemoteError: nobody answers. PermissionError: the token is not the worker's.
    """

    def __init__(
        self,
        address: str,
        token_file: Path,
        timeout_s: float = 60.0,
        patience_s: float = 30.0,
        pause_s: float = 0.05,
        dial: Callable[[], socket.socket] | None = None,
    ):
        self.address, self.token = address, keys.read_token(token_file)
        place = parse(address)
        self.dial = dial or (lambda: socket.create_connection(place, timeout_s))
        self.timeout_s, self.patience_s, self.pause_s = timeout_s, patience_s, pause_s
        self.counts, self.parts_ms, self.lock = Counter(), Counter(), threading.RLock()
        self.connection: socket.socket | None = None
        self.asking = self.given_up = False  # a request is under way; whoever waits for its answer is to stop
        self.number, self.keys, self.lead_s = 0, (b"", b""), 0.0  # the last: spent before a request is packed
        self.known: dict | None = None
        self.known = self.ask({"op": "info"})[0]

    @property
    def info(self) -> dict:
        """The worker's digests and arithmetic."""
        return self.known

    def experts(
        self,
        number: int,
        hidden: Tensor,
        ids: Tensor,
        weights: Tensor,
        chosen: Sequence[int],
        threads: int | None = None,
    ) -> dict[int, Tensor]:
        """Weighted outputs of some experts of a layer, [rows, H] each: its tokens by rank, then by token.

        Args:
            hidden: [N,H]. ids, weights: routes [N,K]. chosen: different experts that `ids` names.
            threads: of the products (default: the calling thread's).

        Raises:
            RemoteError: no usable answer in time. RuntimeError: the worker refuses, and says why.
        """
        begun = time.perf_counter()
        rows = torch.bincount(ids.flatten().long().cpu(), minlength=max(chosen) + 1 if chosen else 1).tolist()
        counts, out = [rows[expert] for expert in chosen], {}
        for part in _parts(counts, hidden.shape[1] * hidden.element_size()):
            names, lengths = list(chosen[part]), counts[part]
            shape = (sum(lengths), hidden.shape[1])

            def check(meta: Mapping, found: Mapping[str, Tensor], names=names, shape=shape) -> None:
                value = found.get("weighted")
                if meta.get("experts") != names or value is None or value.shape != shape or value.dtype != hidden.dtype:
                    got = None if value is None else (value.dtype, list(value.shape))
                    raise frames.BadFrame(
                        f"an answer for experts {meta.get('experts')} holds {got}; needed: "
                        f"{hidden.dtype} {list(shape)} for {names}"
                    )

            said = {"op": "experts", "layer": number, "experts": names, "threads": threads or torch.get_num_threads()}
            self.lead_s = time.perf_counter() - begun
            _, found = self.ask(said, {"hidden": hidden, "ids": ids, "weights": weights}, check)
            out |= dict(zip(names, found["weighted"].split(lengths)))
            begun = time.perf_counter()
            self._add("deserialise", 1e3 * (begun - self.ended_s))
        return out

    def weights(self, component: str, layer: int, expert: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """One expert's component, from the worker's memory. Raises as `experts`."""

        def check(meta: Mapping, found: Mapping[str, Tensor]) -> None:
            value = found.get("weights")
            if value is None or tuple(value.shape) != tuple(shape) or value.dtype != dtype:
                raise frames.BadFrame(f"{component} of expert {expert} in layer {layer} came in another shape")

        said = {"op": "weights", "component": component, "layer": layer, "expert": expert}
        return self.ask(said, {}, check)[1]["weights"]

    def ping(self) -> float:
        """Milliseconds of an empty round trip."""
        begun = time.perf_counter()
        self.ask({"op": "ping"})
        return 1e3 * (time.perf_counter() - begun)

    def ask(self, meta: Mapping, tensors: Mapping[str, Tensor] | None = None, check=None) -> tuple[dict, dict]:
        """Map and tensors of the answer to a request; connects again and replays it if need be.

        Args:
            check: called with map and tensors of an answer, raises BadFrame if it is not the one that was asked for.

        Raises:
            RemoteError, RuntimeError: as `experts`.
        """
        with self.lock:
            try:
                self.asking = True
                return self._asked(meta, tensors or {}, check)
            except RuntimeError:  # the worker refuses: an answer like others
                raise
            except BaseException:  # one that was interrupted would leave its answer to the next request
                self.close()
                raise
            finally:
                self.asking = False

    def _asked(self, meta: Mapping, tensors: Mapping[str, Tensor], check) -> tuple[dict, dict]:
        failed, garbage, pause, end = None, 0, self.pause_s, None
        while True:
            try:
                return self._once(meta, tensors, check)
            except OSError as error:
                self.close()
                failed, garbage = error, garbage + isinstance(error, frames.BadFrame)
            if self.given_up:
                raise RemoteError(f"the request to worker {self.address} was given up") from failed
            if isinstance(failed, PermissionError | RemoteError):
                raise failed
            end = end or time.monotonic() + self.patience_s
            if garbage >= GARBAGE or time.monotonic() + pause > end:
                what = meta["op"] + (f" of layer {meta['layer']}" if "layer" in meta else "")
                raise RemoteError(
                    f"worker {self.address} gives no usable answer to {what} "
                    f"({type(failed).__name__}: {failed}); needed: a worker that runs"
                ) from failed
            self.counts["retries"] += 1
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_S)

    @contextlib.contextmanager
    def giving_up(self) -> Iterator[None]:
        """Inside it whoever waits for an answer, in another thread, stops with an error; its connection is dropped."""
        self.given_up = True
        try:
            connection = self.connection
            if self.asking and connection is not None:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            yield
        finally:
            self.given_up = False

    def _once(self, meta: Mapping, tensors: Mapping[str, Tensor], check) -> tuple[dict, dict]:
        if self.connection is None:
            self._connect()
        self.number += 1
        begun = time.perf_counter()
        buffers = frames.pack(self.number, meta, tensors, self.keys[0])
        packed = time.perf_counter()
        sent = frames.send(self.connection, buffers)
        head, rest = frames.receive(self.connection)
        came = time.perf_counter()
        _, said, found = frames.unpack(head, rest, self.keys[1], self.number)
        if "error" in said:
            raise RuntimeError(f"worker {self.address} refuses: {said['error']}")
        if check is not None:
            check(said, found)
        self.ended_s = time.perf_counter()
        self._account(said.get("times_ms"), packed - begun, came - packed, self.ended_s - came)
        self.counts += Counter(round_trips=1, bytes_sent=sent, bytes_received=len(head) + len(rest))
        return said, found

    def _account(self, theirs, serialise_s: float, away_s: float, deserialise_s: float) -> None:
        """Add one round trip; the wire has what passed between sending and receiving outside of the worker."""
        names = {"serialise", "queue", "compute", "deserialise"}
        if (
            not isinstance(theirs, dict)
            or set(theirs) != names
            or not all(isinstance(v, float) for v in theirs.values())
        ):
            raise frames.BadFrame(
                f"an answer's times are {theirs!r}; needed: milliseconds of {', '.join(sorted(names))}"
            )
        found = Counter(theirs)
        found.update(serialise=1e3 * (serialise_s + self.lead_s), deserialise=1e3 * deserialise_s)
        self.lead_s = 0.0
        found["wire"] = 1e3 * away_s - sum(theirs.values())
        self.last_ms = {name: found[name] for name in PARTS}
        self.parts_ms.update(self.last_ms)

    def _add(self, part: str, ms: float) -> None:
        """More of the last round trip."""
        self.last_ms[part] += ms
        self.parts_ms[part] += ms

    def _connect(self) -> None:
        connection = self.dial()
        try:
            connection.settimeout(self.timeout_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.keys, self.number = keys.greet(connection, self.token), 0
        except BaseException:
            connection.close()
            raise
        self.connection = connection
        if self.known is not None:
            found = self._once({"op": "info"}, {}, None)[0]
            same = all(found.get(name) == self.known[name] for name in ("digests", "arithmetic"))
            if not same:
                raise RemoteError(
                    f"worker {self.address} holds other experts or computes elsewhere than before; "
                    "needed: the worker that was asked first, or one like it"
                )

    def close(self) -> None:
        """Hang up; the next request connects again."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None


def _parts(rows: Sequence[int], row_bytes: int) -> list[slice]:
    """Runs of experts whose outputs fit into one frame each."""
    found, begin, held = [], 0, 0
    for place, count in enumerate(rows):
        if held and held + count * row_bytes > frames.BODY_LIMIT:
            found.append(slice(begin, place))
            begin, held = place, 0
        held += count * row_bytes
    return [*found, slice(begin, len(rows))] if rows else found
