"""Checkpoints whose experts go from their files into the expert store: the model never stands in memory twice."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules import module as registry

from dualdeadline import engine
from dualdeadline.engine import surgery
from dualdeadline.engine.options import choose, count_slots
from dualdeadline.store import pinned

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SERIAL = "HF_DEACTIVATE_ASYNC_LOAD"
DAMAGED = (ValueError, KeyError, TypeError, AttributeError)  # what reading JSON of another form ends in


def load(path_or_id, slots=None, vram=None, *, dtype="auto", revision=None, auto=None, **options) -> nn.Module:
    """A checkpoint as an offloaded model, in eval mode: what `from_pretrained` and `offload` give, in half the memory.

    transformers builds the model without memory and reads the files tensor by tensor, with its own conversions; each
    layer's experts are taken out of its hands as soon as they are complete. With all experts in host memory the peak
    is their size and that of the layer being read (from 8 layers on less than 1.2 times the weights); with
    `wire="coded"` they are encoded on the way. Experts are never on the GPU but in their slots.

    Args:
        path_or_id: folder of a safetensors checkpoint, in one file or in shards, experts apart or fused; or an id of
            the hub. revision: of the id. dtype: a torch dtype, its name, or "auto": as the checkpoint says.
        auto: class that picks the model's (default `AutoModelForCausalLM`).
        slots, vram, options: of `offload`, checked before anything is read.

    Raises:
        ValueError: no such checkpoint, missing, truncated or unfitting files or tensors, by name; or as `offload`.
    """
    if (slots is None) == (vram is None):
        raise ValueError(f"slots is {slots!r} and vram {vram!r}; needed: exactly one of them")
    given = inspect.signature(engine.offload).bind(None, slots, vram, **options)  # TypeError for an unknown option
    given.apply_defaults()
    settings, files = given.arguments, Files(path_or_id, revision)
    skeleton, kind = _skeleton(files, dtype, auto)
    why: tuple[str, ...] = ()
    if vram is not None:
        names = ("vram", "context", "batch", "device", "backend")
        slots, why = engine._planned(skeleton, *(settings[name] for name in names))
    spec, layers = surgery.find(skeleton, empty=True)
    counts, coded = count_slots(slots, spec.E), False
    if settings["tier"] == "pinned":
        names = ("schedule", "wire", "backend", "kernels", "device", "pool", "timed")
        coded = choose(layers, counts, *(settings[name] for name in names)).coded
    model = _read(files, skeleton, kind, coded)
    model = engine.offload(model, slots, **options)
    model.dualdeadline.why = (*why, *model.dualdeadline.why)
    return model


class Files:
    """The files of a checkpoint, in a folder or on the hub: `config`, `tensors` by name, each read when it is indexed.

    Raises:
        ValueError: no config, no safetensors, or a file that is missing, truncated or named nowhere.
    """

    def __init__(self, source, revision: str | None = None):
        from transformers import AutoConfig

        self.source, self.revision = str(source), revision
        if Path(self.source).is_dir() and not (Path(self.source) / "config.json").is_file():
            raise ValueError(f"{self.source} has no config.json; needed: the folder of a checkpoint")
        try:
            self.config = AutoConfig.from_pretrained(self.source, revision=revision)
        except (OSError, *DAMAGED) as error:
            raise ValueError(f"{self.source} is not a checkpoint ({error}); needed: a folder, or a hub's id") from error
        if getattr(self.config, "quantization_config", None):
            raise ValueError(f"{self.source} is quantised; needed: bfloat16, float16 or float32 experts")
        self.tensors = self._tensors()

    def find(self, name: str) -> Path | None:
        """Where a file of the checkpoint lies here, fetched if it is on the hub; None: it has no such file."""
        if Path(self.source).is_dir():
            found = Path(self.source) / name
            return found if found.is_file() else None
        from transformers.utils import cached_file

        found = cached_file(self.source, name, revision=self.revision, _raise_exceptions_for_missing_entries=False)
        return found and Path(found)

    def _tensors(self) -> dict[str, object]:
        index, single = self.find(INDEX), self.find(SINGLE)
        if single is None and index is None:
            raise ValueError(f"{self.source} has neither {SINGLE} nor {INDEX}; needed: a checkpoint in safetensors")
        if single is not None:
            return _slices(single)
        try:
            where = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            names = sorted(set(where.values()))
        except DAMAGED as error:
            raise ValueError(f"{index} is damaged ({error!r}); needed: JSON with a weight_map") from error
        found: dict[str, object] = {}
        for name in names:
            shard = self.find(name)
            if shard is None:
                raise ValueError(f"{self.source} lacks {name}; needed: every file that {INDEX} names")
            inside = _slices(shard)
            lost = sorted(key for key, home in where.items() if home == name and key not in inside)
            if lost:
                raise ValueError(f"{shard} lacks {', '.join(lost[:3])} of {len(lost)}; needed: what {INDEX} says")
            found |= inside
        return found


def _slices(path: Path) -> dict[str, object]:
    """The tensors of a file by name, each read by `[...]`, into memory of its own where safetensors can do that."""
    from safetensors import SafetensorError, safe_open

    try:
        try:
            opened = safe_open(path, framework="pt", backend="pread")  # a mapped file counts as resident memory
        except TypeError:  # safetensors before backends
            opened = safe_open(path, framework="pt")
        return {key: opened.get_slice(key) for key in opened.keys()}
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or truncated ({error}); needed: a whole safetensors file") from error


def _skeleton(files: Files, dtype, auto) -> tuple[nn.Module, torch.dtype]:
    """The model without memory, and the dtype it will have."""
    from transformers import AutoModelForCausalLM

    kind = getattr(torch, dtype, None) if isinstance(dtype, str) and dtype != "auto" else dtype
    if kind == "auto":
        kind = getattr(files.config, "dtype", None) or getattr(files.config.get_text_config(), "dtype", None)
        kind = kind or next(value[...].dtype for value in files.tensors.values())
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise ValueError(f"dtype is {dtype!r}; needed: 'auto', a floating dtype of torch or its name")
    try:
        with torch.device("meta"):
            return (auto or AutoModelForCausalLM).from_config(files.config, dtype=kind).eval(), kind
    except ValueError as error:
        raise ValueError(f"{files.source} has no model of that kind: {error}") from error


def _read(files: Files, skeleton: nn.Module, dtype: torch.dtype, coded: bool) -> nn.Module:
    """The model of the files with its experts beside it (`surgery.HELD`), as weights or as wire records."""
    from transformers import GenerationConfig

    with _diverted(coded), _one_by_one():
        try:
            model, found = type(skeleton).from_pretrained(
                None, config=skeleton.config, state_dict=files.tensors, dtype=dtype, output_loading_info=True
            )
        except (RuntimeError, OSError) as error:
            raise ValueError(f"{files.source} does not fit {type(skeleton).__name__}: {error}") from error
    pinned.trim()
    wrong = {name: sorted(map(str, found[name])) for name in ("missing_keys", "mismatched_keys", "error_msgs")}
    for name, keys in wrong.items():
        if keys:
            said = f"{len(keys)} {name.replace('_', ' ')}: {', '.join(keys[:3])}"
            raise ValueError(f"{files.source} has {said}; needed: every tensor of {type(skeleton).__name__}")
    if model.can_generate() and files.find("generation_config.json"):
        try:
            model.generation_config = GenerationConfig.from_pretrained(files.source, revision=files.revision)
        except (OSError, *DAMAGED) as error:
            raise ValueError(f"{files.source}: generation_config.json is damaged ({error}); needed: JSON") from error
    model.config.name_or_path = model.name_or_path = files.source
    return model.eval()


@contextlib.contextmanager
def _one_by_one() -> Iterator[None]:
    """While open, transformers reads a tensor when it is needed, not all of them ahead."""
    before = os.environ.get(SERIAL)
    os.environ[SERIAL] = "1"
    try:
        yield
    finally:
        os.environ.pop(SERIAL)
        if before is not None:
            os.environ[SERIAL] = before


@contextlib.contextmanager
def _diverted(coded: bool) -> Iterator[None]:
    """While open, experts that this thread gives to a module go to `surgery.HELD` of it, one on meta in their place."""
    parts, mine = {name: part for part, name in surgery.PARAMETERS.items()}, threading.get_ident()

    def divert(module: nn.Module, name: str, value: nn.Parameter | None) -> nn.Parameter | None:
        expert = name in parts and value is not None and value.dim() == 3 and hasattr(module, "has_gate")
        if not expert or value.is_meta or threading.get_ident() != mine:
            return None  # the value itself is registered
        held: Mapping = module.__dict__.setdefault(surgery.HELD, {})
        held[parts[name]] = pinned.keep(value.detach(), coded)
        pinned.trim()
        return nn.Parameter(torch.empty_like(value, device="meta"), value.requires_grad)

    hook = registry.register_module_parameter_registration_hook(divert)
    try:
        yield
    finally:
        hook.remove()
