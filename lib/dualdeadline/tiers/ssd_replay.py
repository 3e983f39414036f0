"""Decode steps whose experts come from an SSD, under recorded routes: by layout, and with reads ahead.

Look-ups, reads and installs are real and timed; attention and expert products are not run (`prefetch` pauses for their
time). So these are the tier's share of a step, what it takes beyond a resident one; ssd_engine.py runs whole ones.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from dualdeadline.cache import slots as cache
from dualdeadline.schedule import COMPONENTS
from dualdeadline.store.fetching import Fetching
from dualdeadline.store.options import SsdOptions
from dualdeadline.store.pages import Memory, as_bytes
from dualdeadline.tiers import ssd, ssd_files
from dualdeadline.tiers.plain import DIRECT, Plain
from dualdeadline.tiers.ssd_files import Files, Folded
from dualdeadline.wire.format import ALIGN, align


def decode(
    files: Files,
    routes: Tensor,
    E: int,
    slots: Sequence[int],
    device="cpu",
    warm: int = 16,
    depth: int = 8,
    layouts: Sequence[str] = ssd.LAYOUTS,
    seed: int = 0,
) -> pd.DataFrame:
    """Time that misses take per token: DataFrame(layout, slots, ms, low, high, n, tokens_per_s, ...).

    Slots follow the engine's LRU tables; `warm` tokens only fill the tables. `misses` and `bytes` are per token.
    Layouts and slot counts take turns token by token. Where the page cache is in the way it is emptied, untimed, before
    every layer's reads.

    Two references, nothing done with their bytes, measured between the reads of the same token: `disk_gbps`, the rate
    of direct reads of whole records with `depth` always in flight, and (for records) `loop_ms`, a plain loop that reads
    as many per layer as are missing and waits for them before the next layer's. `disk_share` is bytes / that rate over
    the time (1: as fast as a disk that never waits for a router), the median over tokens; `loop_share` the loop's time
    over a layer's (1: nothing is lost to what we do with a record), the median over layers of all tokens;
    `times_serial` and `times_parallel` the time of the scattered layouts over it.

    Args:
        routes: int [T,L,K]; T above `warm`. E: experts per layer.

    Raises:
        ValueError: no tokens are left to time.
    """
    T, L, K = routes.shape
    if warm >= T:
        raise ValueError(f"{T} tokens with warm {warm}; needed: more than that")
    draw, missed = np.random.default_rng(seed), {count: _missed(routes, E, count)[warm:] for count in slots}
    readers = {name: ssd.open_layout(name, files, device, depth, L, E) for name in layouts}
    into, fold = ssd_files.slots(files.shape, max(K, depth), device), Folded(files.raw, L, E)
    loops = {
        name: _loop(files, one, depth, into, seed) for name, one in readers.items() if isinstance(one, ssd.Records)
    }
    whole = Plain(files.raw.path, files.raw.largest, depth, seed)
    settings, found = [(name, count) for name in layouts for count in slots], []
    for turn in tqdm(range(T - warm), desc="decode", leave=False):
        for place in draw.permutation(len(settings)):
            name, count = settings[place]
            token = missed[count][turn]
            said = _token(readers[name], loops.get(name), token, fold, into, draw)
            said |= dict(layout=name, slots=count, misses=sum(map(len, token)), disk_gbps=whole.gbps(depth))
            found.append(said | {"bytes": said["misses"] * readers[name].nbytes})
    for open_one in (*readers.values(), *loops.values(), whole):
        open_one.close()
    return _decode_rows(pd.DataFrame(found))


def _loop(files: Files, reader, depth: int, into: list, seed: int) -> Plain:
    """Plain reads of as many bytes as a reader's, into the same memory if they go straight into slots."""
    size, memory = align(reader.nbytes, ALIGN), None
    if into[0]["down"].device.type == "cpu" and size == files.shape.component_bytes["expert"]:
        memory = [[as_bytes(slot[part]) for part in COMPONENTS] for slot in into]
    return Plain(files.raw.path, size, depth, seed, memory)


