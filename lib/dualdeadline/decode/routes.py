"""Routes for models with more layers or experts than any recorded ones: recorded blocks tiled, or drawn locality."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from dualdeadline.decode.recorded import NAME, Recorded, load, with_controls

NEVER = -1.0  # score of an expert that no threshold lets pass


def tile(recorded: Recorded, layers: int, offset: int = 7) -> Recorded:
    """Routes of `layers` layers from fewer recorded ones, repeated block by block.

    Block b takes the steps `b * offset` later within the same prompt (past its end, those of its beginning). Inside a
    block transitions between layers are recorded ones; into the first layers of a block, as many as the scores look
    ahead, nothing is guessed. Recorded layers that suffice are only cut.
    """
    blocks = -(-layers // recorded.routes.shape[1])
    order = torch.stack([_later(recorded, number * offset) for number in range(blocks)])  # [blocks,T]

    def tiled(values: Tensor) -> Tensor:
        return torch.cat([values[rows] for rows in order], 1)[:, :layers]

    scores = {}
    for name, values in recorded.scores.items():
        own = values.clone()
        own[:, : recorded.horizon] = NEVER
        scores[name] = tiled(own)
    return replace(recorded, routes=tiled(recorded.routes), scores=scores)


def _later(recorded: Recorded, steps: int) -> Tensor:
    """Index [T] of the step that many steps later in the same prompt."""
    found = torch.arange(len(recorded.routes))
    for span in recorded.spans:
        found[span] = found[span].roll(-steps)
    return found


def synthetic(L: int, E: int, K: int, hits: Mapping[int, float], prompts: int, steps: int, seed: int) -> Recorded:
    """Routes drawn so that an LRU cache hits at given rates: synthetic locality, of no model.

    Each layer keeps its experts by last use; a token's K distinct experts are drawn by their place in that order, whose
    intervals between the given numbers of slots have the probabilities that the hit rates differ by, uniform inside. So
    the next token depends on the order alone (a Markov process), layers on nothing of each other. Prompts follow one
    another without a break: the rates are those of slots that stay warm.

    Args:
        hits: hit rate by slots per layer, rising. prompts, steps: how many, and steps of each.

    Returns:
        Recorded with the scores `random` (uniform).

    Raises:
        ValueError: rates that do not rise from above 0 to below 1, or slots that lie less than K apart.
    """
    slots, rates = [0, *sorted(hits), E], [0.0, *(hits[count] for count in sorted(hits)), 1.0]
    chances = np.diff(rates)
    if (chances <= 0).any() or (np.diff(slots) < K).any():
        raise ValueError(f"hits are {dict(hits)} of {E} experts; needed: rates that rise, slots at least {K} apart")
    draw, T = np.random.default_rng(seed), prompts * steps
    routes = np.stack([_layer(draw, slots, chances, K, T) for _ in range(L)], 1)
    prompt = torch.arange(prompts).repeat_interleave(steps)
    random = torch.rand(T, L, E, generator=torch.Generator().manual_seed(seed))
    return Recorded(torch.from_numpy(routes), prompt, {"random": random}, horizon=1)


def _layer(draw: np.random.Generator, slots: list[int], chances: np.ndarray, K: int, T: int) -> np.ndarray:
    """Routes [T,K] of one layer."""
    order, found = draw.permutation(slots[-1]), np.empty((T, K), np.int64)
    for token in range(T):
        counts = draw.multinomial(K, chances)
        places = [low + draw.choice(high - low, n, replace=False) for low, high, n in zip(slots, slots[1:], counts)]
        places = draw.permutation(np.concatenate(places))
        found[token] = order[places]
        order = np.concatenate(
            [found[token][::-1], np.delete(order, places)]
        )  # of a token, the last rank is the latest
    return found


def traced(profile: str, model: str) -> bool:
    """Whether notebook 11 has left routes of a model, or their file has been brought here."""
    from dualdeadline.confirmation.place import Place

    where = Place(profile, model) if model else None
    return bool(where) and (where.traces.exists() or (where.base / NAME).exists())


def driving(told: Mapping | None, drawn: Mapping, seed: int, L: int, E: int, K: int) -> Recorded:
    """What drives a model of L layers: a smaller model's recorded routes, tiled, or drawn ones; with the controls.

    Args:
        told: profile, model, corpus, split, labels, horizon and prompts of what notebook 11 traced, or None.
        drawn: hits, prompts and steps of `synthetic`, without `told`.

    Raises:
        ValueError: recorded routes have other E or K. FileNotFoundError: there are none.
    """
    if told is None:
        return with_controls(synthetic(L, E, K, **drawn, seed=seed), seed)
    from dualdeadline.confirmation.place import Place

    where = Place(told["profile"], told["model"])
    own = {name: value for name, value in told.items() if name != "profile"}
    found = with_controls(load(where, **own, seed=seed), seed)
    if (found.E, found.routes.shape[2]) != (E, K):
        raise ValueError(f"{told['model']} has E {found.E}, K {found.routes.shape[2]}; needed: E {E}, K {K}")
    return tile(found, L)
