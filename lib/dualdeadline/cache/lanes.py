"""Access sequences side by side: every prompt and layer is a lane, so one numpy step serves all of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Lanes:
    """Routes as lanes that start with an empty cache and run in lock step.

    Attributes:
        ids: `[S, K, R]` int16 (int32 where ids need it), step, rank, lane (prompt-major, then layer); `experts` where
            a lane has ended.
        token: `[S, P]` row of the routes behind each step of each prompt; T where the prompt has ended.
        experts: number of expert ids, E (L*E for a pool).
    """

    ids: np.ndarray
    token: np.ndarray
    experts: int

    def restore(self, values: np.ndarray, tokens: int) -> np.ndarray:
        """`[S, K, R]` values back in the order of the routes: `[T, L, K]`."""
        steps, k, lanes = values.shape
        prompts = self.token.shape[1]
        values = values.reshape(steps, k, prompts, lanes // prompts).transpose(0, 2, 3, 1)
        live = self.token < tokens
        out = np.empty((tokens, *values.shape[2:]), values.dtype)
        out[self.token[live]] = values[live]
        return out


def steps(prompt: np.ndarray | None, tokens: int) -> np.ndarray:
    """`[S, P]` token index per step and prompt, T where a prompt has ended; `prompt` None: one long one."""
    if prompt is None:
        return np.arange(tokens)[:, None]
    prompt = np.asarray(prompt)
    if prompt.shape != (tokens,):
        raise ValueError(f"prompt has shape {prompt.shape}; needed: ({tokens},), one prompt index per token")
    starts = np.flatnonzero(np.r_[True, prompt[1:] != prompt[:-1]])
    lengths = np.diff(np.r_[starts, tokens])
    step = np.arange(lengths.max())[:, None]
    return np.where(step < lengths, starts + step, tokens)


def spread(values: np.ndarray, token: np.ndarray, fill) -> np.ndarray:
    """`[T, L, X]` values as lanes `[S, X, P*L]`, `fill` where a prompt has ended."""
    padded = np.concatenate([values, np.full((1, *values.shape[1:]), fill, values.dtype)])
    lanes = padded[token].transpose(0, 3, 1, 2)
    return np.ascontiguousarray(lanes.reshape(*lanes.shape[:2], -1))


def lanes(routes: np.ndarray, prompt: np.ndarray | None, experts: int) -> Lanes:
    """Lanes of checked routes `[T, L, K]`."""
    token = steps(prompt, len(routes))
    kind = np.int16 if experts < 2**15 else np.int32
    return Lanes(spread(routes.astype(kind), token, experts), token, experts)


def neighbours(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each access of `ids[n, R]`: index of the same id's previous access (-1: none), of its next one
    (n: none), and how often the id has been used up to and including this access."""
    n = len(ids)
    order = np.argsort(ids, axis=0, kind="stable").astype(np.int32)
    ordered = np.take_along_axis(ids, order, 0)
    same = np.zeros(ids.shape, bool)
    same[1:] = ordered[1:] == ordered[:-1]
    place = np.arange(n, dtype=np.int32)[:, None]
    count = place - np.maximum.accumulate(np.where(same, 0, place), axis=0) + 1
    earlier, later = np.full(ids.shape, -1, np.int32), np.full(ids.shape, n, np.int32)
    earlier[1:] = np.where(same[1:], order[:-1], -1)
    later[:-1] = np.where(same[1:], order[1:], n)
    back = np.empty_like(order)
    np.put_along_axis(back, order, np.broadcast_to(place, order.shape), 0)
    return tuple(np.take_along_axis(values, back, 0) for values in (earlier, later, count))
