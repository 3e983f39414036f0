"""The shared expert: part of the layer, never of the cache. What it weighs, and that nothing of it is offloaded."""

from __future__ import annotations

from pathlib import Path

import torch

from dualdeadline import checkpoints, models, planning

NAMES = ("shared_expert", "shared_experts", "shared_mlp")


def skeleton(key: str) -> torch.nn.Module:
    """The text model of a key of `models.yaml` or a folder, without memory for its weights."""
    from transformers import AutoConfig

    source, commit = models.location(key)
    folder = Path(source) if commit is None else checkpoints.fetch(source, commit, weights=False)
    return planning.skeleton(AutoConfig.from_pretrained(folder).get_text_config())


def blocks(network: torch.nn.Module) -> list[tuple[torch.nn.Module, list[torch.nn.Module]]]:
    """Of each MoE layer the experts module that routes are captured at, and the modules that every token visits."""
    experts = [layer.experts for layer in models.describe(network).layers]
    parents = {
        id(module.experts): module for module in network.modules() if getattr(module, "experts", None) is not None
    }
    return [
        (own, [getattr(parents[id(own)], name) for name in NAMES if hasattr(parents[id(own)], name)]) for own in experts
    ]


def sizes(network: torch.nn.Module) -> dict[str, int]:
    """Bytes of one layer's experts: `shared` (0 if there is none) and `routed`, of one of E."""
    experts, shared = blocks(network)[0]
    routed = sum(value.nbytes for value in experts.parameters())
    total = sum(value.nbytes for part in shared for value in part.parameters())
    return {"shared": total, "routed": routed // models.describe(network).E}


def check(network: torch.nn.Module) -> dict[str, int]:
    """`sizes`, after asserting that routed and shared experts are apart.

    Raises:
        AssertionError: an experts module holds more or fewer than E experts, or a parameter is shared and routed.
    """
    count = models.describe(network).E
    for number, (experts, shared) in enumerate(blocks(network)):
        own = {id(value) for value in experts.parameters()}
        both = [value for part in shared for value in part.parameters() if id(value) in own]
        held = experts.down_proj.shape[0]
        assert held == count and not both, f"layer {number}: {held} experts, {len(both)} parameters shared and routed"
    return sizes(network)
