"""Measure fitted predictors on a trace, prompt by prompt; intervals, differences and records of that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from dualdeadline import metrics, predictors, record, selection
from dualdeadline.predictors.base import previous_rows

KEYS = ["variant", "corpus", "split", "metric", "horizon", "budget", "slots", "layer"]
NONE = -1  # a key that a metric does not have


@dataclass(frozen=True)
class Settings:
    """What to measure: recall at `budgets`, and recall on misses at `miss_budgets` for every `slots`.

    With `details`, one layer ahead also: routing mass, useful bytes, and recall of every target layer at budget K.
    """

    budgets: Sequence[int] = (2, 4, 8, 12, 16)
    miss_budgets: Sequence[int] = (4, 8)
    slots: Sequence[int] = (8, 16, 24, 32, 40, 48)
    details: bool = False


def recency(routes: Tensor, prompt: Tensor, experts: int) -> Tensor:
    """Place [T,L,E] of each expert in its layer's order of last use before the token, 0 the latest.

    A prompt-cold LRU cache of C slots, at least K, holds just the experts with a place below C. Experts not
    used yet in the prompt have place E.
    """
    tokens, layers, count = routes.shape
    stamp = torch.full((tokens, layers, experts), -1, dtype=torch.int32)
    now = torch.arange(tokens * count, dtype=torch.int32).view(tokens, 1, count)  # within a token, rank order
    stamp.scatter_(2, routes.long(), now.expand(-1, layers, -1))
    before = previous_rows(prompt)
    start = torch.where(before < 0, torch.arange(tokens), 0).cummax(0).values  # first row of each token's prompt
    last = stamp.cummax(0).values[before.clamp(min=0)]
    used = (last >= (start * count)[:, None, None]) & (before >= 0)[:, None, None]
    order = last.masked_fill(~used, -1).argsort(dim=-1, descending=True)
    place = torch.arange(experts, dtype=torch.int16).expand_as(order)
    place = torch.empty(order.shape, dtype=torch.int16).scatter_(2, order, place)
    return place.masked_fill(~used, experts)


def measure(predictor, trace, places: Tensor | None, settings: Settings) -> dict[tuple, np.ndarray]:
    """Per-prompt figures [prompts] by (metric, budget, slots, layer); tokens and target layers weigh the same.

    Args:
        places: `recency` of the trace; None leaves out what depends on a cache.
    """
    scores, ahead = predictor.score(trace), predictor.horizon
    routes, details = trace.routes[:, ahead:], settings.details and ahead == 1
    ranked = metrics.Ranked.of(scores, routes)
    found = ranked.chances(settings.budgets)
    rows = {("recall", budget, NONE, NONE): part.mean(-1).mean(-1) for budget, part in zip(settings.budgets, found)}
    if details:
        rows |= _details(found, routes.shape[-1], trace.weights[:, ahead:].float(), settings.budgets, ahead)
    out = {key: metrics.prompt_means(value, trace.prompt) for key, value in rows.items()}
    for slots in settings.slots if places is not None else ():
        resident = places[:, ahead:] < slots
        out |= _on_misses(ranked, routes, resident, slots, trace.prompt, settings.miss_budgets, details)
    return out


def _details(found: Tensor, count: int, weights: Tensor, budgets, ahead: int) -> dict[tuple, Tensor]:
    """Mass recall and useful bytes per byte at each budget, recall by target layer at budget K; [T] each."""
    rows = {}
    for budget, part in zip(budgets, found):
        rows["mass_recall", budget, NONE, NONE] = metrics.share(part, weights).mean(-1)
        rows["precision", budget, NONE, NONE] = part.mean(-1).mean(-1) * count / budget
        if budget == count:
            for layer, value in enumerate(part.mean(-1).unbind(1)):
                rows["layer_recall", budget, NONE, layer + ahead] = value
    return rows


def _on_misses(ranked, routes, resident, slots: int, prompt, budgets, details: bool) -> dict[tuple, np.ndarray]:
    """Share of the misses found, and useful share of the bytes moved, when places go to absent experts only."""
    missing = ~resident.gather(-1, routes.long())
    lost, absent = missing.flatten(1).sum(1), (~resident).sum(-1)
    found = ranked.chances(budgets, resident)
    out = {}
    for budget, part in zip(budgets, found):
        useful, moved = (part * missing).flatten(1).sum(1), absent.clamp(max=budget).sum(-1)
        for name, total in [("miss_recall", lost)] + details * [("miss_precision", moved)]:
            out[name, budget, slots, NONE] = metrics.prompt_means(useful / total, prompt, total)
    return out


def measure_all(fits: pd.DataFrame, trace, corpus, split, settings: Settings, scores, workers=2) -> pd.DataFrame:
    """`measure` for the rows of an index of fits; long frame with `KEYS`, seed, prompt, value.

    Args:
        fits: rows of `selection.read_index` to measure.
        scores: `Workspace.scores`.
    """
    places = recency(trace.routes, trace.prompt, trace.num_experts) if settings.slots else None

    def one(fit) -> pd.DataFrame:
        predictor = predictors.load(scores / fit.folder, trace.routers)
        found = measure(predictor, trace, places, settings)
        keys = pd.DataFrame(list(found), columns=["metric", "budget", "slots", "layer"])
        prompts = len(trace.prompt_ids)
        frame = keys.loc[keys.index.repeat(prompts)].reset_index(drop=True)
        frame["prompt"] = np.tile(np.arange(prompts), len(keys))
        frame["value"] = np.concatenate(list(found.values()))
        return frame.assign(variant=fit.label, seed=fit.seed, horizon=fit.horizon, corpus=corpus, split=split)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(workers) as pool:
            found = pool.map(one, fits.itertuples())
            parts = list(tqdm(found, total=len(fits), desc=f"measure {corpus}"))
    finally:
        torch.set_num_threads(threads)
    return pd.concat(parts, ignore_index=True)


def measure_across(fits: pd.DataFrame, traces: dict, splits: dict, budget: int, scores) -> pd.DataFrame:
    """Recall of the fits on one source, and of the same predictors fitted on all, by source of the prompts tested.

    Args:
        traces, splits: by corpus.

    The frame is that of `measure_all` with variant `<label> from <source>` and split `<split>: <source>`.
    """
    partial = fits[fits.source != ""]
    whole = fits[fits.folder.isin(partial.folder.str.partition("-from-")[0])]
    settings = Settings((budget,), (), ())
    parts = []
    for corpus, trace in traces.items():
        for source in sorted(set(trace.source)):
            part = selection.of_source(trace, source)
            chosen = pd.concat([partial, whole])
            chosen = chosen.assign(label=chosen.label + " from " + chosen.source.replace("", "all"))
            found = measure_all(chosen, part, corpus, f"{splits[corpus]}: {source}", settings, scores)
            parts.append(found[found.metric == "recall"])
    return pd.concat(parts, ignore_index=True)


def over_seeds(values: pd.DataFrame) -> pd.DataFrame:
    """Mean over seeds of each prompt's figure: a predictor stands for its fits, not for the luckiest."""
    return values.groupby([*KEYS, "prompt"], as_index=False, dropna=False).value.mean()


