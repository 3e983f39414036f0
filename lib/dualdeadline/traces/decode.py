"""The decode loop: left-padded batches over the stock forward of a transformers model, with its own KV cache."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from dualdeadline.models import MoESpec
from dualdeadline.traces.capture import Capture
from dualdeadline.traces.sampling import Sampling


@dataclass
class Decoded:
    """One prompt's result: tokens [T] that were fed, captured fields [T,L,...], and whether it ended by itself."""

    tokens: torch.Tensor
    fields: dict[str, torch.Tensor]
    finish: str


PREFILL_ROWS = 8  # prompts processed together; more rows would be padded to the longest of more
SMALL_HIDDEN = 512  # hidden size up to which one CPU thread beats several


def is_small(model) -> bool:
    """Whether a model runs on the CPU and its products are too small to share between threads."""
    return model.device.type == "cpu" and model.config.get_text_config().hidden_size <= SMALL_HIDDEN


@contextmanager
def fitting_threads(model) -> Iterator[None]:
    """One CPU thread for a small model inside the block.

    Its products take microseconds, so a second thread mostly waits at barriers: at hidden size 128 and batch 64
    two threads took ten times as long as one while other programs used the same two cores.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1 if is_small(model) else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Roomy(DynamicLayer):
    """A layer's keys and values [N,heads,tokens,width] with room for more.

    The stock layer joins old and new into a fresh tensor at every step, which at the pilot's size is the
    largest single cost of decoding.

    Args:
        parts: the layer as groups of rows have filled it, each to its own length; aligned at the right end.
        room: tokens that will be added at most.
    """

    def __init__(self, parts: list[DynamicLayer], room: int):
        super().__init__()
        self.lazy_initialization(parts[0].keys, parts[0].values)
        rows, length = sum(len(part.keys) for part in parts), max(part.keys.shape[2] for part in parts)
        self._stores = []
        for name in ("keys", "values"):
            old = [getattr(part, name) for part in parts]
            # what lies before a short prompt is masked, but must be finite: 0 * NaN would spread
            store = old[0].new_zeros((rows, old[0].shape[1], length + room, old[0].shape[3]))
            for target, group in zip(store.split([len(group) for group in old]), old, strict=True):
                target[:, :, length - group.shape[2] : length] = group
            self._stores.append(store)
        self.keys, self.values = (store[:, :, :length] for store in self._stores)

    def update(self, key_states, value_states, *_, **__):
        """Append in place; the two views returned hold everything so far."""
        start, more = self.keys.shape[2], key_states.shape[2]
        for store, new in zip(self._stores, (key_states, value_states), strict=True):
            store[:, :, start : start + more] = new
        self.keys, self.values = (store[:, :, : start + more] for store in self._stores)
        return self.keys, self.values


class Session:
    """A batch of prompts in flight: prefill on construction, then one token per row and `step`.

    Args:
        model: transformers causal language model.
        prompts: N lists of token ids; the closer neighbours are in length, the less padding is computed.
        pad: token id that fills the left side; masked, so any id will do.
        steps: the most steps that will be made.
    """

    def __init__(self, model, prompts: list[list[int]], pad: int, steps: int):
        self.model, self.device, self.pad = model, model.device, pad
        names = inspect.signature(model.forward).parameters
        # transformers renamed this argument between the versions supported
        self.cache_name = "cache" if "cache" in names else "past_key_values"
        self.extra = {"logits_to_keep": 1} if "logits_to_keep" in names else {}
        lengths = torch.tensor([len(ids) for ids in prompts], device=self.device)
        self.mask, self.next_position = _left_mask(lengths), lengths[:, None]
        # sliding and recurrent layers cannot be joined afterwards
        plain = all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config.get_text_config()).layers)
        size = PREFILL_ROWS if plain else len(prompts)
        groups = [self._prefill(prompts[start : start + size]) for start in range(0, len(prompts), size)]
        self.logits = torch.cat([logits for logits, _ in groups])
        self.cache = groups[0][1]
        for place, layer in enumerate(getattr(self.cache, "layers", [])):
            if type(layer) is DynamicLayer:
                self.cache.layers[place] = Roomy([cache.layers[place] for _, cache in groups], steps)

    def _prefill(self, prompts: list[list[int]]) -> tuple[torch.Tensor, object]:
        """Logits [n,V] after the prompts of a few rows, and their cache."""
        width = max(map(len, prompts))
        ids = torch.tensor([[self.pad] * (width - len(ids)) + ids for ids in prompts], device=self.device)
        mask = _left_mask(torch.tensor([len(ids) for ids in prompts], device=self.device))
        return self._forward(ids, (mask.cumsum(1) - 1).clamp(min=0), mask, None)

    def _forward(self, ids, positions, mask, cache) -> tuple[torch.Tensor, object]:
        output = self.model(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True,
            **{self.cache_name: cache}, **self.extra,
        )
        return output.logits[:, -1].to(self.device), getattr(output, self.cache_name)

    def step(self, tokens: torch.Tensor) -> None:
        """Feed one token [N] per row; `logits` [N,V] are then those of the next."""
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], dim=1)
        self.logits, self.cache = self._forward(tokens[:, None], self.next_position, self.mask, self.cache)
        self.next_position = self.next_position + 1


def _left_mask(lengths: torch.Tensor) -> torch.Tensor:
    """[N, longest] ones over each row's last `lengths` places."""
    width = int(lengths.max())
    return (torch.arange(width, device=lengths.device) >= (width - lengths)[:, None]).long()


