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
    """Everything that stays the same while a store is filled; `rows` is its index, prompt id -> row.

    `prompts` belong into the store; `batches` are decoded together, in this order, whoever decodes them;
    `encoded` holds every prompt's token ids; `how` the settings of `decode`.
    """

    spec: models.MoESpec
    path: Path
    meta: dict
    stops: set[int]
    pad: int
    rows: dict[str, dict]
    prompts: Sequence[Prompt]
    batches: list[list[Prompt]]
    encoded: dict[str, list[int]]
    how: dict


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
    run = plan(model, tokenizer, prompts, Path(out), new_tokens, batch_size, sampling, min_new_tokens)
    run.rows = existing(run) if resume else {}
    enter(run, model)
    fill(run, model, [[prompt for prompt in batch if not sound(run, prompt)] for batch in run.batches])
    return store.TraceStore(run.path)


def plan(
    model, tokenizer, prompts: Sequence[Prompt], out: Path, new_tokens: int, batch_size: int,
    sampling: Sampling | None, min_new_tokens: int,
) -> Collection:
    """Settings and batches of a collection; nothing is read or written yet.

    Raises:
        ValueError: no prompts, `min_new_tokens` out of range, or a prompt longer than the context.
    """
    if not 0 <= min_new_tokens <= new_tokens:
        raise ValueError(f"min_new_tokens is {min_new_tokens}; needed: 0 to new_tokens ({new_tokens})")
    encoded = _encode_all(model, tokenizer, prompts, new_tokens)
    spec = models.describe(model)
    meta = spec.facts() | {"model": fingerprint(model), "dtype": str(model.dtype).removeprefix("torch.")}
    meta |= {"new_tokens": new_tokens, "min_new_tokens": min_new_tokens}
    meta |= {"sampling": asdict(sampling) if sampling else None}
    meta |= {"experts": model.config.get_text_config()._experts_implementation}  # its rounding is part of the trace
    meta["settings"] = manifest.sha256(json.dumps(meta, sort_keys=True))[:16]
    stops, pad = special_tokens(model, tokenizer)
    short_first = sorted(prompts, key=lambda prompt: len(encoded[prompt.id]))
    batches = [short_first[start : start + batch_size] for start in range(0, len(prompts), batch_size)]
    how = {"new_tokens": new_tokens, "sampling": sampling, "min_new_tokens": min_new_tokens}
    return Collection(spec, out, meta, stops, pad, {}, prompts, batches, encoded, how)


def fill(run: Collection, model, batches: Sequence[Sequence[Prompt]]) -> None:
    """Decode batches into the store; its index is written before the first and after each.

    Raises:
        OSError: the disk is full; what was collected before is kept.
    """
    batches = [batch for batch in batches if batch]

    def decoded(own, batch: Sequence[Prompt]) -> list[Decoded]:
        spec = run.spec if own is model else models.describe(own)
        ids = [run.encoded[prompt.id] for prompt in batch]
        names = [prompt.id for prompt in batch]
        how = (run.how["new_tokens"], run.how["sampling"], run.stops, run.pad, run.how["min_new_tokens"])
        return decode(own, spec, ids, names, *how)

    found = parallel.each(decoded, model, batches, parallel.workers_for(model, len(batches)))
    try:
        write_index(run)
        with fitting_threads(model), closing(found):
            for batch, results in tqdm(found, desc=f"traces {run.path.name}", total=len(batches), unit="batch",
                                       disable=not batches):
                _keep(run, batch, results)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_state(run)) from None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise OSError(errno.ENOSPC, f"the disk is full; {_state(run)}", str(run.path)) from None


def _state(run: Collection) -> str:
    done = sum(prompt.id in run.rows for prompt in run.prompts)
    return f"{done} of {len(run.prompts)} prompts are kept in {run.path}; run it again to go on"


def existing(run: Collection, path: Path | None = None) -> dict[str, dict]:
    """Index rows that an earlier run with the same settings left in the store's folder, or in another.

    Raises:
        ValueError: the folder holds traces of other settings, or its index cannot be read.
    """
    path = path or run.path
    if not (path / store.META).exists():
        return {}
    old = json.loads((path / store.META).read_text(encoding="utf-8"))
    differs = {key: (old.get(key), value) for key, value in run.meta.items()
               if old.get(key) != value and key != "settings"}
    if differs:
        told = "; ".join(f"{key} was {was!r}, now {now!r}" for key, (was, now) in differs.items())
        raise ValueError(f"{path} holds traces of other settings ({told}); delete that folder, or pass "
                         "resume=False, to collect anew")
    index = store.read_index(path / store.INDEX) if (path / store.INDEX).exists() else pd.DataFrame()
    return {row["id"]: row for row in index.to_dict("records")}


