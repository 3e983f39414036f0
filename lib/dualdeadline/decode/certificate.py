"""Exactness on a real model: generated tokens and every logit of an offloaded run against the resident run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pandas as pd
import torch
from tqdm.auto import tqdm

from dualdeadline import engine


def generated(model, ids: Sequence[Sequence[int]], new_tokens: int, batch: int, **options) -> tuple[torch.Tensor, ...]:
    """Tokens `[P, new]` and logits `[P, new, V]` of prompts, `batch` at a time, left-padded."""
    tokens, logits = [], []
    for begin in range(0, len(ids), batch):
        part = ids[begin : begin + batch]
        width = max(map(len, part))
        rows = torch.tensor([[0] * (width - len(row)) + list(row) for row in part], device=model.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in part], device=model.device)
        with torch.inference_mode():
            out = model.generate(
                rows,
                attention_mask=mask,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
                **options,
            )
        tokens.append(out.sequences[:, width:].cpu())
        logits.append(torch.stack(out.logits, 1).cpu())
    return torch.cat(tokens), torch.cat(logits)


def certify(
    model,
    ids: Sequence[Sequence[int]],
    settings: Iterable[Mapping],
    new_tokens: int = 16,
    batches: Sequence[int] = (1, 3),
    **options,
) -> pd.DataFrame:
    """Run every setting of `offload` on the same prompts and compare all bits with the resident run.

    Args:
        model: resident, with the experts implementation whose bits are wanted.
        settings: arguments of `engine.offload`. options: of `generate`.

    Returns:
        DataFrame of settings with batch, logits and tokens compared, those that differ, hit rate and misses per token.
    """
    wanted = {batch: generated(model, ids, new_tokens, batch, **options) for batch in batches}
    found = []
    for setting in tqdm(list(settings), desc="settings", leave=False):
        engine.offload(model, **setting)
        try:
            for batch, (tokens, logits) in wanted.items():
                got = generated(model, ids, new_tokens, batch, **options)
                stats = model.dualdeadline.stats()
                found.append(
                    {name: str(value) for name, value in setting.items()}
                    | {
                        "batch": batch,
                        "logits": logits.numel(),
                        "logits_differ": int((got[1] != logits).sum()),
                        "tokens": tokens.numel(),
                        "tokens_differ": int((got[0] != tokens).sum()),
                        "hit_rate": stats["hit_rate"],
                        "path": stats["path"],
                    }
                )
        finally:
            model.dualdeadline.remove()
    return pd.DataFrame(found)
