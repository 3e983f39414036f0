"""A trace store in a few figures: record rows and what a heat map shows."""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch

from dualdeadline import metrics, record
from dualdeadline.traces import statistics
from dualdeadline.traces.store import Trace, TraceStore

LIGHT = ("routes", "weights", "tokens")  # all that is read here: a hundredth of a store


def add_records(
    rows: record.Recorder, stores: dict[str, TraceStore], resamples: int, seed: int,
) -> dict[str, Trace]:
    """Rows of every store under its name as the config key `corpus`; the stores' traces (routes, weights, tokens)."""
    found = {name: store.split("all", tensors=LIGHT) for name, store in stores.items()}
    for name, trace in found.items():
        _lengths(rows, name, stores[name], trace)
        _repetition(rows, name, trace, resamples, seed)
        _layers(rows, name, trace, resamples, seed)
    return found


def _lengths(rows: record.Recorder, name: str, store: TraceStore, trace: Trace) -> None:
    prompts = len(store.index)
    rows.add("decode", "tokens", len(trace), "tokens", "measured", n=prompts, corpus=name)
    ended = (store.index.finish == "end of text").mean()
    rows.add("decode", "ended_by_itself", ended, "share", "measured", n=prompts, corpus=name)


def _repetition(rows: record.Recorder, name: str, trace: Trace, resamples: int, seed: int) -> None:
    """Share of repeated 4-grams, prompts weighing the same; the interval is over prompts."""
    shares = statistics.repetition(trace).dropna(subset="repeated")
    parts = {"decode": shares} | dict(list(shares.groupby("source")))
    for variant, part in parts.items():
        values = part.repeated.to_numpy()
        middle, low, high = metrics.prompt_bootstrap(values, np.arange(len(values)), resamples, seed)
        metric = "repeated_4grams" if variant == "decode" else "repeated_4grams_by_source"
        rows.add(variant, metric, middle, "share", "measured", low, high, n=len(values), corpus=name)


def _layers(rows: record.Recorder, name: str, trace: Trace, resamples: int, seed: int) -> None:
    """Per layer: reuse of the previous token's experts, its level for unrelated tokens, and the busiest expert."""
    values, prompt = statistics.reuse_by_token(trace)
    middle, low, high = metrics.prompt_bootstrap(values.numpy(), prompt.numpy(), resamples, seed)
    chance, load = statistics.chance_reuse(trace), statistics.expert_load(trace)
    prompts = len(trace.prompt_ids)
    for layer in range(len(load)):
        keys = {"n": prompts, "corpus": name, "layer": layer}
        rows.add("neighbour", "reuse", middle[layer], "share", "measured", low[layer], high[layer], **keys)
        rows.add("unrelated", "reuse", float(chance[layer]), "share", "measured", **keys)
        busiest = float(load[layer].max()) * trace.num_experts
        rows.add("busiest", "load", busiest, "times even share", "measured", **keys)
    unused = int((load == 0).sum())
    rows.add("decode", "unused_experts", unused, "experts of all layers", "measured", n=prompts, corpus=name)


def add_overhead(rows: record.Recorder, steps: pd.DataFrame, batch: int) -> float:
    """Rows of a benchmark of `traces.overhead`: median and 20/80 % quantiles over steps; the median overhead."""
    ratio = steps.captured_ms / steps.plain_ms - 1
    for metric, values, unit in (
        ("step_plain_ms", steps.plain_ms, "ms"), ("step_captured_ms", steps.captured_ms, "ms"),
        ("capture_overhead", ratio, "share"),
    ):
        low, high = values.quantile(0.2), values.quantile(0.8)
        rows.add("capture", metric, values.median(), unit, "measured", low, high, n=len(values), batch=batch)
    return float(ratio.median())


def table(stores: dict[str, TraceStore]) -> pd.DataFrame:
    """One line per store: prompts, tokens, prompt tokens, ended by themselves, MB on disk."""
    found = []
    for name, store in stores.items():
        files = [store.path / file for file in store.index.file]
        found.append({
            "prompts": name, "number": len(store.index), "tokens": int(store.index.tokens.sum()),
            "prompt tokens (median)": int(store.index.prompt_tokens.median()),
            "ended by themselves": int((store.index.finish == "end of text").sum()),
            "MB": round(sum(path.stat().st_size for path in files) / 1e6),
        })
    return pd.DataFrame(found)


def routing(trace: Trace, prompt: str, layer: int) -> np.ndarray:
    """[E,T] routing weight of each expert at each decode step of one prompt, NaN where it was not routed."""
    part = trace.select([prompt])
    grid = torch.full((len(part), trace.num_experts), torch.nan)
    grid.scatter_(1, part.routes[:, layer], part.weights[:, layer].float())
    return grid.T.numpy()


def longest(trace: Trace, source: str) -> str:
    """Id of the first prompt of a source that has the most decode steps."""
    own = torch.tensor([name == source for name in trace.source])
    return trace.prompt_ids[int(trace.lengths.where(own, -1).argmax())]
