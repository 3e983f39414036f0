"""What must not go silently wrong with a model whose experts are elsewhere: moves, copies, forks, new weights."""

from __future__ import annotations

import functools
import os

import torch
from torch import Tensor, nn

from dualdeadline.engine.surgery import PARAMETERS, LayerExperts

NEEDED = "needed: model.dualdeadline.remove() first"


def unchanged(layer: LayerExperts) -> None:
    """Raise RuntimeError if a layer's experts module is in training mode, or was given weights of its own."""
    if layer.module.training:
        raise RuntimeError("the model is in training mode; needed: model.eval(), offloaded experts have no gradients")
    changed = layer.replaced()
    if changed:
        raise RuntimeError(
            f"{layer.name} was given another {changed} (an adapter, or new weights) while its experts are offloaded; "
            f"{NEEDED}, then offload again"
        )


def same_process(pid: int) -> None:
    """Raise RuntimeError in a process forked from the one that offloaded: neither threads nor CUDA came along."""
    if os.getpid() != pid:
        raise RuntimeError(
            f"the model was offloaded by process {pid}, this is {os.getpid()}; needed: workers that are spawned and "
            "load a model of their own, or none that run it"
        )


class Exact(torch.autograd.Function):
    """Lets a forward run with gradients switched on, and refuses the backward it has no weights for."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weights: Tensor, layer) -> Tensor:
        return layer()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("backward through offloaded experts; needed: model.dualdeadline.remove() before training")


class Guard:
    """Refuses what would leave an offloaded model half changed; state dicts get their experts from the store.

    `.to()`, `.half()`, `share_memory()` and all else that goes through `_apply` raise, on the model and on every part
    of it that holds experts, unless they change nothing; so does `load_state_dict`. `state_dict`, and with it
    `save_pretrained`, is whole: raw experts are the store's own memory, coded ones are decoded,
    those of another tier are fetched from there.

    Args:
        model: just offloaded. handle: its `engine.handle.Offloaded`.
    """

    def __init__(self, model: nn.Module, handle):
        self.store, self.hooks = handle.store, []
        experts = {layer.module for layer in handle.layers}
        self.modules = [module for module in model.modules() if experts & set(module.modules())]
        for module in self.modules:
            module._apply = functools.partial(_apply, module, (handle.layers[0].dtype, handle.options.device))
        for layer in handle.layers:
            self.hooks += [
                layer.module.register_state_dict_post_hook(functools.partial(self._fill, layer.number)),
                layer.module.register_load_state_dict_pre_hook(_refuse_load),
            ]

    def remove(self) -> None:
        """Let the model be changed again."""
        while self.hooks:
            self.hooks.pop().remove()
        while self.modules:
            self.modules.pop().__dict__.pop("_apply", None)

    def _fill(self, number: int, module: nn.Module, state: dict, prefix: str, metadata) -> None:
        for part, name in PARAMETERS.items():
            state[prefix + name] = self.store.whole(part, number)


def _refuse_load(module: nn.Module, state: dict, prefix: str, *others) -> None:
    raise RuntimeError(f"weights for {prefix.rstrip('.')}, whose experts are offloaded, would be lost; {NEEDED}")


def _apply(module: nn.Module, experts: tuple[torch.dtype, torch.device], change, recurse: bool = True) -> nn.Module:
    """In place of `nn.Module._apply`: the module as it is, if the change is none for any kind of its tensors.

    Args:
        experts: dtype and device of its slots.
    """
    values = [value for value in (*module.parameters(), *module.buffers()) if not value.is_meta]
    kinds = {experts, *((value.dtype, value.device) for value in values)}
    for dtype, device in sorted(kinds, key=str):
        probe = torch.empty(0, dtype=dtype, device=device)
        shared = probe.is_shared()
        with torch.no_grad():
            found = change(probe)
        if found is not probe or probe.is_shared() != shared:
            raise RuntimeError(
                f"{type(module).__name__} cannot be moved, cast or shared while its experts are offloaded; {NEEDED}"
            )
    return module
