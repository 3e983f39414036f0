"""Checkpoints: what one needs before it is fetched, downloads that go on where they stopped, folders that are whole."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from dualdeadline import manifest, paths

GIB = 2**30
TOLD_BYTES = GIB  # needs below that are not worth a line
SMALL = ("*.json", "*.txt", "*.jinja", "*.model")  # configs, tokenizer, chat template, processor
WEIGHTS = ("*.safetensors",)
INDEX = "model.safetensors.index.json"
LOCAL = "models"  # folder below downloads: <key> in it stands in for the hub's checkpoint of that key


def local(key: str) -> Path | None:
    """The folder that a user put (or linked) in place of a listed checkpoint: `downloads/models/<key>`, or None."""
    folder = paths.DOWNLOADS / LOCAL / key
    return folder if (folder / "config.json").exists() else None


def fetch(source: str, revision: str, weights: bool = True) -> Path:
    """The folder of a hub's checkpoint; what is missing is downloaded after its size and the free disk were told.

    A connection that breaks goes on at its byte; a download that was stopped goes on with the files that are not
    whole yet, two of which are under way at a time. Without a network a whole checkpoint in the cache is enough.

    Args:
        source, revision: hub id and commit, branch or tag.
        weights: False fetches configs and tokenizer only.

    Raises:
        OSError: the disk has no room (ENOSPC), the repository is gated or missing, or there is no network, with what
            to do. ValueError: a file is missing or damaged.
    """
    from huggingface_hub import snapshot_download

    asked = {"repo_id": source, "revision": revision, "allow_patterns": [*SMALL, *(WEIGHTS if weights else ())]}
    with explained(source, revision):
        try:
            folder = Path(snapshot_download(**asked, local_files_only=True))
            check = whole if weights else config
            check(folder)
            return folder
        except (OSError, ValueError):  # not there, or not all of it
            missing = [one for one in snapshot_download(**asked, dry_run=True) if one.will_download]
        _room(source, sum(one.file_size or 0 for one in missing), len(missing))
        folder = Path(snapshot_download(**asked, max_workers=2))  # a file that is stopped begins anew: few at a time
    return whole(folder) if weights else folder


def _room(source: str, size: int, files: int) -> None:
    from huggingface_hub import constants

    target = Path(constants.HF_HUB_CACHE)
    near = next(path for path in (target, *target.parents) if path.exists())
    free = shutil.disk_usage(near).free
    if size >= TOLD_BYTES:
        print(
            f"{source}: {size / GIB:.1f} GiB in {files} files to download into {target}, {free / GIB:.1f} GiB free",
            flush=True,
        )
    if size > free:
        raise OSError(
            errno.ENOSPC,
            f"{source} needs {size / GIB:.2f} GiB of disk, {free / GIB:.2f} GiB are free; needed: "
            "room there, or HF_HOME on another disk",
            str(target),
        )


@contextmanager
def explained(source: str, revision: str) -> Iterator[None]:
    """While open, the hub's errors say what is wrong with `source` and what to do about it.

    Raises:
        OSError: in place of them.
    """
    import httpx
    from huggingface_hub import errors

    folder = f"or a local folder of it, as model=/path or linked as {paths.DOWNLOADS / LOCAL}/<key>"
    try:
        yield
    except errors.GatedRepoError as error:
        said = (
            f"{source} is gated: its owners ask for an account. Needed: accept its terms at "
            f"https://huggingface.co/{source} and log in (hf auth login, or HF_TOKEN), {folder}"
        )
        raise OSError(said) from error
    except errors.RevisionNotFoundError as error:
        raise OSError(f"{source} has no revision {revision!r}; needed: one that the hub lists") from error
    except errors.RepositoryNotFoundError as error:
        said = f"the hub has no {source}, or it is private. Needed: another name, a login that may read it, {folder}"
        raise OSError(said) from error
    except (errors.LocalEntryNotFoundError, errors.DryRunError, ConnectionError, httpx.TransportError) as error:
        said = (
            f"{source} is not whole in the cache and the hub cannot be reached ({type(error).__name__}: "
            f"{str(error).splitlines()[0]}). Needed: a network (what was downloaded is kept, the same command goes "
            f"on), {folder}"
        )
        raise OSError(said) from error


def config(folder: Path) -> dict:
    """A checkpoint's config.json.

    Raises:
        ValueError: it is missing or no JSON.
    """
    path = Path(folder) / "config.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); needed: the folder of a checkpoint") from None


def whole(folder: Path) -> Path:
    """`folder`, once its config and every safetensors file that belongs to it are there in full length.

    Raises:
        ValueError: what is missing or truncated, by name.
    """
    folder = Path(folder)
    config(folder)
    for path in _files(folder):
        tensors(path)
    return folder


def _files(folder: Path) -> list[Path]:
    """The safetensors files that the index names, or all there are."""
    index = folder / INDEX
    if not index.exists():
        found = sorted(folder.glob("*.safetensors"))
        if not found:
            raise ValueError(f"{folder} holds no *.safetensors; needed: a checkpoint in that format")
        return found
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError) as error:
        raise ValueError(f"{index} is damaged ({error!r}); needed: JSON with a weight_map") from None
    lost = [name for name in names if not (folder / name).exists()]
    if lost:
        raise ValueError(f"{folder} lacks {len(lost)} of {len(names)} files that {INDEX} names: {', '.join(lost[:3])}")
    return [folder / name for name in names]


def tensors(path: Path) -> dict[str, dict]:
    """A safetensors file's header by tensor name: dtype, shape, data_offsets; nothing else is read.

    Raises:
        ValueError: no such header, or the file is shorter or longer than it says.
    """
    size = path.stat().st_size
    try:
        with open(path, "rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            head = json.loads(handle.read(min(length, size)))
        head.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in head.values()), default=0)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} is no safetensors file ({error}); needed: download or copy it again") from None
    if end != size:
        raise ValueError(f"{path} has {size} bytes, its header says {end}; needed: download or copy it again")
    return head


def weight_bytes(folder: Path, dtype: torch.dtype) -> int:
    """Bytes of all weights of a checkpoint in a dtype; unused ones (multi-token heads, say) included."""
    heads = [tensors(path) for path in _files(Path(folder))]
    return sum(math.prod(entry["shape"]) for head in heads for entry in head.values()) * dtype.itemsize


def digest(folder: Path) -> str:
    """The first 12 digits of a SHA-256 over the weights' own, which are remembered by size and time of the file."""
    memory = paths.DATA / "checkpoints.json"
    known = json.loads(memory.read_text(encoding="utf-8")) if memory.exists() else {}
    found, before = [], dict(known)
    for path in sorted(Path(folder).glob("*.safetensors")):
        state = path.stat()
        name = f"{path.resolve()} {state.st_size} {state.st_mtime_ns}"
        if name not in known or state.st_size < TOLD_BYTES:
            known[name] = manifest.file_sha256(path)
        found.append(known[name])
        if state.st_size < TOLD_BYTES:
            del known[name]
    if known != before:
        manifest.write_text(memory, json.dumps(known, indent=1) + "\n")
    return manifest.sha256("".join(found))[:12]


