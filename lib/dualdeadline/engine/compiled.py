"""torch.compile of a model's forward: whole, else in parts, else not at all, and said so."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from dualdeadline.kernels import topk

RECOMPILES = 64  # torch.compile's own limit of 8 is used up by a few batch and cache sizes


class SmallTopK(CustomGraphPass):
    """Puts the small top-k kernel where a router calls torch's."""

    def __call__(self, graph) -> None:
        topk.replace(graph)

    def uuid(self):
        """What compiled code is cached by."""
        return get_hash_for_files((topk.__file__, __file__))


def options() -> dict[str, Any]:
    """Inductor's options: tuned kernels, since matrix times vector is most of a decode step; graphs are ours."""
    return {
        "triton.cudagraphs": False,
        "coordinate_descent_tuning": True,
        "post_grad_custom_post_pass": SmallTopK(),
    }


class Compiled:
    """`torch.compile`'s version of a forward, without CUDA graphs of its own; calls return None if there is none."""

    def __init__(self, forward: Callable, tell: Callable[[str, str], None]):
        self._tell, self._told = tell, False
        self._ways = [
            (how, torch.compile(forward, fullgraph=how == "whole", dynamic=False, options=options()))
            for how in ("whole", "in parts")
        ]

    def __call__(self, call: dict[str, Any]):
        from torch import _dynamo

        while self._ways:
            how, forward = self._ways[0]
            try:  # in parts, what does not compile runs as it is; an error here comes before anything has run
                with _dynamo.config.patch(recompile_limit=RECOMPILES, suppress_errors=how == "in parts"):
                    output = forward(**call)
            except _dynamo.exc.TorchDynamoException as error:
                self._ways.pop(0)
                problem = f"not compiled {how}: {type(error).__name__}: {str(error).splitlines()[0]}"
                self._tell("compile", problem)
                if not self._ways:
                    warnings.warn(f"decode steps run uncompiled; {problem}", stacklevel=6)
                continue
            if not self._told:
                self._tell("compile", f"compiled {how}")
            self._told = True
            return output
        return None
