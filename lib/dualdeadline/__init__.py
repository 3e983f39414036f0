"""DualDeadline: when do a routed expert's components need two deadlines?

Symbols used in every docstring and shape comment:

    T  tokens (decode steps)          L  MoE layers             E  routed experts per layer
    K  experts routed per token       H  hidden size            F  expert width
    C  cache slots                    N  rows of a batch (any number of tokens)

Units stand in names: `_ms` milliseconds, `_bytes` bytes, `_gbps` 1e9 bytes per second.
A gated expert is `down(silu(gate x) * up x)`; its components are gate/up `[2F, H]` and down `[H, F]`.
"""

import importlib

__version__ = "0.1.0"


def __getattr__(name: str):
    """`load`, `offload` and `plan`, imported when they are first asked for: transformers takes seconds."""
    homes = {
        "load": "dualdeadline.engine.loading",
        "offload": "dualdeadline.engine",
        "plan": "dualdeadline.planning",
    }
    if name not in homes:
        raise AttributeError(f"module 'dualdeadline' has no attribute {name!r}")
    return getattr(importlib.import_module(homes[name]), name)
