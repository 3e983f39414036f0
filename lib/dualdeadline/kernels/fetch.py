"""Zero-copy fetch: a kernel reads the missing experts straight from pinned host memory into slots.

Which experts, and how many, is read on the device, so a CUDA graph can hold the fetch and the host learns nothing. One
fetch moves whole components; the link is the limit (55 GB/s as a plain copy), and 16 programs already come near it.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from dualdeadline.kernels import INTERPRETED, require, tl, triton

_warned = False


@triton.jit(do_not_specialize=["source_ptr", "dest_ptr", "count_ptr", "rows", "slots", "listed"])
def fetch_kernel(host_ptr, bank_ptr, source_ptr, dest_ptr, count_ptr, host_stride, bank_stride, rows, slots, listed,
                 WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """bank[dest[m]] = host[source[m]] for the first `count` m, in 32-bit words; programs take blocks in turn."""
    count = tl.minimum(tl.load(count_ptr), listed)
    blocks: tl.constexpr = (WORDS + BLOCK - 1) // BLOCK
    for work in range(tl.program_id(0), count * blocks, tl.num_programs(0)):
        source, dest = tl.load(source_ptr + work // blocks), tl.load(dest_ptr + work // blocks)
        valid = (source >= 0) & (source < rows) & (dest >= 0) & (dest < slots)
        word = (work % blocks) * BLOCK + tl.arange(0, BLOCK)
        inside = (word < WORDS) & valid
        value = tl.load(host_ptr + source.to(tl.int64) * host_stride + word, mask=inside, eviction_policy="evict_first")
        tl.store(bank_ptr + dest.to(tl.int64) * bank_stride + word, value, mask=inside)


def fetch(host_bank: Tensor, bank: Tensor, source_ids: Tensor, dest_slots: Tensor, count: Tensor, programs: int = 8,
          warps: int = 4, unroll: int = 8) -> Tensor:
    """Copy host_bank[source_ids[m]] into bank[dest_slots[m]] for m below count[0]; returns the bank.

    Bytes arrive as they are, whatever they mean. An id out of range skips its copy, a count above M is M; two copies
    into one slot in the same call mix.

    Args:
        host_bank: pinned host memory [E,...], contiguous within an expert, or another GPU's that this one reaches.
        bank: slots [C,...] on the device.
        source_ids, dest_slots: int32[M] on the device. count: int32[1] on the device.
        programs: programs of the launch. warps: of each. unroll: 16-byte loads that each thread keeps in flight.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, or host memory that is not pinned.
        RuntimeError: no GPU and no interpreter.
    """
    require(bank)
    host, slots = _words(host_bank, "host_bank"), _words(bank, "bank")
    if host_bank.shape[1:] != bank.shape[1:] or host_bank.dtype != bank.dtype:
        raise ValueError(f"host_bank is {host_bank.dtype} {tuple(host_bank.shape)}, bank {bank.dtype} "
                         f"{tuple(bank.shape)}; needed: the same dtype and the same shape of an expert")
    if not _reachable(host_bank, bank.device):
        raise ValueError(f"host_bank is {'not pinned' if host_bank.device.type == 'cpu' else host_bank.device}; "
                         f"needed: pinned host memory (see pin), or another GPU's that this one reaches")
    for name, ids in (("source_ids", source_ids), ("dest_slots", dest_slots), ("count", count)):
        if ids.dtype != torch.int32 or ids.dim() != 1 or not ids.is_contiguous() or ids.device != bank.device:
            raise ValueError(f"{name} is {ids.dtype} {tuple(ids.shape)} on {ids.device}; needed: contiguous int32 of "
                             f"one dimension on {bank.device}")
    if len(source_ids) != len(dest_slots) or len(count) != 1:
        raise ValueError(f"lengths are {len(source_ids)}, {len(dest_slots)}, {len(count)}; needed: M, M, 1")
    fetch_kernel[(programs,)](host, slots, source_ids, dest_slots, count, host.stride(0), slots.stride(0), len(host),
                              len(slots), len(source_ids), host.shape[1], 128 * warps * unroll, num_warps=warps)
    return bank


def _reachable(host: Tensor, device: torch.device) -> bool:
    """Whether a kernel of a device reads memory in place: pinned host memory, or that of another GPU that lets it."""
    if host.device.type == "cpu":
        return INTERPRETED or host.is_pinned()
    return host.device != device and torch.cuda.can_device_access_peer(device.index, host.device.index)


def _words(bank: Tensor, name: str) -> Tensor:
    """A bank as int32 [C, words per slot], without a copy."""
    if bank.dim() < 2 or len(bank) == 0 or not bank[0].is_contiguous():
        raise ValueError(f"{name} is {tuple(bank.shape)}, strides {bank.stride()}; needed: contiguous slots [C,...]")
    size, apart = bank[0].numel() * bank.element_size(), bank.stride(0) * bank.element_size()
    if size % 16 or apart % 16 or bank.data_ptr() % 16:
        raise ValueError(f"{name} has slots of {size} bytes, {apart} bytes apart; needed: multiples of 16, aligned")
    return bank.flatten(1).view(torch.int32)


def pin(tensor: Tensor) -> Tensor:
    """The tensor in pinned memory, or as it is, with one warning per process, where memory cannot be pinned.

    From pageable memory copies still work, slower and without overlap; `fetch` refuses it.
    """
    global _warned
    if tensor.is_pinned():
        return tensor
    try:
        return tensor.pin_memory()
    except RuntimeError as error:
        if not _warned:
            warnings.warn(f"host memory is not pinned ({str(error).splitlines()[0]}); copies from it are slower and "
                          f"fetch is not possible; needed: a GPU, and a sufficient `ulimit -l`", stacklevel=2)
        _warned = True
        return tensor
