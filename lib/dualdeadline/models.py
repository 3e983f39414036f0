"""MoE families: where routers, experts and the norms before them are, and how a router scores."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from dualdeadline import manifest, paths

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
        ValueError: no MoE layer, or a family that is not in `FAMILIES`.
    """
    modules = dict(model.named_modules())
    found = tuple(_layer(name, modules) for name in modules if name.endswith(".experts") and _is_experts(modules[name]))
    if not found:
        raise ValueError(f"{type(model).__name__} has no MoE layer (no module named *.experts that holds stacked "
                         f"expert weights); needed: a model of one of {', '.join(FAMILIES)}")
    config = model.config.get_text_config()
    if config.model_type not in FAMILIES:
        raise ValueError(f"model family is {config.model_type!r}; needed: one of {', '.join(FAMILIES)}")
    kind, renormalised = FAMILIES[config.model_type]
    router, experts = found[0].router, found[0].experts
    count, hidden = router.weight.shape
    return MoESpec(
        family=config.model_type, L=len(found), E=count, K=router.top_k, H=hidden,
        F=experts.down_proj.numel() // (count * hidden), kind=kind,
        renormalised=bool(config.norm_topk_prob if renormalised == "config" else renormalised),
        scaling=float(getattr(router, "routed_scaling_factor", 1.0)), layers=found,
    )


def _is_experts(module: nn.Module) -> bool:
    return getattr(module, "down_proj", None) is not None and module.down_proj.dim() == 3


def _layer(name: str, modules: dict[str, nn.Module]) -> MoELayer:
    block = name.rpartition(".")[0]
    router = next((modules[f"{block}.{key}"] for key in _ROUTERS if f"{block}.{key}" in modules), None)
    if router is None:
        raise ValueError(f"{block} has experts but no router; needed: a child named {' or '.join(_ROUTERS)}")
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
        return {"title": Path(key).name, "path": str(Path(key).resolve()), "dtype": "float32"}
    raise ValueError(f"model is {key!r}; needed: one of {', '.join(known)} (data_manifests/models.yaml), "
                     "or a folder that holds a config.json")


def location(key: str) -> tuple[str, str | None]:
    """Where transformers loads a model from: a folder and None, or a hub id and its revision."""
    found = entry(key)
    if "path" not in found:
        return found["hub"], found["revision"]
    return str(paths.need(paths.PACKAGE / found["path"], "90_pilot_model")), None


def revision(key: str) -> str:
    """The model's revision for records: the first 12 digits of its weights' SHA-256, or the hub's commit.

    A hub revision such as `main` is resolved to the commit that the local cache or the hub has for it.
    """
    source, wanted = location(key)
    if wanted is None:
        weights = sorted(Path(source).glob("*.safetensors"))
        return manifest.sha256("".join(manifest.file_sha256(path) for path in weights))[:12]
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(source, revision=wanted)._commit_hash or wanted


def tokenizer(key: str):
    """The tokenizer of a model of `models.yaml`."""
    from transformers import AutoTokenizer

    source, wanted = location(key)
    return AutoTokenizer.from_pretrained(source, revision=wanted)


def encode(tokenizer, text: str) -> list[int]:
    """Token ids of a prompt: in the tokenizer's chat template if it has one, else as plain text."""
    if not tokenizer.chat_template:
        return tokenizer(text)["input_ids"]
    chat = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]


def load(key: str, device: str | None = None, dtype: str | None = None, experts: str = "grouped_mm"):
    """Load a model and its tokenizer for decoding.

    Args:
        key: key of `models.yaml` or a local checkpoint folder.
        device: default `cuda` if there is one, else `cpu`.
        dtype: default as `models.yaml` says, e.g. `float32`.
        experts: transformers' experts implementation.

    Raises:
        ValueError: unknown key, a model without MoE layers, or sizes other than `models.yaml` says.
    """
    from transformers import AutoModelForCausalLM

    source, wanted = location(key)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    kind = getattr(torch, dtype or entry(key)["dtype"])
    model = AutoModelForCausalLM.from_pretrained(source, revision=wanted, dtype=kind).to(device).eval()
    spec = describe(model).facts()
    model.set_experts_implementation(experts)
    wrong = {name: spec[name] for name in ("L", "E", "K", "H", "F") if entry(key).get(name, spec[name]) != spec[name]}
    if wrong:
        raise ValueError(f"{source} has {wrong}; needed: what data_manifests/models.yaml says of {key}")
    return model, tokenizer(key)
