"""Collect traces into a store: resumable, one atomic file per prompt, one index update per batch."""

from __future__ import annotations

import errno
import json
import warnings
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
import torch
from safetensors.torch import save
from tqdm.auto import tqdm

from dualdeadline import manifest, models
from dualdeadline.corpus import Prompt
from dualdeadline.traces import parallel, store
from dualdeadline.traces.decode import Decoded, decode, fitting_threads
from dualdeadline.traces.sampling import Sampling


@dataclass
class Collection:
    """Everything that stays the same while a store is filled; `rows` is its index, prompt id -> row."""

    spec: models.MoESpec
    path: Path
    meta: dict
    stops: set[int]
    pad: int
    rows: dict[str, dict]
    prompts: Sequence[Prompt]


def collect(
    model, tokenizer, prompts: Sequence[Prompt], out: Path, new_tokens: int = 96, batch_size: int = 16,
    sampling: Sampling | None = None, resume: bool = True, min_new_tokens: int = 0,
) -> store.TraceStore:
    """Decode every prompt and store its trace; what is already there and sound is kept.

    A prompt ends before the model's end-of-text token or after `new_tokens`, so traces differ in length; the
    end-of-text token is barred for the first `min_new_tokens`, as in transformers' `generate`.

    Args:
        model: transformers causal language model with MoE layers, on any device.
        out: folder of the store; made if missing.
        batch_size: does not influence what is stored beyond the rounding of the model's own products.
        sampling: None decodes greedily.
        resume: False collects every prompt again and replaces what the folder holds.
        min_new_tokens: 0 to `new_tokens`; every trace has at least so many steps.

    Raises:
        ValueError: no prompts, `min_new_tokens` out of range, a prompt longer than the context, or a folder made
            with another model or settings.
        OSError: the disk is full; what was collected before is kept and a later call goes on.
    """
    if not 0 <= min_new_tokens <= new_tokens:
        raise ValueError(f"min_new_tokens is {min_new_tokens}; needed: 0 to new_tokens ({new_tokens})")
    encoded = _encode_all(model, tokenizer, prompts, new_tokens)
    lengths = {"new_tokens": new_tokens, "min_new_tokens": min_new_tokens}
    run = _prepare(model, tokenizer, Path(out), lengths, sampling, resume, prompts)
    pending = [prompt for prompt in prompts if not _sound(run, prompt, encoded[prompt.id])]
    pending.sort(key=lambda prompt: len(encoded[prompt.id]))
    batches = [pending[start : start + batch_size] for start in range(0, len(pending), batch_size)]

    def decoded(own, batch: Sequence[Prompt]) -> list[Decoded]:
        spec = run.spec if own is model else models.describe(own)
        ids = [encoded[prompt.id] for prompt in batch]
        names = [prompt.id for prompt in batch]
        return decode(own, spec, ids, names, new_tokens, sampling, run.stops, run.pad, min_new_tokens)

    found = parallel.each(decoded, model, batches, parallel.workers_for(model, len(batches)))
    try:
        _write_index(run)
        with fitting_threads(model), closing(found):
            for batch, results in tqdm(found, desc=f"traces {run.path.name}", total=len(batches), unit="batch",
                                       disable=not batches):
                _keep(run, batch, results, encoded)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_state(run)) from None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise OSError(errno.ENOSPC, f"the disk is full; {_state(run)}", str(run.path)) from None
    return store.TraceStore(run.path)


def _state(run: Collection) -> str:
    done = sum(prompt.id in run.rows for prompt in run.prompts)
    return f"{done} of {len(run.prompts)} prompts are kept in {run.path}; run it again to go on"


def _prepare(model, tokenizer, out: Path, lengths: dict, sampling, resume: bool, prompts) -> Collection:
    """Check the folder against these settings and write what is stored once per model."""
    spec = models.describe(model)
    meta = spec.facts() | {"model": fingerprint(model), "dtype": str(model.dtype).removeprefix("torch.")}
    meta |= lengths | {"sampling": asdict(sampling) if sampling else None}
    meta |= {"experts": model.config.get_text_config()._experts_implementation}  # its rounding is part of the trace
    meta["settings"] = manifest.sha256(json.dumps(meta, sort_keys=True))[:16]
    rows = _existing(out, meta) if resume else {}
    routers = models.routers(spec)
    tensors = {name: getattr(routers, name) for name in ("weight", "bias", "norm", "correction")}
    tensors = {name: value for name, value in tensors.items() if value is not None}
    meta["routers_sha256"] = _save(tensors, out / store.ROUTERS, {"settings": meta["settings"]})
    meta |= {"eps": routers.eps, "norm_topk_prob": routers.norm_topk_prob}
    meta |= {"requested": len(prompts), "name": model.name_or_path}
    meta |= {"revision": getattr(model.config, "_commit_hash", None)}
    manifest.write_text(out / store.META, json.dumps(meta, indent=1) + "\n")
    if not resume:
        (out / store.INDEX).unlink(missing_ok=True)
    stops, pad = special_tokens(model, tokenizer)
    return Collection(spec, out, meta, stops, pad, rows, prompts)


