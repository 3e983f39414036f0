"""Decode traces: what a model routed at every decode step, captured at its experts modules.

`collect` runs the decode loop and writes one safetensors file per prompt; `TraceStore` reads them back.
`shards.collect_part` is one process's share of it (torchrun), `python -m dualdeadline.traces` its command.
"""

from dualdeadline.traces.collection import collect
from dualdeadline.traces.sampling import Sampling
from dualdeadline.traces.statistics import chance_reuse, check_capture, expert_load, overhead, repetition, reuse
from dualdeadline.traces.store import Trace, TraceStore

__all__ = [
    "Sampling", "Trace", "TraceStore", "chance_reuse", "check_capture", "collect", "expert_load", "overhead",
    "repetition", "reuse",
]
