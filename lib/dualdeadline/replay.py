"""The replay study: points that sweep workers run, from trace stores and scores by path to rows per prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pandas as pd
from safetensors.torch import load_file

from dualdeadline import cache, manifest, metrics, paths, record, simulate, stamp, sweep
from dualdeadline.cost import TransferModel
from dualdeadline.traces import TraceStore


def run(sweeps: dict[Callable, list[dict]], workspace: paths.Workspace, scheduler: str = "") -> list[pd.DataFrame]:
    """`sweep.run` of each function with its grid, all on one cluster.

    Shards lie in folders that belong to the grid, to the traces and scores it names, and to this code.
    """
    with sweep.Cluster(scheduler) as cluster:
        return [sweep.run(function, grid, folder_of(function, grid, workspace), cluster)
                for function, grid in sweeps.items()]


def folder_of(function: Callable, grid: list[dict], workspace: paths.Workspace) -> Path:
    """Folder of a sweep's shards."""
    inputs = {path for point in grid for path in _inputs(point)} | stamp.closure({function.__module__})
    said = [sorted(sweep.key_of(function, point) for point in grid), *map(manifest.file_sha256, sorted(inputs))]
    return workspace.base / "sweeps" / f"{function.__name__}-{manifest.sha256(repr(said))[:12]}"


def _inputs(point: dict) -> list[Path]:
    """Files that decide a point: the store's index (it holds every trace's hash) and the scores."""
    index = paths.need(Path(point["store"]) / "index.parquet", "02_traces")
    return [index, paths.need(Path(point["scores"]), "03_predictors")] if "scores" in point else [index]


def routes_of(store: str, split: str, prompts: int = 0):
    """Routes `[T, L, K]`, prompts `[T]` and E of a split's first `prompts` prompts (0: all), as arrays."""
    trace = TraceStore(Path(store)).split(split, tensors=("routes",))
    rows = trace.prompt.numpy() < (prompts or len(trace.prompt_ids))
    return trace.routes.numpy()[rows], trace.prompt.numpy()[rows], trace.num_experts


def scores_of(scores: str, tokens: int) -> np.ndarray:
    """Scores `[T, L-h, E]` float32 that notebook 03 wrote for a split, cut to the first `tokens` tokens."""
    found = load_file(paths.need(Path(scores), "03_predictors"))["scores"][:tokens].float().numpy()
    if len(found) < tokens:
        raise ValueError(f"{scores} scores {len(found)} tokens; needed: {tokens}. Run notebook 03_predictors again")
    return found


def curves(store: str, split: str, prompts: int, policy: str, order: str, scope: str, start: str) -> pd.DataFrame:
    """Hit rate of every prompt at every slot count; a pool is shown at its slots per layer."""
    routes, prompt, experts = routes_of(store, split, prompts)
    rates = cache.prompt_curve(routes, prompt, policy, order, scope, start, experts)
    step = routes.shape[1] if scope == "pool" else 1
    slots = np.arange(1, experts + 1)
    shown = rates[:, slots * step - 1]
    return pd.DataFrame({
        "prompt": np.repeat(np.arange(len(shown)), experts), "slots": np.tile(slots, len(shown)),
        "hit_rate": shown.ravel(),
    })


def layer_curves(store: str, split: str, prompts: int, policy: str, order: str) -> pd.DataFrame:
    """Hit rate of every layer at every slot count, prompt-cold."""
    routes, prompt, experts = routes_of(store, split, prompts)
    rates = cache.curve(routes, policy, order, prompt=prompt, experts=experts)
    layer, slots = np.indices(rates.shape)
    return pd.DataFrame({"layer": layer.ravel(), "slots": slots.ravel() + 1, "hit_rate": rates.ravel()})


