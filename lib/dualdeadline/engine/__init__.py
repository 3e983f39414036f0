"""Exact offloaded decode in stock transformers.

offload(model, slots=32) -> the same model; its routed experts live in host memory now
model.dualdeadline.stats(), .remove()
surgery.py     takes experts out of a model     options.py   what may be chosen, and what auto means
hosted.py      layers whose routes the host reads, by a named schedule
device.py      layers that the device runs alone  captured.py whole decode steps as one CUDA graph
guide.py       a predictor's guesses             worth.py     whether they pay, by the clock
loading.py     checkpoints straight into a store guard.py     what must not be done to an offloaded model
timing.py      stall, link and compute times     driven.py   routes from elsewhere, to measure with
banks.py       slots of all layers               arithmetic.py products, in eager torch or fused kernels
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, library, nn

from dualdeadline.engine.guide import Prefetch
from dualdeadline.engine.handle import Offloaded, run_layer
from dualdeadline.engine.options import TIERS, choose, count_slots, judged_by, place
from dualdeadline.engine.surgery import NAME, find

__all__ = ["Offloaded", "offload"]


@torch.inference_mode(False)  # what is made here has to outlive the mode it is called in
@torch.no_grad()
def offload(
    model: nn.Module,
    slots=None,
    vram=None,
    schedule: str = "auto",
    predictor="auto",
    wire: str = "auto",
    tier: str = "pinned",
    backend: str = "auto",
    kernels: str = "auto",
    ssd_path=None,
    *,
    horizon: int = 1,
    budget=(2, 0),
    threshold: float = 0.7,
    context: int = 4096,
    batch: int = 1,
    device=None,
    compile: bool = False,
    pool: str = "layer",
    control: str = "auto",
    timed: bool = False,
    remote: str | None = None,
    remote_token=None,
    ssd=None,
) -> nn.Module:
    """Move a model's routed experts to host memory and serve them from slots; outputs stay those of the same kernels.

    Args:
        model: a transformers MoE model in eval mode, on the CPU or on `device`. Everything else moves to `device`.
        slots: experts kept per layer (1 or more), or dict(gate_up, down). vram: memory limit in bytes or as "6GiB",
            from which `plan` derives the slots; one of the two.
        schedule: one of `schedule.NAMES`. predictor: None, "auto", "gate_ahead", a fitted predictor or a callable.
        wire: raw or coded. tier: pinned, ssd or remote. backend: cpu, streams or graph. kernels: torch or fused.
        horizon: layers that "auto" looks ahead. budget: components fetched ahead per layer, (gate_up, down).
        threshold: least probability of such a guess.
        context, batch: for which `vram` has to suffice. device: default `cuda` where there is one.
        compile: of the graph backend, also compile the model's own code around the experts; its kernels are tuned by
            the clock, so that bits are equal within one offloaded model, not between two.
        pool: "layer" has `slots` for each layer, "shared" as many on average: any layer takes any (by the host).
        control: what switches guesses off and on: the "precision" of late, or also the "time" of steps with and without
            them (auto: where the host drives a GPU).
        timed: `stats()` has stall_ms, link_ms and compute_ms of the experts, also per token (by the host).
        remote, remote_token: of tier remote, the worker's "host:port" and the file of its token. `slots` experts per
            layer then stay here; tokens of the others go to the worker, and their weights leave this process.

        ssd_path, ssd: of tier ssd, the folder of the records (converted from the model where they are missing) and
            `store.options.SsdOptions`: host slots, guesses for them, reads in flight.

    Returns:
        `model` itself, with `model.dualdeadline`.

    Raises:
        ValueError: choices or a model that do not fit, by name; the model is as it was then.
    """
    _check_tier(tier, ssd_path, ssd, remote, remote_token, pool)
    if (slots is None) == (vram is None):
        raise ValueError(f"slots is {slots!r} and vram {vram!r}; needed: exactly one of them")
    spec, layers = find(model)
    why: tuple[str, ...] = ()
    if vram is not None:
        slots, why = _planned(model, vram, context, batch, device, backend)
    asked = dict(schedule=schedule, predictor=predictor, wire=wire, kernels=kernels)
    far = {"remote": (remote, remote_token), "ssd": (ssd_path, ssd)}.get(tier)
    make, asked, fallback = _other_tier(tier, far, place(device, backend), backend, asked)
    schedule, predictor, wire, kernels, backend = asked
    chosen = choose(layers, count_slots(slots, spec.E), schedule, wire, backend, kernels, device, pool, timed)
    if compile and chosen.backend != "graph":
        raise ValueError(f"compile with backend {chosen.backend!r}; needed: backend 'graph'")
    _check_counts(context=context, batch=batch)
    budget = tuple(budget) if isinstance(budget, Sequence) else (budget,)
    prefetch = Prefetch(predictor, horizon, budget, threshold, judged_by(control, chosen.backend))
    other = make() if make else None
    chosen = replace(chosen, fallback=fallback)
    handle = Offloaded(model, spec, layers, chosen, prefetch, why, context, compile, other)
    if other is not None:
        other.ready(handle)
    model.dualdeadline = handle
    return model


def _check_tier(tier: str, ssd_path, ssd, remote, remote_token, pool: str) -> None:
    if pool == "shared" and tier == "remote":
        raise ValueError("pool is 'shared' with tier 'remote'; needed: pool 'layer', its slots keep what they hold")
    if tier not in TIERS or (tier == "ssd") != (ssd_path is not None) or (ssd is not None and tier != "ssd"):
        raise ValueError(
            f"tier is {tier!r}, ssd_path {ssd_path!r}, ssd {ssd}; needed: 'ssd' with a path, or 'pinned' or 'remote'"
        )
    if (tier == "remote") != (remote is not None and remote_token is not None):
        raise ValueError(
            f"tier is {tier!r}, remote {remote!r}, remote_token {'given' if remote_token else None}; needed: all "
            "three, or another tier without both"
        )


def _check_counts(**counts) -> None:
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} is {value!r}; needed: a whole number above 0")


def _other_tier(tier: str, far, where: torch.device, backend: str, asked: dict):
    """What makes a tier below or beside host memory (or None), (schedule, predictor, wire, kernels, backend) as it
    needs them, and why another backend runs than was asked for."""
    if tier == "remote":
        from dualdeadline.remote import tier as remote

        return lambda: remote.RemoteTier(*far), remote.choices(where, backend, **asked), ""
    if tier == "ssd":
        from dualdeadline.engine import ssd

        backend, fallback = ssd.choices(where, backend)
        return lambda: ssd.SsdTier(*far), (*asked.values(), backend), fallback
    return None, (*asked.values(), backend), ""


def _planned(model: nn.Module, vram, context: int, batch: int, device, backend: str) -> tuple[int, tuple[str, ...]]:
    """Slots for a memory limit, and the plan's reasons; what planning itself took is free again."""
    from dualdeadline.planning import plan

    kind = place(device, backend).type
    found = plan(model, vram, context=context, batch=batch, device=kind)
    if kind == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return found.slots, tuple(f"plan: {line}" for line in found.why[:2])  # slots and hits; the engine chooses the rest


def _experts_forward(module: nn.Module, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Our entry in transformers' experts interface."""
    if torch.compiler.is_compiling():
        return torch.ops.dualdeadline.experts(
            hidden, ids, weights, module._dualdeadline_key, module._dualdeadline_layer
        )
    if not hasattr(module, "_dualdeadline"):
        raise RuntimeError(
            "this model's experts are not offloaded, or were given back while a forward ran; needed: "
            "dualdeadline.offload, or another experts implementation"
        )
    return module._dualdeadline.layer(module._dualdeadline_layer, hidden, ids, weights)


@library.custom_op("dualdeadline::experts", mutates_args=())
def _experts_op(hidden: Tensor, ids: Tensor, weights: Tensor, key: int, number: int) -> Tensor:
    return run_layer(key, number, hidden, ids, weights)


@_experts_op.register_fake
def _(hidden: Tensor, ids: Tensor, weights: Tensor, key: int, number: int) -> Tensor:
    return torch.empty_like(hidden)


def _register() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, _experts_forward)


_register()
