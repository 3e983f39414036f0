"""What a user may choose, checked, and what `auto` stands for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral

import torch

from dualdeadline import kernels as triton_kernels
from dualdeadline import schedule as schedules
from dualdeadline.cache.pool import POOLS
from dualdeadline.engine.surgery import LayerExperts, fits_fused
from dualdeadline.schedule import COMPONENTS
from dualdeadline.store import WIRES

BACKENDS = ("cpu", "streams", "graph")
KERNELS = ("torch", "fused")
TIERS = ("pinned", "remote", "ssd")
IN_GRAPH = ("demand_serial", "staged_barrier")  # schedules of the graph backend: one deadline, or two
SCHEDULE = "demand_pipelined"  # no named schedule makes a measured decode step shorter (notebook 07)


@dataclass(frozen=True)
class Options:
    """Choices of `offload` after checking; `why` says what `auto` chose and the reason."""

    slots: Mapping[str, int]
    schedule: str
    coded: bool
    backend: str
    kernels: str
    device: torch.device
    why: tuple[str, ...]
    pool: str = "layer"
    timed: bool = False
    fallback: str = ""  # why another backend runs than the one that was asked for


def one_of(name: str, value, known: Sequence[str]) -> None:
    if value != "auto" and value not in known:
        raise ValueError(f"{name} is {value!r}; needed: 'auto' or one of {', '.join(known)}")


def count_slots(slots, E: int) -> dict[str, int]:
    """Slots per layer and component.

    Args:
        slots: a number, or dict(gate_up, down) for banks of two sizes.

    Raises:
        ValueError: not whole numbers of at least 1.
    """
    found = dict(slots) if isinstance(slots, Mapping) else {part: slots for part in COMPONENTS}
    good = set(found) == set(COMPONENTS) and all(
        isinstance(count, Integral) and not isinstance(count, bool) and count >= 1 for count in found.values()
    )
    if not good:
        raise ValueError(
            f"slots is {slots!r}; needed: a whole number of at least 1, or a dict of such numbers for "
            f"{' and '.join(COMPONENTS)}"
        )
    return {part: min(int(count), E) for part, count in found.items()}


def choose(
    layers: Sequence[LayerExperts],
    slots: Mapping[str, int],
    schedule: str,
    wire: str,
    backend: str,
    kernels: str,
    device,
    pool: str = "layer",
    timed: bool = False,
) -> Options:
    """Check all choices together and fill in what is `auto`.

    Raises:
        ValueError: an unknown word, or choices that cannot act together or on this machine.
    """
    one_of("schedule", schedule, schedules.NAMES)
    one_of("wire", wire, WIRES)
    one_of("backend", backend, BACKENDS)
    one_of("kernels", kernels, KERNELS)
    if pool not in POOLS:
        raise ValueError(f"pool is {pool!r}; needed: one of {', '.join(POOLS)}")
    device, why = place(device, backend), []
    pool = _pool(pool, layers, slots, why)
    backend = _backend(backend, device, why, _by_host(pool, timed))
    kernels = _kernels(kernels, layers, backend, device, why)
    if backend == "graph" and kernels != "fused":
        raise ValueError("backend 'graph' computes with kernels 'fused'; needed: backend 'streams' for kernels 'torch'")
    coded = _coded(wire, layers, backend, why)
    schedule = _schedule(schedule, backend, why)
    return Options(slots, schedule, coded, backend, kernels, device, tuple(why), pool, timed)


def _by_host(pool: str, timed: bool) -> str | None:
    """Why the host has to drive every layer, or None."""
    if pool == "shared":
        return "one pool for all layers is looked up by the host"
    return "operations are timed one by one" if timed else None


def _pool(pool: str, layers: Sequence[LayerExperts], slots: Mapping[str, int], why: list[str]) -> str:
    kinds = {(layer.dtype, *layer.shapes.values()) for layer in layers}
    if pool == "shared" and len(kinds) > 1:
        raise ValueError(f"layers have experts of {len(kinds)} sizes or dtypes; needed: pool 'layer', or equal ones")
    if pool == "shared" and min(slots.values()) >= layers[0].E:
        why.append("pool layer: every expert has a slot, there is nothing to share")
        return "layer"
    return pool


def judged_by(control: str, backend: str) -> str:
    """What switches guesses off, of `guide.CONTROLS`.

    Raises:
        ValueError: the time of steps inside a graph, which the host does not take.
    """
    if control == "time" and backend == "graph":
        raise ValueError("control is 'time' with backend 'graph'; needed: 'auto' or 'precision', a graph keeps no time")
    return ("time" if backend == "streams" else "precision") if control == "auto" else control


def place(device, backend: str) -> torch.device:
    """Where slots are; of several GPUs the current one."""
    found = torch.device(device or ("cuda" if torch.cuda.is_available() and backend != "cpu" else "cpu"))
    if found.type not in ("cpu", "cuda") or (found.type == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"device is {str(found)!r}; needed: 'cpu', or 'cuda' where torch sees a GPU")
    if found.type == "cpu":
        return found
    current = torch.cuda.current_device()
    if found.index not in (None, current):
        raise ValueError(
            f"device is {str(found)!r}, the current one cuda:{current}; needed: torch.cuda.set_device first"
        )
    return torch.device("cuda", current)


def _schedule(schedule: str, backend: str, why: list[str]) -> str:
    if backend == "graph" and schedule not in ("auto", *IN_GRAPH):
        raise ValueError(
            f"schedule is {schedule!r} with backend 'graph'; needed: {' or '.join(IN_GRAPH)}, since one "
            "launch computes all experts of a layer, or backend 'streams'"
        )
    if schedule == "auto":
        schedule = IN_GRAPH[-1] if backend == "graph" else SCHEDULE
        why.append(
            f"schedule {schedule}: "
            + (
                "down crosses while gate/up computes, at no launch more"
                if backend == "graph"
                else "none makes a host-launched step shorter"
            )
        )
    return schedule


def _backend(backend: str, device: torch.device, why: list[str], by_host: str | None) -> str:
    tried = triton_kernels.INTERPRETED and backend == "graph"  # the device's kernels in Triton's interpreter
    if (backend == "cpu") == (device.type == "cuda") and backend != "auto" and not tried:
        raise ValueError(
            f"backend is {backend!r}, the device is {device}; needed: 'cpu' on a CPU, "
            "'streams' or 'graph' on a CUDA device"
        )
    if backend == "graph" and by_host:
        raise ValueError(f"backend is 'graph' and {by_host}; needed: backend 'streams' or 'auto'")
    if backend != "auto":
        return backend
    if device.type != "cuda":
        why.append("backend cpu: no GPU is visible")
        return "cpu"
    missing = by_host or triton_kernels.available()
    why.append(f"backend streams: {missing}" if missing else "backend graph: a GPU that Triton can use")
    return "streams" if missing else "graph"


def _kernels(kernels: str, layers: Sequence[LayerExperts], backend: str, device, why: list[str]) -> str:
    missing = next(filter(None, map(fits_fused, layers)), None) or triton_kernels.available()
    if backend == "cpu" and not triton_kernels.INTERPRETED:
        missing = "backend cpu computes in eager torch"
    if kernels == "fused" and missing:
        raise ValueError(f"kernels 'fused' cannot run: {missing}; needed: kernels 'torch'")
    if kernels == "auto":
        kernels = "torch" if missing or backend == "cpu" else "fused"
        why.append(f"kernels {kernels}" + (f": {missing}" if missing else ""))
    return kernels


def _coded(wire: str, layers: Sequence[LayerExperts], backend: str, why: list[str]) -> bool:
    shrinks = all(layer.dtype == torch.bfloat16 for layer in layers)
    if wire == "coded" and not shrinks:
        raise ValueError(
            f"wire is 'coded' and experts are {layers[0].dtype}; needed: bfloat16, other dtypes do not shrink"
        )
    if wire != "auto":
        return wire == "coded"
    coded = shrinks and backend == "graph"
    reason = (
        "a third fewer bytes over the link"
        if coded
        else (
            "nothing to gain without a link"
            if backend == "cpu"
            else ("host-launched steps lose what fewer bytes save" if shrinks else "only bfloat16 shrinks")
        )
    )
    why.append(f"wire {'coded' if coded else 'raw'}: {reason}")
    return coded
