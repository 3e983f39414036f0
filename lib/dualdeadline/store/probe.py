"""Which ways to an SSD this machine has: O_DIRECT, io_uring, GPUDirect Storage; each with the reason why not."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

IO_URING_SETUP = 425  # the same number on every architecture
GDS_DEVICE = Path("/dev/nvidia-fs0")
GDS_LIBRARIES = ("libcufile.so.0", "libcufile.so", "/usr/local/cuda/lib64/libcufile.so.0")


def report(path: Path) -> dict[str, str]:
    """By way, "available" or why not.

    Args:
        path: a file of records; O_DIRECT depends on its file system.
    """
    return {"O_DIRECT": direct(path), "io_uring": io_uring(), "GPUDirect Storage": gpudirect()}


def direct(path: Path) -> str:
    """Whether a file opens and reads with O_DIRECT."""
    if not hasattr(os, "O_DIRECT"):
        return "not available: this system has no O_DIRECT"
    from dualdeadline.store.pages import PAGE, aligned, as_bytes

    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        return f"not available: {error.strerror} on opening"
    try:
        os.preadv(descriptor, [as_bytes(aligned(PAGE))], 0)
    except OSError as error:
        return f"not available: {error.strerror} on reading"
    finally:
        os.close(descriptor)
    return "available"


def io_uring() -> str:
    """Whether the kernel lets this process make a ring.

    The reader does not use one: with records of some hundred KiB a thread that waits for a ring's completions takes as
    long as threads that read, and one caller that waits itself leaves guesses without anybody to go on with them.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    found = libc.syscall(IO_URING_SETUP, 4, ctypes.create_string_buffer(128))
    if found < 0:
        number = ctypes.get_errno()
        return f"not available: io_uring_setup says {errno.errorcode.get(number, number)}"
    os.close(found)
    return "available"


def gpudirect() -> str:
    """Whether cuFile reads from disk straight into GPU memory: its library, its driver, and the kernel module.

    Without the module cuFile still works, by a detour through host memory that the reader's own path does not need.
    """
    library = None
    for name in GDS_LIBRARIES:
        try:
            library = ctypes.CDLL(name)
            break
        except OSError:
            continue
    if library is None:
        return f"not available: no library ({', '.join(GDS_LIBRARIES)})"
    if not GDS_DEVICE.exists():
        return f"not available: the library is there, the kernel module nvidia-fs is not (no {GDS_DEVICE})"

    class Error(ctypes.Structure):
        _fields_ = [("err", ctypes.c_int), ("cu_err", ctypes.c_int)]

    library.cuFileDriverOpen.restype = Error
    said = library.cuFileDriverOpen()
    if said.err:
        return f"not available: cuFileDriverOpen returns {said.err} (CUDA error {said.cu_err})"
    library.cuFileDriverClose.restype = Error
    library.cuFileDriverClose()
    return "available"
