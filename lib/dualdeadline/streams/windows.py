"""Layers of transformers' own OLMoE, cut at the router: how long a layer computes, eager and in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import torch

from dualdeadline.streams.bench import Variant, graph, interleaved

OLMOE_CONFIG = dict(
    hidden_size=2048,
    intermediate_size=1024,
    num_hidden_layers=16,
    num_attention_heads=16,
    num_key_value_heads=16,
    num_experts=64,
    num_experts_per_tok=8,
    vocab_size=50304,
)


class StockLayers:
    """One decode step of a stock model with random weights, layer by layer.

    Args:
        context: tokens that the static cache holds and attention reads.
        experts_implementation: of transformers, for `after`.
        sizes: overrides of `OLMOE_CONFIG`.
    """

    def __init__(
        self, context: int = 512, device="cuda", experts_implementation: str = "eager", seed: int = 0, **sizes
    ):
        from transformers import AutoModelForCausalLM, OlmoeConfig, StaticCache  # seconds, where no GPU needs them

        config = OlmoeConfig(**(OLMOE_CONFIG | sizes))
        torch.manual_seed(seed)
        with torch.device(device):
            self.model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        self.model.set_experts_implementation(experts_implementation)
        self.layers = self.model.model.layers
        self.hidden = torch.randn(1, 1, config.hidden_size, device=device, dtype=torch.bfloat16)
        self.place = torch.tensor([[context - 1]], device=device)
        self.cache = StaticCache(config=config, max_cache_len=context)
        self.rotary = self.model.model.rotary_emb(self.hidden, position_ids=self.place)
        self.routed: dict[int, tuple] = {}
        with torch.inference_mode():
            for number in range(len(self.layers)):  # the cache allocates at its first use
                self.before(number)

    @torch.inference_mode()
    def before(self, number: int) -> None:
        """From a layer's input to its router's choice."""
        layer = self.layers[number]
        attended, _ = layer.self_attn(
            hidden_states=layer.input_layernorm(self.hidden),
            attention_mask=None,
            past_key_values=self.cache,
            position_ids=self.place,
            cache_position=self.place[0],
            position_embeddings=self.rotary,
        )
        residual = self.hidden + attended
        state = layer.post_attention_layernorm(residual)
        _, weights, ids = layer.mlp.gate(state)
        self.routed[number] = state, ids, weights, residual

    @torch.inference_mode()
    def after(self, number: int) -> torch.Tensor:
        """The routed experts and the residual sum."""
        state, ids, weights, residual = self.routed[number]
        return residual + self.layers[number].mlp.experts(state[0], ids, weights).view_as(residual)

    @torch.inference_mode()
    def rewind(self, place: int | None = None) -> None:
        """Let the next step write the last place of the cache, or `place`: the cache counts the steps it has seen."""
        for layer in self.cache.layers:
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length.fill_(int(self.place) if place is None else place)

    def graphs(self, part: str = "before") -> list[Callable[[], None]]:
        """Each layer's part as a CUDA graph."""
        return [graph(lambda number=number: getattr(self, part)(number)) for number in range(len(self.layers))]


def windows(stock: StockLayers, samples: int = 50, parts=("before", "after")) -> pd.DataFrame:
    """Time of each layer's parts, host-launched and (`before` only) in a CUDA graph.

    The stock eager experts choose their loop on the host, so that part cannot be captured.

    Returns:
        DataFrame(layer, part, mode, ms, low, high, n).

    Raises:
        ValueError: more samples than the cache has places for.
    """
    stock.rewind(0)
    if 3 * samples > int(stock.place):
        most = int(stock.place) // 3  # each sample fills a place of the cache
        raise ValueError(f"samples is {samples}; needed: at most {most}, or a longer context")
    variants = {}
    for number in range(len(stock.layers)):
        for part in parts:
            call = getattr(stock, part)
            variants[number, part, "eager"] = Variant(lambda turn, call=call, number=number: call(number))
    for number, replay in enumerate(stock.graphs()):
        variants[number, "before", "graph"] = Variant(lambda turn, replay=replay: replay(), queued=True)
    found = interleaved(variants, samples, device=stock.hidden.device)
    rows = [(*key, *np.percentile(times, (50, 20, 80)), len(times)) for key, times in found.items()]
    return pd.DataFrame(rows, columns=["layer", "part", "mode", "ms", "low", "high", "n"])
