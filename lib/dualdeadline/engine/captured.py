"""A model's decode step as one CUDA graph: `model.forward` is replaced on the instance, the class stays as it is."""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from dualdeadline.engine.statics import CACHE_NAMES, Home, View, flatten, obstacle, rolling

MOST_ROWS = 8  # above it the fused experts hand over to a grouped path that is not captured
RECOMPILES = 64  # torch.compile's own limit of 8 is used up by a few batch and cache sizes


class Settings:
    """Sets attributes of an object until `remove()`."""

    def __init__(self, target: object, **values: object):
        self._target, self._before = target, {name: getattr(target, name) for name in values}
        for name, value in values.items():
            setattr(target, name, value)

    def remove(self) -> None:
        """Put the former values back."""
        for name, value in self._before.items():
            setattr(self._target, name, value)
        self._before = {}


def prefer_static(model, context: int | None) -> Settings:
    """Let `generate()` use a static cache for `context` tokens, unless the user chose a cache; undone by `remove()`.

    While it is set, transformers refuses a `generate()` call that also passes a cache object of its own.
    """
    config = model.generation_config
    if config.cache_implementation is not None:
        return Settings(config)
    return Settings(config, cache_implementation="static", max_cache_len=config.max_cache_len or context)


@dataclass
class _Step:
    """One decode step with fixed shapes: its input buffers, and how to run it again."""

    home: Home
    inputs: dict[tuple, torch.Tensor]  # by (keyword,) or (keyword, key of a dictionary)
    arguments: dict[str, Any]  # the call over those buffers, without the cache
    cache_name: str
    counts: list[int] = field(default_factory=list)  # of the cache, before the first step
    advance: list[int] = field(default_factory=list)  # what a step adds to them
    replay: Callable | None = None


