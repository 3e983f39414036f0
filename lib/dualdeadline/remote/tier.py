"""The engine's side of a worker: a store whose weights are elsewhere, and layers that send tokens to them.

The first `slots` experts of every layer stay here, in slots of their own number; tokens of all others cross the link
and their weighted outputs come back. Both are added in ascending expert id, so the bits are those of the resident run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dualdeadline.cache.slots import COUNTERS, SlotTables
from dualdeadline.engine.arithmetic import Torch
from dualdeadline.engine.surgery import PARAMETERS, LayerExperts
from dualdeadline.remote.client import Client, RemoteError
from dualdeadline.remote.held import arithmetic, digest
from dualdeadline.schedule import COMPONENTS

FIXED = {"schedule": ("auto",), "predictor": ("auto", None), "wire": ("auto", "raw"), "kernels": ("auto", "torch")}


def choices(device: torch.device, backend: str, **asked) -> tuple:
    """Schedule, predictor, wire, kernels and backend of `offload` as the remote tier needs them.

    Raises:
        ValueError: one was asked for that it cannot be.
    """
    for name, known in FIXED.items():
        if not any(asked[name] is one or asked[name] == one for one in known):
            words = " or ".join(map(repr, known))
            raise ValueError(
                f"{name} is {asked[name]!r} with tier 'remote'; needed: {words}, the worker computes "
                "whole experts in eager torch and no weights cross the link"
            )
    if backend == "graph":
        raise ValueError("backend is 'graph' with tier 'remote'; needed: 'auto', a graph cannot ask a worker")
    host = "cpu" if device.type == "cpu" else "streams"
    return "auto", None, "raw", "torch", host if backend == "auto" else backend


class RemoteTier:
    """What `offload` needs to serve experts from a worker.

    Args:
        address: "host:port". token_file: shared with the worker.
    """

    def __init__(self, address: str, token_file):
        self.client = Client(address, token_file)

    def store(self, layers: Sequence[LayerExperts], options) -> RemoteStore:
        return RemoteStore(layers, self.client, options.device)

    def hosted(self, handle, lanes) -> RemoteLayers:
        """Layers for a handle. Raises ValueError if its slots are shared by layers."""
        if handle.options.pool == "shared":
            raise ValueError("pool is 'shared' with tier 'remote'; needed: 'layer', slots hold what they always hold")
        return RemoteLayers(handle.layers, handle.store, handle.banks, handle.tables, lanes)

    def ready(self, handle) -> None:
        """The model is served: its own weights can go."""
        handle.store.release()


class RemoteStore:
    """Stands for experts that a worker holds; until `release` also keeps the model's own.

    Args:
        layers: of `surgery.find`; their modules are emptied. client: of the worker. device: where slots are.

    Raises:
        RemoteError: the worker's experts, or what it computes with, are not the model's; the model is as it was then.
    """

    coded = pinned = False
    why_not = "no weights cross the link"

    def __init__(self, layers: Sequence[LayerExperts], client: Client, device: torch.device):
        self.layers, self.client = list(layers), client
        self.devices = [getattr(layer.module, PARAMETERS["down"]).device for layer in self.layers]
        self.taken: list[dict[str, Tensor]] | None = [layer.take() for layer in self.layers]
        self.returned = 0
        try:
            self._compare(device)
        except BaseException:
            self.give_back()
            raise

    def _compare(self, device: torch.device) -> None:
        info, own = self.client.info, arithmetic(device)
        kinds = {value.dtype for taken in self.taken for value in taken.values()} - {self.layers[0].dtype}
        if kinds:
            raise ValueError(f"experts are held as {kinds}; needed: {self.layers[0].dtype}, not wire records")
        self.digests = [
            digest(layer, [taken[part] for part in COMPONENTS])
            for layer, taken in zip(self.layers, self.taken, strict=True)
        ]
        if info.get("arithmetic") != own:
            raise RemoteError(
                f"worker {self.client.address} computes with {info.get('arithmetic')}; needed: {own}, "
                "others give other bits"
            )
        theirs = info.get("digests") or []
        for layer, mine, other in zip(self.layers, self.digests, [*theirs, *[None] * len(self.layers)]):
            if mine != other or len(theirs) != len(self.layers):
                raise RemoteError(
                    f"worker {self.client.address} holds other experts than {layer.name} "
                    f"({len(theirs)} layers); needed: {len(self.layers)} layers of the same checkpoint"
                )

    def release(self) -> None:
        """Let go of the model's own weights."""
        self.taken = None

    def bytes(self, component: str, layer: int = 0) -> int:
        """Bytes of its weights that cross the link for an expert: none."""
        return 0

    nbytes = 0

    def weights(self, component: str, layer: int, expert: int) -> Tensor:
        """One expert's weights on the CPU. Raises RemoteError if they are at the worker, which is gone."""
        if self.taken is not None:
            return self.taken[layer][component][expert].cpu()
        found = self.layers[layer]
        return self.client.weights(component, layer, expert, found.shapes[component], found.dtype)

    def whole(self, component: str, layer: int) -> Tensor:
        """One component of all experts of a layer, `[E, rows, columns]` on the CPU. Raises as `weights`."""
        return torch.stack([self.weights(component, layer, expert) for expert in range(self.layers[layer].E)])

    def give_back(self) -> None:
        """Return every layer's weights to its module, from the worker if they are no longer here.

        Raises:
            RemoteError: it is gone, or its weights changed. Layers that came back stay; call it again for the rest.
        """
        for layer, device in list(zip(self.layers, self.devices))[self.returned :]:
            for part, value in self._both(layer).items():
                layer.give(part, value.to(device))
            self.returned += 1
        self.client.close()

    def _both(self, layer: LayerExperts) -> dict[str, Tensor]:
        if self.taken is not None:
            return self.taken[layer.number]
        found = {part: self.whole(part, layer.number) for part in COMPONENTS}
        if digest(layer, [found[part] for part in COMPONENTS]) != self.digests[layer.number]:
            raise RemoteError(f"{layer.name} came back changed; needed: a worker with the model's own checkpoint")
        return found

    def unpin(self) -> None:
        """Nothing is pinned."""

    def stats(self) -> dict:
        """What crossed the link."""
        parts = {name: round(value, 3) for name, value in self.client.parts_ms.items()}
        return {"remote": {"address": self.client.address, **self.client.counts, "parts_ms": parts}}