def _token(
    reader, loop: Plain | None, token: list[list[int]], fold: Folded, into: list, draw: np.random.Generator
) -> dict:
    """One token's misses, layer by layer, and between them the loop's reads (if there is one): ms, loop_ms, shares of
    its layers, cache."""
    ms, loop_ms, how = [], [], ""
    for number, experts in enumerate(token):
        if not experts:
            continue
        rows = experts if isinstance(reader, ssd.Records) else [fold.row(number, expert) for expert in experts]
        first = draw.random() < 0.5
        loop_ms += [loop.read(len(experts))[1]] if loop and first else []
        how, begun = reader.drop(), time.perf_counter()
        reader.fetch(number, rows, into[: len(rows)])
        ms.append(1e3 * (time.perf_counter() - begun))
        loop_ms += [loop.read(len(experts))[1]] if loop and not first else []
    shares = [alone / mine for alone, mine in zip(loop_ms, ms)]
    return dict(ms=sum(ms), loop_ms=sum(loop_ms) if loop else np.nan, shares=shares, cache=how)


def _decode_rows(found: pd.DataFrame) -> pd.DataFrame:
    """A row per layout and slot count, of its tokens."""
    found = found.assign(disk_share=found.bytes / found.disk_gbps / 1e6 / found.ms)
    out = []  # a token without misses has no shares: medians leave it out
    for (count, name), part in found.groupby(["slots", "layout"]):
        low, median, high = np.percentile(part.ms, (20, 50, 80))
        row = dict(layout=name, slots=count, ms=median, low=low, high=high, n=len(part), mean_ms=part.ms.mean())
        row |= part[["misses", "bytes", "loop_ms"]].mean().to_dict() | {"tokens_per_s": 1e3 / part.ms.mean()}
        row |= part[["disk_gbps", "disk_share"]].median().to_dict()
        shares = [share for token in part.shares for share in token]
        out.append(row | {"loop_share": float(np.median(shares)) if shares else np.nan, "cache": part.cache.iloc[-1]})
    table = pd.DataFrame(out)
    for name in ("serial", "parallel"):
        base = table[table.layout == f"scattered, {name}"].set_index("slots").mean_ms
        table[f"times_{name}"] = table.slots.map(base) / table.mean_ms
    return table


def _missed(routes: Tensor, E: int, slots: int) -> list[list[list[int]]]:
    """By token and layer, the experts that LRU slots miss, from empty slots on."""
    T, L, _ = routes.shape
    tables, found = cache.SlotTables(L, E, (slots, slots)), []
    for token in range(T):
        found.append([])
        for number in range(L):
            looked = cache.lookup(tables, number, routes[token, number][None].int())
            found[-1].append(looked.source[0, : int(looked.count[0])].tolist())
    return found


def prefetch(
    files: Files,
    routes: Tensor,
    prompt: Tensor,
    E: int,
    scores: Mapping[str, Mapping[int, Tensor]],
    slots: int,
    layer_ms: float,
    depths: Sequence[int] = (1, 2, 3),
    rules: Sequence[bool] = (False, True),
    budget: int = 4,
    threshold: float = 0.5,
    policy: str = "lru",
    depth: int = 8,
    warm: int = 8,
    seed: int = 0,
) -> pd.DataFrame:
    """Reads ahead against demand alone, over one tier of host slots: a row per prompt and setting.

    DataFrame(prompt, predictor, ahead, rule, ms per token, hit_rate, read_ms, lead_ms, in_time, bytes per token,
    useful, wasted, late, bound_ms). `lead_ms` is ahead x the layer time that was measured, `in_time` whether it reaches
    `read_ms`, the time of one read. `bound_ms` is what no read ahead can beat with the misses of demand loading: the
    pauses or the disk's time for their bytes at `disk_gbps`, whichever is longer; that rate is measured between the
    runs, by direct reads of whole records with nothing else done.

    Args:
        routes, prompt: int [T,L,K] and [T]; every prompt starts with empty slots, its first `warm` tokens not timed.
        scores: by predictor and layers ahead, probabilities [T,L,E] at the token and layer they speak of. L layers
            ahead is the same layer at the next token; the rule then counts on three layers' time.
        rules: whether guesses that cannot arrive in time are made all the same (False) or held back (True).
        slots: host slots per layer. layer_ms: pause for a layer's work on tokens that are there.
    """
    pairs = [(name, d) for name, found in scores.items() for d in depths if d in found]
    plan = [("", 0, True)] + [(name, d, rule) for name, d in pairs for rule in rules]
    draw, found, alone = np.random.default_rng(seed), [], []
    whole = Plain(files.raw.path, files.raw.largest, depth, seed)
    for number in tqdm(sorted(set(prompt.tolist())), desc="prompts", leave=False):
        rows = (prompt == number).nonzero()[:, 0]
        for place in draw.permutation(len(plan)):
            name, ahead, rule = plan[place]
            alone.append(whole.gbps())
            options = SsdOptions(
                slots, policy=policy, ahead=min(ahead, 3), budget=budget, rule=rule, threshold=threshold, depth=depth
            )
            guesses = scores[name][ahead][rows] if ahead else None
            run = _Run(files, routes[rows], E, guesses, options, layer_ms, ahead)
            found.append(dict(prompt=number, predictor=name, ahead=ahead, rule=rule) | run.measure(warm))
    whole.close()
    table = pd.DataFrame(found)
    demand = table[table.ahead == 0].set_index("prompt").bytes
    rate, pauses = float(np.median(alone)), layer_ms * routes.shape[1]
    bound = np.maximum([demand[row.prompt] / rate / 1e6 for row in table.itertuples()], pauses)
    return table.assign(bound_ms=bound, disk_gbps=rate, layer_pause_ms=layer_ms, slots=slots)


