"""Fit predictors on the train split, compare them on validation, keep what later stages read."""

from __future__ import annotations

import inspect
import itertools
import textwrap
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import pandas as pd
import torch
from safetensors.torch import load_file, save_file
from tqdm.auto import tqdm

from dualdeadline import manifest, metrics, paths, predictors, record
from dualdeadline.predictors.residual import FEATURES

UNTRAINED = ("random", "popularity", "previous_layer", "previous_token", "transition", "gate_ahead", "oracle")
KINDS = ("baseline", "published", "ours", "control")


@dataclass(frozen=True)
class Candidate:
    """A predictor with options under the label that tables show; `kind` is one of `KINDS`."""

    label: str
    name: str
    kind: str = "published"
    options: dict = field(default_factory=dict)

    @property
    def learns(self) -> bool:
        """Whether it is trained by gradient descent, with a seed and epochs."""
        return issubclass(predictors.REGISTRY[self.name], predictors.Learned)


ABLATIONS = [
    Candidate("probe", "probe"),
    Candidate("shared_mlp", "shared_mlp"),
    Candidate("shared_mlp_128", "shared_mlp", options={"width": 128}),
    Candidate("shared_mlp_64", "shared_mlp", options={"width": 64}),
    Candidate("shared_mlp_kl", "shared_mlp", options={"loss": "kl"}),
    Candidate("shared_mlp_deadline", "shared_mlp", options={"loss": "deadline"}),
    Candidate("low_rank", "low_rank", options={"loss": "kl"}),
    Candidate("low_rank_bce", "low_rank", options={"loss": "bce"}),
    Candidate("shuffled", "shuffled", "control"),
    Candidate("residual_gate_default", "residual_gate", "ours"),
    Candidate("residual_gate_rank8", "residual_gate", "ours", {"rank": 8}),
    Candidate("residual_gate_rank16", "residual_gate", "ours", {"rank": 16}),
    *(Candidate(f"residual_gate_no_{name}", "residual_gate", "ours",
                {"features": tuple(other for other in FEATURES if other != name)}) for name in FEATURES),
    Candidate("residual_gate_no_memory", "residual_gate", "ours", {"features": ("state",)}),
    Candidate("residual_gate_no_low_rank", "residual_gate", "ours", {"features": ("previous", "running")}),
]

ADDED = [name for name in predictors.REGISTRY if name not in (*UNTRAINED, *(item.name for item in ABLATIONS))]
BASELINES = [Candidate(name, name, "baseline") for name in (*UNTRAINED, *ADDED)]
SHOWN = (*UNTRAINED, *ADDED, "probe", "low_rank")  # one seed, every horizon; the finalists come beside them


@dataclass(frozen=True)
class Job:
    """One fit: a candidate at a horizon with a seed, on all train prompts or those of one source only."""

    candidate: Candidate
    horizon: int = 1
    seed: int = 0
    source: str = ""

    @property
    def folder(self) -> str:
        """Name of its folder in `Workspace.scores`."""
        name = f"{self.candidate.label}-h{self.horizon}-s{self.seed}"
        return f"{name}-from-{self.source}" if self.source else name


def jobs(candidates, horizons: Sequence[int], seeds: Sequence[int], source: str = "") -> list[Job]:
    """Every combination of candidate, horizon and seed; one that draws nothing has the first seed only."""
    every = itertools.product(candidates, horizons, seeds)
    return [Job(candidate, horizon, seed, source) for candidate, horizon, seed in every
            if candidate.learns or seed == seeds[0]]


def fit_all(todo: Sequence[Job], train, validation, folder: Path, budgets: Sequence[int], workers: int = 2,
            done: pd.DataFrame | None = None, **training) -> pd.DataFrame:
    """Fit every job, save it below `folder`, and measure it on validation; one row per job.

    Args:
        train, validation: traces of those splits.
        done: rows of an earlier call; their jobs are not fitted again, and they lead the result.
        workers: fits run side by side, one CPU thread each.
        training: options for everything that trains, e.g. `epochs=2`.

    Columns: label, kind, horizon, seed, source, folder, fit_s, parameters, recall@<budget> ..., calibration_error.
    """
    known = set() if done is None else set(done.folder)
    todo = list({job.folder: job for job in todo if job.folder not in known}.values())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(workers) as pool:
            futures = [pool.submit(_fit, job, train, validation, folder, budgets, training) for job in todo]
            rows = [future.result() for future in tqdm(futures, desc="fits")]
    finally:
        torch.set_num_threads(threads)
    return pd.concat([done, pd.DataFrame(rows)], ignore_index=True) if rows else done


def _fit(job: Job, train, validation, folder: Path, budgets: Sequence[int], training: dict) -> dict:
    candidate = job.candidate
    options = (training if candidate.learns else {}) | candidate.options
    predictor = predictors.build(candidate.name, horizon=job.horizon, seed=job.seed, **options)
    start = time.perf_counter()
    predictor.fit(of_source(train, job.source))
    seconds = time.perf_counter() - start
    predictors.save(predictor, folder / job.folder)
    said = {"label": candidate.label, "kind": candidate.kind, "horizon": job.horizon, "seed": job.seed,
            "source": job.source, "folder": job.folder, "fit_s": seconds}
    return said | {"parameters": predictor.parameter_count()} | quality(predictor, validation, budgets)


