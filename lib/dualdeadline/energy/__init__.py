"""Joules: of a GPU by NVML's total-energy counter, of CPU packages by RAPL, or a reason why neither can be read.

A counter gives what the whole device used, whoever used it. The idle power beside it is measured on the spot, shown,
and subtracted only where a name says `net`.

    with Meter() as meter: ...     .joules .net_joules .idle_watts .seconds .source
    per_token(call, tokens)        joules per token, every counter that can be read
    compare(calls, tokens)         several things in turn; ratio(...) of two of them
    per_megabyte(joules, before, after)   over what crossed the link between two stats()
"""

from dualdeadline.energy.sensors import NoCounter, Nvml, Rapl, counters
from dualdeadline.energy.meter import STEP_S, Meter, compare, per_megabyte, per_token, ratio, records

__all__ = [
    "STEP_S",
    "Meter",
    "NoCounter",
    "Nvml",
    "Rapl",
    "compare",
    "counters",
    "per_megabyte",
    "per_token",
    "ratio",
    "records",
]
