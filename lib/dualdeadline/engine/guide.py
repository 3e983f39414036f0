"""Guesses of a predictor beside the decode loop, as prefetch wants them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from dualdeadline import models
from dualdeadline.cache.pool import Pool
from dualdeadline.engine.worth import Worth
from dualdeadline.predictors import REGISTRY
from dualdeadline.predictors.base import MAX_HORIZON, Predictor
from dualdeadline.predictors.gate_ahead import GateAhead

GUESSES = 8  # of a token that prefetch looks at
CONTROLS = ("precision", "time")
SLOPE = 1.0  # of gate-ahead without a trace: probability one half at the router's cut, by its own logits


def untrained(spec: models.MoESpec, horizon: int) -> GateAhead:
    """Gate-ahead from the model's own routers, not calibrated on any trace.

    Raises:
        ValueError: no layer lies that far ahead.
    """
    found = GateAhead(horizon, routers=models.routers(spec))
    if spec.L <= horizon:
        raise ValueError(f"the model has {spec.L} MoE layers; horizon {horizon} needs more")
    found.L, found.E, found.K, found.H = spec.L, spec.E, spec.K, spec.H
    count = spec.L - horizon
    found.table |= {"slope": torch.full((count,), SLOPE), "offset": torch.zeros(count)}
    return found


def resolve(
    predictor, spec: models.MoESpec, horizon: int, backend: str, coded: bool = False
) -> tuple[object | None, str]:
    """What guesses, and why that. `auto` never raises: gate-ahead, which needs no trace, where it was measured to
    pay (encoded experts inside a graph) and on the cpu backend, which has no link; else no guesses.

    Raises:
        ValueError: an unknown name, one that needs a trace, or a predictor fitted for other sizes.
    """
    if predictor is None:
        return None, "no predictor was asked for"
    if predictor == "auto" and backend != "cpu" and not (coded and backend == "graph"):
        return None, "auto prefetches encoded experts inside a graph only: elsewhere none gained 2 % (notebooks 07, 09)"
    if predictor == "auto":
        try:
            return untrained(spec, horizon), "gate-ahead, which needs no trace"
        except Exception as error:  # whatever a new family does: decoding goes on without guesses
            return None, f"gate-ahead does not fit this model ({error})"
    if predictor == GateAhead.name:
        return untrained(spec, horizon), "gate-ahead as asked for, not calibrated"
    if isinstance(predictor, str):
        known = f"known: {', '.join(sorted(REGISTRY))}"
        raise ValueError(
            f"predictor is {predictor!r}; needed: None, 'auto', 'gate_ahead', or a fitted predictor object "
            f"(every other kind is fitted on a trace first; {known})"
        )
    if isinstance(predictor, Predictor):
        predictor._fitted()
        wrong = [name for name in ("L", "E", "K", "H") if getattr(predictor, name) != getattr(spec, name)]
        if wrong:
            got = {name: getattr(predictor, name) for name in wrong}
            raise ValueError(f"the predictor was fitted for {got}; needed: {({n: getattr(spec, n) for n in wrong})}")
    elif not callable(predictor) or (getattr(predictor, "on_device", False) and not hasattr(predictor, "horizon")):
        raise ValueError(
            f"predictor is {type(predictor).__name__}; needed: a Predictor, or a callable "
            "(layer, hidden[N,H], ids[N,K]) -> probabilities[N,E] or None"
        )
    return predictor, f"{getattr(predictor, 'name', type(predictor).__name__)} as given"


@dataclass(frozen=True)
class Prefetch:
    """What was asked for: predictor, layers ahead, components per layer (gate_up, down), least probability, and what
    switches guesses off: "precision" (live share of useful ones), "time" (that, and the time of steps without them)."""

    predictor: object
    horizon: int
    budget: tuple[int, int]
    threshold: float
    control: str = "precision"

    def __post_init__(self):
        if self.control not in CONTROLS:
            raise ValueError(f"control is {self.control!r}; needed: 'auto' or one of {', '.join(CONTROLS)}")
        numbers = [*self.budget, self.horizon, self.threshold]
        if any(isinstance(value, bool) or not isinstance(value, Real) for value in numbers) or any(
            value != int(value) for value in numbers[:-1]
        ):
            raise ValueError(
                f"budget is {self.budget}, horizon {self.horizon!r}, threshold {self.threshold!r}; needed: "
                "whole numbers (gate_up, down), a whole number and a probability"
            )
        if len(self.budget) != 2 or min(self.budget) < 0 or max(self.budget) < 1 or not 0 <= self.threshold <= 1:
            raise ValueError(
                f"budget is {self.budget}, threshold {self.threshold}; needed: two counts from 0, one above "
                "0, and a probability"
            )
        if not 1 <= self.horizon <= MAX_HORIZON:
            raise ValueError(f"horizon is {self.horizon}; needed: 1 to {MAX_HORIZON} layers")


class Guide:
    """Guesses for layer `number + horizon`, and their admission into slots.

    Args:
        predictor: from `resolve`. prefetch: budget, threshold and horizon (of a bare callable).
        control: live state of `cache.slots.admit`.

    A predictor with `across_tokens` speaks of its own layer at the next token (see `next_token`), whatever the horizon.
    A predictor that fails is switched off, with the reason in `failed`: a guess changes time, never results.
    """

    def __init__(self, predictor, spec: models.MoESpec, prefetch: Prefetch, control: Tensor):
        self.spec, self.budget, self.threshold, self.control = spec, prefetch.budget, prefetch.threshold, control
        self.horizon = predictor.horizon if isinstance(predictor, Predictor) else prefetch.horizon
        self.step: Callable | None = predictor.online() if isinstance(predictor, Predictor) else predictor
        self.foreign, self.failed = not isinstance(predictor, Predictor), ""
        self.ahead = 0 if getattr(predictor, "across_tokens", False) else self.horizon
        self.worth = Worth() if prefetch.control == "time" else None

    @property
    def on(self) -> bool:
        """Whether guesses are made in this step, as far as their time decides."""
        return self.worth is None or self.worth.on

    def after(self, number: int, hidden: Tensor, ids: Tensor) -> tuple[int, Tensor, Tensor] | None:
        """(target layer, ids [N,G], probabilities [N,G]) by falling probability, on the CPU; None without a guess."""
        if self.step is None or self.horizon == 0:
            return None
        try:
            chances = self._ask(number, hidden, ids)
            if chances is None or number + self.ahead >= self.spec.L:
                return None
            chances = torch.as_tensor(chances).detach().float().cpu()
            if chances.shape != (len(hidden), self.spec.E):
                raise ValueError(f"probabilities are {tuple(chances.shape)}; needed: {(len(hidden), self.spec.E)}")
            chances = torch.where(chances.isfinite(), chances, -1.0)
            values, names = chances.topk(min(GUESSES, self.spec.E), -1)
            return number + self.ahead, names.int(), values
        except Exception as error:
            self.failed, self.step = f"the predictor failed: {error}", None
            return None

    def _ask(self, number: int, hidden: Tensor, ids: Tensor):
        """The predictor's answer; a foreign one gets copies, and random numbers of its own."""
        if not self.foreign:
            return self.step(number, hidden, ids)
        with torch.random.fork_rng(devices=[]):
            return self.step(number, hidden.detach().clone(), ids.clone())

    def admit(self, pool: Pool, target: int, names: Tensor, chances: Tensor) -> list[list]:
        """Slots for what is worth fetching ahead; see `Pool.admit`."""
        return pool.admit(target, names, chances, self.threshold, self.budget, self.control)


