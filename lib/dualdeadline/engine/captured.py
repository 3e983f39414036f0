"""A model's decode step as one CUDA graph: `model.forward` is replaced on the instance, the class stays as it is."""

from __future__ import annotations

import functools
import gc
import inspect
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dualdeadline.engine.statics import Home, Places, flat, nested, obstacle, rolling, unfit

MOST_ROWS = 8  # above it the fused experts hand over to a grouped path that is not captured
_CACHE_NAMES = ("past_key_values", "cache")  # the second since transformers 5.24


class Settings:
    """Sets attributes of an object until `remove()`."""

    def __init__(self, target: object, **values: object):
        self._target, self._before = target, {name: getattr(target, name) for name in values}
        vars(target).update(values)

    def remove(self) -> None:
        """Put the former values back."""
        vars(self._target).update(self._before)
        self._before = {}


def prefer_static(model, context: int | None) -> Settings:
    """Let `generate()` use a static cache for `context` tokens, unless the user chose a cache; undone by `remove()`.

    While it is set, transformers refuses a `generate()` call that also passes a cache object of its own.
    """
    config = getattr(model, "generation_config", None)
    if config is None:
        return Settings(model)
    if config.cache_implementation is not None:
        return Settings(config)
    return Settings(config, cache_implementation="static", max_cache_len=config.max_cache_len or context)


@dataclass
class _Step:
    """A decode step of one kind: its input buffers by path, and how to run it again."""

    home: Home
    inputs: dict[tuple, torch.Tensor]
    arguments: dict[str, Any]  # the call over those buffers, without the cache
    cache_name: str
    counts: list[int]  # the cache's host counters before the first step
    advance: dict[int, int]  # what a step adds to them, by their place
    replay: Callable | None = None


