"""Who may talk to a worker: a token in a file, never sent; both sides prove that they have it and derive a key."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
from pathlib import Path

from dualdeadline.remote import frames

VERSION = 1
TOKEN_BYTES = 16  # the least
SMALL = 4096  # bytes of a frame's tensors before the other side is known


def new_token(path: Path) -> Path:
    """Write a random token that only its owner can read; the file must not exist.

    Raises:
        FileExistsError: it does.
    """
    path = Path(path)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32) + "\n")
    return path


def read_token(path: Path) -> bytes:
    """The token in a file.

    Raises:
        ValueError: others may read the file, or it is too short. FileNotFoundError: there is none.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no token file {path}; needed: one that the worker and its users share")
    if path.stat().st_mode & 0o077:
        raise ValueError(f"{path} has mode {path.stat().st_mode & 0o777:o}; needed: 600, a token is its owner's")
    token = path.read_bytes().strip()
    if len(token) < TOKEN_BYTES:
        raise ValueError(f"{path} holds {len(token)} bytes; needed: at least {TOKEN_BYTES} (see remote.new_token)")
    return token


def _proof(token: bytes, role: str, nonces: bytes) -> bytes:
    return hmac.new(token, f"dualdeadline {VERSION} {role}".encode() + nonces, hashlib.sha256).digest()


def _take(connection: socket.socket, name: str, size: int) -> tuple[bytes, dict]:
    _, meta, _ = frames.unpack(*frames.receive(connection, SMALL), b"", 0)
    if "refused" in meta:
        raise PermissionError("the worker refuses our token; needed: the same token file on both sides")
    value = meta.get(name)
    if not isinstance(value, bytes) or len(value) != size:
        raise frames.BadFrame(f"a greeting holds {sorted(meta)}; needed: {name!r} of {size} bytes")
    return value, meta


def _keys(token: bytes, nonces: bytes) -> tuple[bytes, bytes]:
    return _proof(token, "to worker", nonces), _proof(token, "to client", nonces)


def greet(connection: socket.socket, token: bytes) -> tuple[bytes, bytes]:
    """The client's side: proves the token, checks the worker's proof; keys of what is sent and of what comes.

    Raises:
        PermissionError: one side does not know the other's token. BadFrame: the worker speaks something else.
        ConnectionError: it hung up.
    """
    theirs, meta = _take(connection, "nonce", 32)
    if meta.get("version") != VERSION:
        raise frames.BadFrame(f"the worker speaks version {meta.get('version')}; needed: {VERSION}")
    own = secrets.token_bytes(32)
    said = {"nonce": own, "proof": _proof(token, "client", theirs + own)}
    frames.send(connection, frames.pack(0, said, {}, b""))
    proof, _ = _take(connection, "proof", 32)
    if not hmac.compare_digest(proof, _proof(token, "worker", theirs + own)):
        raise PermissionError("the worker does not know the token; needed: the same token file on both sides")
    return _keys(token, theirs + own)


def challenge(connection: socket.socket, token: bytes) -> tuple[bytes, bytes] | None:
    """The worker's side: keys of what is sent and of what comes, or None if the client does not know the token."""
    own = secrets.token_bytes(32)
    frames.send(connection, frames.pack(0, {"version": VERSION, "nonce": own}, {}, b""))
    theirs, meta = _take(connection, "nonce", 32)
    proof, nonces = meta.get("proof"), own + theirs
    if not isinstance(proof, bytes) or not hmac.compare_digest(proof, _proof(token, "client", nonces)):
        frames.send(connection, frames.pack(0, {"refused": True}, {}, b""))
        return None
    frames.send(connection, frames.pack(0, {"proof": _proof(token, "worker", nonces)}, {}, b""))
    return _keys(token, nonces)[::-1]