class DeviceGuide:
    """The predictor kernel beside a device-driven layer: (number, hidden, ids) -> ids and probabilities [N,G].

    Args:
        predictor: one that `kernels.predictor` knows, with a horizon of at least 1.

    Raises:
        ValueError: another one.
    """

    on_device = True

    def __init__(self, predictor: Predictor, device: torch.device):
        from dualdeadline.kernels import predictor as kernel

        if predictor.horizon < 1:
            raise ValueError(f"the predictor's horizon is {predictor.horizon}; needed: at least 1 on a device")
        self.kernel, self.horizon, self.K = kernel, predictor.horizon, min(GUESSES, predictor.E)
        self.prepared, self.fused = kernel.prepare(predictor, device, torch.bfloat16), {}

    def __call__(self, number: int, hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor] | None:
        tokens = len(hidden)
        if tokens not in self.fused:
            self.fused[tokens] = self.kernel.Fused(self.prepared, hidden.device, tokens, self.K)
        return self.fused[tokens].step(number, hidden)


def for_device(predictor, device: torch.device) -> tuple[object | None, str]:
    """A guide that needs no host, or None and why there is none."""
    if predictor is None or getattr(predictor, "on_device", False):
        return predictor, ""
    try:
        return DeviceGuide(predictor, device), ""
    except (ValueError, AttributeError) as error:
        return None, f"no guesses inside a graph: {error}"
