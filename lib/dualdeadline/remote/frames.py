"""What crosses the wire: frames of a header, a small msgpack map, and tensors as raw bytes behind it.

    magic 4 | sequence u64 | bytes of the map u32 | bytes of the tensors u64 | tag 16 | map | tensors

The tag is a keyed BLAKE2b of everything else: checksum and proof of the sender at once. Its key is that of the
connection and direction (see `keys`); before that it is empty and frames are small. Numbers are big-endian, tensors
little-endian, each at a multiple of 64 bytes. Nothing is encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
from collections.abc import Callable, Mapping

import msgpack
import torch
from torch import Tensor

MAGIC = b"DDR1"
HEADER = struct.Struct("!4sQIQ16s")
ALIGN = 64
META_LIMIT = 2**20  # bytes of a map
BODY_LIMIT = 2**28  # bytes of a frame's tensors: 65,536 rows of 2,048 bfloat16
DTYPES = {
    str(kind).removeprefix("torch."): kind
    for kind in (torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64, torch.uint8)
}


class BadFrame(ConnectionError):
    """Bytes that are not what the protocol says: whoever sent them cannot be relied on any further."""


def pack(
    sequence: int, meta: Mapping, tensors: Mapping[str, Tensor], key: bytes, late: Callable[[], Mapping] | None = None
) -> list:
    """A frame as buffers to be sent one after the other, tensors without a copy if they are contiguous on the CPU.

    Args:
        late: gives more of the map, asked for when the tensors are done: times that tell of them, say.

    Raises:
        ValueError: a dtype that has no name here, or more bytes than a frame may hold.
    """
    body, places, end = [], {}, 0
    for name, value in tensors.items():
        kind = str(value.dtype).removeprefix("torch.")
        if kind not in DTYPES:
            raise ValueError(f"{name} is {value.dtype}; needed: one of {', '.join(DTYPES)}")
        value = value.detach().cpu().contiguous()
        places[name] = [kind, list(value.shape), end]
        if value.numel():
            body.append(memoryview(value.view(-1).view(torch.uint8).numpy()))
        end += value.nbytes
        if value.nbytes % ALIGN:
            body.append(bytes(-value.nbytes % ALIGN))
            end += -value.nbytes % ALIGN
    found = _tag(key, *body)
    packed = msgpack.packb({**meta, "tensors": places, **(late() if late else {})}, use_bin_type=True)
    if len(packed) > META_LIMIT or end > BODY_LIMIT:
        raise ValueError(
            f"a frame of {len(packed)} + {end} bytes; needed: at most {META_LIMIT} + {BODY_LIMIT}, in parts"
        )
    head = HEADER.pack(MAGIC, sequence, len(packed), end, bytes(16))[:-16]
    found.update(head)
    found.update(packed)
    return [head + found.digest(), packed, *body]


def _tag(key: bytes, *parts):
    found = hashlib.blake2b(key=key, digest_size=16)
    for part in parts:
        found.update(part)
    return found


def send(connection: socket.socket, buffers: list) -> int:
    """Send all buffers; bytes sent."""
    waiting = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
    total = sum(map(len, waiting))
    while waiting:
        sent = connection.sendmsg(waiting[:64])
        while waiting and sent >= len(waiting[0]):
            sent -= len(waiting.pop(0))
        if sent:
            waiting[0] = waiting[0][sent:]
    return total


def receive(connection: socket.socket, body_limit: int = BODY_LIMIT) -> tuple[bytes, bytearray]:
    """The next frame as it came, header and the rest, not yet checked beyond its sizes.

    Raises:
        BadFrame: no header of ours, or sizes above the limits. ConnectionError: the other side is gone.
        TimeoutError: nothing came in time.
    """
    head = bytes(_exactly(connection, HEADER.size))
    magic, _, meta, body, _ = HEADER.unpack(head)
    if magic != MAGIC:
        raise BadFrame(f"a frame begins with {magic!r}; needed: {MAGIC!r}")
    if meta > META_LIMIT or body > body_limit:
        raise BadFrame(f"a frame says {meta} + {body} bytes; needed: at most {META_LIMIT} + {body_limit}")
    return head, _exactly(connection, meta + body)


def _exactly(connection: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view, got = memoryview(data), 0
    while got < count:
        more = connection.recv_into(view[got:])
        if not more:
            raise ConnectionError(f"the connection ended after {got} of {count} bytes")
        got += more
    return data


def unpack(head: bytes, rest: bytearray, key: bytes, sequence: int | None) -> tuple[int, dict, dict[str, Tensor]]:
    """Sequence, map and tensors of a frame; the tensors share its memory.

    Args:
        sequence: the one that has to come, or None for any.

    Raises:
        BadFrame: a wrong tag or sequence, or a map that does not describe the bytes.
    """
    _, number, meta_size, _, tag = HEADER.unpack(head)
    view = memoryview(rest)
    if not hmac.compare_digest(_tag(key, view[meta_size:], head[:-16], view[:meta_size]).digest(), tag):
        raise BadFrame(f"frame {number} has a wrong checksum; needed: the bytes and the key it was made with")
    if sequence is not None and number != sequence:
        raise BadFrame(f"a frame has number {number}; needed: {sequence}")
    try:
        meta = msgpack.unpackb(view[:meta_size], raw=False, strict_map_key=True)
        places = meta.pop("tensors")
        found = {name: _tensor(rest, meta_size, *place) for name, place in places.items()}
    except Exception as error:  # msgpack has many kinds of its own
        raise BadFrame(f"frame {number} cannot be read: {type(error).__name__}: {error}") from None
    return number, meta, found


def _tensor(rest: bytearray, offset: int, kind: str, shape: list[int], start: int) -> Tensor:
    dtype, count = DTYPES[kind], 1
    for size in shape:
        if not isinstance(size, int) or size < 0:
            raise ValueError(f"shape is {shape}; needed: sizes from 0")
        count *= size
    if not count:
        return torch.empty(shape, dtype=dtype)
    if not isinstance(start, int) or start < 0 or offset + start + count * dtype.itemsize > len(rest):
        raise ValueError(f"a tensor of {count} {kind} from byte {start}; needed: inside {len(rest) - offset} bytes")
    flat = torch.frombuffer(rest, dtype=torch.uint8, count=count * dtype.itemsize, offset=offset + start)
    if (offset + start) % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).view(shape)
