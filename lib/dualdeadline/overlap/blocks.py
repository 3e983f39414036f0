"""Schedules of one MoE block, measured against the floor of their own copies, and simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dualdeadline import schedule, simulate, streams
from dualdeadline.cost import CostModel, TransferModel
from dualdeadline.schedule import Compute, Copy, Schedule
from dualdeadline.streams.bench import Variant, interleaved
from dualdeadline.timeline import Timeline


@dataclass(frozen=True)
class Setting:
    """What the schedules of one interleaved measurement have in common.

    submission: `graph` (one CUDA graph) or `streams` (issued by the host); copy_streams: 1 or 2 copy queues; wire:
    `raw`, `coded` (decoded on arrival), or None where the study does not ask.
    """

    tokens: int = 1
    top_k: int = 8
    kernels: str = "fused"
    submission: str = "graph"
    copy_streams: int = 1
    ready: tuple[int, ...] = (0, 2, 4, 6, 8)
    schedules: tuple[str, ...] = schedule.NAMES
    wire: str | None = None

    def config(self, shape: str) -> dict:
        """Config keys of its record rows."""
        return {
            "shape": shape,
            "kernels": self.kernels,
            "submission": self.submission,
            "copy_streams": self.copy_streams,
            "tokens": self.tokens,
            "top_k": self.top_k,
            **({"wire": self.wire} if self.wire else {}),
        }

    def counts(self) -> list[int]:
        """Numbers of ready gate/ups that this top_k allows."""
        return [ready for ready in self.ready if ready <= self.top_k]


def settings(tokens: Sequence[int], top_ks: Sequence[int], base_top_k: int = 8) -> list[Setting]:
    """The full cross at one token, then more tokens from the base point (everything missing, base top_k)."""
    ways = (("fused", "graph"), ("torch", "streams"))
    cross = [Setting(1, top_k, kernels, submission) for top_k in top_ks for kernels, submission in ways]
    cross += [Setting(1, base_top_k, "fused", "streams"), Setting(1, base_top_k, "fused", "graph", 2)]
    more = [
        Setting(count, base_top_k, kernels, submission, ready=(0,))
        for count in tokens
        if count > 1
        for kernels, submission in ways
    ]
    return cross + more


def layer_plan(routes: torch.Tensor, ready: int) -> schedule.Layer:
    """Distinct experts of routes `[N,K]`, gate/up of the first `ready` present, and the tokens each serves."""
    experts = streams.distinct(routes)
    ids, counts = routes.unique(return_counts=True)
    return schedule.Layer(
        experts, schedule.ready(experts[:ready], ["gate_up"]), dict(zip(ids.tolist(), counts.tolist()))
    )


def block(work: streams.Work, name: str, layer: int, ready: int, wire: str | None = None) -> Schedule:
    """A named schedule of one layer of `work`; `coded`: of its encoded experts, decoding included."""
    chosen = layer_plan(work.routes[layer], ready)
    if wire == "coded":
        return schedule.with_decode(schedule.block(name, chosen, work.encoded.component_bytes, layer))
    return schedule.block(name, chosen, work.shape.component_bytes, layer)


def ideal(plan: Schedule, component_bytes) -> Timeline:
    """Timeline on a link of 50 GB/s and memory of 4000 GB/s, without fixed costs: to look at, not to quote."""
    reads = {stage: TransferModel(0.0, 1e3 / 4e12) for stage in ("gate_up", "down", "down_combine", "combine")}
    return simulate.run(plan, CostModel(TransferModel(0.0, 1e3 / 5e10), reads, component_bytes))


def floor(plan: Schedule) -> Schedule:
    """Only the copies of a schedule, back to back."""
    return Schedule("floor", tuple(op for op in plan.ops if isinstance(op, Copy)), plan.present)


def resident(work: streams.Work, layer: int) -> Schedule:
    """The block with every expert present."""
    experts = work.experts(layer)
    ops = (Compute(layer, "gate_up", experts), Compute(layer, "down_combine", experts))
    return Schedule("resident", ops, frozenset((layer, *pair) for pair in schedule.ready(experts)))


def check(work: streams.Work, setting: Setting, layer: int = 0) -> None:
    """Every schedule of a setting, run over slots full of NaN, must give the resident output bit by bit.

    Raises:
        AssertionError: naming the schedule and how many values differ.
    """
    expected = work.resident(layer)
    for ready in setting.counts():
        for name in setting.schedules:
            plan = block(work, name, layer, ready, setting.wire)
            work.forget(layer, [(expert, part) for _, expert, part in plan.present])
            if setting.submission == "graph" and work.device.type == "cuda":
                replay = streams.capture(plan, work, setting.copy_streams)
                work.forget(layer, [(expert, part) for _, expert, part in plan.present])
                replay()
            else:
                streams.run(plan, work, setting.copy_streams)
            differ = int((work.out[layer] != expected).sum())
            assert torch.equal(work.out[layer], expected), f"{name}, {ready} ready: {differ} values differ"


def measure(
    work: streams.Work, settings: Sequence[Setting], samples: int, budget_s: float = float("inf"), seed: int = 0
) -> list[dict]:
    """Times of all schedules, their floors and the resident block of each setting, all interleaved.

    Returns:
        For each setting (ready, name) -> ms `[samples]`; floors are named `floor:<schedule>`, the resident block has
        ready -1.
    """
    variants, twins = {}, {}
    for number, setting in enumerate(settings):
        check(work, setting)
        plans = _plans(work, setting)
        firsts: dict[tuple, tuple] = {}
        for key, plan in plans.items():
            if key[1].startswith("floor:"):  # schedules with the same copies share a floor
                pieces = tuple((op.piece, op.bytes) for op in plan(0).copies)
                twins[number, key] = number, firsts.setdefault(pieces, key)
        kept = {key: plan for key, plan in plans.items() if twins.get((number, key), (number, key)) == (number, key)}
        variants |= {(number, key): _variant(work, plan, setting) for key, plan in kept.items()}
    found = interleaved(variants, samples, seed=seed, device=work.device, budget_s=budget_s)
    out: list[dict] = [{} for _ in settings]
    for number, key in [*variants, *(place for place in twins if place not in variants)]:
        out[number][key] = found[twins.get((number, key), (number, key))]
    return out


def _plans(work: streams.Work, setting: Setting) -> dict:
    """(ready, name) -> schedule of a layer, of everything that is timed for a setting."""
    plans = {(-1, "resident"): lambda layer: resident(work, layer)}
    for ready in setting.counts():
        for name in setting.schedules:
            plans[ready, name] = lambda layer, name=name, ready=ready: block(work, name, layer, ready, setting.wire)
            plans[ready, f"floor:{name}"] = lambda layer, plan=plans[ready, name]: floor(plan(layer))
    return plans


def _variant(work: streams.Work, plan, setting: Setting) -> Variant:
    """Layers take turns, so that neither slots nor host records are warm in a cache."""
    plans = [plan(layer) for layer in range(work.layers)]
    if setting.submission == "graph":
        replays = [streams.capture(each, work, setting.copy_streams) for each in plans]
        return Variant(lambda turn: replays[turn % len(replays)](), queued=True)
    for each in plans:
        work.prepare(each)

    def issue(turn: int) -> None:
        lanes = streams.CudaLanes(work.device, copy_streams=setting.copy_streams)
        streams.issue(plans[turn % len(plans)], work, lanes)
        lanes.join()

    return Variant(issue)


def simulated_blocks(
    shape: streams.Shape, routes: torch.Tensor, setting: Setting, cost: CostModel, coded=None
) -> dict:
    """(ready, schedule) -> simulated milliseconds, the median over the layers of routes `[layers,N,K]`.

    Args:
        coded: bytes of the encoded components, for a setting whose wire is `coded`.
    """
    if setting.tokens == 1:  # K distinct experts with one token each: all layers are alike
        routes = routes[:1]

    def ms(name: str, layer: torch.Tensor, ready: int) -> float:
        plan = schedule.block(name, layer_plan(layer, ready), coded or shape.component_bytes)
        return simulate.run(schedule.with_decode(plan) if coded else plan, cost).ms

    return {
        (ready, name): float(np.median([ms(name, layer, ready) for layer in routes]))
        for ready in setting.counts()
        for name in setting.schedules
    }
