"""What `offload` leaves on a model: the store, the slots, and the way each forward takes."""

from __future__ import annotations

import copy
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dualdeadline import models
from dualdeadline.cache import slots as cache
from dualdeadline.cache.pool import Pool
from dualdeadline.engine import banks, guard, timing
from dualdeadline.engine import guide as guides
from dualdeadline.engine.captured import CapturedForward, prefer_static
from dualdeadline.engine.device import DeviceDriven
from dualdeadline.engine.hosted import Hosted
from dualdeadline.engine.lanes import CallerLanes, StreamLanes
from dualdeadline.engine.options import Options
from dualdeadline.engine.surgery import NAME, LayerExperts, move
from dualdeadline.schedule import COMPONENTS
from dualdeadline.store import HostStore
from dualdeadline.telemetry import Telemetry

BREAK_EVEN = 0.8  # share of guesses that must be asked for in time: one that is hides part of its link time, another
# costs all of it; 0.90 to 0.95 of a next router's or a predictor's are, 0.05 to 0.12 of random or shuffled ones
_keys = itertools.count()
_handles: weakref.WeakValueDictionary[int, Offloaded] = weakref.WeakValueDictionary()


def run_layer(key: int, number: int, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """A layer of the handle with that key, from compiled code that knows numbers only."""
    return _handles[key].layer(number, hidden, ids, weights)


class Offloaded:
    """A model's offloaded experts; made by `offload`, found as `model.dualdeadline`."""

    def __init__(
        self,
        model: nn.Module,
        spec: models.MoESpec,
        layers: Sequence[LayerExperts],
        options: Options,
        prefetch: guides.Prefetch,
        why: Sequence[str],
        context: int,
        compile: bool,
        tier=None,
    ):
        self.model, self.spec, self.layers, self.options = weakref.ref(model), spec, list(layers), options
        asked = prefetch.predictor, spec, prefetch.horizon
        guess, reason = guides.resolve(*asked, options.backend, options.coded)
        self.guessing, self.why = reason, (*why, *options.why, f"predictor: {reason}")
        self.configs = [layer.module.config for layer in layers]  # possibly shared with other models
        self.pid = os.getpid()  # threads and CUDA do not survive a fork
        self.lock = threading.RLock()  # one layer at a time, whichever thread asks
        self.broken = self.leaving = False  # a layer began and did not end (`_forget` is due); weights go back
        self.installed: list = []  # with a `remove`, the last one first
        self.moved: list[tuple[Tensor, torch.device]] = []  # parameters and buffers, and where they were
        self.tier = tier  # makes stores and layers of another kind than those of host memory
        pinned = options.device.type == "cuda"
        self.store = HostStore(layers, options.coded, pinned) if tier is None else tier.store(layers, options)
        try:
            move(model, options.device, self.moved)
            self._build(guess, prefetch)
            self._install(model, context, compile)
        except BaseException:
            self._uninstall(model)
            raise

    def _build(self, guess, prefetch: guides.Prefetch) -> None:
        """Slots, tables, lanes and guides."""
        device, slots = self.options.device, self.options.slots
        self.banks = banks.allocate(self.layers, slots, device, self.options.pool == "shared")
        self.pool = Pool(self.spec.L, self.spec.E, [slots[part] for part in COMPONENTS], self.options.pool == "shared")
        self.tables = self.pool.tables
        sizes = {part: self.store.bytes(part) for part in COMPONENTS}
        self.telemetry = Telemetry(self.spec.L, self.spec.E, slots, sizes, self.pool.shared)
        self.lanes = lanes = self._lanes(device)
        self.device = None
        self.whole = min(slots.values()) >= self.spec.E
        if self.whole:
            self._fill()
        if self.options.backend == "graph":
            guess = self._for_graph(guess, prefetch)
        self.guide = guides.Guide(guess, self.spec, prefetch, cache.control(BREAK_EVEN)) if guess else None
        if self.tier is not None:
            self.hosted = self.tier.hosted(self, lanes)
            return
        chosen = self.options.schedule, self.options.kernels
        self.hosted = Hosted(self.layers, self.store, self.banks, self.pool, lanes, *chosen, self.guide)

    def _lanes(self, device: torch.device):
        if self.options.timed:
            return timing.TimedStreams(device) if device.type == "cuda" else timing.TimedCaller()
        return StreamLanes(device) if device.type == "cuda" else CallerLanes()

    def _fill(self) -> None:
        """Every expert fits: each into the slot of its own number; also again, after an error."""
        banks.fill(self.banks, self.store)
        own = torch.arange(self.spec.E, dtype=torch.int32)
        self.tables.slot_of.copy_(own)
        self.tables.expert_of.copy_(own)
        if self.device is not None:
            self.device.filled = True

    def _for_graph(self, guess, prefetch: guides.Prefetch):
        """The device-driven twin; what is left to guess on the host's way (nothing: its tables come and go)."""
        found, reason = guides.for_device(guess, self.options.device)
        self.why += (reason,) if reason else ()
        if self.options.device.type == "cuda" and not self.store.pinned:
            raise ValueError(f"{self.store.why_not}; needed: pinned memory for backend 'graph', or backend 'streams'")
        self.newer = "host"
        self.device = DeviceDriven(
            self.layers,
            self.store,
            self.banks,
            self.tables.to(self.options.device),
            self.options.schedule,
            found,
            prefetch.budget,
            prefetch.threshold,
            cache.control(BREAK_EVEN, self.options.device),
        )
        return None

    def _install(self, model: nn.Module, context: int, compile: bool) -> None:
        self.key = next(_keys)
        _handles[self.key] = self
        for layer in self.layers:
            layer.module._dualdeadline, layer.module._dualdeadline_layer = self, layer.number
            layer.module._dualdeadline_key = self.key
            layer.module.config = copy.copy(layer.module.config)  # other models may share the old one
            layer.module.config._experts_implementation = NAME
        self.installed.append(guard.Guard(model, self))
        if self.device is not None:
            ready = functools.partial(self._use, "device")  # a capture cannot hold the copy of the host's tables
            self.captured = CapturedForward(model, compile, on_path=self._on_path, refuse=self._refuse, ready=ready)
            self.installed += [self.captured, prefer_static(model, context)]

    def _refuse(self, rows: int) -> str | None:
        return self.device.takes(rows, self.spec.K)

    def _on_path(self, name: str, reason: str) -> None:
        """Told before each forward on the graph backend which way it takes."""
        if name == "compile":
            self.why += (f"compile: {reason}",)
            return
        on_device = name in ("graph", "first", "buffers")
        if on_device:  # a graph would go on with what it was captured with
            for layer in self.layers:
                guard.unchanged(layer)
        self.telemetry.ran("graph" if on_device else "streams", "" if on_device else reason)
        self._use("device" if on_device else "host")

    def _use(self, tables: str) -> None:
        """Let the tables of one side be those that count; both speak of the same slots."""
        if self.device is None or self.newer == tables:
            return
        if tables == "device":
            self.device.tables.copy_(self.tables)
        else:
            self.device.settle()  # nothing, unless a forward ended before its last layer
            self.tables.copy_(self.device.tables)
        self.newer = tables

    def layer(self, number: int, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Output [N,H] of one layer's routed experts, as transformers' dispatch asks for it."""
        guard.same_process(self.pid)
        if self.leaving:
            raise RuntimeError(f"not all experts were given back, {guard.NEEDED}, again")
        guard.unchanged(self.layers[number])
        if hidden.device.type != self.options.device.type:
            raise RuntimeError(
                f"tokens are on {hidden.device}, slots on {self.options.device}; needed: the model where "
                "`offload` put it"
            )
        if torch.is_grad_enabled() and (hidden.requires_grad or weights.requires_grad):
            return guard.Exact.apply(hidden, weights, lambda: self._run(number, hidden, ids, weights))
        return self._run(number, hidden, ids, weights)

    def _run(self, number: int, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        with torch.no_grad(), self.lock:
            if self.broken:  # whoever interrupted the last one also interrupted what was to follow
                self._forget()
            self.broken = True
            try:
                inside = self.device is not None and self.captured.inside
                self._use("device" if inside else "host")
                out = (self.device.layer if inside else self._by_host)(number, hidden, ids, weights)
            except BaseException:
                self.broken = not (self.device and self.device.capturing())  # a capture has done nothing yet
                if self.broken:
                    self._forget()
                raise
            self.broken = False
            return out

    def _by_host(self, number: int, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if self.whole and not self.tables.present(number, 0):
            self._fill()
        if number == 0 and self.device is None:
            self.telemetry.ran(self.options.backend, self.options.fallback)
        if number == 0:
            self.telemetry.tokens += len(ids)
        self.telemetry.routes(number, ids.cpu())
        return self.hosted.layer(number, hidden, ids, weights)

    def _forget(self) -> None:
        """After an error nothing in the slots can be relied on: what is asked for next is fetched anew."""
        self.newer = "host"
        if self.device is not None:
            self.device.filled = False
            self.device.settle()
        self.hosted.forget()
        self.broken = False

    def stats(self) -> dict:
        """Counters since `offload`, what ran and what was chosen; see `telemetry`."""
        tables = self.device.tables if self.device is not None and self.newer == "device" else self.tables
        found = self.telemetry.counts(tables.counts(), self.hosted.misses)
        counters = self.pool.counters if self.pool.shared else tables.counters
        found |= self.telemetry.by_layer(counters, self.pool.misses) | self.telemetry.times(self.lanes)
        on, reason = self._prefetch()
        return found | {
            "path": self.telemetry.path,
            "paths": dict(self.telemetry.paths),
            "forwards": self.telemetry.forwards,
            "path_reason": self.telemetry.reason,
            "hit_rate_optimum": self.telemetry.optimum(),
            "prefetch_on": on,
            "prefetch_reason": reason,
            "slots": dict(self.options.slots),
            "pool": self.options.pool,
            "bytes_early": getattr(self.hosted, "bytes_early", 0),
            "schedule": self.options.schedule,
            "kernels": self.options.kernels,
            "wire": "coded" if self.options.coded else "raw",
            "backend": self.options.backend,
            "host_bytes": self.store.nbytes,
            "why": self.why,
            **(self.store.stats() if hasattr(self.store, "stats") else {}),
        }

    def _prefetch(self) -> tuple[bool, str]:
        """Whether guesses are fetched now, and why or why not."""
        owner = self.device if self.device is not None else self.guide
        guide = self.device.guide if self.device is not None else self.guide
        failed = getattr(owner, "failed", "")
        if failed or guide is None:
            return False, failed or self.guessing
        if not 1 <= guide.horizon < self.spec.L or self.whole:
            return False, f"nothing to guess: horizon {guide.horizon}, {self.spec.L} layers, slots {self.options.slots}"
        precision, _, least, _, _, waiting = owner.control.tolist()
        if waiting:
            return False, f"live precision was below {least:.2f}; guesses are tried again in {waiting:.0f} calls"
        worth = getattr(guide, "worth", None)
        return (True, self.guessing) if worth is None else (worth.verdict, f"{self.guessing}; {worth}")

    def remove(self) -> None:
        """Give the model its experts back and forget everything; the model is what it was before `offload`."""
        model = self.model()
        if model is None or getattr(model, "dualdeadline", None) is not self:
            return  # the model is gone, or this was done before
        guard.same_process(self.pid)
        with torch.inference_mode(False), torch.no_grad(), self.lock:
            self._uninstall(model)
        del model.dualdeadline

    def __reduce_ex__(self, protocol):
        raise RuntimeError(f"an offloaded model cannot be copied or pickled; {guard.NEEDED}, or save_pretrained")

    def _uninstall(self, model: nn.Module) -> None:
        """Undo `offload`; where giving back fails, what is left refuses to run and this can be called again."""
        while len(self.installed) > 1:
            self.installed[-1].remove()  # raises if somebody else's change lies on top
            self.installed.pop()
        self.leaving = True
        if hasattr(self, "lanes"):
            self.lanes.close()
        for value, device in self.moved:
            value.data = value.data.to(device)
        self.store.give_back()
        while self.installed:  # the guard: until now weights are missing
            self.installed.pop().remove()
        for layer, config in zip(self.layers, self.configs, strict=True):
            for name in ("_dualdeadline", "_dualdeadline_layer", "_dualdeadline_key"):
                layer.module.__dict__.pop(name, None)
            layer.module.config = config
