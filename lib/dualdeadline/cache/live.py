"""Live control of prefetch. A guess is judged by the next look-up of its own layer, the one it was made for: in time if
that asks for it, else late, whatever becomes of it; so wrong ones show at once, and not only when they are evicted.
`control` float32[6] holds (precision, weight, break-even, calls, pause, waiting). Precision is the share of guesses in
time, a running mean over all layers and both components whose weight is cut to WINDOW after each call of `admit`, so
that older ones fade. Where it falls below the break-even, the next `pause` calls do nothing and the pause doubles, up
to LONGEST; then guesses are on trial, with the weight of TRIAL right ones in their favour. A pause that was earned by
a full WINDOW above the break-even is SHORTEST again.
"""

from __future__ import annotations

import torch
from torch import Tensor

EVENTS = ("hits", "misses", "fetched_ahead", "useful", "wasted", "in_time", "late")  # counted of each component
USEFUL, WASTED, IN_TIME, LATE = (EVENTS.index(name) for name in ("useful", "wasted", "in_time", "late"))
WINDOW = 128  # judged components that the precision remembers, about four decode steps of 16 layers; not tuned
PRIOR = 32  # right ones that a new estimate starts with, so that the first wrong ones do not decide
TRIAL = 4  # right ones that it starts with after a pause
SHORTEST, LONGEST = 64, 4096  # calls of a pause: four decode steps of 16 layers, and enough to make trials cost nothing
CALLS = 2**20  # calls are counted modulo this, which float32 holds exactly


def control(break_even: float, device=None) -> Tensor:
    """Control of prefetch, float32[6]: on until guesses show less precision than `break_even`.

    A break-even of 0 never switches prefetch off, one above 1 leaves single calls between pauses.
    """
    return torch.tensor([1.0, PRIOR, break_even, 0.0, SHORTEST, 0.0], dtype=torch.float32, device=device)


def is_on(control: Tensor) -> bool:
    """Whether the next call of `admit` acts; waits for the device."""
    return float(control[5]) == 0


def settle(tables, control: Tensor) -> None:
    """Count a call of `admit`, take in what the counters of all layers show beyond `settled`, and decide.

    Args:
        tables: `SlotTables` on the CPU. control: changed in place.
    """
    state, settled = control.numpy(), tables.settled.numpy()
    total = tables.counters.numpy().sum(0).reshape(2, len(EVENTS)).sum(0)[[IN_TIME, LATE]]
    right, both = int(total[0] - settled[0]), int((total - settled).sum())
    precision, weight, least, calls, pause, waiting = control.tolist()
    if both > 0:  # in double precision, whose products of two float32 are exact
        state[0], state[1] = (precision * weight + right) / (weight + both), min(weight + both, WINDOW)
    state[3] = (int(calls) + 1) % CALLS
    settled[:] = total
    if waiting > 0:
        state[5] = waiting - 1
        if waiting == 1:
            state[0], state[1] = 1, TRIAL
    elif state[0] < least:
        state[4], state[5] = min(2 * pause, LONGEST), pause
    elif state[1] == WINDOW:
        state[4] = SHORTEST
