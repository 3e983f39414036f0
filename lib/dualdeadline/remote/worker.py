"""A process that holds experts and answers activations: `python -m dualdeadline.remote.worker --help`.

Requests of all connections wait in one queue for one thread that computes; each connection has a thread of its own that
reads, unpacks, packs and sends. Listens on loopback unless told otherwise; what is sent is signed, not encrypted.
"""

from __future__ import annotations

import argparse
import ipaddress
import queue
import socket
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from dualdeadline.remote import frames, keys
from dualdeadline.remote.held import Held, arithmetic

GREETING_S = 5.0  # for a stranger to prove the token
CONNECTIONS = 16  # at once
MOST_THREADS = 1024


class Worker:
    """Serves experts in threads of its own.

    Args:
        held: the experts. token: of `keys.read_token`. bind, port: where it listens; port 0 takes a free one.
        expose: allow an address that is not loopback. more: sockets that listen already, of other namespaces, say.

    Attributes:
        address: (host, port) where it listens.

    Raises:
        ValueError: an address that is not loopback without `expose`.
    """

    def __init__(self, held: Held, token: bytes, bind: str = "127.0.0.1", port: int = 0, expose: bool = False, more=()):
        if not expose and not ipaddress.ip_address(bind).is_loopback:
            raise ValueError(f"bind is {bind}; needed: a loopback address, or --expose in a network you trust")
        self.held, self.token, self.jobs, self.stopped = held, token, queue.SimpleQueue(), False
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        self.listener = socket.create_server((bind, port), family=family, backlog=CONNECTIONS)
        self.address = self.listener.getsockname()[:2]
        self.connections: set[socket.socket] = set()
        self.listeners = [self.listener, *more]
        threading.Thread(target=self._compute, daemon=True).start()
        for listener in self.listeners:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def stop(self) -> None:
        """Close everything; requests under way are not answered."""
        self.stopped = True
        for listener in self.listeners:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.jobs.put(None)

    def _accept(self, listener: socket.socket) -> None:
        while not self.stopped:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            if len(self.connections) >= CONNECTIONS:
                connection.close()
                continue
            self.connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.settimeout(GREETING_S)
            both = keys.challenge(connection, self.token)
            connection.settimeout(None)
            last = 0
            while both and not self.stopped:
                head, rest = frames.receive(connection)
                last = self._reply(connection, time.perf_counter(), head, rest, both, last)
        except (OSError, ValueError):  # of the other side; it may come again
            pass
        finally:
            self.connections.discard(connection)
            connection.close()

    def _reply(self, connection, came: float, head: bytes, rest: bytearray, both: tuple, last: int) -> int:
        """Answer one request; its number."""
        number, meta, tensors = frames.unpack(head, rest, both[1], None)
        if number <= last:
            raise frames.BadFrame(f"request {number} after {last}; needed: a later one")
        unpacked = time.perf_counter()
        try:
            said, found, begun, ended = self._answer(meta, tensors)
        except Exception as error:  # of what was asked for; the connection is sound
            said, found, begun, ended = {"error": f"{type(error).__name__}: {error}"}, {}, unpacked, unpacked
        back = time.perf_counter()

        def times() -> dict:
            now = time.perf_counter()
            spans = {
                "deserialise": unpacked - came,
                "queue": begun - unpacked + back - ended,
                "compute": ended - begun,
                "serialise": now - back,
            }
            return {"times_ms": {name: 1e3 * value for name, value in spans.items()}}

        frames.send(connection, frames.pack(number, said, found, both[0], times))
        return number

    def _answer(self, meta: dict, tensors: dict[str, Tensor]) -> tuple[dict, dict[str, Tensor], float, float]:
        """What is said, tensors, and when computing began and ended."""
        op = meta.get("op")
        now = time.perf_counter()
        if op == "experts":
            job: Future = Future()
            self.jobs.put((job, meta, tensors))
            return job.result()
        if op == "ping":
            return {}, {}, now, now
        if op == "info":
            return self.info(), {}, now, now
        if op == "weights":
            value = self.held.weights[meta["component"]][meta["layer"]][meta["expert"]]
            return {}, {"weights": value}, now, now
        raise ValueError(f"op is {op!r}; needed: experts, weights, ping or info")

    def info(self) -> dict:
        """What a client compares with its own."""
        return {"digests": self.held.digests, "arithmetic": arithmetic(self.held.device)}

    def _compute(self) -> None:
        threads = 0
        while (taken := self.jobs.get()) is not None:
            job, meta, tensors = taken
            begun = time.perf_counter()
            try:
                wanted = int(meta["threads"])
                if not 0 < wanted <= MOST_THREADS:
                    raise ValueError(f"threads is {wanted}; needed: 1 to {MOST_THREADS}")
                if wanted != threads:
                    torch.set_num_threads(wanted)  # the caller's, on which the bits depend
                    threads = wanted
                values = (tensors[name] for name in ("hidden", "ids", "weights"))
                found = self.held.compute(meta["layer"], *values, meta["experts"])
                job.set_result(({"experts": meta["experts"]}, {"weighted": found}, begun, time.perf_counter()))
            except BaseException as error:
                job.set_exception(error)


def _held(given: argparse.Namespace) -> Held:
    if given.synthetic:
        sizes = [tuple(map(int, each.split(","))) for each in given.synthetic]
        return Held.synthetic(sizes, getattr(torch, given.dtype or "bfloat16"), given.seed)
    from transformers import AutoConfig, AutoModelForCausalLM

    from dualdeadline import models

    source, wanted = models.location(given.model)
    dtype = getattr(torch, given.dtype or models.entry(given.model)["dtype"])
    if given.store:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source, revision=wanted), dtype=dtype)
        return Held.of_store(model.eval(), given.store)
    model = AutoModelForCausalLM.from_pretrained(source, revision=wanted, dtype=dtype).eval()
    return Held.of_model(model, given.device)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dualdeadline.remote.worker", description=__doc__.split(":")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", help="folder of a checkpoint, or a key of models.yaml")
    what.add_argument(
        "--synthetic", metavar="H,F,E", action="append", help="a layer of random experts, to measure with"
    )
    parser.add_argument("--store", type=Path, help="folder of the experts' records; of --model only the config is read")
    parser.add_argument(
        "--token-file", required=True, type=Path, help="mode 600; the token itself is never an argument"
    )
    parser.add_argument("--bind", default="127.0.0.1")
    parser.add_argument("--port", default=0, type=int, help="0: a free one, said on stdout")
    parser.add_argument("--expose", action="store_true", help="allow --bind to an address that is not loopback")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default=None, help="default: as models.yaml says; synthetic: bfloat16")
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--listen-fd", default=[], type=int, action="append", help="a listening socket handed down")
    parser.add_argument("--until-stdin-ends", action="store_true", help="stop when whoever started it closes the pipe")
    given = parser.parse_args(arguments)
    try:
        token = keys.read_token(given.token_file)
        if not given.expose and not ipaddress.ip_address(given.bind).is_loopback:
            raise ValueError(f"--bind is {given.bind}; needed: a loopback address, or --expose in a network you trust")
        more = [socket.socket(fileno=number) for number in given.listen_fd]
        worker = Worker(_held(given), token, given.bind, given.port, given.expose, more)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"listening on {worker.address[0]}:{worker.address[1]}", flush=True)
    with suppress(KeyboardInterrupt):
        if given.until_stdin_ends:
            sys.stdin.read()
        else:
            threading.Event().wait()
    worker.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
