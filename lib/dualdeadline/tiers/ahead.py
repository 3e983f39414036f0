"""Reads ahead against demand on the cold tier: guesses of fitted predictors, a choice, its test on other prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor

from dualdeadline import paths, predictors, selection, steps
from dualdeadline.engine.next_token import NextToken
from dualdeadline.predictors.base import previous_rows
from dualdeadline.tiers import ssd_replay, ssd_rows
from dualdeadline.tiers.ssd_files import Files
from dualdeadline.traces import TraceStore

METRICS = {
    "hit_rate": "share",
    "read_ms": "ms",
    "lead_ms": "ms",
    "bytes": "bytes",
    "useful": "records",
    "wasted": "records",
}
METRICS |= {"late": "records", "bound_ms": "ms", "disk_gbps": "GB/s"}
TINY = 1e-6  # guesses below their own threshold are 0, so one threshold for all of them lies just above that


@dataclass(frozen=True)
class Drive:
    """Routes int [T,L,K], prompts [T], and by predictor and layers ahead probabilities [T,L,E] where they speak of."""

    routes: Tensor
    prompt: Tensor
    scores: Mapping[str, Mapping[int, Tensor]]
    E: int


@dataclass(frozen=True)
class Setting:
    """What reads ahead: predictor, layers ahead, and whether reads that would come too late are held back."""

    predictor: str = ""
    ahead: int = 0
    rule: bool = True

    @property
    def name(self) -> str:
        """Variant of its record rows."""
        return f"{self.predictor}{', held back if late' if self.rule else ''}" if self.ahead else "demand"


def drive(
    workspace: paths.Workspace,
    corpus: str,
    split: str,
    guesses: Sequence[Sequence],
    horizons: Sequence[int],
    prompts: int,
    tokens: int,
    layers: int,
    seed: int = 0,
) -> Drive:
    """The first tokens of some prompts, and what fitted predictors say of them.

    Args:
        guesses: (label of notebook 03 or "next_token", least probability); below that a guess counts as none.
        layers: of the model, the first ones.

    Raises:
        FileNotFoundError: no traces or predictors; names the stage that makes them.
    """
    folder = paths.need(workspace.traces / corpus, "02_traces")
    store = TraceStore(folder)
    trace = store.split(split)
    place = torch.arange(len(trace)) - trace.prompt_starts[trace.prompt]
    trace = trace.select((trace.prompt < prompts) & (place < tokens))
    fits = selection.read_index(workspace)
    fits = fits[(fits.seed == seed) & (fits.source == "")].set_index(["label", "horizon"]).folder
    scores: dict[str, dict[int, Tensor]] = {}
    for label, least in guesses:
        if label == NextToken.name:
            found = {layers: across(NextToken.fit(store.split("train", tensors=("routes",))), trace)}
        else:
            found = {}
            for d in horizons:
                said = predictors.load(workspace.scores / fits[label, d], trace.routers).score(trace).float()
                found[d] = torch.cat([torch.zeros(len(said), d, said.shape[2]), said], 1)
        scores[label] = {d: torch.where(said >= least, said, 0.0)[:, :layers] for d, said in found.items()}
    return Drive(trace.routes[:, :layers].long(), trace.prompt, scores, trace.num_experts)


def across(predictor: NextToken, trace) -> Tensor:
    """What a predictor said of each token and layer one token before, [T,L,E]; 0 at a prompt's first."""
    before, routes = previous_rows(trace.prompt), trace.routes.long()
    said = torch.stack([predictor(number, None, routes[:, number]) for number in range(routes.shape[1])], 1)
    return torch.where((before >= 0)[:, None, None], said[before.clamp(min=0)], 0.0)


def run(
    made: Files,
    data: Drive,
    only: Setting | None,
    slots: int,
    pause_ms: float,
    rules: Sequence[bool],
    warm: int,
    seed: int,
) -> pd.DataFrame:
    """`ssd_replay.prefetch` of one setting, or of all, beside demand."""
    scores = {
        name: {d: said for d, said in found.items() if only is None or (name, d) == (only.predictor, only.ahead)}
        for name, found in data.scores.items()
    }
    depths = sorted({d for found in scores.values() for d in found})
    routes = data.routes, data.prompt, data.E
    return ssd_replay.prefetch(
        made, *routes, scores, slots, pause_ms, depths, rules, threshold=TINY, warm=warm, seed=seed
    )


def best(found: pd.DataFrame) -> Setting:
    """The setting with the smallest mean ratio to demand."""
    ratio = ssd_rows.gain(found).groupby(["predictor", "ahead", "rule"]).ratio.mean()
    name, ahead, rule = ratio.idxmin()
    return Setting(name, int(ahead), bool(rule))


def rows(found: pd.DataFrame, split: str, pause_ms: float, resamples: int, seed: int) -> list[dict]:
    """Record rows of all settings: mean over prompts, and the ratio to demand with its 95 % interval over prompts."""
    out = []
    for (name, ahead, rule), part in found.groupby(["predictor", "ahead", "rule"], sort=False):
        said = Setting(name, int(ahead), bool(rule))
        config = dict(split=split, slots=int(part.slots.iloc[0]), pause_ms=pause_ms, ahead=said.ahead, rule=said.rule)
        common = dict(variant=said.name, kind="measured", config=config | {"cache": part.cache.iloc[0]})
        mean, low, high, n = steps.two_level(part.set_index("prompt").ms, resamples, seed)
        out.append(common | dict(metric="tier_ms", unit="ms", median=mean, low=low, high=high, n=n))
        for column, unit in METRICS.items():
            out.append(common | dict(metric=f"tier_{column}", unit=unit, median=part[column].mean(), n=n))
        if ahead:
            said = ssd_rows.ratio_row(found, said.name, name, ahead, rule, resamples, seed)
            out.append(said | {"metric": "tier_time_ratio", "config": common["config"]})
    return out


def parts(
    made: Files,
    chooses: Drive,
    tests: Drive,
    slots: Sequence[int],
    pauses_ms: Sequence[float],
    warm: int,
    resamples: int,
    seed: int,
) -> Iterator[tuple[str, list[dict]]]:
    """A setting is chosen on one split at the fewest slots, for each pause, and measured on another beside demand.

    More slots see the longest pause only. With it, and half of the experts in host memory, that is H7's comparison.

    Args:
        slots: host slots per layer. pauses_ms: for a layer's work on tokens that are there.
    """
    chosen, said, ratio = {}, [], []
    for pause in pauses_ms:
        found = run(made, chooses, None, min(slots), pause, [False], warm, seed)
        chosen[pause], said = best(found), said + rows(found, "validation", pause, resamples, seed)
    yield "ahead, choice", said
    said = []
    for pause, one in chosen.items():
        for count in slots if pause == max(pauses_ms) else [min(slots)]:
            found = run(made, tests, one, count, pause, [one.rule], warm, seed)
            said += rows(found, "test", pause, resamples, seed)
            if pause == max(pauses_ms) and 2 * count == tests.E:
                choice = one.predictor, one.ahead, one.rule
                ratio = [ssd_rows.ratio_row(found, "predicted-demand", *choice, resamples, seed)]
    yield "ahead, test", said
    yield "ahead, half of the experts in host memory", ratio


def late(
    made: Files, data: Drive, slots: int, pause_ms: float, warm: int, resamples: int, seed: int
) -> Iterator[tuple[str, list[dict]]]:
    """All settings where slots are warm and layers short, so that depth x layer time stays below the time of a read."""
    found = run(made, data, None, slots, pause_ms, [False], warm, seed)
    yield "ahead, late", rows(found, "validation, warm slots", pause_ms, resamples, seed)
