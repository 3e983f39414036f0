"""Decode steps whose experts come from an SSD, under recorded routes: by layout, and with reads ahead.

Look-ups, reads and installs are real and timed; attention and expert products are not run (`prefetch` pauses for their
time). So these are the tier's share of a decode step; `engine` runs whole ones.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import StoppingCriteria, StoppingCriteriaList

from dualdeadline.cache import slots as cache
from dualdeadline.engine import offload
from dualdeadline.schedule import COMPONENTS
from dualdeadline.store.fetching import Fetching
from dualdeadline.store.options import SsdOptions
from dualdeadline.store.pages import Memory
from dualdeadline.tiers import ssd, ssd_files
from dualdeadline.tiers.ssd_files import Files, Folded


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

    Slots follow the engine's LRU tables; `warm` tokens only fill the tables. `misses` and `bytes` are per token;
    `disk_gbps` is the rate of direct reads of whole records with nothing else done, measured between the tokens of each
    setting; `disk_share` is bytes / that rate over time (1: as fast as the disk can), `speedup` the time of the serial
    scattered layout over it. Where the page cache is in the way it is emptied, untimed, before every layer's reads.

    Args:
        routes: int [T,L,K]; T above `warm`. E: experts per layer.

    Raises:
        ValueError: no tokens are left to time.
    """
    T, L, K = routes.shape
    if warm >= T:
        raise ValueError(f"{T} tokens with warm {warm}; needed: more than that")
    into, found, draw = ssd_files.slots(files.shape, K, device), [], np.random.default_rng(seed)
    settings = [(name, count) for name in layouts for count in slots]
    for place in tqdm(draw.permutation(len(settings)), desc="decode", leave=False):
        name, count = settings[place]
        reader = ssd.open_layout(name, files, device, depth, L, E)
        fold = Folded(files.raw, L, E)
        missed = _missed(routes, E, count)[warm:]
        ms, how, alone = [], "", []
        for token in missed:
            spent = 0.0
            alone.append(ssd.burst_gbps(files.raw.path, files.raw.largest, depth, draw))
            for number, experts in enumerate(token):
                rows = experts if isinstance(reader, ssd.Records) else [fold.row(number, e) for e in experts]
                how = reader.drop() if experts else how
                begun = time.perf_counter()
                reader.fetch(number, rows, into[: len(rows)])
                spent += 1e3 * (time.perf_counter() - begun)
            ms.append(spent)
        misses = sum(len(experts) for token in missed for experts in token) / len(missed)
        reader.close()
        found.append(_decode_row(name, count, ms, misses, misses * reader.nbytes, float(np.median(alone)), how))
    table = pd.DataFrame(found).sort_values(["slots", "layout"], ignore_index=True)
    base = table[table.layout == ssd.LAYOUTS[0]].set_index("slots").mean_ms
    return table.assign(speedup=[base.get(row.slots, np.nan) / row.mean_ms for row in table.itertuples()])


def _decode_row(
    name: str, count: int, ms: list[float], misses: float, nbytes: float, disk_gbps: float, how: str
) -> dict:
    low, median, high = np.percentile(ms, (20, 50, 80))
    mean = float(np.mean(ms))
    said = dict(layout=name, slots=count, ms=median, low=low, high=high, n=len(ms), mean_ms=mean, misses=misses)
    rates = dict(tokens_per_s=1e3 / mean, bytes=nbytes, disk_gbps=disk_gbps)
    rates["disk_share"] = nbytes / disk_gbps / 1e6 / mean
    return said | rates | {"cache": how}


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
    draw, found = np.random.default_rng(seed), []
    alone = []
    for number in tqdm(sorted(set(prompt.tolist())), desc="prompts", leave=False):
        rows = (prompt == number).nonzero()[:, 0]
        for place in draw.permutation(len(plan)):
            name, ahead, rule = plan[place]
            alone.append(ssd.burst_gbps(files.raw.path, files.raw.largest, depth, draw))
            options = SsdOptions(
                slots, policy=policy, ahead=min(ahead, 3), budget=budget, rule=rule, threshold=threshold, depth=depth
            )
            guesses = scores[name][ahead][rows] if ahead else None
            run = _Run(files, routes[rows], E, guesses, options, layer_ms, ahead)
            found.append(dict(prompt=number, predictor=name, ahead=ahead, rule=rule) | run.measure(warm))
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
        return said | {"cache": ssd.DIRECT if kind == "direct" else kind}

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


def engine(
    model: nn.Module,
    ids: Tensor,
    folder,
    settings: Mapping[str, Mapping],
    slots: int,
    new_tokens: int = 16,
    **options,
) -> pd.DataFrame:
    """Whole decode steps of `offload(tier="ssd")`: a row per setting, beside host memory and the resident run.

    DataFrame(setting, tokens_per_s, ms per token, low, high, n, equal, hit_rate, host_hits, reads, ssd_bytes, path).
    `equal`: tokens and the logits of every step are those of the run with all experts in memory, bit by bit.

    Args:
        model: as `offload` takes it. ids: prompt [N,tokens]. folder: of the records. settings: by name, keyword
            arguments of `SsdOptions`. options: of `offload`.
    """
    wanted, found = _generate(model, ids, new_tokens)[0], []
    plan = {"host memory": None} | dict(settings)
    for name, asked in tqdm(plan.items(), desc="settings", leave=False):
        way = {} if asked is None else {"tier": "ssd", "ssd_path": folder, "ssd": SsdOptions(**asked)}
        offload(model, slots=slots, **options, **way)
        try:
            got, ms = _generate(model, ids.to(model.device), new_tokens)
            said = model.dualdeadline.stats()
        finally:
            model.dualdeadline.remove()
        below = said.get("tiers", {"ssd": {}, "host": {}})
        same = all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(got, wanted, strict=True))
        low, median, high = np.percentile(ms, (20, 50, 80))
        row = dict(setting=name, tokens_per_s=1e3 / np.mean(ms), ms=median, low=low, high=high, n=len(ms))
        row |= dict(equal=same, hit_rate=said["hit_rate"], host_hits=below["host"].get("hits", 0))
        row |= dict(reads=below["ssd"].get("reads", 0), ssd_bytes=below["ssd"].get("bytes", 0))
        found.append(row | {"path": below["ssd"].get("path", "host memory")})
    return pd.DataFrame(found)


class _Clock(StoppingCriteria):
    """Notes when each new token is there."""

    def __init__(self):
        self.times: list[float] = []

    def __call__(self, ids: Tensor, scores, **more) -> Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)


def _generate(model: nn.Module, ids: Tensor, new_tokens: int) -> tuple[tuple[Tensor, Tensor], list[float]]:
    """(Logits and ids of all tokens), and the milliseconds of each new token behind a first one."""
    clock = _Clock()
    said = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=new_tokens + 1,
        max_new_tokens=new_tokens + 1,
        stopping_criteria=StoppingCriteriaList([clock]),
        return_dict_in_generate=True,
        output_logits=True,
    )
    return (torch.stack(said.logits), said.sequences), (1e3 * np.diff(clock.times)).tolist()
