"""Whole decode steps of the engine over an SSD, compared bit by bit with the resident run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import StoppingCriteria, StoppingCriteriaList

from dualdeadline.engine import offload
from dualdeadline.store.options import SsdOptions
from dualdeadline.tiers.plain import Plain

LOOPS = 5  # of the same reads, nothing else done


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

    DataFrame(setting, tokens_per_s, ms per token, low, high, n, equal, hit_rate, host_hits, reads, ssd_bytes, path,
    step_share, net_share). `equal`: tokens and the logits of every step are those of the run with all experts in
    memory, bit by bit. Where all reads are demand, the shares are the time of a plain loop over as many reads in each
    layer, waited for before the next layer's, over the steps' time, and over what of it host memory does not take.

    Args:
        model: as `offload` takes it. ids: prompt [N,tokens]. folder: of the records. settings: by name, keyword
            arguments of `SsdOptions`. options: of `offload`.
    """
    wanted, found, host_ms = _generate(model, ids, new_tokens)[0], [], 0.0
    plan = {"host memory": None} | dict(settings)
    for name, asked in tqdm(plan.items(), desc="settings", leave=False):
        way = {} if asked is None else {"tier": "ssd", "ssd_path": folder, "ssd": SsdOptions(**asked)}
        offload(model, slots=slots, **options, **way)
        try:
            asks = _Asks(model.dualdeadline.store) if asked == {} else None
            got, ms, begun = _generate(model, ids.to(model.device), new_tokens)
            said = model.dualdeadline.stats()
            loop_ms = asks.loop_ms(begun) if asks else np.nan
        finally:
            model.dualdeadline.remove()
        below = said.get("tiers", {"ssd": {}, "host": {}})
        same = all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(got, wanted, strict=True))
        low, median, high = np.percentile(ms, (20, 50, 80))
        row = dict(setting=name, tokens_per_s=1e3 / np.mean(ms), ms=median, low=low, high=high, n=len(ms))
        row |= dict(equal=same, hit_rate=said["hit_rate"], host_hits=below["host"].get("hits", 0))
        row |= dict(reads=below["ssd"].get("reads", 0), ssd_bytes=below["ssd"].get("bytes", 0))
        host_ms = host_ms if found else sum(ms)  # host memory comes first
        row |= dict(step_share=loop_ms / sum(ms), net_share=loop_ms / max(sum(ms) - host_ms, 1e-9))
        found.append(row | {"path": below["ssd"].get("path", "host memory")})
    return pd.DataFrame(found)


class _Asks:
    """Notes how many reads each layer asks a store for, and when."""

    def __init__(self, store):
        self.store, self.begin, self.found = store, store.begin, []
        store.begin = self

    def __call__(self, number: int, wanted: Sequence) -> None:
        self.found.append((time.perf_counter(), len(wanted)))
        self.begin(number, wanted)

    def loop_ms(self, since: float) -> float:
        """Median milliseconds of plain loops over the same reads, of those that were asked for since then."""
        layout, depth = self.store.layout, self.store.options.depth
        loop, counts = Plain(layout.path, layout.largest, depth), [n for at, n in self.found if at > since and n]
        ms = [sum(loop.read(count)[1] for count in counts) for _ in range(LOOPS)]
        loop.close()
        return float(np.median(ms))


class _Clock(StoppingCriteria):
    """Notes when each new token is there."""

    def __init__(self):
        self.times: list[float] = []

    def __call__(self, ids: Tensor, scores, **more) -> Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)


def _generate(model: nn.Module, ids: Tensor, new_tokens: int) -> tuple[tuple[Tensor, Tensor], list[float], float]:
    """(Logits and ids of all tokens), milliseconds of each new token behind a first one, and when that was there."""
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
    return (torch.stack(said.logits), said.sequences), (1e3 * np.diff(clock.times)).tolist(), clock.times[0]
