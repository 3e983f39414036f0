"""Energy of what runs: of a block of code, per token, of one thing over another, per megabyte."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd

from dualdeadline.energy.sensors import counters

MB = 1e6
IDLE_S = 1.0  # of silence before a measurement
STEP_S = 0.25  # counters tell of the past: NVML's moves every 20 to 100 ms, so shorter spans say little
COLUMNS = ["source", "metric", "unit", "value", "tokens", "seconds"]


class Meter:
    """Energy of what runs inside: `with Meter() as meter: work()`.

    Args:
        counter: of `counters()`; default: the first. idle_s: seconds of silence before, for the idle power; 0: none.

    Attributes:
        joules: as counted, idle power included. net_joules: without it. seconds, idle_watts, source.
        Not a number where nothing can be read, or idle power was not measured.
    """

    def __init__(self, counter=None, idle_s: float = IDLE_S):
        self.counter, self.idle_s = counter or counters()[0], idle_s
        self.source, self.joules, self.seconds = self.counter.source, float("nan"), float("nan")
        self.idle_watts = float("nan")

    @property
    def blind(self) -> bool:
        """Whether there is nothing to read."""
        return self.source.startswith("none")

    def __enter__(self) -> Meter:
        if self.idle_s > 0:
            self.idle_watts = _idle([self], self.idle_s)[0]
        self.begun, self.before = self.now()
        return self

    def __exit__(self, *error) -> None:
        ended, after = self.now()
        self.seconds, self.joules = ended - self.begun, self.counter.since(self.before, after)

    def now(self) -> tuple[float, object]:
        """Time and counter when the GPU has done what it was given."""
        _synchronize()
        return time.perf_counter(), self.counter.read()

    @property
    def net_joules(self) -> float:
        return self.joules - self.idle_watts * self.seconds


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def per_token(
    call: Callable[[], object], tokens: int, seconds: float = 5.0, idle_s: float = IDLE_S, found: list | None = None
) -> pd.DataFrame:
    """Joules per token of something that makes `tokens` at each call, run again and again for at least some seconds.

    Args:
        idle_s: silence before, in which idle power is measured.
        found: counters; default: all that can be read. All of them measure the same run.

    Returns:
        DataFrame(source, metric, unit, value, tokens, seconds): joules_per_token, net_joules_per_token (without idle
        power), watts and idle_watts of each source. Where none can be read: one row, source "none: why", no value.

    Raises:
        ValueError: no tokens, or less time than a counter can show.
    """
    if tokens < 1 or min(seconds, idle_s) < STEP_S:
        raise ValueError(
            f"tokens is {tokens}, seconds {seconds}, idle_s {idle_s}; needed: at least 1, {STEP_S}, {STEP_S}"
        )
    meters = [Meter(counter, 0) for counter in found or counters()]
    for watts, meter in zip(_idle(meters, idle_s), meters, strict=True):
        meter.idle_watts = watts
    made, begun = 0, time.perf_counter()
    with contextlib.ExitStack() as stack:
        for meter in meters:
            stack.enter_context(meter)
        while made == 0 or time.perf_counter() - begun < seconds:
            call()
            _synchronize()
            made += tokens
    return pd.DataFrame([row for meter in meters for row in _rows(meter, made)], columns=COLUMNS)


def _idle(meters: list[Meter], idle_s: float) -> list[float]:
    """Idle power of all counters over the same silence."""
    if all(meter.blind for meter in meters):
        return [float("nan")] * len(meters)
    before = [meter.now() for meter in meters]
    time.sleep(idle_s)
    after = [meter.now() for meter in meters]
    return [
        meter.counter.since(first[1], last[1]) / (last[0] - first[0])
        for meter, first, last in zip(meters, before, after, strict=True)
    ]


def _rows(meter: Meter, made: int) -> list[tuple]:
    if meter.blind:
        return [(meter.source, "joules_per_token", "J/token", float("nan"), made, meter.seconds)]
    values = {
        "joules_per_token": ("J/token", meter.joules / made),
        "net_joules_per_token": ("J/token", meter.net_joules / made),
        "watts": ("W", meter.joules / meter.seconds),
        "idle_watts": ("W", meter.idle_watts),
    }
    return [(meter.source, name, unit, value, made, meter.seconds) for name, (unit, value) in values.items()]


def compare(
    calls: Mapping[str, Callable[[], object]],
    tokens: int,
    seconds: float = 60.0,
    slice_s: float = 5.0,
    seed: int = 0,
    counter=None,
) -> pd.DataFrame:
    """Energy of several things in turn: rounds of one slice each, in random order, until each has run so long.

    Args:
        calls: each makes `tokens` when called. seconds: of each, at least. slice_s: of one slice, at least.
        counter: default: the first of `counters()`.

    Returns:
        DataFrame(name, round, source, joules, seconds, tokens), idle power not subtracted.

    Raises:
        ValueError: no tokens, or slices shorter than a counter can show.
    """
    if tokens < 1 or slice_s < STEP_S:
        raise ValueError(f"tokens is {tokens}, slice_s {slice_s}; needed: at least 1 token and {STEP_S} s")
    draw, rows, spent = np.random.default_rng(seed), [], dict.fromkeys(calls, 0.0)
    counter, names = counter or counters()[0], list(calls)
    while min(spent.values()) < seconds:
        for place in draw.permutation(len(names)):
            name, made = names[place], 0
            with Meter(counter, 0) as meter:
                begun = time.perf_counter()
                while made == 0 or time.perf_counter() - begun < slice_s:
                    calls[name]()
                    _synchronize()
                    made += tokens
            spent[name] += meter.seconds
            rows.append((name, len(rows) // len(names), meter.source, meter.joules, meter.seconds, made))
    return pd.DataFrame(rows, columns=["name", "round", "source", "joules", "seconds", "tokens"])


def ratio(found: pd.DataFrame, one: str, other: str, resamples: int = 2000, seed: int = 0) -> dict:
    """Record row of joules per token of one over those of another, with a 95 % interval over rounds of `compare`."""
    table = {name: part.set_index("round") for name, part in found.groupby("name")}
    each = [(table[name].joules / table[name].tokens).to_numpy() for name in (one, other)]
    picked = np.random.default_rng(seed).integers(0, len(each[0]), (resamples, len(each[0])))
    drawn = each[0][picked].mean(1) / each[1][picked].mean(1)
    low, high = np.percentile(drawn, (2.5, 97.5))
    return dict(
        variant=f"{one}-{other}",
        metric="energy_ratio",
        unit="ratio",
        kind="measured",
        n=len(each[0]),
        median=each[0].mean() / each[1].mean(),
        low=low,
        high=high,
        config={"source": found.source.iloc[0]},
    )


def per_megabyte(joules: float, before: Mapping, after: Mapping) -> dict[str, float | None]:
    """Joules spread over what crossed the link between two `stats()`: per useful and per wasted megabyte (1e6 bytes).

    Useful are the bytes that the router asked for, whether they were fetched for it or ahead of it; wasted those that
    were fetched ahead and evicted unused. All joules over each of both, so the two do not add up; None over none.
    """
    useful = sum(after[name] - before[name] for name in ("bytes_demand", "bytes_useful"))
    wasted = after["bytes_wasted"] - before["bytes_wasted"]
    return {
        name: joules * MB / size if size else None
        for name, size in (("joules_per_useful_mb", useful), ("joules_per_wasted_mb", wasted))
    }


def records(found: pd.DataFrame, variant: str, config: Mapping) -> list[dict]:
    """Record rows of `per_token`; of a source that cannot be read a row without a value, whose config says why."""
    return [
        dict(
            variant=variant,
            metric=row.metric,
            unit=row.unit,
            kind="measured",
            n=row.tokens,
            median=row.value,
            config={**config, "source": row.source},
        )
        for row in found.itertuples()
    ]
