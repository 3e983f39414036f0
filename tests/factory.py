"""Traces of a made-up MoE: random routers on states that drift over tokens and over layers."""

from __future__ import annotations

import torch
from dualdeadline.models import Routers
from dualdeadline.traces import Trace


def synthetic_routers(layers=5, experts=16, hidden=32, seed=0, norm=True) -> Routers:
    """Random softmax routers behind norms with uneven factors."""
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(layers, experts, hidden, generator=draw) * 3 * hidden**-0.5
    factor = 0.5 + torch.rand(layers, hidden, generator=draw) if norm else None
    return Routers(weight=weight, bias=None, norm=factor, correction=None, eps=1e-5, kind="softmax",
                   norm_topk_prob=False, scaling=1.0)


def synthetic_trace(prompts=12, tokens=24, layers=5, experts=16, routed=4, hidden=32, seed=0, model_seed=0,
                    dtype=torch.float32) -> Trace:
    """A trace whose routes follow from its states, as a decoder's do.

    The residual stream starts from a slowly changing token state; each layer adds a fixed linear map of it
    ("attention"), noise, and the directions of the routed experts. So gate-ahead works, a learned map works
    better, the previous token helps a little, and the ids of another layer say nothing by themselves.
    """
    routers = synthetic_routers(layers, experts, hidden, model_seed)
    model = torch.Generator().manual_seed(1000 + model_seed)
    maps = torch.randn(layers, hidden, hidden, generator=model) * 0.5 * hidden**-0.5
    directions = torch.randn(layers, experts, hidden, generator=model)
    center = torch.randn(hidden, generator=model)  # makes some experts popular
    draw = torch.Generator().manual_seed(2000 + seed)
    count = prompts * tokens
    state = _drift(prompts, tokens, hidden, draw) + 0.5 * center
    names = ("routes", "weights", "router_input", "router_logits", "layer_input")
    parts: dict[str, list] = {name: [] for name in names}
    for layer in range(layers):
        parts["layer_input"].append(state)
        state = state + state @ maps[layer] + 0.2 * torch.randn(count, hidden, generator=draw)
        read = state * torch.rsqrt(state.square().mean(-1, keepdim=True) + routers.eps) * routers.norm[layer]
        logits = routers.logits(layer, read)
        weights, ids = logits.softmax(-1).topk(routed, -1)
        state = state + torch.einsum("nk,nkh->nh", weights, directions[layer][ids])
        for name, value in zip(names, (ids, weights, read, logits)):
            parts[name].append(value)
    stacked = {name: torch.stack(value, 1) for name, value in parts.items()}
    stacked = {name: value if name == "routes" else value.to(dtype) for name, value in stacked.items()}
    return Trace(**stacked, tokens=torch.zeros(count, dtype=torch.long),
                 prompt=torch.arange(prompts).repeat_interleave(tokens), num_experts=experts,
                 prompt_ids=[f"prompt{i}" for i in range(prompts)], routers=routers,
                 source=["gsm_symbolic" if i % 3 else "humaneval" for i in range(prompts)])


def _drift(prompts: int, tokens: int, hidden: int, draw: torch.Generator) -> torch.Tensor:
    """[prompts * tokens, hidden]: an autoregressive walk per prompt with unit variance."""
    noise = torch.randn(prompts, tokens, hidden, generator=draw)
    walk = [noise[:, 0]]
    for step in range(1, tokens):
        walk.append(0.6 * walk[-1] + 0.8 * noise[:, step])
    return torch.stack(walk, 1).flatten(0, 1)