def memory(source: str, size: int, device: str) -> None:
    """Tell what the weights need where they go, and refuse them if they cannot fit.

    Args:
        size: bytes of the weights. device: as of `models.load`; weights for one GPU pass through host memory.

    Raises:
        ValueError: too little memory, with what else could be done.
    """
    free = {device: _free(device)}
    if torch.device("cpu" if device == "auto" else device).type == "cuda":
        free["cpu"] = _free("cpu")
    told = ", ".join(f"{name} has {room / GIB:.1f} GiB free" for name, room in free.items())
    if size >= TOLD_BYTES:
        print(f"{source}: weights of {size / GIB:.1f} GiB, {told}", flush=True)
    short = [name for name, room in free.items() if room < size]
    if short:
        raise ValueError(
            f"{source} has weights of {size / GIB:.2f} GiB and {told}; needed: more memory on {', '.join(short)}, "
            "several GPUs (device='auto', with accelerate), or experts outside the GPU "
            "(dualdeadline.load(path, slots=...))"
        )


def _free(device: str) -> int:
    """Bytes free on a device; `auto`: on all GPUs together, or in host memory where there are none."""
    if device == "auto":
        if not torch.cuda.is_available():
            return _free("cpu")
        return sum(torch.cuda.mem_get_info(number)[0] for number in range(torch.cuda.device_count()))
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(torch.device(device))[0]
    lines = Path("/proc/meminfo")
    if not lines.exists():
        return 2**62
    found = dict(line.split(":", 1) for line in lines.read_text().splitlines())
    return int(found["MemAvailable"].split()[0]) * 1024


def need_accelerate() -> None:
    """ImportError unless accelerate is installed; the study does without it."""
    if importlib.util.find_spec("accelerate") is None:
        raise ImportError(
            "device is 'auto' and accelerate is not installed; needed: pip install accelerate, or one device"
        )


def placed_on_gpus(model) -> None:
    """Check that accelerate left no layer of a spread model outside the GPUs.

    Raises:
        ValueError: the modules that it put in host memory or on disk.
    """
    spread = getattr(model, "hf_device_map", None) or {}
    outside = sorted(name for name, where in spread.items() if str(where) in ("cpu", "disk", "meta"))
    if outside and (torch.cuda.is_available() or len(set(spread.values())) > 1):
        raise ValueError(
            f"{model.name_or_path} does not fit the GPUs: {len(outside)} modules such as {outside[0]} lie in "
            "host memory or on disk; needed: more GPUs, or dualdeadline.load(path, slots=...)"
        )
