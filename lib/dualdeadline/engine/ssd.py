"""Layers whose missing experts come from an SSD: reads begin with the look-up, installs follow in the lanes' order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dualdeadline import kernels as triton_kernels
from dualdeadline import schedule, streams
from dualdeadline.cache import slots as cache
from dualdeadline.engine import guide as guides
from dualdeadline.engine.hosted import Hosted, Wave
from dualdeadline.schedule import COMPONENTS, Copy
from dualdeadline.store.options import SsdOptions
from dualdeadline.store.ssd import SsdStore

NO_GRAPH = "tier ssd: a read from a file is the host's work, which a graph cannot hold"


def choices(device: torch.device, backend: str) -> tuple[str, str]:
    """Backend of the SSD tier for what was asked for, and why it is another one ("" if it is not)."""
    if device.type == "cuda" and backend in ("auto", "graph"):
        return "streams", NO_GRAPH
    if device.type == "cpu" and backend == "graph" and triton_kernels.INTERPRETED:
        return "cpu", NO_GRAPH
    return backend, ""


class SsdTier:
    """Makes the store and the layers of `offload(tier="ssd")`.

    Args:
        folder: of the records; converted from the model if they are not there.
    """

    def __init__(self, folder: str | Path, options: SsdOptions | None = None):
        self.folder, self.options = Path(folder), options or SsdOptions()

    def store(self, layers, options) -> SsdStore:
        return SsdStore(layers, self.folder, options.coded, options.device, self.options)

    def ready(self, handle) -> None:
        """The model is served; nothing is left to do."""

    def hosted(self, handle, lanes) -> SsdHosted:
        """Layers for a handle, with guesses for the host slots where they were asked for."""
        if handle.options.device.type == "cuda" and handle.guide is not None:
            handle.guide = None
            handle.guessing = "tier ssd: a guess for GPU slots would keep the host waiting for the disk; see ssd.ahead"
        chosen = handle.options.schedule, handle.options.kernels
        found = SsdHosted(handle.layers, handle.store, handle.banks, handle.pool, lanes, *chosen, handle.guide)
        found.below, reason = self._below(handle)
        handle.why += (f"host slots: {reason}",)
        return found

    def _below(self, handle) -> tuple[guides.Guide | None, str]:
        """What guesses for the host slots, or None, and why."""
        asked = self.options
        if not asked.ahead:
            return None, "no guesses were asked for"
        if asked.ahead >= handle.spec.L:
            raise ValueError(f"ahead is {asked.ahead}, the model has {handle.spec.L} MoE layers; needed: fewer")
        guess, reason = guides.resolve(asked.predictor, handle.spec, asked.ahead, "cpu")
        if guess is None:
            return None, reason
        prefetch = guides.Prefetch(asked.predictor, asked.ahead, (asked.budget, asked.budget), asked.threshold)
        return guides.Guide(guess, handle.spec, prefetch, cache.control(0.0)), reason


class SsdWave(Wave):
    """A wave whose copies wait for their reads."""

    def copy(self, op: Copy) -> None:
        self.hosted.install(self.number, op.expert, {part: self.dest[part][op.expert] for part in op.components})


class SsdHosted(Hosted):
    """`Hosted` over an `SsdStore`; `below` guesses for its host slots (or None)."""

    below: guides.Guide | None = None

    def bring(self, number: int, component: str, expert: int, slot: int) -> None:
        """Read one component that was guessed into its slot."""
        self.install(number, expert, {component: slot})

    def install(self, number: int, expert: int, slots: Mapping[str, int]) -> None:
        """Wait for some components of an expert, and copy what was not read straight into its slot."""
        into = {part: self.banks[part][number][slot] for part, slot in slots.items()}
        with self.store.fetched(number, expert, into) as views:
            if views:
                self.store.put(views, into)

    def layer(self, number: int, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        self.store.enter(number)
        return super().layer(number, hidden, ids, weights)

    def _wave(self, number: int, *rest) -> None:
        self._remember()
        super()._wave(number, *rest)

    def _issue(self, number: int, plan: schedule.Schedule, slots, job, lanes) -> None:
        """Reads first, in the order of the copies; each copy then waits for its own."""
        self._evicted(number)
        wanted = []
        for op in plan.copies:
            into = {part: self.banks[part][number][slots[part][op.expert]] for part in op.components}
            wanted.append((op.expert, into))
        self.store.begin(number, wanted)
        streams.issue(plan, SsdWave(self, number, slots, job), lanes)

    def _remember(self) -> None:
        """What lies in the slots before they are given away."""
        self._before = self.pool.tables.expert_of.numpy().copy()

    def _evicted(self, number: int) -> None:
        """What has lost its slot since: wait until nothing writes there any more; exclusive host slots take it over."""
        lost = (self._before >= 0) & (self._before != self.pool.tables.expert_of.numpy())
        for row, index, slot in np.argwhere(lost).tolist():
            layer, expert = divmod(int(self._before[row, index, slot]), self.pool.E)
            layer, part = (layer if self.pool.shared else row), COMPONENTS[index]
            mark = self.arriving.pop((layer, expert, part), None)
            if mark is not None:
                self.lanes.compute(lambda: None, [mark])
            if self.store.options.exclusive:
                bank = self.banks[part][layer][slot]
                self.lanes.copy(lambda n=layer, p=part, e=expert, b=bank: self.store.give_up(n, p, e, b), ())
        self._remember()

    def _fill_next(self, target: int) -> None:
        if not self.store.pinned:  # on a GPU the host would wait for the disk before it computes this layer
            super()._fill_next(target)

    def _speculate(self, number: int, hidden: Tensor, ids: Tensor) -> None:
        self._remember()
        super()._speculate(number, hidden, ids)
        guess = self.below.after(number, hidden, ids) if self.below else None
        if guess is not None:
            target, names, chances = guess
            present = self.pool.present(target, 0) & self.pool.present(target, 1)
            self.store.ahead(target, names, chances, self.below.threshold, present)

    def _fetch_ahead(self, target: int, part: str, pairs: Sequence[tuple[int, int]]) -> None:
        self._evicted(target)
        super()._fetch_ahead(target, part, pairs)

    def forget(self) -> None:
        super().forget()
        self.store.settle()
