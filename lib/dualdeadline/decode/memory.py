"""Device memory of a model that was given a limit, from `offload` through `generate`."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence

import torch

from dualdeadline import engine
from dualdeadline.decode import big
from dualdeadline.engine.surgery import find
from dualdeadline.sizes import parse_bytes

PROMPT = 24  # tokens


def rows(
    limits: Sequence[str], context: int, new_tokens: int, seed: int = 0, device: str = "cuda", **built
) -> Iterator[tuple[str, list[dict]]]:
    """Record rows `reserved_bytes` of one part: the most that was reserved under each limit, and the slots it gave.

    Tokens must be those of the model with all experts in slots, whose memory is measured too.

    Args:
        limits: amounts as of `sizes.parse_bytes`. context: tokens the limit must do for. built: of `big.build`.

    Raises:
        AssertionError: other tokens.
    """
    found, wanted = [], None
    for limit in (None, *limits):
        tokens, row = _run(limit, context, new_tokens, seed, device, built)
        wanted = tokens if wanted is None else wanted
        assert torch.equal(tokens, wanted), f"within {limit} other tokens were generated"
        found.append(row)
    yield "vram", found


def _run(limit: str | None, context: int, new_tokens: int, seed: int, device: str, built: dict):
    model = big.build(device, seed=seed, **built).cpu()  # drawn on a GPU, which is quicker by far
    spec, _ = find(model)
    free(device)
    asked = {"slots": spec.E} if limit is None else {"vram": limit}
    engine.offload(model, context=context, device=device, **asked)
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, model.config.vocab_size, (1, PROMPT), generator=draw).to(device)
    tokens = model.generate(ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False).cpu()
    reserved, stats = torch.cuda.max_memory_reserved() if device == "cuda" else 0, model.dualdeadline.stats()
    config = {
        "limit": limit or "none",
        "limit_bytes": parse_bytes(limit) if limit else 0,
        "slots": stats["slots"]["gate_up"],
        "path": stats["path"],
        "context": context,
        "new_tokens": new_tokens,
    }
    del model
    free(device)
    said = dict(variant=f"within {limit}" if limit else "all experts in slots", metric="reserved_bytes")
    return tokens, said | dict(unit="bytes", kind="measured", n=1, median=reserved, config=config)


def free(device: str = "cuda") -> None:
    """Nothing of another model is reserved, and the peak begins anew."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
