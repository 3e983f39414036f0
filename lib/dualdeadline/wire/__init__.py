"""Lossless wire format: an expert component in fewer bytes, and the same bits after decoding.

    encode(tensor) -> WireRecord          .nbytes are all bytes that cross the link, header included
    decode(record, device=None) -> tensor
    format.py   what stands where in a record      codec.py  to and from records on the CPU
    space.py    the designs that were compared     store.py  all records of a model in one file

The kernels that decode on a GPU are in `kernels/wire.py`.
"""

from dualdeadline.wire.codec import decode, encode
from dualdeadline.wire.format import BITS, BLOCK, WireRecord
from dualdeadline.wire.many import encode_many
from dualdeadline.wire.store import Store

__all__ = ["BITS", "BLOCK", "Store", "WireRecord", "decode", "encode", "encode_many"]