def _existing(out: Path, meta: dict) -> dict[str, dict]:
    """Index rows of an earlier run with the same settings."""
    if not (out / store.META).exists():
        return {}
    old = json.loads((out / store.META).read_text(encoding="utf-8"))
    differs = {key: (old.get(key), value) for key, value in meta.items() if old.get(key) != value and key != "settings"}
    if differs:
        told = "; ".join(f"{key} was {was!r}, now {now!r}" for key, (was, now) in differs.items())
        raise ValueError(f"{out} holds traces of other settings ({told}); delete that folder, or pass "
                         "resume=False, to collect anew")
    index = store.read_index(out / store.INDEX) if (out / store.INDEX).exists() else pd.DataFrame()
    return {row["id"]: row for row in index.to_dict("records")}


def fingerprint(model) -> str:
    """16 hex digits that tell checkpoints apart: every parameter's name, shape and 64 evenly spread values."""
    parts = []
    for name, value in model.state_dict().items():
        flat = value.detach().flatten()
        sample = flat[:: max(1, flat.numel() // 64)].float().cpu()
        parts.append(f"{name}{tuple(value.shape)}{manifest.sha256(sample.numpy().tobytes())}")
    return manifest.sha256("\n".join(parts))[:16]


def special_tokens(model, tokenizer) -> tuple[set[int], int]:
    """End-of-text ids and the id to pad with."""
    found = getattr(model.generation_config, "eos_token_id", None)
    found = found if isinstance(found, list) else [found]
    stops = {token for token in [*found, tokenizer.eos_token_id] if token is not None}
    return stops, tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(stops, default=0)


def _encode_all(model, tokenizer, prompts: Sequence[Prompt], new_tokens: int) -> dict[str, list[int]]:
    if not prompts:
        raise ValueError("got no prompts; needed: at least one")
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31
    encoded = {prompt.id: models.encode(tokenizer, prompt.text) for prompt in prompts}
    for prompt in prompts:
        length = len(encoded[prompt.id])
        if not 0 < length <= context - new_tokens:
            raise ValueError(f"prompt {prompt.id} ({prompt.source}) has {length} tokens; needed: 1 to "
                             f"{context - new_tokens} (context {context} less {new_tokens} new tokens)")
    return encoded


def _sound(run: Collection, prompt: Prompt, ids: list[int]) -> bool:
    """Whether the prompt's file is there, unaltered, and of this prompt; otherwise say why it is collected again."""
    row = run.rows.get(prompt.id)
    if row is None:
        return False
    path = run.path / row["file"]
    problem = store.problem_with(path, row["sha256"])
    if not problem:
        found = store.metadata(path)
        if found.get("prompt") != _digest(ids) or found.get("settings") != run.meta["settings"]:
            problem = f"{path} belongs to another prompt text or other settings"
    if problem:
        warnings.warn(f"{problem}; prompt {prompt.id} is collected again", stacklevel=3)
        del run.rows[prompt.id]
    return not problem


def _digest(ids: list[int]) -> str:
    return manifest.sha256(" ".join(map(str, ids)))


def _keep(run: Collection, batch: Sequence[Prompt], results: list[Decoded], encoded: dict[str, list[int]]) -> None:
    """Write a batch's files, then the index; on a full disk or Ctrl-C the files that are there still enter it."""
    try:
        for prompt, result in zip(batch, results, strict=True):
            run.rows[prompt.id] = _write(run, prompt, result, encoded[prompt.id])
    finally:
        _write_index(run)


def _write_index(run: Collection) -> None:
    """Rows in the order of the prompts asked for; what is here but was not asked for stays, at position -1."""
    asked = {prompt.id: place for place, prompt in enumerate(run.prompts)}
    facts = {prompt.id: prompt._asdict() for prompt in run.prompts}
    for name, row in run.rows.items():
        row["position"] = asked.get(name, -1)
        row |= {key: facts[name][key] for key in ("source", "split", "group")} if name in asked else {}
    if run.rows:
        with manifest.atomic(run.path / store.INDEX) as temporary:
            pd.DataFrame(run.rows.values()).to_parquet(temporary, index=False)


def _write(run: Collection, prompt: Prompt, result: Decoded, ids: list[int]) -> dict:
    name = f"{store.FILES}/{prompt.id}.safetensors"
    tensors = result.fields | {"tokens": result.tokens.int(), "prompt_tokens": torch.tensor(ids, dtype=torch.int32)}
    facts = {"id": prompt.id, "prompt": _digest(ids), "settings": run.meta["settings"], "finish": result.finish}
    return {
        "id": prompt.id, "tokens": len(result.tokens), "prompt_tokens": len(ids), "finish": result.finish,
        "file": name, "sha256": _save(tensors, run.path / name, facts),
    }


def _save(tensors: dict[str, torch.Tensor], path: Path, facts: dict[str, str]) -> str:
    """Write a safetensors file atomically; its SHA-256. Written as bytes, so that a full disk is an OSError."""
    content = save({name: value.contiguous() for name, value in tensors.items()}, metadata=facts)
    with manifest.atomic(path) as temporary:
        temporary.write_bytes(content)
    return manifest.sha256(content)
