"""Batches side by side on the cores that a small model, which decodes on one thread, would leave idle."""

from __future__ import annotations

import copy
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from dualdeadline.traces.decode import is_small


def workers_for(model, batches: int) -> int:
    """How many batches to decode at once: as many as there are cores if the model is small, else one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(cores, batches)) if is_small(model) else 1


def each(function: Callable, model, items: Iterable, workers: int) -> Iterator[tuple]:
    """Yield every item with `function(model, item)`, in the order of the items.

    Every worker thread has a model of its own, since hooks on a module see whatever passes through it. Close the
    generator to stop early: a batch under way then ends at its next forward pass.

    Args:
        function: called in threads when there are several `workers`; must not change the model.
        items: taken one ahead of the workers, so few results wait to be consumed.
    """
    if workers == 1:
        yield from ((item, function(model, item)) for item in items)
        return
    stop, free, waiting = threading.Event(), SimpleQueue(), deque()
    own = [model, *(copy.deepcopy(model) for _ in range(workers - 1))]
    hooks = [one.register_forward_pre_hook(lambda *_: _end_if(stop)) for one in own]
    for one in own:
        free.put(one)
    with ThreadPoolExecutor(workers) as pool:
        try:
            for item in items:
                waiting.append((item, pool.submit(_with_one, free, function, item)))
                if len(waiting) > workers:
                    done, result = waiting.popleft()
                    yield done, result.result()
            for done, result in waiting:
                yield done, result.result()
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            for hook in hooks:
                hook.remove()


def _end_if(stop: threading.Event) -> None:
    if stop.is_set():
        raise InterruptedError("decoding was stopped")


def _with_one(free: SimpleQueue, function: Callable, item):
    model = free.get()
    try:
        return function(model, item)
    finally:
        free.put(model)
