"""Run states that resume exactly, and the exported checkpoint. No pickle: safetensors and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dualdeadline.pretrain import model

SHARDS = 2


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
    """Write bfloat16 weights as two shards with index, config.json and generation_config.json; the files."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in params.items()}
    total, done = sum(value.nbytes for value in weights.values()), 0
    where = {}
    for name, value in weights.items():
        where[name] = f"model-{1 + min(done * SHARDS // total, SHARDS - 1):05d}-of-{SHARDS:05d}.safetensors"
        done += value.nbytes
    for shard in sorted(set(where.values())):
        part = {name: value for name, value in weights.items() if where[name] == shard}
        save_file(part, out / shard, {"format": "pt"})
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    write_config(cfg, out)
    return sorted(out.iterdir())


def write_config(cfg, out: Path) -> None:
    """config.json (bfloat16, OlmoeForCausalLM) and generation_config.json (end 0, padding 1)."""
    from transformers import GenerationConfig

    cfg.architectures, cfg.dtype = ["OlmoeForCausalLM"], torch.bfloat16
    cfg.save_pretrained(out)
    GenerationConfig(bos_token_id=cfg.bos_token_id, eos_token_id=cfg.eos_token_id,
                     pad_token_id=cfg.pad_token_id).save_pretrained(out)


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Weights of an exported folder (shards or one file) in float32."""
    files = sorted(Path(folder).glob("model*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no model*.safetensors; give the folder of an export")
    return {name: value.float() for path in files for name, value in load_file(path).items()}


def assemble(shards: Path, out: Path) -> str:
    """Join the exported shards into `out/model.safetensors`, with configs and a load check; its SHA-256."""
    from transformers import OlmoeConfig, OlmoeForCausalLM

    from dualdeadline import manifest

    out, cfg = Path(out), OlmoeConfig.from_pretrained(shards)
    weights = {name: value.bfloat16() for name, value in read_weights(shards).items()}
    wrong = {name for name, shape in model.shapes(cfg).items()
             if name not in weights or tuple(weights[name].shape) != shape}
    if wrong or len(weights) != len(model.shapes(cfg)):
        raise ValueError(f"{shards}: missing or misshapen {sorted(wrong)[:3]}; needed: all shards")
    with manifest.atomic(out / "model.safetensors") as temporary:
        save_file(weights, temporary, {"format": "pt"})
    write_config(cfg, out)
    loaded = OlmoeForCausalLM.from_pretrained(out, dtype=torch.bfloat16).state_dict()
    if not all(torch.equal(loaded[name], value) for name, value in weights.items()):
        raise ValueError(f"{out}: transformers loads other weights than were written")
    digest = manifest.file_sha256(out / "model.safetensors")
    print(f"{out / 'model.safetensors'}: {(out / 'model.safetensors').stat().st_size} bytes, sha256 {digest}")
    return digest