def quality(predictor, trace, budgets: Sequence[int]) -> dict[str, float]:
    """Mean recall over tokens and target layers at each budget, and the calibration error."""
    scores, routes = predictor.score(trace), trace.routes[:, predictor.horizon:]
    found = metrics.chances(scores, routes, budgets).flatten(1).mean(1)
    return {f"recall@{budget}": float(value) for budget, value in zip(budgets, found)} | {
        "calibration_error": metrics.calibration_error(scores, routes)}


def of_source(trace, source: str):
    """The prompts of one source; all of them for the empty name.

    Raises:
        ValueError: the trace has no such source.
    """
    if not source:
        return trace
    chosen = [place for place, name in enumerate(trace.source) if name == source]
    if not chosen:
        raise ValueError(f"source is {source!r}; needed: one of {', '.join(sorted(set(trace.source)))}")
    return trace.select(chosen)


def source_of(name: str) -> str:
    """Source text of a predictor's `logits`."""
    return textwrap.dedent(inspect.getsource(predictors.REGISTRY[name].logits))


def add_records(recorder: record.Recorder, fits: pd.DataFrame, budgets: Sequence[int], prompts: int) -> None:
    """Record rows of every fit: validation recall at each budget, calibration error, fit seconds, parameters."""
    for fit in fits.to_dict("records"):
        config = {key: fit[key] for key in ("horizon", "seed")}
        config |= {"source": fit["source"] or "all", "role": fit["kind"]}
        for budget in budgets:
            recorder.add(fit["label"], "validation_recall", fit[f"recall@{budget}"], "share", "replayed",
                         n=prompts, budget=budget, **config)
        for metric, unit, kind, count in (("calibration_error", "share", "replayed", prompts),
                                          ("fit_s", "s", "measured", 1), ("parameters", "count", "measured", 1)):
            recorder.add(fit["label"], metric, fit[metric], unit, kind, n=count, **config)


def best(fits: pd.DataFrame, kind: str, column: str, horizon: int = 1) -> str:
    """Label of the fit of a kind with the largest value of `column` at a horizon, first seed, all sources."""
    found = fits[(fits.kind == kind) & (fits.horizon == horizon) & (fits.source == "")]
    found = found[found.seed == fits.seed.min()]
    if found.empty:
        raise ValueError(f"no fit of kind {kind!r} at horizon {horizon}; needed: one in the plan")
    return str(found.loc[found[column].idxmax(), "label"])


def candidate(label: str) -> Candidate:
    """The candidate of a label.

    Raises:
        ValueError: unknown label.
    """
    known = {item.label: item for item in [*BASELINES, *ABLATIONS]}
    if label not in known:
        raise ValueError(f"candidate is {label!r}; needed: one of {', '.join(known)}")
    return known[label]


def finalist(label: str) -> Candidate:
    """The candidate that goes on to test: ours under its registry name, whichever of its variants was chosen."""
    found = candidate(label)
    return replace(found, label=found.name) if found.kind == "ours" else found


def write_index(fits: pd.DataFrame, workspace: paths.Workspace, **chosen: str) -> Path:
    """Record what was fitted and chosen, for the stages that read it."""
    path = workspace.scores / "fits.csv"
    manifest.write_text(path, fits.assign(**chosen).to_csv(index=False))
    return path


def read_index(workspace: paths.Workspace) -> pd.DataFrame:
    """Rows of `write_index`.

    Raises:
        FileNotFoundError: nothing fitted yet; names the stage.
    """
    path = paths.need(workspace.scores / "fits.csv", "03_predictors")
    return pd.read_csv(path, dtype={"source": str}, keep_default_na=False)


def to_measure(fits: pd.DataFrame, labels: Sequence[str] = ()) -> pd.DataFrame:
    """Fits that go to test: on all sources, at every horizon that `gate_ahead` has; only `labels`, if given.

    The controls go too, at the one horizon that they have.
    """
    whole = fits[fits.source == ""]
    count = whole.groupby("label").horizon.transform("nunique")
    complete = (count == fits[fits.label == "gate_ahead"].horizon.nunique()) | (whole.kind == "control")
    return whole[complete & whole.label.isin(labels or whole.label)]


def write_scores(folders: Sequence[str], trace, name: str, workspace: paths.Workspace) -> list[Path]:
    """Scores [T, L-horizon, E] of saved predictors on a trace, in float16, as `<folder>/<name>.safetensors`."""
    written = []
    for folder in tqdm(folders, desc=f"scores of {name}"):
        predictor = predictors.load(workspace.scores / folder, trace.routers)
        path = workspace.scores / folder / f"{name}.safetensors"
        with manifest.atomic(path) as temporary:
            save_file({"scores": predictor.score(trace).half()}, temporary)
        written.append(path)
    return written


def read_scores(folder: str, name: str, workspace: paths.Workspace) -> torch.Tensor:
    """Scores that `write_scores` wrote, [T, L-horizon, E] float32.

    Raises:
        FileNotFoundError: none there; names the stage that makes them.
    """
    path = paths.need(workspace.scores / folder / f"{name}.safetensors", "03_predictors")
    return load_file(path)["scores"].float()
