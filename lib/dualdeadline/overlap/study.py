"""The loops of the overlap study: over settings with a device, over recorded cost models without one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pandas as pd
from tqdm.auto import tqdm

from dualdeadline import paths, schedule, simulate, steps, streams
from dualdeadline.cost import CostModel
from dualdeadline.overlap.blocks import Setting, block, layer_plan, measure, simulated_blocks
from dualdeadline.overlap.rows import block_rows, cost_rows, simulated_rows, span_rows
from dualdeadline.streams import probes
from dualdeadline.timeline import Timeline


def run(
    work: streams.Work,
    plan: Sequence[Setting],
    samples: int,
    budget_s: float,
    many_s: float,
    transfers: pd.DataFrame,
    seed: int = 0,
) -> list[dict]:
    """Check, measure and calibrate each setting; record rows.

    Args:
        budget_s, many_s: seconds for a setting of one token, and of several, at most; fewer samples are taken
            then, and the rows say how many.
        transfers: of `probes.copies`, in CUDA graphs.
    """
    out = []
    for setting in tqdm(plan, desc=f"settings, {work.shape.name}", leave=False):
        work.tokens(setting.tokens, setting.top_k, setting.kernels, seed)
        graphs = setting.submission == "graph"
        cost = probes.calibrate(work, transfers, graphs)
        found = measure(work, [setting], samples, budget_s if setting.tokens == 1 else many_s, seed)[0]
        out += block_rows(work.shape.name, setting, found) + cost_rows(work.shape.name, setting, cost)
    return out


def run_shapes(
    shapes: Sequence[streams.Shape],
    plan: Sequence[Setting],
    layers: int,
    samples: int,
    budget_s: float,
    many_s: float,
    transfers: pd.DataFrame,
    seed: int = 0,
) -> list[dict]:
    """`run` for each shape on the GPU, and the timelines of the first shape's base setting; record rows."""
    out = []
    for shape in shapes:
        work = streams.Work(shape, layers, device="cuda", seed=seed)
        out += run(work, plan, samples, budget_s, many_s, transfers, seed)
        if shape is shapes[0]:
            out += span_rows(timelines(work, Setting()))
    return out


def recorded_cost(rows: pd.DataFrame, shape: streams.Shape, setting: Setting) -> CostModel:
    """The cost model that was recorded for a setting.

    Raises:
        ValueError: there is none.
    """
    part = of_setting(rows[rows.metric == "cost"], shape.name, setting)
    if part.empty:
        raise ValueError(f"no cost model is recorded for {shape.name}, {setting}; needed: a run on a GPU")
    return CostModel.from_parts(dict(zip(part.variant, part["median"])), shape.component_bytes)


def of_setting(rows: pd.DataFrame, shape: str, setting: Setting) -> pd.DataFrame:
    """Record rows of one setting."""
    for key, value in setting.config(shape).items():
        rows = rows[rows[f"config.{key}"] == value]
    return rows


def resimulate(
    rows: pd.DataFrame, shapes: Iterable[streams.Shape], plan: Sequence[Setting], layers: int, seed: int = 0
) -> list[dict]:
    """Simulated record rows of every setting whose cost model is recorded, without a device.

    Raises:
        ValueError: no cost model is recorded.
    """
    if rows.empty or not (rows.metric == "cost").any():
        raise ValueError("no cost model is recorded for this model; needed: this notebook run on a machine with a GPU")
    out = []
    for shape in shapes:
        for setting in tqdm(plan, desc=f"simulated settings, {shape.name}", leave=False):
            if len(of_setting(rows[rows.metric == "cost"], shape.name, setting)):
                routes = streams.draw_routes(shape, layers, setting.tokens, setting.top_k, seed)
                guessed = simulated_blocks(shape, routes, setting, recorded_cost(rows, shape, setting))
                out += simulated_rows(shape.name, setting, guessed)
    return out


