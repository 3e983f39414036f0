"""Routes and scores that drive a model of other sizes: decode steps of whole prompts, in one file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dualdeadline import manifest, paths

NAME = "decode.safetensors"


@dataclass(frozen=True)
class Recorded:
    """Decode steps of some prompts, one after another.

    Attributes:
        routes: int64 [T,L,K]. prompt: int64 [T]. scores: by predictor, probabilities [T,L,E] at the layer they speak
            of (0 where the horizon reaches no source). horizon: of the scores. ids: tokens of each prompt.
    """

    routes: Tensor
    prompt: Tensor
    scores: dict[str, Tensor]
    horizon: int
    ids: tuple[tuple[int, ...], ...] = ()

    @property
    def E(self) -> int:
        return next(iter(self.scores.values())).shape[-1]

    @property
    def spans(self) -> list[slice]:
        """The steps of each prompt."""
        ends = torch.unique_consecutive(self.prompt, return_counts=True)[1].cumsum(0).tolist()
        return [slice(begin, end) for begin, end in zip([0, *ends[:-1]], ends)]


def controls(routes: Tensor, E: int, seed: int) -> dict[str, Tensor]:
    """Scores that know everything, and the same of other steps: what prediction can give, and what it may cost."""
    oracle = torch.zeros(*routes.shape[:2], E).scatter_(-1, routes, 1.0)
    order = torch.randperm(len(routes), generator=torch.Generator().manual_seed(seed))
    return {"oracle": oracle, "shuffled": oracle[order]}


def with_controls(recorded: Recorded, seed: int) -> Recorded:
    """The same with scores that know everything, and with those of other steps."""
    own = controls(recorded.routes, recorded.E, seed)
    return replace(recorded, scores=recorded.scores | own)


def load(
    workspace: paths.Workspace, model: str, corpus: str, split: str, labels, horizon: int, prompts: int, seed: int
) -> Recorded:
    """The decode steps of the first `prompts` prompts of a split, their tokens, and what some predictors said at them.

    Without labels the only scores are uniform ones, `random`. Kept in `<workspace>/decode.safetensors`: where there are
    no traces (a GPU machine, say) that file is enough.

    Raises:
        FileNotFoundError: neither traces nor that file. ValueError: the file was made for something else.
    """
    path = workspace.base / NAME
    made_for = dict(
        model=model, corpus=corpus, split=split, labels=",".join(labels), horizon=horizon, prompts=prompts, seed=seed
    )
    if (workspace.traces / corpus).exists():
        _make(path, workspace, made_for, labels)
    return _read(paths.need(path, "02_traces"), made_for)


def _make(path: Path, workspace: paths.Workspace, made_for: dict, labels) -> None:
    from dualdeadline import replay, selection  # with dask behind them

    store, horizon = str(workspace.traces / made_for["corpus"]), made_for["horizon"]
    routes, prompt, experts = replay.routes_of(store, made_for["split"], made_for["prompts"])
    tensors = {"routes": torch.as_tensor(routes).short(), "prompt": torch.as_tensor(prompt)}
    tensors["experts"] = torch.tensor(experts)
    if labels:
        fits = selection.read_index(workspace)
        own = (fits.seed == made_for["seed"]) & (fits.source == "") & (fits.horizon == horizon)
        fits = fits[own].set_index("label")
    for label in labels:
        file = workspace.scores / fits.folder[label] / f"{made_for['corpus']}.safetensors"
        found = torch.as_tensor(replay.scores_of(str(file), len(routes))).half()
        none = torch.zeros(len(found), horizon, experts, dtype=torch.half)
        tensors[f"scores {label}"] = torch.cat([none, found], 1)
    ids = _tokens(made_for)
    for number, row in enumerate(ids):
        tensors[f"ids {number:04}"] = torch.tensor(row)
    with manifest.atomic(path) as temporary:
        save_file(tensors, temporary, {name: str(value) for name, value in made_for.items()})


def _tokens(made_for: dict) -> list[list[int]]:
    from dualdeadline import corpus, models

    tokenizer = models.tokenizer(made_for["model"])
    chosen = [prompt for prompt in corpus.load(made_for["corpus"]) if prompt.split == made_for["split"]]
    return [models.encode(tokenizer, prompt.text) for prompt in chosen[: made_for["prompts"]]]


def _read(path: Path, made_for: dict) -> Recorded:
    with safe_open(path, "pt") as file:
        said = {name: type(value)(file.metadata()[name]) for name, value in made_for.items()}
        if said != made_for:
            raise ValueError(f"{path} was made for {said}; needed: {made_for}, made where the traces are")
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    scores = {
        name.removeprefix("scores "): value.float() for name, value in tensors.items() if name.startswith("scores ")
    }
    if not scores:  # routes alone
        scores["random"] = torch.rand(
            *tensors["routes"].shape[:2],
            int(tensors["experts"]),
            generator=torch.Generator().manual_seed(made_for["seed"]),
        )
    ids = tuple(tuple(tensors[name].tolist()) for name in sorted(tensors) if name.startswith("ids "))
    return Recorded(tensors["routes"].long(), tensors["prompt"], scores, made_for["horizon"], ids)
