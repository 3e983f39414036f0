"""MoE families: where routers, experts and the norms before them are, and how a router scores."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from dualdeadline import checkpoints, manifest, paths

if TYPE_CHECKING:
    from torch import nn

# How each family scores: function over all E logits, and whether the K weights are renormalised to sum to one
# ("config": as the checkpoint's norm_topk_prob says). A softmax over the K chosen logits only (GPT-OSS,
# Granite) equals a softmax over all E, renormalised.
FAMILIES = {
    "olmoe": ("softmax", "config"),
    "qwen2_moe": ("softmax", "config"),
    "qwen3_moe": ("softmax", "config"),
    "qwen3_next": ("softmax", "config"),
    "qwen3_5_moe_text": ("softmax", True),
    "mixtral": ("softmax", True),
    "deepseek_v2": ("softmax", False),
    "deepseek_v3": ("sigmoid", "config"),
    "gpt_oss": ("softmax", True),
    "granitemoe": ("softmax", True),
    "granitemoeshared": ("softmax", True),
}
_ROUTERS = ("gate", "router")
_NORMS = ("post_attention_layernorm", "pre_feedforward_layernorm")


class MoELayer(NamedTuple):
    """Modules of one MoE layer: the decoder layer, its router, experts and the norm that feeds them (or None)."""

    name: str
    decoder: nn.Module
    router: nn.Module
    experts: nn.Module
    norm: nn.Module | None


@dataclass(frozen=True)
class MoESpec:
    """Sizes and modules of a model's MoE layers; `kind` and `renormalised` as in `FAMILIES`.

    `scaling` multiplies the K weights after that (DeepSeek's routed_scaling_factor, else 1).
    """

    family: str
    L: int
    E: int
    K: int
    H: int
    F: int
    kind: str
    renormalised: bool
    scaling: float
    layers: tuple[MoELayer, ...]

    def facts(self) -> dict:
        """The plain values, without modules."""
        names = ("family", "L", "E", "K", "H", "F", "kind", "renormalised", "scaling")
        return {name: getattr(self, name) for name in names}


@dataclass
class Routers:
    """Each layer's router and the norm that feeds it, once per model.

    weight[L,E,H]; bias[L,E] or None (added to the logits); correction[L,E] or None (added to the scores for
    choosing only: DeepSeek-V3); norm[L,H] or None (the factor the norm multiplies by: 1+w where the family
    stores it as w); eps of that norm; kind and norm_topk_prob as in `FAMILIES`; scaling of the K weights.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    norm: torch.Tensor | None
    correction: torch.Tensor | None
    eps: float
    kind: str
    norm_topk_prob: bool
    scaling: float

    def logits(self, layer: int, state: torch.Tensor) -> torch.Tensor:
        """Router logits [N,E] of one layer for states [N,H] that already went through that layer's norm."""
        bias = None if self.bias is None else self.bias[layer].to(state.dtype)
        return torch.nn.functional.linear(state, self.weight[layer].to(state.dtype), bias)

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Scores [...,E] over all experts: softmax or sigmoid of the logits, before choosing and scaling."""
        return logits.sigmoid() if self.kind == "sigmoid" else logits.softmax(-1)


def describe(model: nn.Module) -> MoESpec:
    """Find the MoE layers of a transformers model, in order.

    Raises:
        ValueError: no MoE layer, a layer without the modules or weights needed, or a family that is not in
            `FAMILIES`; each says what is missing, the last with the line to add.
    """
    modules = dict(model.named_modules())
    found = tuple(_layer(name, modules) for name in modules if name.endswith(".experts") and _is_experts(modules[name]))
    if not found:
        raise ValueError(_no_layers(model, modules))
    router, experts = found[0].router, found[0].experts
    for name in ("weight", "top_k"):
        if getattr(router, name, None) is None:
            raise ValueError(f"{found[0].name}: {type(router).__name__} has no {name}; needed: a router that holds "
                             "weight [E,H] and top_k")
    config = model.config.get_text_config()
    if config.model_type not in FAMILIES:
        raise ValueError(_no_entry(model, config.model_type, len(found)))
    kind, renormalised = FAMILIES[config.model_type]
    count, hidden = router.weight.shape
    return MoESpec(
        family=config.model_type, L=len(found), E=count, K=router.top_k, H=hidden,
        F=experts.down_proj.numel() // (count * hidden), kind=kind,
        renormalised=bool(config.norm_topk_prob if renormalised == "config" else renormalised),
        scaling=float(getattr(router, "routed_scaling_factor", 1.0)), layers=found,
    )


def _no_layers(model: nn.Module, modules: dict[str, nn.Module]) -> str:
    other = next((f" ({name} is a {type(one).__name__} without a stacked down_proj [E,H,F])"
                  for name, one in modules.items() if name.endswith(".experts")), "")
    return (f"{type(model).__name__} has no MoE layer: no module named *.experts holds stacked expert weights{other}; "
            f"needed: a model of one of {', '.join(FAMILIES)}")


def _no_entry(model: nn.Module, family: str, layers: int) -> str:
    return (f"{type(model).__name__} is of the family {family!r}, which is not supported. Its {layers} MoE layers, "
            "their routers and experts were found; missing is how the router scores. Needed: one entry in FAMILIES of "
            f'lib/dualdeadline/models.py, or models.FAMILIES["{family}"] = ("softmax" or "sigmoid", True or False or '
            '"config": whether the K weights are made to sum to one, "config" as its norm_topk_prob says); then '
            f"dualdeadline.families checks it. Supported: {', '.join(FAMILIES)}")


def _is_experts(module: nn.Module) -> bool:
    return getattr(module, "down_proj", None) is not None and module.down_proj.dim() == 3


def _layer(name: str, modules: dict[str, nn.Module]) -> MoELayer:
    block = name.rpartition(".")[0]
    router = next((modules[f"{block}.{key}"] for key in _ROUTERS if f"{block}.{key}" in modules), None)
    if router is None:
        children = ", ".join(name for name, _ in modules[block].named_children())
        raise ValueError(f"{block} has experts but no router; needed: a child named {' or '.join(_ROUTERS)}, or its "
                         f"name in _ROUTERS of lib/dualdeadline/models.py (it has {children})")
    decoder = block.rpartition(".")[0]
    norm = next((modules[f"{decoder}.{key}"] for key in _NORMS if f"{decoder}.{key}" in modules), None)
    return MoELayer(decoder, modules[decoder], router, modules[name], norm)


@torch.no_grad()
def routers(spec: MoESpec) -> Routers:
    """Copy every layer's router parameters to the CPU, in the dtype they are executed in."""

    def stack(name: str) -> torch.Tensor | None:
        found = [getattr(layer.router, name, None) for layer in spec.layers]
        return None if found[0] is None else torch.stack([value.detach().cpu() for value in found])

    norms = [layer.norm for layer in spec.layers]
    eps = 0.0 if norms[0] is None else _eps(norms[0])
    return Routers(
        weight=stack("weight"), bias=stack("bias"), correction=stack("e_score_correction_bias"),
        norm=None if norms[0] is None else torch.stack([_factor(norm) for norm in norms]), eps=eps,
        kind=spec.kind, norm_topk_prob=spec.renormalised, scaling=spec.scaling,
    )


def _eps(norm: nn.Module) -> float:
    return float(getattr(norm, "variance_epsilon", None) or norm.eps)


def _factor(norm: nn.Module) -> torch.Tensor:
    """What an RMS norm multiplies by, found by trying it: families store it as w or as 1+w."""
    weight = norm.weight.detach().float()
    seen = norm(torch.ones_like(weight)).float() * math.sqrt(1 + _eps(norm))
    for factor in (weight, 1 + weight):
        if torch.allclose(seen, factor, rtol=1e-2, atol=1e-4):  # a norm may round to bfloat16
            return factor.cpu()
    raise ValueError(f"{type(norm).__name__} scales neither by its weight nor by one plus it; add the case here")


def entry(key: str) -> dict:
    """What `models.yaml` says of a model; a folder with a config.json is a local checkpoint of that path.

    Raises:
        ValueError: neither a key nor such a folder.
    """
    known = manifest.read_yaml("models.yaml")
    if key in known:
        return known[key]
    if (Path(key) / "config.json").exists():
        said = checkpoints.config(Path(key))
        kind = next((part[name] for part in (said, said.get("text_config") or {}) for name in ("dtype", "torch_dtype")
                     if part.get(name)), "float32")
        return {"title": Path(key).name, "path": str(Path(key).resolve()), "dtype": kind}
    raise ValueError(f"model is {key!r}; needed: one of {', '.join(known)} (data_manifests/models.yaml), "
                     "or a folder that holds a config.json")


def location(key: str) -> tuple[str, str | None]:
    """Where transformers loads a model from: a folder and None, or a hub id and its revision.

    A folder `downloads/models/<key>` below the data folder stands in for the hub's checkpoint.
    """
    found = entry(key)
    if "path" not in found:
        own = checkpoints.local(key)
        return (found["hub"], found["revision"]) if own is None else (str(own), None)
    if not (folder := paths.PACKAGE / found["path"]).exists():
        raise FileNotFoundError(f"{folder} is missing; needed: the embedded model, which is part of the repository")
    return str(folder), None


def revision(key: str) -> str:
    """The model's revision for records: the first 12 digits of its weights' SHA-256, or the hub's commit.

    A hub revision such as `main` is resolved to the commit that the local cache or the hub has for it.
    """
    source, wanted = location(key)
    if wanted is None:
        return checkpoints.digest(Path(source))
    if len(wanted) == 40 and set(wanted) <= set("0123456789abcdef"):
        return wanted
    return checkpoints.fetch(source, wanted, weights=False).name


def tokenizer(key: str):
    """The tokenizer of a model of `models.yaml`, with the chat template beside it."""
    from transformers import AutoTokenizer

    source, wanted = location(key)
    return AutoTokenizer.from_pretrained(source if wanted is None else checkpoints.fetch(source, wanted, weights=False))


def encode(tokenizer, text: str) -> list[int]:
    """Token ids of a prompt: in the tokenizer's chat template if it has one, else as plain text."""
    if not tokenizer.chat_template:
        return tokenizer(text)["input_ids"]
    chat = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]