class CapturedForward:
    """Runs decode steps of a transformers model from CUDA graphs.

    A decode step is one new token per row, 1 to 8 rows, with a StaticCache that holds a prompt. Every tensor argument
    is copied into a buffer. The first step of its kind (shapes, dtypes, other arguments, the cache's tensors) runs
    over the buffers and compiles kernels; the second is captured, and replayed from then on. Everything else goes to
    the original forward. Outputs keep their type; their tensors are copies that stay valid, the cache in them is the
    caller's. The cache's tensors are kept with the graph. When their cache is gone, the next one of the same sizes
    moves in (contents copied, its layers then hold the kept tensors), which saves a new capture.

    Attributes:
        inside: True while a forward runs that is, or will be, captured: nothing in it may wait for the device.
        compiling: set to False, steps first met from then on are captured as they are.

    Args:
        compile: capture `torch.compile`'s version of the forward; if that fails, warns and does without.
        capture: default: if the model is on a CUDA device. False calls the forward over the buffers instead.
        on_path: called before each forward with path and reason: `"graph"`, `"first"`, `"buffers"` (capture=False)
            or `"forward"`; also with `"compile"` and how that went.
        keep: graphs that are kept; the least recently used one is dropped.
        refuse: why a decode step of so many rows must not be captured, or None.
        ready: called before each capture, for what the capture must not hold.

    A graph knows nothing of later changes to the model: call `clear()` after moving it or adding hooks.
    """

    def __init__(self, model, compile: bool = False, capture: bool | None = None,
                 on_path: Callable[[str, str], None] | None = None, keep: int = 4,
                 refuse: Callable[[int], str | None] | None = None, ready: Callable[[], None] | None = None):
        self.model, self.inside, self.keep = model, False, keep
        self._refuse, self._ready = refuse or (lambda rows: None), ready or (lambda: None)
        self._capture = model.device.type == "cuda" if capture is None else capture
        self._tell = on_path or (lambda name, reason: None)
        self._before, self._original = model.__dict__.get("forward"), model.forward
        self._config, self._anchor = vars(model.config.get_text_config()), next(model.parameters())
        self._names = list(inspect.signature(self._original).parameters)
        self._compiled, self.compiling = None, compile
        if compile:
            from dualdeadline.engine.compiled import Compiled  # torch's compiler takes seconds to import

            self._compiled = Compiled(self._original, self._tell)
        self._places: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._steps: OrderedDict[tuple, _Step] = OrderedDict()
        self._refused: dict[tuple, str] = {}
        self._pool = None
        generation = getattr(model, "generation_config", None)  # a model without a head has none
        self._settings = Settings(generation, disable_compile=True) if generation else Settings(self)
        lock = threading.RLock()  # buffers and graphs are one set: a second thread waits for its turn

        @functools.wraps(self._original)
        def forward(*args, **kwargs):
            if torch.compiler.is_compiling():
                return self._original(*args, **kwargs)
            with lock:
                return self._forward(*args, **kwargs)

        self._installed = model.forward = forward

    def remove(self) -> None:
        """Give the model its own forward back and drop the graphs.

        Raises:
            RuntimeError: somebody replaced the forward again since.
        """
        if self._installed is None:
            return
        if self.model.__dict__.get("forward") is not self._installed:
            raise RuntimeError("model.forward was replaced after this one; needed: remove the later one first")
        del self.model.forward
        if self._before is not None:
            self.model.forward = self._before
        self._installed = None
        self._settings.remove()
        self.clear()

    def clear(self) -> None:
        """Drop all graphs, buffers and kept cache tensors."""
        self._drop(len(self._steps))
        self._refused.clear()

    def _drop(self, count: int) -> None:
        if self._capture and count > 0:
            torch.cuda.synchronize()  # a graph that still runs must not lose its memory
        for _ in range(count):
            self._steps.popitem(last=False)

    def _forward(self, *args, **kwargs):
        call = dict(zip(self._names, args, strict=False)) | kwargs
        cache_name = next((name for name in _CACHE_NAMES if call.get(name) is not None), _CACHE_NAMES[0])
        cache, given = call.pop(cache_name, None), flat(call)
        reason = self._unsuited(given, cache)
        if reason is None:
            places = self._places[cache]
            key = cache_name, self._key(given), places.kinds, places.state()
            reason = self._refused.get(key)
        step = None if reason else self._find(key, places, cache)
        if step is not None:
            for path, buffer in step.inputs.items():
                buffer.copy_(given[path])
            if step.replay is None:
                reason = self._refused[key] = self._record(step, cache, places)
        if reason:
            self._tell("forward", reason)
            return self._original(*args, **kwargs)
        if step is None:
            self._tell("first", "the first step of its kind")
            return self._first(key, given, cache_name, cache, places)
        self._tell(*(("graph", "") if self._capture else ("buffers", "capture is off")))
        output = step.replay(cache, places)
        places.advance(step.advance)
        return output

    def _unsuited(self, given: dict, cache) -> str | None:
        """Why a call goes to the original forward; None if a graph can take it: then the cache's places are known."""
        if torch.is_grad_enabled() or self.model.training:
            return "gradients are on, or the model is in training mode"
        reason = obstacle(given, cache, self._config, MOST_ROWS)
        reason = reason or self._refuse(len(given["input_ids",]))
        if reason is not None:
            return reason
        places = self._places.get(cache)
        if places is None or places.empty or places.layers != cache.layers:
            places = self._places[cache] = Places(cache)
        return "the cache is empty" if places.empty else unfit(given, places, self._anchor.device)

    def _key(self, given: dict) -> tuple:
        names = (self._config.get(f"_{kind}_implementation_internal") for kind in ("attn", "experts"))
        inputs = ((path, *((v.shape, v.dtype) if isinstance(v, torch.Tensor) else (v,))) for path, v in given.items())
        device = self._anchor.device.type
        autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        return torch.is_inference_mode_enabled(), autocast, *names, *inputs

    def _find(self, key: tuple, places: Places, cache) -> _Step | None:
        """The step for a key and a cache; the cache moves to kept tensors if there are free ones of its sizes."""
        homes = list({id(step.home): step.home for step in self._steps.values()}.values())
        home = next((home for home in homes if home.holds(places)), None)
        home = home or next((home for home in homes if home.take(cache, places)), None)
        stored = key, id(home)
        if stored in self._steps:
            self._steps.move_to_end(stored)
        return self._steps.get(stored)

    def _first(self, key: tuple, given: dict, cache_name: str, cache, places: Places):
        with torch.inference_mode(False):  # an inference tensor could not be written from outside of that mode
            inputs = {path: torch.empty_like(v) for path, v in given.items() if isinstance(v, torch.Tensor)}
        for path, buffer in inputs.items():
            buffer.copy_(given[path])
        home = next((step.home for step in self._steps.values() if step.home.holds(places)), None)
        step = _Step(home or Home(cache, places), inputs, nested(given | inputs), cache_name, places.counts(), {})
        output = self._run(step, cache, places)
        if self._compiled:
            gc.collect()  # what compiled it sits in cycles that hold the cache, which then never seems to go
        pairs = zip(places.counts(), step.counts, strict=True)
        step.advance = {at: now - then for at, (now, then) in enumerate(pairs) if now != then}
        now = self._places[cache] = Places(cache)
        if not step.home.holds(now):
            self._refused[key] = "the cache replaces its tensors in such a step"
        elif self._fields(output, cache) is None:
            self._refused[key] = f"the output, a {type(output).__name__}, holds more than tensors and the cache"
        else:
            self._drop(len(self._steps) + 1 - self.keep)
            self._steps[key, id(step.home)] = step
        return output

    def _run(self, step: _Step, cache, places: Places):
        self.inside = True
        try:
            call = step.arguments | {step.cache_name: cache}
            output = self._compiled(call) if self._compiled and self.compiling else None
            if output is None:
                with rolling(places):
                    output = self._original(**call)
            return output
        finally:
            self.inside = False

    def _record(self, step: _Step, cache, places: Places) -> str | None:
        """Give a step its replay; says why, if it cannot be captured. A capture executes nothing on the device."""
        if not self._capture:
            step.replay = functools.partial(self._again, step)
            return None
        self._ready()
        counts, graph = places.counts(), torch.cuda.CUDAGraph()
        if not any(other.replay for other in self._steps.values()):
            self._pool = torch.cuda.graph_pool_handle()  # one for all: graphs run one after the other
        try:
            places.write(step.counts)  # compiled code may check them; the kernels do not depend on them
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                output = self._run(step, cache, places)
        except Exception as error:  # a wait for the device, or no memory: the original forward still works
            self._steps = OrderedDict(item for item in self._steps.items() if item[1] is not step)
            warnings.warn(f"no CUDA graph of this step: {type(error).__name__}: {error}", stacklevel=5)
            return f"capture failed: {type(error).__name__}: {error}"
        finally:
            places.write(counts)
        fields = self._fields(output, cache)
        step.replay = functools.partial(self._replay, graph, type(output), fields)
        return None

    def _again(self, step: _Step, cache, places: Places):
        counts = places.counts()
        places.write(step.counts)  # as in a capture
        output = self._run(step, cache, places)
        places.write(counts)  # as after a graph, which the host does not see
        return output

    def _replay(self, graph, kind: type, fields: dict, cache, places: Places):
        graph.replay()
        ready = {"cache": lambda name: cache, "own": lambda name: getattr(self.model.base_model, name)}
        return kind(**{name: value.clone() if isinstance(value, torch.Tensor) else ready[value](name)
                       for name, value in fields.items()})

    def _fields(self, output, cache) -> dict | None:
        """An output's tensors by name, "cache" for the cache and "own" for a tensor that the model keeps; or None."""
        if not hasattr(output, "to_tuple"):
            return None
        own = vars(self.model.base_model)  # e.g. Qwen3.5's rope_deltas, which only a prefill replaces
        fields = {name: "cache" if value is cache else "own" if value is own.get(name) else value
                  for name, value in output.items()}
        known = (isinstance(value, torch.Tensor | str) for value in fields.values())
        return fields if all(known) else None