def prefetches(
    store: str, split: str, prompts: int, variant: str, scores: str, horizon: int, sizes: list[int],
    budgets: list[int], thresholds: list[float],
) -> pd.DataFrame:
    """Hit rate, useful and wasted copies per token and layer of every prompt and setting, on predicted layers.

    Settings: every size (slots per layer) x budget x threshold with LRU; the first budget and threshold with
    speculative space not charged; and, without prefetch, eviction of what is predicted least.
    """
    routes, prompt, _ = routes_of(store, split, prompts)
    score = scores_of(scores, len(routes))
    settings = [("lru", budget, least, True) for budget in budgets for least in thresholds]
    settings += [("lru", budgets[0], thresholds[0], False), ("predicted", 0, 0.0, True)]
    parts, shared = [], cache.Replay(routes, score, prompt)
    for size in sizes:
        for policy, budget, least, charged in settings:
            done = shared.run(size, budget, policy, least, charged)
            parts.append(_per_prompt(done, prompt, horizon).assign(
                slots=size, policy=policy, budget=budget, threshold=least, charged=charged))
    return pd.concat(parts, ignore_index=True)


def references(store: str, split: str, prompts: int, horizons: list[int], sizes: list[int]) -> pd.DataFrame:
    """What no predictor enters: LRU and the optimum without prefetch, on the layers that each horizon predicts."""
    routes, prompt, experts = routes_of(store, split, prompts)
    parts = []
    for size in sizes:
        for name, policy in (("none", "lru"), ("belady", "belady")):
            hit = cache.hits(routes, size, policy, "token", prompt, experts=experts)
            for ahead in horizons:
                rate = metrics.prompt_means(hit[:, ahead:].mean((1, 2)), prompt)
                parts.append(pd.DataFrame({"prompt": np.arange(len(rate)), "hit_rate": rate}).assign(
                    variant=name, horizon=ahead, slots=size))
    return pd.concat(parts, ignore_index=True)


def _per_prompt(done: cache.Prefetch, prompt: np.ndarray, horizon: int) -> pd.DataFrame:
    means = metrics.prompt_means(np.stack([
        done.hits[:, horizon:].mean((1, 2)), done.useful[:, horizon:].mean(1), done.wasted[:, horizon:].mean(1),
    ], axis=1), prompt)
    rows = pd.DataFrame(means, columns=["hit_rate", "useful", "wasted"])
    return rows.rename_axis("prompt").reset_index()


def stalls(
    store: str, split: str, prompts: int, variant: str, scores: str, horizon: int, budgets: list[int],
    sizes: list[int],
) -> pd.DataFrame:
    """Stall of every prompt in the original's accounting and in its variants, on predicted layers.

    Metrics: `stall_ms` with mean, p50 and p95 copy times; with p50, `stall_free_predictor_ms` without predictor
    time, `stall_link_once_ms` and `stall_link_once_partial_ms` with the link charged once, and `stall_lru_ms`
    behind a prompt-cold LRU cache of each size (slots per layer), speculative space not charged.
    """
    routes, prompt, _ = routes_of(store, split, prompts)
    score = scores_of(scores, len(routes))
    layers = routes.shape[1]
    layer = np.tile(np.arange(horizon, layers), len(routes))
    rows, flat = routes[:, horizon:].reshape(len(layer), -1), score.reshape(len(layer), -1)

    def add(metric, covered, timings="p50", slots=0, **rules):
        parts.append(_stall(covered, np.repeat(prompt, layers - horizon), horizon, budgets, timings, **rules).assign(
            metric=metric, timings=timings, slots=slots))

    parts, plain = [], simulate.coverage(flat, rows, layer)
    for timings in ("mean", "p50", "p95"):
        add("stall_ms", plain, timings)
    add("stall_free_predictor_ms", plain, predictor_ms=0.0)
    add("stall_link_once_ms", plain, link_once=True)
    add("stall_link_once_partial_ms", plain, link_once=True, partial=True)
    shared = cache.Replay(routes, score, prompt)
    for size in sizes:
        held = shared.run(size, 0).resident[:, horizon:]
        add("stall_lru_ms", simulate.coverage(flat, rows, layer, held.reshape(flat.shape)), slots=size)
    found = pd.concat(parts, ignore_index=True).rename(
        columns={"group": "prompt", "monolithic_ms": "monolithic", "staged_ms": "staged"})
    keys = ["prompt", "metric", "timings", "budget", "slots"]
    return found.melt(keys, ["monolithic", "staged"], "schedule", "ms")