class _Run:
    """One prompt's tokens through host slots."""

    def __init__(
        self,
        files: Files,
        routes: Tensor,
        E: int,
        scores: Tensor | None,
        options: SsdOptions,
        layer_ms: float,
        ahead: int,
    ):
        self.routes, self.scores, self.options, self.pause = routes, scores, options, layer_ms / 1e3
        self.L, self.lead = routes.shape[1], ahead
        self.fetching = Fetching(Folded(files.raw, self.L, E), options, Memory())

    def measure(self, warm: int) -> dict:
        """Mean milliseconds per token behind the warm ones, and what the tier counted in them."""
        self._tokens(range(warm))
        before, begun = self._counts(), time.perf_counter()
        self._tokens(range(warm, len(self.routes)))
        ms = 1e3 * (time.perf_counter() - begun)
        self.fetching.settle()
        count = {name: value - before[name] for name, value in self._counts().items()}
        tokens, store = len(self.routes) - warm, self.fetching
        lead = self.lead * (store.layer_ms or 0.0)
        said = {"ms": ms / tokens, "n": tokens, "hit_rate": count["hits"] / max(1, count["hits"] + count["misses"])}
        said |= {"read_ms": store.reader.ms, "lead_ms": lead, "in_time": lead >= (store.reader.ms or 0.0)}
        said |= {"bytes": count["bytes"] / tokens} | {
            name: count[name] / tokens for name in ("useful", "wasted", "late")
        }
        kind = store.reader.path_kind
        store.reader.close()
        return said | {"cache": DIRECT if kind == "direct" else kind}

    def _counts(self) -> dict[str, int]:
        said = self.fetching.stats()["tiers"]
        return {name: said["host"][name] for name in ("hits", "misses", "useful", "wasted", "late")} | {
            "bytes": said["ssd"]["bytes"]
        }

    def _tokens(self, tokens: Sequence[int]) -> None:
        empty = torch.empty(0, dtype=torch.uint8)
        for token in tokens:
            for number in range(self.L):
                self.fetching.enter(number)
                experts = self.routes[token, number].tolist()
                self.fetching.begin(number, [(expert, dict.fromkeys(COMPONENTS, empty)) for expert in experts])
                self._ahead(token, number)
                for expert in experts:
                    with self.fetching.fetched(number, expert, dict.fromkeys(COMPONENTS, empty)):
                        pass  # it lies in its host slot: that is where it was wanted
                time.sleep(self.pause)

    def _ahead(self, token: int, number: int) -> None:
        later, target = divmod(number + self.lead, self.L)
        if self.lead and later == self.lead // self.L and token + later < len(self.routes):
            chances, ids = self.scores[token + later, target].topk(8)
            self.fetching.ahead(target, ids[None], chances[None], self.options.threshold, set())
