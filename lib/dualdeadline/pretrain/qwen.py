"""The second embedded MoE's training forward: the `qwen3_5_moe` text architecture, three delta-rule layers to one full.

Parameters are named as in transformers' `Qwen3_5MoeForCausalLM.state_dict()`. Sizes keep Qwen3.6-35B-A3B's proportions
at hidden size 64: 256 experts of width F = H/4, 8 routed, a gated shared expert of the same width, attention wider than
the residual, two key heads to four value heads, a quarter of a head rotated. No multi-token prediction.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from dualdeadline.pretrain import delta, model

COMMON = {
    "input_norm": "input_layernorm.weight",
    "post_norm": "post_attention_layernorm.weight",
    "router": model.BLOCK["router"],
    "gate_up": model.GATE_UP,
    "down": model.DOWN,
    "shared_gate": "mlp.shared_expert.gate_proj.weight",
    "shared_up": "mlp.shared_expert.up_proj.weight",
    "shared_down": "mlp.shared_expert.down_proj.weight",
    "shared_switch": "mlp.shared_expert_gate.weight",
}
SHARED = ("shared_gate", "shared_up", "shared_down", "shared_switch")
FULL = {key: model.BLOCK[key] for key in ("q", "k", "v", "o", "q_norm", "k_norm")}
LINEAR = {
    "qkv": "linear_attn.in_proj_qkv.weight",
    "z": "linear_attn.in_proj_z.weight",
    "b": "linear_attn.in_proj_b.weight",
    "a": "linear_attn.in_proj_a.weight",
    "conv": "linear_attn.conv1d.weight",
    "dt_bias": "linear_attn.dt_bias",
    "A_log": "linear_attn.A_log",
    "norm": "linear_attn.norm.weight",
    "out": "linear_attn.out_proj.weight",
}
MIXERS = {"full_attention": FULL, "linear_attention": LINEAR}
SPEED = 4.0  # exp(A_log) at first; a head's slowest and fastest decay per token:
DECAYS = (1 / 256, 1 / 2)


def config(**changes):
    """Qwen3_5MoeTextConfig of the second embedded model (7.5 M parameters); `changes` override fields."""
    from transformers import Qwen3_5MoeTextConfig

    fields = dict(
        vocab_size=8192,
        hidden_size=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=256,
        num_experts_per_tok=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        router_aux_loss_coef=0.01,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    )
    made = Qwen3_5MoeTextConfig(**(fields | changes))
    made.architectures = ["Qwen3_5MoeForCausalLM"]
    return made


class Sizes(NamedTuple):
    """What the block must know beside its parameters' shapes; `heads` of full attention, the rest of the delta rule."""

    heads: int
    head_dim: int
    key_heads: int
    key_dim: int
    value_dim: int
    top_k: int
    eps: float


def _mixer_shapes(cfg) -> dict[str, dict[str, tuple[int, ...]]]:
    hidden, wide = cfg.hidden_size, cfg.num_attention_heads * cfg.head_dim
    narrow, heads = cfg.num_key_value_heads * cfg.head_dim, cfg.linear_num_value_heads
    values = heads * cfg.linear_value_head_dim
    mixed = 2 * cfg.linear_num_key_heads * cfg.linear_key_head_dim + values
    full = {
        "q": (2 * wide, hidden),
        "k": (narrow, hidden),
        "v": (narrow, hidden),
        "o": (hidden, wide),
        "q_norm": (cfg.head_dim,),
        "k_norm": (cfg.head_dim,),
    }
    linear = {
        "qkv": (mixed, hidden),
        "z": (values, hidden),
        "b": (heads, hidden),
        "a": (heads, hidden),
        "conv": (mixed, 1, cfg.linear_conv_kernel_dim),
        "dt_bias": (heads,),
        "A_log": (heads,),
        "norm": (cfg.linear_value_head_dim,),
        "out": (hidden, values),
    }
    return {"full_attention": full, "linear_attention": linear}


