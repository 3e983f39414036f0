"""Single operations of a captured layer, timed alone: what the simulator adds up."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from dualdeadline.cache import slots as cache
from dualdeadline.decode.big import Variants
from dualdeadline.decode.measure import clocked
from dualdeadline.engine.crossing import Crossing
from dualdeadline.kernels import slots as kernel
from dualdeadline.overlap.rows import measured
from dualdeadline.schedule import COMPONENTS
from dualdeadline.streams import bench

REPEATS = 16  # of an operation in one graph
COUNTS = (0, 1, 2, 4)  # experts of one fetch or decode


def rows(group: Variants, times: int = 7) -> Iterator[dict]:
    """Record rows `single_ms`: look-up, fetch and decode of some experts' components, by wire."""
    device, spec = group.device, group.spec
    K = group.recorded.routes.shape[2]
    tables = cache.SlotTables(spec.L, spec.E, (spec.E, spec.E), device)
    ids, found = torch.arange(K, device=device)[None], cache.Found(1, K, device)
    yield _row("lookup", group, lambda: kernel.lookup(tables, 0, ids, found), times, {})
    bank = {part: [torch.empty_like(group.stores["raw"].sources[part][0][:K], device=device)] for part in COMPONENTS}
    for wire, store in group.stores.items():
        crossing, listed = Crossing(store, bank, (K, K), device), cache.Found(1, K, device)
        listed.source.copy_(torch.arange(K))
        listed.dest.copy_(torch.arange(K))
        for index, part in enumerate(COMPONENTS):
            for count in COUNTS:
                listed.count.fill_(min(count, K))
                said = {"wire": wire, "component": part, "count": count, "bytes": count * store.bytes(part)}
                cross, land = (functools.partial(step, 0, index, listed) for step in (crossing.cross, crossing.land))
                yield _row("fetch", group, cross, times, said)
                if store.coded:
                    yield _row("decode", group, land, times, said)


def _row(name: str, group: Variants, work: Callable[[], object], times: int, said: dict) -> dict:
    repeats = REPEATS if group.device.type == "cuda" else 1

    def often() -> None:
        for _ in range(repeats):
            work()

    run = bench.graph(often) if group.device.type == "cuda" else often
    found = [clocked(group.device, run) / repeats for _ in range(times + 1)][1:]
    return measured(name, "single_ms", "ms", found, said)