class CapturedForward:
    """Runs decode steps of a transformers model from CUDA graphs.

    A decode step is one new token per row, 1 to 8 rows, with a StaticCache that holds a prompt. Every tensor argument
    is copied into a buffer. The first step of its kind (shapes, dtypes, other arguments, the cache's tensors) runs
    from the buffers without a graph and compiles what has to be compiled; the second is captured; from then on it is
    replayed. Everything else goes to the original forward. Outputs keep their type; their tensors are copies, so that
    they stay valid, and the cache in them is the caller's.

    The cache's tensors are kept with the graph. Once their cache is gone, the next one of the same sizes takes them
    over: its contents are copied in and its layers then hold the kept tensors, which saves a new capture.

    Attributes:
        inside: True while a forward runs that is, or will be, captured: host work is not allowed in it.

    Args:
        compile: capture `torch.compile`'s version of the forward instead; if that fails, warns and does without.
        capture: default: if the model is on a CUDA device. False (for tests): what would be a replay calls the
            forward over the buffers.
        on_path: called before each forward with its path and the reason: `"graph"`, `"first"` (over the buffers),
            `"buffers"` (capture=False) or `"forward"`; `"compile"` tells how compilation went.
        keep: graphs that are kept; the least recently used one is dropped.

    A graph knows nothing of later changes to the model: `clear()` after moving it or adding hooks.
    """

    def __init__(self, model, compile: bool = False, capture: bool | None = None,
                 on_path: Callable[[str, str], None] | None = None, keep: int = 4):
        self.model, self.inside, self.keep = model, False, keep
        self._capture = model.device.type == "cuda" if capture is None else capture
        self._on_path = on_path or (lambda name, reason: None)
        self._original, self._had = model.forward, model.__dict__.get("forward")
        self._names = list(inspect.signature(self._original).parameters)
        self._compile, self._compiled = compile, None
        self._steps: OrderedDict[tuple, _Step] = OrderedDict()
        self._refused: dict[tuple, str] = {}
        self._pool = None
        self._settings = Settings(model.generation_config, disable_compile=True)

        @functools.wraps(self._original)
        def forward(*args, **kwargs):
            if torch.compiler.is_compiling():
                return self._original(*args, **kwargs)
            return self._forward(args, kwargs)

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
        if self._had is not None:
            self.model.forward = self._had
        self._installed = None
        self._settings.remove()
        self.clear()

    def clear(self) -> None:
        """Drop all graphs, buffers and kept cache tensors."""
        self._settle()
        self._steps.clear()
        self._refused.clear()
        self._pool = None

    def _settle(self) -> None:
        if self._capture and self._steps:
            torch.cuda.synchronize()  # a graph that still runs must not lose its memory

    def _forward(self, args: tuple, kwargs: dict):
        call = dict(zip(self._names, args, strict=False)) | kwargs
        cache_name = next((name for name in CACHE_NAMES if call.get(name) is not None), CACHE_NAMES[0])
        cache = call.pop(cache_name, None)
        view = None
        reason = obstacle(self.model, call, cache, MOST_ROWS)
        if reason is None:
            view = View.of(cache)
            tensors, plain, reason = flatten(call, view)
        if reason is None:
            key = self._key(tensors, plain, cache_name, view)
            reason = self._refused.get(key)
        if reason is not None:
            self._on_path("forward", reason)
            return self._original(*args, **kwargs)
        step, stored = self._find(key, view, cache)
        if step is None:
            self._on_path("first", "the first step of its kind")
            return self._first(key, view, cache, cache_name, tensors, plain)
        for path, value in tensors.items():
            step.inputs[path].copy_(value)
        reason = None if step.replay is not None else self._record(step, cache, view)
        if reason is not None:
            self._refused[key] = reason
            del self._steps[stored]
            self._on_path("forward", reason)
            return self._original(*args, **kwargs)
        self._on_path(*(("graph", "") if self._capture else ("buffers", "capture is off")))
        output = step.replay(cache, view)
        view.write([now + more for now, more in zip(view.counts(), step.advance, strict=True)])
        return output

    def _key(self, tensors: dict, plain: dict, cache_name: str, view: View) -> tuple:
        device, config = self.model.device.type, self.model.config
        inputs = tuple((path, value.shape, value.dtype) for path, value in tensors.items())
        ways = (torch.is_inference_mode_enabled(), torch.is_autocast_enabled(device),
                getattr(config, "_attn_implementation", None), getattr(config, "_experts_implementation", None))
        return inputs, tuple(plain.items()), cache_name, ways, view.kinds, view.state()

    def _find(self, key: tuple, view: View, cache) -> tuple[_Step | None, tuple | None]:
        """The step for a key and a cache, whose tensors are exchanged for kept ones if that is possible."""
        homes = {id(step.home): step.home for step in self._steps.values()}
        home = next((home for home in homes.values() if home.holds(view)), None)
        if home is None:
            home = next((home for home in homes.values() if home.free_for(cache, view)), None)
            if home is None:
                return None, None
            home.take(cache, view)
        stored = key, id(home)
        if stored not in self._steps:
            return None, None
        self._steps.move_to_end(stored)
        return self._steps[stored], stored

    def _first(self, key: tuple, view: View, cache, cache_name: str, tensors: dict, plain: dict):
        with torch.inference_mode(False):  # an inference tensor could not be written from outside of that mode
            inputs = {path: torch.empty_like(value, requires_grad=False) for path, value in tensors.items()}
        for path, value in tensors.items():
            inputs[path].copy_(value)
        homes = [step.home for step in self._steps.values() if step.home.holds(view)]
        home = homes[0] if homes else Home(cache, view)
        step = _Step(home, inputs, _arguments(inputs, plain), cache_name, view.counts())
        output = self._run(step, cache, view)
        if not home.holds(View.of(cache, anew=True)):
            self._refused[key] = "the cache replaces its tensors in every step"
            return output
        if self._fields(output, cache) is None:
            self._refused[key] = f"the output, a {type(output).__name__}, holds more than tensors and the cache"
            return output
        step.advance = [now - then for now, then in zip(view.counts(), step.counts, strict=True)]
        self._steps[key, id(home)] = step
        while len(self._steps) > self.keep:
            self._settle()
            self._steps.popitem(last=False)
        return output

    def _record(self, step: _Step, cache, view: View) -> str | None:
        """Give a step its replay; says why, if it cannot be captured. A capture executes nothing on the device."""
        if not self._capture:
            step.replay = functools.partial(self._again, step)
            return None
        counts = view.counts()
        graph, names = torch.cuda.CUDAGraph(), None
        if self._pool is None or not any(other.replay for other in self._steps.values()):
            self._pool = torch.cuda.graph_pool_handle()  # one for all: graphs run one after the other
        try:
            view.write(step.counts)  # compiled code may check them; what they are good for is in the inputs
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                output = self._run(step, cache, view)
            names = self._fields(output, cache)
        except Exception as error:  # a host synchronisation, or memory that ran out: the original forward still works
            reason = f"capture failed: {type(error).__name__}: {error}"
            warnings.warn(f"decode steps run without a CUDA graph; {reason}", stacklevel=5)
            return reason
        finally:
            view.write(counts)
        step.replay = functools.partial(self._replay, graph, type(output), names)
        return None

    def _again(self, step: _Step, cache, view: View):
        counts = view.counts()
        output = self._run(step, cache, view)
        view.write(counts)  # as after a graph, which the host does not see
        return output

    def _replay(self, graph, kind: type, names: dict, cache, view: View):
        graph.replay()
        found = {"cache": cache}
        values = {}
        for name, value in names.items():
            values[name] = value.clone() if isinstance(value, torch.Tensor) else found.get(value)
            if value == "attribute":
                values[name] = getattr(self.model.base_model, name)
        return kind(**values)

    def _fields(self, output, cache) -> dict | None:
        """What an output holds: tensors, `"cache"` or `"attribute"` (the model's own tensor); None if other things."""
        if not hasattr(output, "to_tuple"):
            return None
        fields = {}
        for name, value in output.items():
            if value is cache:
                fields[name] = "cache"
            elif not isinstance(value, torch.Tensor):
                return None
            else:
                own = value is getattr(self.model.base_model, name, None)
                fields[name] = "attribute" if own else value
        return fields