def shapes(cfg) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter, in transformers' names."""
    h, f, e, shared = cfg.hidden_size, cfg.moe_intermediate_size, cfg.num_experts, cfg.shared_expert_intermediate_size
    common = {
        "input_norm": (h,),
        "post_norm": (h,),
        "router": (e, h),
        "gate_up": (e, 2 * f, h),
        "down": (e, h, f),
        "shared_gate": (shared, h),
        "shared_up": (shared, h),
        "shared_down": (h, shared),
        "shared_switch": (1, h),
    }
    named, mixers = {model.EMBED: (cfg.vocab_size, h)}, _mixer_shapes(cfg)
    for layer, kind in enumerate(cfg.layer_types):
        names = COMMON | MIXERS[kind]
        named |= {f"model.layers.{layer}.{names[key]}": shape for key, shape in (common | mixers[kind]).items()}
    return named | {model.FINAL_NORM: (h,)}


def initial(cfg, seed: int = 0) -> dict[str, torch.Tensor]:
    """Float32 parameters: fan-in normal, outputs into the residual scaled by 1/sqrt(2L), norms that multiply by one.

    K routing weights that add up to one shrink a sum of K experts by sqrt(K): their downs start that much wider. The
    delta rule's heads start with decays from a few tokens to a few hundred.
    """
    generator, params, kinds = torch.Generator().manual_seed(seed), {}, {}
    for names in (COMMON, FULL, LINEAR):
        kinds |= {name: key for key, name in names.items()}
    residual = 1 / math.sqrt(2 * cfg.num_hidden_layers)
    spread = {
        "o": residual,
        "out": residual,
        "shared_down": residual,
        "router": 0.25,
        "down": residual * math.sqrt(cfg.num_experts_per_tok),
    }
    decays = torch.logspace(*(math.log10(value) for value in DECAYS), cfg.linear_num_value_heads)
    fixed = {"A_log": decays.new_full((len(decays),), math.log(SPEED)), "dt_bias": (decays / SPEED).expm1().log()}
    for name, shape in shapes(cfg).items():
        kind = kinds.get(name.split(".", 3)[-1])
        if len(shape) == 1:
            plain = torch.ones(shape) if kind == "norm" else torch.zeros(shape)
            params[name] = fixed.get(kind, plain).clone()
            continue
        std = 0.05 if name == model.EMBED else shape[-1] ** -0.5
        params[name] = torch.randn(shape, generator=generator) * std * spread.get(kind, 1.0)
    params[model.EMBED][cfg.pad_token_id] = 0
    return params


