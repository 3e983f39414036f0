"""Run states that resume exactly, and the exported checkpoint. No pickle: safetensors and JSON."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dualdeadline.pretrain import architectures

LARGEST = 2**24 - 2**17  # bytes of weights in one file: more than 16 MiB a file does not travel


def save_state(path: Path, tensors: dict[str, torch.Tensor], meta: dict) -> None:
    """Write one run state atomically; refuses tensors that are not finite, so the last good state stays."""
    from dualdeadline import manifest

    floats = [value for value in tensors.values() if value.is_floating_point()]
    sums = torch.stack([value.float().sum().cpu() for value in floats])
    if not bool(sums.isfinite().all()):
        raise FloatingPointError(f"state is not finite; {path} keeps the last good state")
    with manifest.atomic(path) as temporary:
        save_file({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, temporary,
                  metadata={"meta": json.dumps(meta)})


def load_state(path: Path) -> tuple[dict[str, torch.Tensor], dict]:
    """Tensors (on the CPU) and meta of a state written by `save_state`.

    Raises:
        FileNotFoundError: no state there (the machine may have been given back): use --init-from.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"no state at {path}: nothing to resume (a new machine starts bare); "
                                "continue from exported weights with --init-from FOLDER")
    with safe_open(path, "pt") as handle:
        meta = json.loads(handle.metadata()["meta"])
    return load_file(path), meta


def export(params: dict[str, torch.Tensor], cfg, out: Path) -> list[Path]:
    """Write bfloat16 weights, in shards with an index if one file would be too large, and both configs; the files."""
    from dualdeadline import manifest

    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in params.items()}
    total, done = sum(value.nbytes for value in weights.values()), 0
    shards, where = -(-total // LARGEST), {}
    for name, value in weights.items():
        number = 1 + min(done * shards // total, shards - 1)
        where[name] = f"model-{number:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors"
        done += value.nbytes
    for shard in sorted(set(where.values())):
        part = {name: value for name, value in weights.items() if where[name] == shard}
        with manifest.atomic(out / shard) as temporary:
            save_file(part, temporary, {"format": "pt"})
    if shards > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    write_config(cfg, out)
    return sorted(out.iterdir())


def write_config(cfg, out: Path) -> None:
    """config.json (bfloat16, with its class) and generation_config.json (end 0, padding 1)."""
    from transformers import GenerationConfig

    cfg.dtype = torch.bfloat16
    cfg.save_pretrained(out)
    GenerationConfig(bos_token_id=cfg.bos_token_id, eos_token_id=cfg.eos_token_id,
                     pad_token_id=cfg.pad_token_id).save_pretrained(out)


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Weights of an exported folder (shards or one file) in float32."""
    files = sorted(Path(folder).glob("model*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no model*.safetensors; give the folder of an export")
    return {name: value.float() for path in files for name, value in load_file(path).items()}


def assemble(shards: Path, out: Path, beside: Path | None = None) -> str:
    """Join exported weights into `out/model.safetensors`, with configs, card and a load check; its SHA-256.

    Args:
        shards: folder of an export. out: the model's folder. beside: a folder whose tokenizer is copied.

    Raises:
        ValueError: weights are missing, misshapen or read back differently.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from dualdeadline import manifest

    out, cfg = Path(out), AutoConfig.from_pretrained(shards)
    weights = {name: value.bfloat16() for name, value in read_weights(shards).items()}
    needed = architectures.of(cfg).shapes(cfg)
    wrong = {name for name, shape in needed.items() if name not in weights or tuple(weights[name].shape) != shape}
    if wrong or len(weights) != len(needed):
        raise ValueError(f"{shards}: missing or misshapen {sorted(wrong)[:3]}; needed: all shards")
    out.mkdir(parents=True, exist_ok=True)
    with manifest.atomic(out / "model.safetensors") as temporary:
        save_file(weights, temporary, {"format": "pt"})
    write_config(cfg, out)
    for folder, names in ((Path(shards), ("README.md",)), (beside, ("tokenizer.json", "tokenizer_config.json"))):
        for name in names if folder and folder != out else ():
            if (folder / name).exists():
                shutil.copy(folder / name, out / name)
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16).state_dict()
    if not all(torch.equal(loaded[name], value) for name, value in weights.items()):
        raise ValueError(f"{out}: transformers loads other weights than were written")
    digest = manifest.file_sha256(out / "model.safetensors")
    print(f"{out / 'model.safetensors'}: {(out / 'model.safetensors').stat().st_size} bytes, sha256 {digest}")
    return digest
