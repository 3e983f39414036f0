"""Triton kernels of the runtime, each beside its torch reference; they know nothing of models.

    experts.py   the routed experts of up to 8 tokens       grouped.py   the same above 8 tokens
    fetch.py     host memory into slots, named on device    predictor.py the predictor in one launch

Without Triton (macOS) this imports, and so do the torch references; what needs a kernel says why it cannot run.
"""

from __future__ import annotations

import os

import torch

try:
    import triton
    import triton.language as tl
except ImportError:

    class triton:  # noqa: N801  (stands in for the module, so that decorated functions can be defined)
        """Stand-in whose `jit` leaves a function as it is; nothing decorated may be called."""

        @staticmethod
        def jit(function=None, **options):
            return function or (lambda found: found)

    tl = None

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BFLOAT16_CAPABILITY = (8, 0)  # the oldest compute capability whose Triton kernels may use bfloat16


def available() -> str | None:
    """Why the Triton kernels cannot run here, or None if they can (on a GPU or in Triton's interpreter)."""
    if tl is None:
        return "triton is not installed; needed: triton 3.6 or newer (Linux)"
    if INTERPRETED:
        return None
    if not torch.cuda.is_available():
        return "no GPU is visible to torch; needed: an NVIDIA GPU, or TRITON_INTERPRET=1 before the first import"
    found = torch.cuda.get_device_capability()
    if found < BFLOAT16_CAPABILITY:
        return f"the GPU's compute capability is {found[0]}.{found[1]}; needed: 8.0 or newer, for bfloat16"
    return None


def require(tensor: torch.Tensor) -> None:
    """Raise RuntimeError unless the kernels can run on a tensor's device."""
    why = available()
    if why is None and not INTERPRETED and tensor.device.type != "cuda":
        why = f"the tensor is on {tensor.device}; needed: a CUDA device, or TRITON_INTERPRET=1 before the first import"
    if why is not None:
        raise RuntimeError(f"Triton kernels cannot run: {why}")


# last, because they take `tl` and `triton` from here
from dualdeadline.kernels import experts, fetch, grouped  # noqa: E402

__all__ = ["INTERPRETED", "available", "experts", "fetch", "grouped", "require", "tl", "triton"]