def full_attention(inner, p, cos, sin, sizes: Sizes, dtype):
    """Causal self-attention: normed heads, partly rotated, output gated; inner[B, S, H] -> float32 [B, S, H]."""
    batch, length, _ = inner.shape
    width, wide, narrow = sizes.head_dim, p["q"].shape[0], p["k"].shape[0]
    q, k, v = F.linear(inner, torch.cat((p["q"], p["k"], p["v"])).to(dtype)).split((wide, narrow, narrow), -1)
    q, gate = q.view(batch, length, sizes.heads, 2 * width).chunk(2, -1)
    k, v = (part.view(batch, length, -1, width).transpose(1, 2) for part in (k, v))
    q = model.rms_norm(q, 1 + p["q_norm"], sizes.eps).transpose(1, 2)
    k, turned = model.rms_norm(k, 1 + p["k_norm"], sizes.eps), cos.shape[-1]
    q, k = (torch.cat((model.rotate(part[..., :turned], cos, sin), part[..., turned:]), -1) for part in (q, k))
    k, v = (part.repeat_interleave(wide // (2 * narrow), 1) for part in (k, v))
    mixed = F.scaled_dot_product_attention(q.to(dtype), k.to(dtype), v, is_causal=True).transpose(1, 2)
    gated = (mixed.float() * gate.float().sigmoid()).to(dtype).reshape(batch, length, -1)
    return F.linear(gated, p["o"].to(dtype)).float()


def linear_attention(inner, p, sizes: Sizes, dtype):
    """Gated delta net: short convolution, delta rule, gated norm; inner[B, S, H] -> float32 [B, S, H]."""
    batch, length, _ = inner.shape
    parts = [p[key] for key in ("qkv", "z", "b", "a")]
    made = F.linear(inner, torch.cat(parts).to(dtype)).split([len(part) for part in parts], -1)
    mixed, (z, b, a) = F.silu(delta.causal_conv(made[0], p["conv"])), made[1:]
    keys = sizes.key_heads * sizes.key_dim
    q, k, v = mixed.split((keys, keys, mixed.shape[-1] - 2 * keys), -1)
    q, k = (part.view(batch, length, sizes.key_heads, sizes.key_dim) for part in (q, k))
    v = v.view(batch, length, -1, sizes.value_dim)
    decay = -p["A_log"].exp() * F.softplus(a.float() + p["dt_bias"])
    out = delta.gated_delta_rule(q, k, v, decay, b.float().sigmoid(), dtype=dtype)
    out = model.rms_norm(out, p["norm"], sizes.eps) * F.silu(z.float()).view(out.shape)
    return F.linear(out.to(dtype).flatten(2), p["out"].to(dtype)).float()


def shared_expert(inner, p, dtype):
    """The expert that every token visits, times its sigmoid gate; inner[N, H] -> float32 [N, H]."""
    gate, up, switch = (F.linear(inner, p[key].to(dtype)) for key in ("shared_gate", "shared_up", "shared_switch"))
    hidden = (F.silu(gate.float()) * up.float()).to(dtype)
    return switch.float().sigmoid() * F.linear(hidden, p["shared_down"].to(dtype)).float()


def mix(x, p, cos, sin, sizes: Sizes, dtype, dropout: float = 0.0):
    """The block's first half, by the parameters it is given; x[B, S, H] float32 -> (x,)."""
    inner = model.rms_norm(x, 1 + p["input_norm"], sizes.eps).to(dtype)
    mixed = linear_attention(inner, p, sizes, dtype) if "qkv" in p else full_attention(inner, p, cos, sin, sizes, dtype)
    return (x + F.dropout(mixed, dropout, dropout > 0),)


def to_experts(x, p, cos, sin, sizes: Sizes, dtype, dropout: float = 0.0):
    """The shared expert, and what the routed experts are given: as `model.before_experts`."""
    inner = model.rms_norm(x, 1 + p["post_norm"], sizes.eps).to(dtype).flatten(0, 1)
    x = x + F.dropout(shared_expert(inner, p, dtype).view_as(x), dropout, dropout > 0)
    return x, inner, *model.route(inner, p["router"], sizes.top_k, dtype, renormalised=True)


class Forward(model.Forward):
    """`model.Forward` of this architecture; cfg: Qwen3_5MoeTextConfig."""

    def parts(self) -> list:
        return [(mix, ("input_norm", *FULL, *LINEAR)), (to_experts, ("post_norm", "router", *SHARED))]

    def measure(self) -> Sizes:
        cfg = self.cfg
        return Sizes(
            cfg.num_attention_heads,
            cfg.head_dim,
            cfg.linear_num_key_heads,
            cfg.linear_key_head_dim,
            cfg.linear_value_head_dim,
            cfg.num_experts_per_tok,
            cfg.rms_norm_eps,
        )

    def tables(self, length: int, device) -> tuple[torch.Tensor, torch.Tensor]:
        rope = self.cfg.rope_parameters
        return model.rotary(length, int(self.cfg.head_dim * rope["partial_rotary_factor"]), rope["rope_theta"], device)

    def layer_params(self, params: dict, layer: int) -> dict:
        names = COMMON | MIXERS[self.cfg.layer_types[layer]]
        return {key: params[f"model.layers.{layer}.{name}"] for key, name in names.items()}

    def norm(self, params: dict):
        return 1 + params[model.FINAL_NORM]
