"""Static caches as a captured step sees them: what may be captured, where a cache's tensors are, whose they are."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch

_EXTRAS = ("attentions", "hidden_states", "router_logits")


def flat(call: dict[str, Any]) -> dict[tuple, Any]:
    """Arguments by path: (keyword,), or (keyword, key) for what is in dictionaries."""
    found = {}
    for name, value in call.items():
        found |= {(name, key): part for key, part in value.items()} if isinstance(value, dict) else {(name,): value}
    return found


def nested(paths: dict[tuple, Any]) -> dict[str, Any]:
    """The arguments that `flat` took apart."""
    call: dict[str, Any] = {}
    for (name, *key), value in paths.items():
        (call.setdefault(name, {}) if key else call)[key[0] if key else name] = value
    return call


def obstacle(given: dict[tuple, Any], cache, settings: dict[str, Any], most_rows: int) -> str | None:
    """Why a call (its arguments as of `flat`, without the cache) is not a decode step for a graph; None if it is.

    `settings` are the attributes of the model's config, as a dictionary because its own look-ups are slow.
    """
    from transformers import StaticCache

    ids = given.get(("input_ids",))
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return "input_ids are no tensor [N, tokens]"
    if ids.shape[1] != 1 or not 1 <= len(ids) <= most_rows:
        return f"input_ids are {list(ids.shape)}; graphs take one token of 1 to {most_rows} rows"
    if not isinstance(cache, StaticCache) or cache.offloading:
        return f"the cache is a {type(cache).__name__}; graphs need a StaticCache that stays on the device"
    if given.get(("labels",)) is not None or given.get(("return_dict",), settings.get("return_dict")) is False:
        return "a loss or a plain tuple is asked for"
    for name in _EXTRAS:
        wanted = given.get((f"output_{name}",))
        if settings.get(f"output_{name}") or settings.get(f"_output_{name}") if wanted is None else wanted:
            return f"output_{name} is asked for"
    return None


def unfit(given: dict[tuple, Any], places: Places, device: torch.device) -> str | None:
    """Why the arguments of a decode step cannot go into buffers; None if they can."""
    if places.windows and not {"position_ids", "attention_mask"} <= {name for name, *_ in given}:
        return "a sliding window, but no position_ids or no attention mask"  # both would come from host counters
    for (name, *_), value in given.items():
        if isinstance(value, torch.Tensor):
            if value.device != device:
                return f"{name} is on {value.device}, the model on {device}"
            if name == "attention_mask" and value.dim() != 4:
                return "the attention mask is not 4D, so it grows with every step"
        elif value is None:
            if places.windows and name in ("position_ids", "attention_mask"):
                return f"a sliding window, but {name} is None"
        elif not isinstance(value, bool | int | float | str):
            return f"{name} is a {type(value).__name__}"
    return None


class Places:
    """Where a cache's tensors and host values are: (dictionary, key) pairs, so that reading them is cheap."""

    def __init__(self, cache):
        self.layers, self.tensors, self.flags, self._counts = list(cache.layers), [], [], []
        self.windows = [layer for layer in cache.layers if hasattr(layer, "cumulative_length_int")]
        self.empty = any(getattr(layer, "keys", True) is None for layer in cache.layers)
        for layer in cache.layers:
            self._walk(vars(layer))
        self.kinds = (*map(type, cache.layers), *(key for places in (self.tensors, self._counts) for _, key in places))

    def _walk(self, values: dict) -> None:
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                self.tensors.append((values, key))
            elif isinstance(value, dict):
                self._walk(value)
            elif isinstance(value, int):
                (self.flags if isinstance(value, bool) else self._counts).append((values, key))

    def state(self) -> tuple:
        """Host values that a step's kernels depend on."""
        return (*(values[key] for values, key in self.flags), *map(_is_full, self.windows))

    def counts(self) -> list[int]:
        """Host counters, which a graph does not move on."""
        return [values[key] for values, key in self._counts]

    def write(self, counts: list[int]) -> None:
        """Set the host counters."""
        for (values, key), count in zip(self._counts, counts, strict=True):
            values[key] = count

    def advance(self, more: dict[int, int]) -> None:
        """Add to some host counters, by their place in `counts()`."""
        for at, count in more.items():
            values, key = self._counts[at]
            values[key] += count


class Home:
    """The tensors that graphs were captured over, and the cache whose layers hold them now."""

    def __init__(self, cache, places: Places):
        self.tensors = [values[key] for values, key in places.tensors]
        self.owner, self.sizes = weakref.ref(cache), self._sizes(places)

    @staticmethod
    def _sizes(places: Places) -> list:
        found = [values[key] for values, key in places.tensors]
        return [(value.shape, value.dtype, value.device, value.is_inference()) for value in found]

    def holds(self, places: Places) -> bool:
        """Whether these are the tensors at those places."""
        now = places.tensors
        return len(now) == len(self.tensors) and all(v[k] is t for (v, k), t in zip(now, self.tensors, strict=True))

    def take(self, cache, places: Places) -> bool:
        """Move a cache in, if none of another live cache is here: copy its contents and let its layers hold these."""
        if self.owner() not in (None, cache) or self._sizes(places) != self.sizes:
            return False
        for (values, key), kept in zip(places.tensors, self.tensors, strict=True):
            kept.copy_(values[key])
            values[key] = kept
        self.owner = weakref.ref(cache)
        return True


@contextlib.contextmanager
def rolling(places: Places) -> Iterator[None]:
    """While open, full sliding windows move on by `_roll`: the same bits, but legal in a capture.

    transformers makes an index tensor from a host value there, for which a capture fails.
    """
    full = [layer for layer in places.windows if _is_full(layer)]
    for layer in full:
        layer.update = functools.partial(_roll, layer)
    try:
        yield
    finally:
        for layer in full:
            del layer.update


def _is_full(layer) -> bool:
    return layer.cumulative_length_int >= layer.max_cache_len


def _roll(layer, keys: torch.Tensor, values: torch.Tensor, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
    layer.cumulative_length_int += 1
    for kept, new in ((layer.keys, keys), (layer.values, values)):
        kept.copy_(torch.cat((kept[:, :, 1:], new), dim=2))
    return layer.keys, layer.values