def enter(run: Collection, model) -> None:
    """Write what is stored once per model; an index that no row of `run` comes from goes away."""
    routers = models.routers(run.spec)
    tensors = {name: getattr(routers, name) for name in ("weight", "bias", "norm", "correction")}
    tensors = {name: value for name, value in tensors.items() if value is not None}
    own = {"routers_sha256": _save(tensors, run.path / store.ROUTERS, {"settings": run.meta["settings"]})}
    own |= {"eps": routers.eps, "norm_topk_prob": routers.norm_topk_prob}
    own |= {"requested": len(run.prompts), "name": model.name_or_path}
    own |= {"revision": getattr(model.config, "_commit_hash", None)}
    manifest.write_text(run.path / store.META, json.dumps(run.meta | own, indent=1) + "\n")
    if not run.rows:
        (run.path / store.INDEX).unlink(missing_ok=True)


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


def sound(run: Collection, prompt: Prompt) -> bool:
    """Whether the prompt's file is there, unaltered, and of this prompt; otherwise say why it is collected again."""
    row = run.rows.get(prompt.id)
    if row is None:
        return False
    path = run.path / row["file"]
    problem = store.problem_with(path, row["sha256"])
    if not problem:
        found = store.metadata(path)
        if found.get("prompt") != _digest(run.encoded[prompt.id]) or found.get("settings") != run.meta["settings"]:
            problem = f"{path} belongs to another prompt text or other settings"
    if problem:
        warnings.warn(f"{problem}; prompt {prompt.id} is collected again", stacklevel=3)
        del run.rows[prompt.id]
    return not problem


def _digest(ids: list[int]) -> str:
    return manifest.sha256(" ".join(map(str, ids)))


def _keep(run: Collection, batch: Sequence[Prompt], results: list[Decoded]) -> None:
    """Write a batch's files, then the index; on a full disk or Ctrl-C the files that are there still enter it."""
    try:
        for prompt, result in zip(batch, results, strict=True):
            run.rows[prompt.id] = _write(run, prompt, result)
    finally:
        write_index(run)


def write_index(run: Collection) -> None:
    """Rows in the order of the prompts asked for; what is here but was not asked for stays, at position -1."""
    asked = {prompt.id: place for place, prompt in enumerate(run.prompts)}
    facts = {prompt.id: prompt._asdict() for prompt in run.prompts}
    for name, row in run.rows.items():
        row["position"] = asked.get(name, -1)
        row |= {key: facts[name][key] for key in ("source", "split", "group")} if name in asked else {}
    if run.rows:
        with manifest.atomic(run.path / store.INDEX) as temporary:
            pd.DataFrame(run.rows.values()).to_parquet(temporary, index=False)


def _write(run: Collection, prompt: Prompt, result: Decoded) -> dict:
    ids = run.encoded[prompt.id]
    name = f"{store.FILES}/{prompt.id}.safetensors"
    tensors = result.fields | {"tokens": result.tokens.int(), "prompt_tokens": torch.tensor(ids, dtype=torch.int32)}
    facts = {"id": prompt.id, "prompt": _digest(ids), "settings": run.meta["settings"], "finish": result.finish}
    return {
        "id": prompt.id, "tokens": len(result.tokens), "prompt_tokens": len(ids), "finish": result.finish,
        "file": name, "sha256": _save(tensors, run.path / name, facts),
    }


def _save(tensors: dict[str, torch.Tensor], path: Path, facts: dict[str, str]) -> str:
    """Write a safetensors file atomically; its SHA-256. Written as bytes, so that a full disk is an OSError."""
    content = _in_order(save({name: value.contiguous() for name, value in tensors.items()}, metadata=facts))
    with manifest.atomic(path) as temporary:
        temporary.write_bytes(content)
    return manifest.sha256(content)


def _in_order(content: bytes) -> bytes:
    """A safetensors file with its text metadata by name: the library writes it in another order each time."""
    size = int.from_bytes(content[:8], "little")
    head = json.loads(content[8 : 8 + size])
    head["__metadata__"] = dict(sorted(head["__metadata__"].items()))
    text = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)  # data begin at a multiple of eight bytes
    return len(text).to_bytes(8, "little") + text + content[8 + size :]
