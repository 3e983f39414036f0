"""Counters of an engine: what hit, what crossed the link and for what, which path ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from dualdeadline import cache
from dualdeadline.cache.slots import COUNTERS
from dualdeadline.schedule import COMPONENTS

ROUTES_KEPT = 4096  # decode steps whose routes are remembered for the optimum's hit rate


class Telemetry:
    """Everything `stats()` says beyond the options.

    Args:
        L, E: MoE layers and experts. slots: by component. sizes: link bytes of each component.
        shared: whether all layers share L times as many slots.
    """

    def __init__(self, L: int, E: int, slots: Mapping[str, int], sizes: Mapping[str, int], shared: bool = False):
        self.L, self.E, self.slots, self.sizes = L, E, dict(slots), dict(sizes)
        self.path, self.reason, self.paths, self.forwards = "", "", Counter(), 0
        self.shared, self.tokens = shared, 0  # tokens whose layers the host ran
        self._routes: list[np.ndarray] = []
        self._step: list[np.ndarray] = []

    def ran(self, path: str, reason: str = "") -> None:
        """A forward takes a path, for a reason if it is not the one that was asked for."""
        self.path, self.reason = path, reason
        self.paths[path] += 1
        self.forwards += 1

    def routes(self, number: int, ids: torch.Tensor) -> None:
        """Routes [N,K] on the CPU of one layer of a decode step; kept for one token per forward."""
        if number == 0:
            self._step = []
        if len(ids) == 1 and len(self._routes) < ROUTES_KEPT and len(self._step) == number:
            self._step.append(ids[0].numpy().copy())
            if len(self._step) == self.L:
                self._routes.append(np.stack(self._step))

    def optimum(self) -> float | None:
        """Hit rate of Belady's policy, from empty slots, on the routes of forwards of one token that the host saw."""
        if not self._routes:
            return None
        routes, slots = np.stack(self._routes), min(self.slots.values())
        if not self.shared:
            return float(cache.hit_rate(routes, slots, "belady", order="token", experts=self.E).mean())
        entries = routes + self.E * np.arange(self.L)[:, None]  # one cache, asked L times a token
        entries = entries.reshape(-1, 1, routes.shape[2])
        return float(cache.hit_rate(entries, self.L * slots, "belady", order="token", experts=self.L * self.E).mean())

    def by_layer(self, counters: torch.Tensor, misses: Sequence[int]) -> dict:
        """Hit rates of each layer, None where nothing was asked for; hits and misses as in `counts`."""
        columns = {name: counters[:, COUNTERS.index(name)].tolist() for name in COUNTERS}
        parts = [[f"{event}_{part}" for event in ("hits", "misses")] for part in COMPONENTS]
        rates = []
        for layer, seen in enumerate(misses):
            asked = sum(columns[name][layer] for name in parts[0])
            missed = max(seen, *(columns[miss][layer] for _, miss in parts))
            rates.append(1 - missed / asked if asked else None)
        return {"hit_rate_by_layer": rates}

    def times(self, lanes) -> dict:
        """Milliseconds per token that the host's layers took, where lanes take time: see `engine.timing`."""
        totals = getattr(lanes, "totals", dict)()
        per_token = {
            f"{name}_per_token": value / self.tokens if self.tokens else None for name, value in totals.items()
        }
        return totals | per_token | ({"timed_tokens": self.tokens} if totals else {})

    def counts(self, found: Mapping[str, int], misses: int) -> dict:
        """Counters of `cache.slots.SlotTables.counts` in bytes and in the words of `stats`.

        An access is one distinct (layer, expert) of a forward; it hits if both components are there. `misses` counts
        that where the host looks up. Inside a graph each bank counts its own, and `misses` is that of the bank that
        misses more: exact unless guesses or unequal banks make them miss different experts. With all experts in
        slots a graph looks nothing up and counts nothing.
        """
        out = {f"{name}_{part}": found[f"{name}_{part}"] for name in ("hits", "misses") for part in COMPONENTS}
        accesses = found["hits_gate_up"] + found["misses_gate_up"]
        most = max(found[f"misses_{part}"] for part in COMPONENTS)
        out["misses"] = max(most, misses)
        out["hits"] = accesses - out["misses"]
        out["hit_rate"] = out["hits"] / accesses if accesses else None
        out["bytes_demand"] = sum(found[f"misses_{part}"] * self.sizes[part] for part in COMPONENTS)
        for name, column in (("bytes_ahead", "fetched_ahead"), ("bytes_useful", "useful"), ("bytes_wasted", "wasted")):
            out[name] = sum(found[f"{column}_{part}"] * self.sizes[part] for part in COMPONENTS)
        return out