def step_cost(work: streams.Work, transfers: pd.DataFrame, windows: pd.DataFrame) -> CostModel:
    """Cost model of whole steps: stages and launches of `work`, and the graph time of each layer up to its router."""
    part = windows[(windows.part == "before") & (windows["mode"] == "graph")].sort_values("layer")
    return replace(probes.calibrate(work, transfers, graphs=False), before_ms=tuple(part.ms))


def recorded_step_cost(rows: pd.DataFrame, shape: streams.Shape) -> CostModel:
    """The cost model of whole steps that was recorded.

    Raises:
        ValueError: there is none.
    """
    part = rows[rows.metric == "step_cost"]
    if part.empty:
        raise ValueError("no cost model of decode steps is recorded for this model; needed: a run on a GPU")
    parts = dict(zip(part.variant, part["median"]))
    layers = sorted((int(name.split()[1]), ms) for name, ms in parts.items() if name.startswith("before "))
    return replace(CostModel.from_parts(parts, shape.component_bytes), before_ms=tuple(ms for _, ms in layers))


def steps_of(
    workspace: paths.Workspace,
    corpus: str,
    split: str,
    labels,
    horizons,
    prompts: int,
    per_prompt: int,
    seed: int,
    component_bytes,
    layers: int = 0,
) -> steps.Steps:
    """Decode steps of the first `prompts` prompts of a split, with the scores of some predictors at those steps.

    Args:
        layers: only the first so many MoE layers of each step (0: all).

    Kept in `<workspace>/steps.safetensors`: where there are no traces (a GPU machine, say) that file is enough.

    Raises:
        FileNotFoundError: neither traces nor that file are there. ValueError: the file was made for something else.
    """
    path = workspace.base / "steps.safetensors"
    made_for = dict(
        corpus=corpus,
        split=split,
        labels=list(labels),
        horizons=list(horizons),
        prompts=prompts,
        per_prompt=per_prompt,
        seed=seed,
        **({"layers": layers} if layers else {}),
    )
    if not (workspace.traces / corpus).exists() and path.exists():
        return steps.Steps.load(path, component_bytes, **made_for)
    from dualdeadline import replay, selection  # with dask behind them: not needed where only steps are measured

    store = str(paths.need(workspace.traces / corpus, "02_traces"))
    routes, prompt, experts = replay.routes_of(store, split, prompts)
    rows = steps.sample_rows(prompt, per_prompt, seed)
    fits = selection.read_index(workspace)
    fits = fits[(fits.seed == seed) & (fits.source == "") & fits.horizon.isin(horizons)].set_index(["label", "horizon"])
    scores = {}
    for label in labels:
        for horizon in horizons:
            file = workspace.scores / fits.folder[label, horizon] / f"{corpus}.safetensors"
            found = replay.scores_of(str(file), len(routes))[rows]
            scores[label, horizon] = found[:, : layers - horizon] if layers else found
    routes = routes[:, :layers] if layers else routes
    steps.Steps(routes, prompt, experts, rows, scores, component_bytes).save(path, **made_for)
    return steps.Steps.load(path, component_bytes, **made_for)  # rounded as on the machine that measures


def timelines(work: streams.Work, setting: Setting, ready: int = 0) -> dict[str, Timeline]:
    """A measured timeline of each schedule of a setting, after one run that warms up."""
    work.tokens(setting.tokens, setting.top_k, setting.kernels)
    return {name: [streams.run(block(work, name, 0, ready), work) for _ in range(2)][-1] for name in setting.schedules}


def simulated_timelines(rows: pd.DataFrame, shape: streams.Shape, setting: Setting, ready: int = 0):
    """The same from a recorded cost model."""
    routes = streams.draw_routes(shape, 1, setting.tokens, setting.top_k, 0)[0]
    layer, cost = layer_plan(routes, ready), recorded_cost(rows, shape, setting)
    return {name: simulate.run(schedule.block(name, layer, shape.component_bytes), cost) for name in setting.schedules}
