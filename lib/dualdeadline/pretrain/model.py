"""The embedded MoE's training forward: OLMoE as one functional block, faster than stock at this size.

Parameters are a dict named as in transformers' `OlmoeForCausalLM.state_dict()`, so export is a cast.
With H = 128, F = 32, E = 64 a routed layer equals a dense gated layer of width E*F whose hidden units are
multiplied by their expert's routing weight, zero where an expert is not routed: static shapes, no sorting, no
host synchronisation, and the gradient of an expert that is not routed is exactly zero. It costs E/K times the
arithmetic of the routed product; `experts="sparse"` (module `sparse`) does the routed product in Triton.
The second embedded model (module `qwen`) shares the router, the experts, the loss and `Forward`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

BLOCK = {
    "q": "self_attn.q_proj.weight", "k": "self_attn.k_proj.weight", "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight", "q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight",
    "input_norm": "input_layernorm.weight", "post_norm": "post_attention_layernorm.weight",
    "router": "mlp.gate.weight",
}
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
EMBED, FINAL_NORM = "model.embed_tokens.weight", "model.norm.weight"


def config(**changes):
    """OlmoeConfig of the embedded model (14.8 M parameters); `changes` override fields."""
    from transformers import OlmoeConfig

    fields = dict(
        vocab_size=8192, hidden_size=128, intermediate_size=32, num_hidden_layers=16, num_attention_heads=4,
        num_key_value_heads=4, num_experts=64, num_experts_per_tok=8, norm_topk_prob=False,
        tie_word_embeddings=True, max_position_embeddings=1024, router_aux_loss_coef=0.01, bos_token_id=0,
        eos_token_id=0, pad_token_id=1, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    made = OlmoeConfig(**(fields | changes))
    made.architectures = ["OlmoeForCausalLM"]
    return made


def shapes(cfg) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter, in transformers' names and order."""
    h, f, e = cfg.hidden_size, cfg.intermediate_size, cfg.num_experts
    block = dict.fromkeys(("q_norm", "k_norm", "input_norm", "post_norm"), (h,))
    block |= dict.fromkeys("qkvo", (h, h)) | {"router": (e, h)}
    named = {EMBED: (cfg.vocab_size, h)}
    for layer in range(cfg.num_hidden_layers):
        named |= {f"model.layers.{layer}.{BLOCK[key]}": shape for key, shape in block.items()}
        named |= {f"model.layers.{layer}.{GATE_UP}": (e, 2 * f, h), f"model.layers.{layer}.{DOWN}": (e, h, f)}
    return named | {FINAL_NORM: (h,)}


def initial(cfg, seed: int = 0) -> dict[str, torch.Tensor]:
    """Float32 parameters: fan-in normal, outputs into the residual scaled by 1/sqrt(2L), norms one.

    Routing weights are softmax shares of about 1/E at first, so down projections start sqrt(E/K) wider.
    """
    generator, params = torch.Generator().manual_seed(seed), {}
    residual = 1 / math.sqrt(2 * cfg.num_hidden_layers)
    for name, shape in shapes(cfg).items():
        if len(shape) == 1:
            params[name] = torch.ones(shape)
            continue
        std = 0.05 if name == EMBED else shape[-1] ** -0.5
        if name.endswith((BLOCK["o"], DOWN)):
            std *= residual
        if name.endswith(BLOCK["router"]):
            std *= 0.25  # near even at first, so that the balance loss need not repair the start
        if name.endswith(DOWN):
            std *= math.sqrt(cfg.num_experts / cfg.num_experts_per_tok)
        params[name] = torch.randn(shape, generator=generator) * std
    params[EMBED][cfg.pad_token_id] = 0
    return params


def rms_norm(x, weight, eps: float):
    """Root-mean-square norm in float32; the result is float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotary(length: int, dim: int, theta: float, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine tables [length, dim], as transformers' default rotary embedding."""
    steps = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    angle = torch.arange(length, device=device).float()[:, None] / theta**steps
    angle = torch.cat((angle, angle), -1)
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """Rotary embedding of x[..., S, D] by tables [S, D]."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Sizes(NamedTuple):
    """What the block must know beside its parameters' shapes."""

    heads: int
    top_k: int
    eps: float