def intervals(values: pd.DataFrame, resamples: int, seed: int) -> pd.DataFrame:
    """Mean over prompts and 95 % interval of every figure; columns `KEYS`, mean, low, high, n (prompts).

    A prompt without a value (nothing missed, say) is left out of that figure.
    """
    parts = [_bootstrap(part, resamples, seed) for _, part in over_seeds(values).groupby(["corpus", "split"])]
    return pd.concat(parts, ignore_index=True)


def _bootstrap(values: pd.DataFrame, resamples: int, seed: int) -> pd.DataFrame:
    wide = values.pivot(index=KEYS, columns="prompt", values="value")
    table = wide.to_numpy().T  # [prompts, figures]
    there = ~np.isnan(table)
    mean, low, high = metrics.prompt_bootstrap(table, np.arange(len(table)), resamples, seed, weights=there)
    return wide.index.to_frame(index=False).assign(mean=mean, low=low, high=high, n=there.sum(0))


def differences(values: pd.DataFrame, ours: str, others: Iterable[str], resamples: int, seed: int) -> pd.DataFrame:
    """Paired differences `ours` minus each of `others`, by prompt; as `intervals`, metric `<metric>_difference`."""
    keys = [key for key in [*KEYS, "prompt"] if key != "variant"]
    table = over_seeds(values).set_index(keys)
    mine = table[table.variant == ours].value
    parts = []
    for other in others:
        gap = (mine - table[table.variant == other].value).dropna().rename("value").reset_index()
        parts.append(gap.assign(variant=f"{ours}-{other}", metric=gap.metric + "_difference"))
    return intervals(pd.concat(parts, ignore_index=True), resamples, seed)


def add_records(recorder: record.Recorder, table: pd.DataFrame, kind: str = "replayed") -> None:
    """One record row per row of `intervals` or `differences`; keys that a metric does not have are left out."""
    for row in table.itertuples():
        config = {key: getattr(row, key) for key in ("corpus", "split")}
        config |= {key: int(value) for key in ("horizon", "budget", "slots", "layer")
                   if (value := getattr(row, key)) != NONE}
        recorder.add(row.variant, row.metric, row.mean, "share", kind, row.low, row.high, row.n, **config)


def calibration(fits: pd.DataFrame, trace, scores) -> pd.DataFrame:
    """Reliability bins of some fits: label, horizon, probability, routed share, count, error over all bins."""
    parts = []
    for fit in fits.itertuples():
        predictor = predictors.load(scores / fit.folder, trace.routers)
        found, routes = predictor.score(trace), trace.routes[:, fit.horizon:]
        error = metrics.calibration_error(found, routes)
        parts.append(pd.DataFrame(metrics.reliability(found, routes)).assign(
            label=fit.label, horizon=fit.horizon, calibration_error=error))
    return pd.concat(parts, ignore_index=True)
