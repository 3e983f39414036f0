"""The embedded MoE's training forward: OLMoE as one functional block, faster than stock at this size.

Parameters are a dict named as in transformers' `OlmoeForCausalLM.state_dict()`, so export is a cast.
With H = 128, F = 32, E = 64 a routed layer equals a dense gated layer of width E*F whose hidden units are
multiplied by their expert's routing weight, zero where an expert is not routed: static shapes, no sorting, no
host synchronisation, and the gradient of an expert that is not routed is exactly zero. It costs E/K times the
arithmetic of the routed product; `experts="sparse"` (module `sparse`) does the routed product in Triton.
"""

from __future__ import annotations

import math

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


def rotary(length: int, cfg, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine tables [length, head_dim], as transformers' default rotary embedding."""
    dim = cfg.hidden_size // cfg.num_attention_heads
    steps = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    angle = torch.arange(length, device=device).float()[:, None] / cfg.rope_parameters["rope_theta"] ** steps
    angle = torch.cat((angle, angle), -1)
    return angle.cos(), angle.sin()


def _rotate(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def attention(x, p, cos, sin, heads: int, eps: float, dtype):
    """Causal self-attention of the block with QK-norm over the whole width; x[B, S, H] float32 -> same."""
    batch, length, width = x.shape
    inner = rms_norm(x, p["input_norm"], eps).to(dtype)
    q, k, v = F.linear(inner, torch.cat((p["q"], p["k"], p["v"])).to(dtype)).split(width, -1)
    split = (batch, length, heads, width // heads)
    q = rms_norm(q, p["q_norm"], eps).view(split).transpose(1, 2)
    k = rms_norm(k, p["k_norm"], eps).view(split).transpose(1, 2)
    q, k = _rotate(q, cos, sin).to(dtype), _rotate(k, cos, sin).to(dtype)
    mixed = F.scaled_dot_product_attention(q, k, v.view(split).transpose(1, 2), is_causal=True)
    return F.linear(mixed.transpose(1, 2).reshape(batch, length, width), p["o"].to(dtype)).float()


def routed_mask(scores, top_k: int):
    """True for the `top_k` largest of each row, ties to the lower index; scores[N, E] -> bool[N, E].

    Counting who is larger is one fused kernel under inductor; torch.topk on rows of 64 is slower.
    """
    lower = torch.ones(scores.shape[-1], scores.shape[-1], dtype=torch.bool, device=scores.device).tril(-1)
    mine, other = scores.unsqueeze(-1), scores.unsqueeze(-2)
    return ((other > mine) | ((other == mine) & lower)).sum(-1, dtype=torch.int32) < top_k


def route(x, router, top_k: int, dtype):
    """Routing of x[N, H]: weights[N, E] (zero where not routed), balance loss, z-loss, share[E], mask[N, E].

    The balance loss is Switch's E * sum_e f_e P_e of this layer alone (Fedus et al. 2022, eq. 4-6), divided
    by K so that an even load gives 1; the z-loss is the mean squared logsumexp (Zoph et al. 2022, eq. 5).
    """
    logits = F.linear(x, router.to(dtype)).float()
    probabilities = logits.softmax(-1)
    mask = routed_mask(logits.detach(), top_k)
    load = mask.float().mean(0)
    balance = logits.shape[-1] / top_k * (load * probabilities.mean(0)).sum()
    return probabilities * mask, balance, logits.logsumexp(-1).square().mean(), load, mask


def dense_experts(x, weights, gate_up, down):
    """All experts as one gated layer of width E*F, hidden units scaled by their expert's weight.

    x[N, H], weights[N, E], gate_up[E, 2F, H], down[E, H, F] -> [N, H], in the dtype of x.
    """
    experts, double, width = gate_up.shape
    gate, up = F.linear(x, gate_up.reshape(-1, width)).view(-1, experts, double).chunk(2, -1)
    hidden = (F.silu(gate.float()) * up.float() * weights.unsqueeze(-1)).to(x.dtype)
    return hidden.flatten(1) @ down.transpose(1, 2).reshape(-1, width)


def dense_block(x, p, cos, sin, heads: int, top_k: int, eps: float, dtype, dropout: float = 0.0):
    """One decoder layer; x[B, S, H] float32 -> x, balance, z, load."""
    x = x + F.dropout(attention(x, p, cos, sin, heads, eps, dtype), dropout, dropout > 0)
    inner = rms_norm(x, p["post_norm"], eps).to(dtype).flatten(0, 1)
    weights, balance, z, load, _ = route(inner, p["router"], top_k, dtype)
    out = dense_experts(inner, weights, p["gate_up"].to(dtype), p["down"].to(dtype))
    return x + F.dropout(out.view_as(x).float(), dropout, dropout > 0), balance, z, load


def head_loss(x, targets, norm, embed, eps: float, dtype):
    """Mean cross entropy (nats per token) of x[B, S, H] against targets[B, S], tied output embedding."""
    logits = F.linear(rms_norm(x, norm, eps).to(dtype), embed.to(dtype)).flatten(0, 1).float()
    return F.cross_entropy(logits, targets.flatten())


def layer_params(params: dict, layer: int) -> dict:
    """Parameters of one layer under the short names that the block uses."""
    names = BLOCK | {"gate_up": GATE_UP, "down": DOWN}
    return {key: params[f"model.layers.{layer}.{name}"] for key, name in names.items()}


class Forward:
    """The training forward of one configuration.

    Args:
        cfg: OlmoeConfig. length: window length. device, dtype: where and in what the products run.
        experts: `dense` or `sparse` (Triton, CUDA only). compiled: compile the block and the loss, one each
            (all layers share one compiled block, so warm-up does not grow with L).
        dropout: rate on what attention and experts add to the residual; stock inference has none.
    """

    def __init__(self, cfg, length: int, device, dtype=torch.bfloat16, experts: str = "dense",
                 compiled: bool = False, dropout: float = 0.0):
        self.cfg, self.dtype, self.experts, self.dropout = cfg, dtype, experts, dropout
        self.cos, self.sin = rotary(length, cfg, device)
        if experts == "sparse":
            from dualdeadline.pretrain import sparse

            self.block = sparse.Block(compiled)
        elif experts == "dense":
            self.block = torch.compile(dense_block, dynamic=False) if compiled else dense_block
        else:
            raise ValueError(f"experts is {experts!r}; needed: dense or sparse")
        self.head = torch.compile(head_loss, dynamic=False) if compiled else head_loss

    def hidden(self, params: dict, tokens):
        """States before the last norm [B, S, H], and per-layer balance[L], z[L], load[L, E]."""
        cfg, length = self.cfg, tokens.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x, rows = F.embedding(tokens, params[EMBED]), []
        for layer in range(cfg.num_hidden_layers):
            x, *row = self.block(x, layer_params(params, layer), cos, sin, cfg.num_attention_heads,
                                 cfg.num_experts_per_tok, cfg.rms_norm_eps, self.dtype, self.dropout)
            rows.append(row)
        return x, *(torch.stack(column) for column in zip(*rows, strict=True))

    def logits(self, params: dict, tokens):
        """Logits [B, S, V], for tests."""
        x = rms_norm(self.hidden(params, tokens)[0], params[FINAL_NORM], self.cfg.rms_norm_eps)
        return F.linear(x.to(self.dtype), params[EMBED].to(self.dtype))

    def loss(self, params: dict, tokens, targets, balance_coef: float = 0.01, z_coef: float = 0.001):
        """Loss to minimise and a dict of its parts: cross entropy (nats), balance[L], z[L], load[L, E]."""
        x, balance, z, load = self.hidden(params, tokens)
        nats = self.head(x, targets, params[FINAL_NORM], params[EMBED], self.cfg.rms_norm_eps, self.dtype)
        total = nats + balance_coef * balance.sum() + z_coef * z.sum()
        parts = {"nats": nats, "balance": balance, "z": z, "load": load}
        return total, {name: value.detach() for name, value in parts.items()}
