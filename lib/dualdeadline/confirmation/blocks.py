"""Blocks of missing experts at the first, middle and last layer, after what prediction has brought ahead.

The same bytes are ahead for every schedule: `budget` whole experts where experts travel whole, as many gate/ups as fit
into these bytes where components have two deadlines. Which of them are routed is what recorded tokens and a predictor
say. Times are measured on a GPU, else simulated from recorded costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from dualdeadline import metrics, schedule, simulate, streams
from dualdeadline.cost import CostModel
from dualdeadline.streams.bench import Variant, interleaved

BASE = "demand_serial"  # the published study's monolithic
WHOLE = (BASE, "demand_pipelined")  # schedules in which experts travel whole
NOTHING = "nothing_ahead"  # the base with every expert missing
VARIANTS = (*schedule.NAMES, NOTHING)
PLACES = ("first", "middle", "last")


@dataclass(frozen=True)
class Tokens:
    """Tokens of one layer: prompt `[N]`, and routed experts ahead when bytes are spent on whole experts or gate/ups."""

    layer: int
    prompt: np.ndarray
    whole: np.ndarray
    first: np.ndarray

    def ahead(self, name: str) -> np.ndarray:
        """Experts ahead `[N]` under one of `VARIANTS`."""
        if name == NOTHING:
            return np.zeros_like(self.whole)
        return self.whole if name in WHOLE else self.first


def layers_of(count: int, horizon: int) -> dict[str, int]:
    """The layers looked at: the first that prediction reaches, the middle and the last of `count`."""
    return dict(zip(PLACES, (horizon, max(horizon, count // 2), count - 1)))


def tokens(routes, prompt, scores, budget: int, shape: streams.Shape) -> dict[str, Tokens]:
    """By place, what a predictor's scores `[T, L-h, E]` bring ahead of routes `[T, L, K]` within `budget` experts."""
    horizon = routes.shape[1] - scores.shape[1]
    sizes, found = shape.component_bytes, {}
    limits = budget, budget * sizes["expert"] // sizes["gate_up"]
    for place, layer in layers_of(routes.shape[1], horizon).items():
        score = torch.as_tensor(scores[:, layer - horizon])
        hits = metrics.chances(score, torch.as_tensor(routes[:, layer]).long(), limits).sum(-1)
        whole, first = (part.round().long().numpy() for part in hits)
        found[place] = Tokens(layer, np.asarray(prompt), whole, first)
    return found


def plan(name: str, ahead: int, experts: Sequence[int], shape: streams.Shape, layer: int = 0) -> schedule.Schedule:
    """One of `VARIANTS` for experts of which the first `ahead` are present, whole or by their gate/up."""
    name = BASE if name == NOTHING else name
    parts = schedule.COMPONENTS if name in WHOLE else ("gate_up",)
    chosen = schedule.Layer(tuple(experts), schedule.ready(experts[:ahead], parts))
    return schedule.block(name, chosen, shape.component_bytes, layer)


def simulated(found: Mapping[str, Tokens], shape: streams.Shape, cost: CostModel, top_k: int) -> pd.DataFrame:
    """Simulated milliseconds of every token's block: DataFrame(place, layer, schedule, prompt, ms)."""
    experts = tuple(range(top_k))
    ms = {
        name: np.array([simulate.run(plan(name, ahead, experts, shape), cost).ms for ahead in range(top_k + 1)])
        for name in VARIANTS
    }
    parts = [
        pd.DataFrame({"prompt": part.prompt, "ms": ms[name][part.ahead(name)]}).assign(
            place=place, layer=part.layer, schedule=name
        )
        for place, part in found.items()
        for name in VARIANTS
    ]
    return pd.concat(parts, ignore_index=True)


def measured(found: Mapping[str, Tokens], work: streams.Work, samples: int, budget_s: float, seed: int = 0):
    """The same frame, measured: one sample is a token drawn from the layer's, the same for all schedules.

    Every plan is first run over slots full of NaN and must give the resident output bit by bit.

    Args:
        work: one layer for each place, one token. samples: of each place and schedule; budget_s: seconds at most.

    Raises:
        AssertionError: a schedule changes the output; names it.
    """
    draw, variants, drawn = np.random.default_rng(seed), {}, {}
    for number, (place, part) in enumerate(found.items()):
        drawn[place] = draw.integers(len(part.prompt), size=samples)
        for name in VARIANTS:
            ahead = part.ahead(name)[drawn[place]]
            replays = {count: _ready(name, count, work, number) for count in sorted(set(ahead.tolist()))}
            call = lambda turn, replays=replays, ahead=ahead: replays[int(ahead[turn % len(ahead)])]()  # noqa: E731
            variants[place, name] = Variant(call, queued=work.device.type == "cuda")
    warm = 5
    times = interleaved(variants, samples, warm, seed, work.device, budget_s)
    parts = []
    for (place, name), ms in times.items():
        tokens = drawn[place][(np.arange(len(ms)) + warm) % samples]
        part = found[place]
        parts.append(
            pd.DataFrame({"prompt": part.prompt[tokens], "ms": ms}).assign(place=place, layer=part.layer, schedule=name)
        )
    return pd.concat(parts, ignore_index=True)


def _ready(name: str, ahead: int, work: streams.Work, layer: int):
    """A replay of one schedule, checked."""
    made = plan(name, ahead, work.experts(layer), work.shape, layer)
    expected = work.resident(layer)
    replay = streams.capture(made, work) if work.device.type == "cuda" else lambda: streams.run(made, work)
    work.forget(layer, [(expert, part) for _, expert, part in made.present])
    replay()
    differ = int((work.out[layer] != expected).sum())
    assert torch.equal(work.out[layer], expected), f"{name}, {ahead} ahead: {differ} values differ"
    return replay


def means(frame: pd.DataFrame, resamples: int, seed: int) -> pd.DataFrame:
    """Mean block by place and variant, ms, and changes (ratio of means less one), with intervals over prompts.

    Returns:
        DataFrame(place, layer, variant, metric, median, low, high, n): `block_ms`; `block_change` of `x-<BASE>`, the
        same bytes ahead, and of `x-<NOTHING>`.
    """
    lines = []
    for (place, layer), part in frame.groupby(["place", "layer"], sort=False):
        wide = {name: rows.reset_index(drop=True) for name, rows in part.groupby("schedule", sort=False)}

        def add(metric, variant, value, prompt, weight=None):
            found = metrics.prompt_bootstrap(value, prompt, resamples, seed, weight)
            lines.append((place, layer, variant, metric, *found, prompt.nunique()))  # noqa: B023

        for name, rows in wide.items():
            add("block_ms", name, rows.ms, rows.prompt)
            for base in [base for base in (BASE, NOTHING) if base != name]:
                known = wide[base].ms
                add("block_change", f"{name}-{base}", (rows.ms - known) / known, rows.prompt, known)
    return pd.DataFrame(lines, columns=["place", "layer", "variant", "metric", "median", "low", "high", "n"])