def attention(x, p, cos, sin, sizes: Sizes, dtype):
    """Causal self-attention of the block with QK-norm over the whole width; x[B, S, H] float32 -> same."""
    (batch, length, width), heads, eps = x.shape, sizes.heads, sizes.eps
    inner = rms_norm(x, p["input_norm"], eps).to(dtype)
    q, k, v = F.linear(inner, torch.cat((p["q"], p["k"], p["v"])).to(dtype)).split(width, -1)
    split = (batch, length, heads, width // heads)
    q = rms_norm(q, p["q_norm"], eps).view(split).transpose(1, 2)
    k = rms_norm(k, p["k_norm"], eps).view(split).transpose(1, 2)
    q, k = rotate(q, cos, sin).to(dtype), rotate(k, cos, sin).to(dtype)
    mixed = F.scaled_dot_product_attention(q, k, v.view(split).transpose(1, 2), is_causal=True)
    return F.linear(mixed.transpose(1, 2).reshape(batch, length, width), p["o"].to(dtype)).float()


def top(scores, top_k: int):
    """The `top_k` largest of each row in falling order, ties to the lower index; scores[N, E] float32.

    Returns index[N, K], the scores there [N, K] (with gradient) and True where chosen [N, E]. K passes over a row are
    one fused kernel under inductor, and so is the gradient; torch.topk and its scatter are slower on rows this short.
    """
    number = torch.arange(scores.shape[-1], device=scores.device)
    fixed, chosen = scores.detach(), torch.zeros_like(scores, dtype=torch.bool)
    index, values = [], []
    for _ in range(top_k):
        index.append(fixed.masked_fill(chosen, float("-inf")).argmax(-1))
        here = number == index[-1].unsqueeze(-1)
        values.append((scores * here).sum(-1))
        chosen = chosen | here
    return torch.stack(index, -1), torch.stack(values, -1), chosen


def route(x, router, top_k: int, dtype, renormalised: bool = False):
    """Routing of x[N, H]: weights[N, K], index[N, K], balance loss, z-loss, share[E].

    Weights are shares of a softmax over all E, or (`renormalised`) over the K chosen, which then add up to one.
    The balance loss is Switch's E * sum_e f_e P_e of this layer alone (Fedus et al. 2022, eq. 4-6), divided
    by K so that an even load gives 1; the z-loss is the mean squared logsumexp (Zoph et al. 2022, eq. 5).
    """
    logits = F.linear(x, router.to(dtype)).float()
    index, values, chosen = top(logits, top_k)
    total = logits.logsumexp(-1, keepdim=True)
    weights = values.softmax(-1) if renormalised else (values - total).exp()
    load = chosen.float().mean(0)
    balance = logits.shape[-1] / top_k * (load * (logits - total).exp().mean(0)).sum()
    return weights, index, balance, total.square().mean(), load


def dense_experts(x, weights, index, gate_up, down):
    """All experts as one gated layer of width E*F, hidden units scaled by their expert's weight.

    x[N, H], weights[N, K], index[N, K], gate_up[E, 2F, H], down[E, H, F] -> [N, H], in the dtype of x.
    """
    experts, double, width = gate_up.shape
    number = torch.arange(experts, device=x.device)
    spread = sum(weights[:, k : k + 1] * (number == index[:, k : k + 1]) for k in range(index.shape[1]))
    gate, up = F.linear(x, gate_up.reshape(-1, width)).view(-1, experts, double).chunk(2, -1)
    hidden = (F.silu(gate.float()) * up.float() * spread.unsqueeze(-1)).to(x.dtype)
    return hidden.flatten(1) @ down.transpose(1, 2).reshape(-1, width)


def before_experts(x, p, cos, sin, sizes: Sizes, dtype, dropout: float = 0.0):
    """The block up to its experts; x[B, S, H] float32 -> x, the experts' input [N, H], and what `route` gives."""
    x = x + F.dropout(attention(x, p, cos, sin, sizes, dtype), dropout, dropout > 0)
    inner = rms_norm(x, p["post_norm"], sizes.eps).to(dtype).flatten(0, 1)
    return x, inner, *route(inner, p["router"], sizes.top_k, dtype)


class Block:
    """One decoder layer; x[B, S, H] float32 -> x, balance[], z[], load[E].

    Args:
        parts: functions of (x, p, cos, sin, sizes, dtype, dropout) that follow each other, each with the names of the
            parameters that it reads; all give x, the last one what `before_experts` gives.
        experts: `dense` or `sparse`. compiled: compile every part by itself, so that layers share what they can.
    """

    def __init__(self, parts, experts: str, compiled: bool):
        def made(work):
            return torch.compile(work, dynamic=False) if compiled else work

        self.parts = [(made(work), keys) for work, keys in parts]
        if experts == "sparse":
            from dualdeadline.pretrain import sparse

            tables = made(sparse.tables)
            self.experts = lambda *given: sparse.Experts.apply(*given, tables)
        elif experts == "dense":
            self.experts = made(dense_experts)
        else:
            raise ValueError(f"experts is {experts!r}; needed: dense or sparse")

    def __call__(self, x, p, cos, sin, sizes, dtype, dropout: float = 0.0):
        made = (x,)
        for work, keys in self.parts:
            made = work(made[0], {key: p[key] for key in keys if key in p}, cos, sin, sizes, dtype, dropout)
        x, inner, weights, index, *losses = made
        out = self.experts(inner, weights, index, p["gate_up"].to(dtype), p["down"].to(dtype))
        return x + F.dropout(out.view_as(x).float(), dropout, dropout > 0), *losses


def head_loss(x, targets, norm, embed, eps: float, dtype):
    """Mean cross entropy (nats per token) of x[B, S, H] against targets[B, S], tied output embedding."""
    logits = F.linear(rms_norm(x, norm, eps).to(dtype), embed.to(dtype)).flatten(0, 1).float()
    return F.cross_entropy(logits, targets.flatten())


class Forward:
    """The training forward of one configuration; a subclass is another architecture.

    Args:
        cfg: the model's config. length: window length. device, dtype: where and in what the products run.
        experts: `dense` or `sparse` (Triton, CUDA only). compiled: compile the block's parts and the loss,
            one each (all layers of a kind share them, so warm-up does not grow with L).
        dropout: rate on what attention and experts add to the residual; stock inference has none.
    """

    def __init__(self, cfg, length: int, device, dtype=torch.bfloat16, experts: str = "dense",
                 compiled: bool = False, dropout: float = 0.0):
        self.cfg, self.dtype, self.experts, self.dropout = cfg, dtype, experts, dropout
        self.sizes = self.measure()
        self.cos, self.sin = self.tables(length, device)
        self.block = Block(self.parts(), experts, compiled)
        self.head = torch.compile(head_loss, dynamic=False) if compiled else head_loss

    def parts(self) -> list:
        """Functions of one layer up to its experts; see `Block`."""
        return [(before_experts, tuple(BLOCK))]

    def measure(self) -> Sizes:
        """Sizes that the block is given."""
        cfg = self.cfg
        return Sizes(cfg.num_attention_heads, cfg.num_experts_per_tok, cfg.rms_norm_eps)

    def tables(self, length: int, device) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotary tables [length, rotated width of a head]."""
        cfg = self.cfg
        return rotary(length, cfg.hidden_size // cfg.num_attention_heads, cfg.rope_parameters["rope_theta"], device)

    def layer_params(self, params: dict, layer: int) -> dict:
        """Parameters of one layer under the short names that the block uses."""
        names = BLOCK | {"gate_up": GATE_UP, "down": DOWN}
        return {key: params[f"model.layers.{layer}.{name}"] for key, name in names.items()}

    def norm(self, params: dict):
        """What the last norm multiplies by [H]."""
        return params[FINAL_NORM]

    def hidden(self, params: dict, tokens):
        """States before the last norm [B, S, H], and per-layer balance[L], z[L], load[L, E]."""
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        x, rows = F.embedding(tokens, params[EMBED]), []
        for layer in range(self.cfg.num_hidden_layers):
            p = self.layer_params(params, layer)
            x, *row = self.block(x, p, cos, sin, self.sizes, self.dtype, self.dropout)
            rows.append(row)
        return x, *(torch.stack(column) for column in zip(*rows, strict=True))

    def logits(self, params: dict, tokens):
        """Logits [B, S, V], for tests."""
        x = rms_norm(self.hidden(params, tokens)[0], self.norm(params), self.cfg.rms_norm_eps)
        return F.linear(x.to(self.dtype), params[EMBED].to(self.dtype))

    def loss(self, params: dict, tokens, targets, balance_coef: float = 0.01, z_coef: float = 0.001):
        """Loss to minimise and a dict of its parts: cross entropy (nats), balance[L], z[L], load[L, E]."""
        x, balance, z, load = self.hidden(params, tokens)
        nats = self.head(x, targets, self.norm(params), params[EMBED], self.cfg.rms_norm_eps, self.dtype)
        total = nats + balance_coef * balance.sum() + z_coef * z.sum()
        parts = {"nats": nats, "balance": balance, "z": z, "load": load}
        return total, {name: value.detach() for name, value in parts.items()}