def load(key: str, device: str | None = None, dtype: str | None = None, experts: str = "grouped_mm"):
    """Load a model and its tokenizer for decoding; disk and memory needed are checked, and told from 1 GiB on.

    Args:
        key: key of `models.yaml` or a local checkpoint folder; a multimodal checkpoint gives its text model.
        device: default `cuda` if there is one, else `cpu`. `auto`: accelerate spreads the layers over all GPUs.
        dtype: default as `models.yaml` (of a folder, its config) says, e.g. `float32`.
        experts: transformers' experts implementation.

    Raises:
        ValueError: unknown key, missing or truncated files, too little memory, a model without MoE layers, or sizes
            other than `models.yaml` says. OSError: a download is impossible, see `checkpoints.fetch`.
        ImportError: `auto` without accelerate.
    """
    source, wanted = location(key)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "auto":
        checkpoints.need_accelerate()
    folder = checkpoints.whole(Path(source)) if wanted is None else checkpoints.fetch(source, wanted)
    kind = getattr(torch, dtype or entry(key)["dtype"])
    checkpoints.memory(source, checkpoints.weight_bytes(folder, kind), device)
    model = _from_files(folder, kind, device)
    if wanted is not None:
        model.name_or_path, model.config._commit_hash = source, folder.name
    spec = describe(model).facts()
    model.set_experts_implementation(experts)
    wrong = {name: spec[name] for name in ("L", "E", "K", "H", "F") if entry(key).get(name, spec[name]) != spec[name]}
    if wrong:
        raise ValueError(f"{source} has {wrong}; needed: what data_manifests/models.yaml says of {key}")
    return model, tokenizer(key)


def _from_files(folder: Path, dtype: torch.dtype, device: str):
    """The causal language model of a folder, every one of its weights found there.

    Raises:
        ValueError: the files lack weights of the model, or hold some of other shapes.
    """
    from transformers import AutoModelForCausalLM

    spread = {"device_map": "auto"} if device == "auto" else {}
    model, found = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True, **spread)
    wrong = sorted(str(name) for kind in ("missing_keys", "mismatched_keys") for name in found[kind])
    if wrong:  # transformers would fill them at random
        raise ValueError(f"{folder} lacks {len(wrong)} weights of {type(model).__name__}: {', '.join(wrong[:3])}; "
                         "needed: a whole checkpoint of that model")
    if spread:
        checkpoints.placed_on_gpus(model)
        return model.eval()
    return model.to(device).eval()
