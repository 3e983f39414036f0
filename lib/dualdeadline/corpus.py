"""Prompts with grouped splits."""

from __future__ import annotations

from typing import NamedTuple

from dualdeadline import manifest

SHARES = {"pretrain": (0.0, 0.4), "pilot": (0.4, 0.7), "replication": (0.7, 1.0)}


class Prompt(NamedTuple):
    """One prompt. `id` is a hash of source and key; prompts of one `group` share a split."""

    id: str
    source: str
    split: str
    group: str
    text: str


def templates(purpose: str) -> list[int]:
    """Ids of the word-problem templates that serve one purpose; the three purposes share none.

    Args:
        purpose: `pretrain` (text the embedded model is trained on), `pilot` or `replication`.
    """
    from reasoning_gym.arithmetic.gsm_symbolic.gsm_symbolic import tasks_ok

    if purpose not in SHARES:
        raise ValueError(f"purpose is {purpose!r}; needed: one of {', '.join(SHARES)}")
    order = sorted(tasks_ok, key=lambda task: manifest.sha256(f"gsm_symbolic/{task}"))
    first, last = SHARES[purpose]
    return order[round(first * len(order)) : round(last * len(order))]