def _stall(covered, group, horizon, budgets, timings, predictor_ms=None, **rules) -> pd.DataFrame:
    """`simulate.stall` per prompt with the published times."""
    told = simulate.published()
    transfer = TransferModel.fit(told["transfer"]["size_bytes"], told["transfer"][f"{timings}_ms"])
    charged = told["predictor_latency_ms"] if predictor_ms is None else predictor_ms
    window = simulate.windows_for(int(covered.layer.max()) + 1, charged, horizon)
    compute_ms = told["expert_gate_up_compute_top8_p50_ms"]
    return simulate.stall(covered, window, transfer, told["bytes"], compute_ms, budgets, group=group, **rules)


def intervals(rows: pd.DataFrame, value: str, keys: list[str], resamples: int, seed: int) -> pd.DataFrame:
    """Mean over prompts and 95 % interval of `value` for every combination of `keys`: mean, low, high, n."""
    wide = rows.pivot(index=keys, columns="prompt", values=value)
    mean, low, high = metrics.prompt_bootstrap(wide.to_numpy().T, np.arange(wide.shape[1]), resamples, seed)
    return wide.index.to_frame(index=False).assign(mean=mean, low=low, high=high, n=wide.shape[1])


def gains(rows: pd.DataFrame, keys: list[str], resamples: int, seed: int) -> pd.DataFrame:
    """Staged minus monolithic, paired by prompt; as `intervals`."""
    wide = rows.pivot(index=[*keys, "prompt"], columns="schedule", values="ms")
    return intervals((wide.staged - wide.monolithic).rename("ms").reset_index(), "ms", keys, resamples, seed)


def add_records(recorder: record.Recorder, found: pd.DataFrame, unit: str, metric: str = "", **config) -> None:
    """One row per row of `intervals`: columns `variant` and `metric` name it, all other keys are its config."""
    for row in found.to_dict("records"):
        ends = {key: row.pop(key) for key in ("mean", "low", "high", "n")}
        name, what = row.pop("variant"), metric or row.pop("metric")
        recorder.add(name, what, ends["mean"], unit, "replayed", ends["low"], ends["high"], ends["n"], **config, **row)


def seconds_of(call: Callable, times: int = 3) -> float:
    """Least processor seconds of several calls, so that other work on the machine counts less."""
    spent = []
    for _ in range(times):
        start = time.process_time()
        call()
        spent.append(time.process_time() - start)
    return min(spent)


def race(routes, prompt, experts: int, sample: Iterable[int]) -> dict[str, float]:
    """Processor seconds for LRU at all E slot counts: `plain_s` of the OrderedDict loop (timed on the slot
    counts of `sample` and scaled up), `one_pass_s` of `cache.curve`, `speedup`; results are compared first."""
    sample = list(sample)
    found = cache.curve(routes, "lru", "rank", prompt=prompt, experts=experts).mean(0)
    plain = [cache.ordered_dict_lru(routes, slots, prompt) for slots in sample]
    if not np.allclose(found[np.array(sample) - 1], plain):
        raise AssertionError("the one-pass replay and the plain loop disagree")
    slow = seconds_of(lambda: [cache.ordered_dict_lru(routes, slots, prompt) for slots in sample], 1)
    fast = seconds_of(lambda: cache.curve(routes, "lru", "rank", prompt=prompt, experts=experts))
    whole = slow * experts / len(sample)
    return {"plain_s": whole, "one_pass_s": fast, "speedup": whole / fast}
