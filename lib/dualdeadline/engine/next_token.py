"""Guesses a whole token ahead: which experts a layer routes at the next token, from what it routed at this one.

Their bytes have all other layers' time to arrive. Given to `offload(predictor=...)` as they are; host-driven only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dualdeadline.predictors.base import membership, previous_rows

PRIOR = 8.0  # tokens of plain popularity behind each expert's counts, as in `predictors.Transition`


class NextToken:
    """Probabilities of each expert at the next token: the mean, over this token's experts, of how often it followed.

    Args:
        table: [L,E,E], probability that target j is routed at the next token where i was at this one.
    """

    across_tokens = True
    name = "next_token"

    def __init__(self, table: Tensor):
        self.table = table

    @classmethod
    def fit(cls, trace) -> NextToken:
        """Count over the prompts of a trace.

        Raises:
            ValueError: no prompt with two tokens.
        """
        before = previous_rows(trace.prompt)
        after = torch.arange(len(before))[before >= 0]
        if not len(after):
            raise ValueError("no prompt of the trace has two tokens; needed: at least one")
        E, tables = trace.num_experts, []
        for routes in trace.routes.long().unbind(1):
            now, then = membership(routes[before[after]], E), membership(routes[after], E)
            tables.append((now.T @ then + PRIOR * then.mean(0)) / (now.sum(0)[:, None] + PRIOR))
        return cls(torch.stack(tables))

    def __call__(self, number: int, hidden: Tensor, ids: Tensor) -> Tensor:
        """[N,E] for layer `number` at the next token."""
        seen = membership(ids.long().cpu(), self.table.shape[1])
        return seen @ self.table[number] / seen.sum(-1, keepdim=True).clamp(min=1)


class SameAgain:
    """The experts of this token, for the next one: what a cache that keeps the latest holds anyway.

    Args:
        E: experts per layer.
    """

    across_tokens = True
    name = "same_again"

    def __init__(self, E: int):
        self.E = E

    def __call__(self, number: int, hidden: Tensor, ids: Tensor) -> Tensor:
        """[N,E]: 1 for the experts of this token."""
        return membership(ids.long().cpu(), self.E)
