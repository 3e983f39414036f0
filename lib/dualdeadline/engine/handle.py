"""What `offload` leaves on a model: the store, the slots, and the way each forward takes."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dualdeadline import models
from dualdeadline.cache import slots as cache
from dualdeadline.engine import guide as guides
from dualdeadline.engine.hosted import Hosted
from dualdeadline.engine.lanes import CallerLanes, StreamLanes
from dualdeadline.engine.options import Options
from dualdeadline.engine.surgery import NAME, LayerExperts
from dualdeadline.schedule import COMPONENTS
from dualdeadline.store import HostStore
from dualdeadline.telemetry import Telemetry

BREAK_EVEN = 0.5  # share of guesses that must turn out useful; a wasted component costs what a useful one saves
_keys = itertools.count()
_handles: weakref.WeakValueDictionary[int, Offloaded] = weakref.WeakValueDictionary()


class _Exact(torch.autograd.Function):
    """Lets a forward run with gradients switched on, and refuses the backward it has no weights for."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weights: Tensor, layer) -> Tensor:
        return layer()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("backward through offloaded experts; needed: model.dualdeadline.remove() before training")


class Offloaded:
    """A model's offloaded experts; made by `offload`, found as `model.dualdeadline`."""

    def __init__(self, model: nn.Module, spec: models.MoESpec, layers: Sequence[LayerExperts], options: Options,
                 predictor, horizon: int, budget: tuple[int, int], threshold: float, compile: bool,
                 why: Sequence[str]):
        self.model, self.spec, self.layers, self.options = weakref.ref(model), spec, list(layers), options
        guess, reason = guides.resolve(predictor, spec, horizon)
        self.why = (*why, *options.why, f"predictor: {reason}")
        self.before = layers[0].module.config._experts_implementation or "eager"
        self.store = HostStore(layers, options.coded, pinned=options.device.type == "cuda")
        try:
            _move(model, options.device)
            self._build(guess, horizon, budget, threshold)
            self._install(model, compile)
        except BaseException:
            self._uninstall(model)
            raise

    def _build(self, guess, horizon: int, budget: tuple[int, int], threshold: float) -> None:
        """Slots, tables, lanes and guide."""
        device, slots = self.options.device, self.options.slots
        self.banks = {part: [torch.zeros(slots[part], *layer.shapes[part], dtype=layer.dtype, device=device)
                             for layer in self.layers] for part in COMPONENTS}
        self.tables = cache.SlotTables(self.spec.L, self.spec.E, tuple(slots[part] for part in COMPONENTS), "cpu")
        lanes = StreamLanes(device) if device.type == "cuda" else CallerLanes()
        self.control = cache.control(BREAK_EVEN)
        self.guide = guides.Guide(guess, self.spec, horizon, budget, threshold, self.control) if guess else None
        self.hosted = Hosted(self.layers, self.store, self.banks, self.tables, lanes, self.options.schedule,
                             self.options.kernels, self.guide)
        sizes = {part: self.store.bytes(part) for part in COMPONENTS}
        self.telemetry = Telemetry(self.spec.L, self.spec.E, slots, sizes)

    def _install(self, model: nn.Module, compile: bool) -> None:
        self.key = next(_keys)
        _handles[self.key] = self
        for layer in self.layers:
            layer.module._dualdeadline, layer.module._dualdeadline_layer = self, layer.number
            layer.module._dualdeadline_key = self.key
        model.set_experts_implementation(NAME)

    def layer(self, number: int, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Output [N,H] of one layer's routed experts, as transformers' dispatch asks for it."""
        if self.layers[number].module.training:
            raise RuntimeError("the model is in training mode; needed: model.eval(), offloaded experts have no gradients")
        if hidden.device.type != self.options.device.type:
            raise RuntimeError(f"tokens are on {hidden.device}, slots on {self.options.device}; needed: the model where "
                               "`offload` put it")
        if torch.is_grad_enabled() and (hidden.requires_grad or weights.requires_grad):
            return _Exact.apply(hidden, weights, lambda: self._run(number, hidden, ids, weights))
        return self._run(number, hidden, ids, weights)

    def _run(self, number: int, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        host = ids.cpu()
        if number == 0:
            self.telemetry.ran(self.options.backend)
        self.telemetry.routes(number, host)
        with torch.no_grad():
            return self.hosted.layer(number, hidden, ids, weights)

    def stats(self) -> dict:
        """Counters since the last `reset_stats`, what ran and what was chosen; see `telemetry`."""
        found = self.telemetry.counts(self.tables.counts())
        ahead = self.guide is not None and self.guide.step is not None
        return found | {
            "path": self.telemetry.path, "paths": dict(self.telemetry.paths), "forwards": self.telemetry.forwards,
            "hit_rate_optimum": self.telemetry.optimum(), "prefetch_on": ahead,
            "prefetch_reason": self.guide.failed if self.guide else self.why[-1],
            "slots": dict(self.options.slots), "schedule": self.options.schedule, "kernels": self.options.kernels,
            "wire": "coded" if self.options.coded else "raw", "backend": self.options.backend,
            "host_bytes": self.store.nbytes, "why": self.why,
        }

    def remove(self) -> None:
        """Give the model its experts back and forget everything; the model is what it was before `offload`."""
        model = self.model()
        self._uninstall(model)
        if hasattr(model, "dualdeadline"):
            del model.dualdeadline

    def _uninstall(self, model: nn.Module) -> None:
        if hasattr(self, "hosted"):
            self.hosted.lanes.close()
        for layer in self.layers:
            for name in ("_dualdeadline", "_dualdeadline_layer", "_dualdeadline_key"):
                layer.module.__dict__.pop(name, None)
        model.set_experts_implementation(self.before)
        self.store.give_back()


def _move(model: nn.Module, device: torch.device) -> None:
    """Everything that is in memory to one device; experts are not any more."""
    for value in itertools.chain(model.parameters(), model.buffers()):
        if not value.is_meta:
            value.data = value.data.to(device)
