"""Two hosts on one machine: two network namespaces with a pair of virtual interfaces between them, slowed as one asks.

Namespaces need root and iproute2, a delay also the kernel's netem. Where that is missing a `Relay` delays in this
process, which needs nothing and is no network.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator

CLONE_NEWNET = 0x40000000
NEAR, FAR = "10.213.0.1", "10.213.0.2"


class LinkError(RuntimeError):
    """What the kernel or iproute2 said when a link could not be made."""


class Link:
    """A link between namespaces `near` and `far`: `with Link() as link`, gone afterwards.

    Raises:
        LinkError: on entering, if this user or kernel cannot make it.
    """

    def __init__(self):
        tail = f"{os.getpid() % 100000}{id(self) % 1000}"
        self.near, self.far = f"ddn{tail}", f"ddf{tail}"

    def __enter__(self) -> Link:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        for name in (self.near, self.far):
            _ip("netns", "add", name)
        # both ends get the names of their namespaces, which are short enough for interfaces
        _ip("link", "add", self.near, "netns", self.near, "type", "veth", "peer", "name", self.far, "netns", self.far)
        for name, address in ((self.near, NEAR), (self.far, FAR)):
            _ip("-n", name, "addr", "add", f"{address}/30", "dev", name)
            for device in ("lo", name):
                _ip("-n", name, "link", "set", device, "up")

    def slow(self, delay_ms: float = 0.0, rate_mbit: float = 0.0) -> None:
        """Delay and limit both directions from now on; a round trip takes twice the delay longer. 0: none.

        Raises:
            LinkError: a kernel without netem (delay) or tbf (rate alone).
        """
        words = ["netem", "limit", "100000", "delay", f"{delay_ms}ms"] if delay_ms else []
        if rate_mbit:
            words += ["rate", f"{rate_mbit}mbit"] if words else ["tbf", "burst", "256kb", "latency", "1s"]
            words += [] if delay_ms else ["rate", f"{rate_mbit}mbit"]
        for name in (self.near, self.far):
            with contextlib.suppress(LinkError):  # there is none at first
                _run("tc", "-n", name, "qdisc", "del", "dev", name, "root")
            if words:
                _run("tc", "-n", name, "qdisc", "add", "dev", name, "root", *words)

    def __exit__(self, *error) -> None:
        for name in (self.near, self.far):
            with contextlib.suppress(LinkError):
                _ip("netns", "del", name)

    def listen(self) -> socket.socket:
        """A listening socket of the far namespace, to be handed to a worker."""
        with _inside(self.far):
            return socket.create_server((FAR, 0))

    def dial(self, port: int, timeout_s: float = 30.0) -> socket.socket:
        """A socket of the near namespace, connected to a port of the far one; usable anywhere in this process."""
        with _inside(self.near):
            return socket.create_connection((FAR, port), timeout_s)


@contextlib.contextmanager
def _inside(name: str) -> Iterator[None]:
    """This thread is in a network namespace; sockets made here stay there."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as home, open(f"/var/run/netns/{name}") as there:
        if libc.setns(there.fileno(), CLONE_NEWNET):
            raise LinkError(f"cannot enter namespace {name}: {os.strerror(ctypes.get_errno())}; needed: root")
        try:
            yield
        finally:
            if libc.setns(home.fileno(), CLONE_NEWNET):
                raise LinkError(f"cannot leave namespace {name}: {os.strerror(ctypes.get_errno())}")


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    if shutil.which(words[0]) is None:
        raise LinkError(f"{words[0]} is not installed; needed: iproute2")
    if os.geteuid() != 0:
        raise LinkError("no root; needed: root, to make network namespaces")
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise LinkError(
            f"`{' '.join(words)}` fails: {said[0] if said else done.returncode}; needed: root, and a kernel "
            "with network namespaces (netem for delay and rate)"
        )


class Relay:
    """Passes a connection on, each chunk so much later: the delay of a network, in threads of this process.

    Args:
        target: (host, port). delay_ms: of each direction.

    Attributes:
        address: (host, port) on loopback.
    """

    def __init__(self, target: tuple[str, int], delay_ms: float):
        self.target, self.delay_s = target, delay_ms / 1e3
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()[:2]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            far = socket.create_connection(self.target)
            for source, sink in ((near, far), (far, near)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                waiting: queue.SimpleQueue = queue.SimpleQueue()
                threading.Thread(target=self._read, args=(source, waiting), daemon=True).start()
                threading.Thread(target=self._write, args=(sink, waiting), daemon=True).start()

    def _read(self, source: socket.socket, waiting: queue.SimpleQueue) -> None:
        data = b"first"
        while data:
            try:
                data = source.recv(2**16)
            except OSError:
                data = b""
            waiting.put((time.perf_counter() + self.delay_s, data))

    def _write(self, sink: socket.socket, waiting: queue.SimpleQueue) -> None:
        with contextlib.suppress(OSError):
            while True:
                due, data = waiting.get()
                time.sleep(max(0.0, due - time.perf_counter()))
                if not data:
                    break
                sink.sendall(data)
        sink.close()

    def close(self) -> None:
        """Take no more connections."""
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