@torch.inference_mode()
def decode(
    model, spec: MoESpec | None, prompts: list[list[int]], names: list[str], new_tokens: int,
    sampling: Sampling | None, stops: set[int], pad: int, min_new_tokens: int = 0,
) -> list[Decoded]:
    """Decode a batch; a row ends before an end-of-text token, or after `new_tokens` tokens.

    Rows that have ended are fed the pad token until the last one ends, and those steps are cut off.

    Args:
        spec: where to capture; None captures nothing (the reference run).
        prompts, names: token ids and prompt ids, one per row.
        stops: end-of-text tokens; they are never fed, so they have no row in the trace.
        min_new_tokens: steps during which `stops` are barred.
    """
    with fitting_threads(model):
        return _decode(model, spec, prompts, names, new_tokens, sampling, stops, pad, min_new_tokens)


def _decode(model, spec, prompts, names, new_tokens, sampling, stops, pad, min_new_tokens) -> list[Decoded]:
    session = Session(model, prompts, pad, new_tokens)
    ends = torch.tensor(sorted(stops), dtype=torch.long)
    keys = np.array([sampling.key(name) for name in names], dtype=np.uint64) if sampling else None
    lengths = torch.full((len(prompts),), new_tokens)
    fed: list[torch.Tensor] = []
    ended = torch.zeros(len(prompts), dtype=torch.bool)
    with Capture(spec, new_tokens) if spec else nullcontext() as capture:
        for step in range(new_tokens):
            logits = session.logits
            if step < min_new_tokens and len(ends):
                logits = logits.index_fill(-1, ends.to(logits.device), float("-inf"))
            tokens = sampling.choose(logits, keys, step) if sampling else logits.argmax(-1)
            stopped = torch.isin(tokens.cpu(), ends) & ~ended
            lengths[stopped] = step
            ended |= stopped
            if ended.all():
                break
            tokens = tokens.masked_fill(ended.to(tokens.device), pad)
            fed.append(tokens.cpu())
            session.step(tokens)
            if capture:
                capture.take()
    return _rows(torch.stack(fed, 1) if fed else torch.empty(len(prompts), 0), capture, lengths, new_tokens)


def _rows(tokens: torch.Tensor, capture: Capture | None, lengths: torch.Tensor, new_tokens: int) -> list[Decoded]:
    fields = capture.rows() if capture and capture.taken else {}
    return [
        Decoded(
            tokens[row, :length].long(), {name: value[row, :length] for name, value in fields.items()},
            "length" if length == new_tokens else "end of text",
        )
        for row, length in enumerate(lengths.tolist())
    ]