class RemoteLayers:
    """Runs layers whose experts are in slots here or at the worker; as `engine.hosted.Hosted`.

    Args:
        layers, store, banks, tables, lanes: of the engine. Slots are filled here, and stay as they are.
    """

    def __init__(
        self,
        layers: Sequence[LayerExperts],
        store: RemoteStore,
        banks: Mapping[str, Sequence[Tensor]],
        tables: SlotTables,
        lanes,
    ):
        self.layers, self.store, self.banks, self.tables, self.lanes = layers, store, banks, tables, lanes
        self.misses, self.guide = 0, None
        self.kept = min(tables.slots)
        for part in COMPONENTS:
            for layer in layers:
                for expert in range(self.kept):
                    banks[part][layer.number][expert].copy_(store.weights(part, layer.number, expert))
        own = torch.arange(self.kept, dtype=torch.int32)
        tables.slot_of[:, :, : self.kept], tables.expert_of[:, :, : self.kept] = own, own

    def layer(self, number: int, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Output [N,H] of one layer's routed experts for tokens [N,H] with routes ids, weights [N,K]."""
        routed = [e for e in dict.fromkeys(ids.flatten().tolist()) if 0 <= e < self.layers[number].E]
        near, far = ([e for e in routed if (e < self.kept) == here] for here in (True, False))
        self._count(number, len(near), len(far))
        banks = {part: self.banks[part][number] for part in COMPONENTS}
        job, found = Torch(self.layers[number], banks, hidden, ids, weights), {}
        self.lanes.enter()
        marks = [self._ask(number, hidden, ids, weights, far, found)] if far else []
        if near:
            job.wave(dict.fromkeys(COMPONENTS, {expert: expert for expert in near}))
            for stage in (job.gate_up, job.down):
                self.lanes.compute(lambda stage=stage: stage(near), ())
        if far:
            self.lanes.compute(lambda: self._add(job, found), marks)
        return job.finish()

    def _ask(self, number: int, hidden: Tensor, ids: Tensor, weights: Tensor, far: list[int], found: dict):
        """Send the tokens that need an expert elsewhere; their order is kept, and with it each expert's product."""
        rows = torch.isin(ids, torch.tensor(far, device=ids.device, dtype=ids.dtype)).any(1).nonzero()[:, 0]
        sent, threads = [value[rows].cpu() for value in (hidden, ids, weights)], torch.get_num_threads()
        return self.lanes.copy(lambda: found.update(self.store.client.experts(number, *sent, far, threads)), ())

    def _add(self, job: Torch, found: Mapping[int, Tensor]) -> None:
        for expert, value in found.items():
            job.places[expert] = torch.where(job.by_rank == expert)
            job.weighted[expert] = value.to(job.x.device)

    def _count(self, number: int, hits: int, misses: int) -> None:
        self.misses += misses
        for part in COMPONENTS:
            for event, count in (("hits", hits), ("misses", misses)):
                self.tables.counters[number, COUNTERS.index(f"{event}_{part}")] += count

    def forget(self) -> None:
        """After an error: give up a request that is under way; slots hold what they always hold."""
        with self.store.client.giving_up():
            self.lanes.settle()
