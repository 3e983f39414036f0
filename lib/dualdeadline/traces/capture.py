"""Forward hooks that read what the experts modules are given; nothing is recomputed and nothing changed."""

from __future__ import annotations

import itertools

import torch

from dualdeadline.models import MoESpec

FIELDS = ("router_input", "routes", "weights", "router_logits", "layer_input")


def device_of(tensor: torch.Tensor) -> torch.device:
    """Which tensors may share a buffer."""
    return tensor.device


class Capture:
    """Context manager: while open, every decode step's routing goes into buffers [steps,L,N,...].

    Hooks only keep references; `take` stacks each field's L tensors at the end of a step in one call, which
    costs a fraction of copying them one by one inside the hooks. Of a model that is spread over devices every
    field has one buffer for each run of layers whose tensors lie on the same one.

    Args:
        spec: the model's MoE layers.
        steps: the most decode steps that will be taken.
    """

    def __init__(self, spec: MoESpec, steps: int):
        self.spec, self.steps, self.taken = spec, steps, 0
        self.buffers: dict[str, list[torch.Tensor]] = {}
        self._seen: dict[str, list[torch.Tensor]] = {field: [] for field in FIELDS}
        self._handles: list = []

    def __enter__(self) -> Capture:
        for layer in self.spec.layers:
            self._handles += [
                layer.decoder.register_forward_pre_hook(self._on_layer, with_kwargs=True),
                layer.router.register_forward_hook(self._on_router),
                layer.experts.register_forward_pre_hook(self._on_experts),
            ]
        return self

    def __exit__(self, *_) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _on_layer(self, _module, args, kwargs) -> None:
        self._seen["layer_input"].append(args[0] if args else kwargs["hidden_states"])

    def _on_router(self, _module, _args, output) -> None:
        # the logits stand at another place in each family's output, but only they have E columns
        logits = next(o for o in output if o.is_floating_point() and o.shape[-1] == self.spec.E)
        self._seen["router_logits"].append(logits)

    def _on_experts(self, _module, args) -> None:
        hidden, index, weights = args[:3]
        self._seen["router_input"].append(hidden)
        self._seen["routes"].append(index)
        self._seen["weights"].append(weights)

    def take(self) -> None:
        """Close a decode step: move what its hooks saw into the buffers.

        Raises:
            RuntimeError: the step did not run every MoE layer exactly once.
        """
        for field, seen in self._seen.items():
            if len(seen) != self.spec.L:
                raise RuntimeError(f"a decode step gave {len(seen)} of {field}; needed: one per MoE layer "
                                   f"({self.spec.L})")
            parts = [list(part) for _, part in itertools.groupby(seen, device_of)]
            if field not in self.buffers:
                self.buffers[field] = [part[0].new_empty((self.steps, len(part), *part[0].shape)) for part in parts]
            for buffer, part in zip(self.buffers[field], parts, strict=True):
                torch.stack(part, out=buffer[self.taken])
            seen.clear()
        self.taken += 1

    def rows(self) -> dict[str, torch.Tensor]:
        """Everything taken, on the CPU: name -> [N,steps taken,L,...], each row contiguous.

        Routes come in the order of falling weight: most routers choose in that order, and those that do not
        sort (DeepSeek's `topk(sorted=False)`) are put into it, ties kept as executed.
        """
        found = {}
        for field, buffers in self.buffers.items():
            moved = torch.cat([buffer[: self.taken].cpu() for buffer in buffers], dim=1)
            width = moved.shape[-1]
            found[field] = moved.reshape(self.taken, self.spec.L, -1, width).permute(2, 0, 1, 3).contiguous()
        order = found["weights"].argsort(dim=-1, descending=True, stable=True)
        found["weights"] = found["weights"].gather(-1, order)
        found["routes"] = found["routes"].gather(-1, order).to(torch.int16)
        return found
