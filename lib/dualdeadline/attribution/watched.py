"""Steps that the host drives, cut into parts by hooks and watched lanes; nothing of it is there when nobody watches.

One sequence of stamps divides a forward: what lies between two of them is one part. On a CPU a stamp is the clock, on a
GPU an event in the stream that computes, so that the parts are that stream's time: a wait for a copy, or for the host.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pandas as pd
import torch
from torch import nn

from dualdeadline.attribution import parts

WARMUP = 2


class Recorder:
    """Stamps of some forwards.

    Attributes:
        cuts: (part that ends here, stamp), part None: what lies before belongs to nothing.
        installs: pairs of stamps between which something was installed, from whatever thread or stream.
    """

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.cuts: list[tuple[str | None, object]] = []
        self.installs: list[tuple[object, object]] = []
        self.first = self.stamp()

    def stamp(self):
        """Now: seconds, or an event in the current stream."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def cut(self, part: str | None) -> None:
        """What ran since the last cut is `part`."""
        self.cuts.append((part, self.stamp()))

    @contextlib.contextmanager
    def install(self) -> Iterator[None]:
        """Note that something is installed inside."""
        begun = self.stamp()
        yield
        self.installs.append((begun, self.stamp()))

    def _ms(self, stamp) -> float:
        if not self.cuda:
            return 1e3 * (stamp - self.first)
        stamp.synchronize()
        return self.first.elapsed_time(stamp)

    def steps(self) -> list[Counter]:
        """Milliseconds by part of each forward; on a GPU waits until it has passed."""
        busy = merged([(self._ms(begun), self._ms(ended)) for begun, ended in self.installs])
        out, before = [], 0.0
        for part, stamp in self.cuts:
            now = self._ms(stamp)
            if part is None:
                out.append(Counter())
            elif part in parts.WAITS:
                installing = overlap(before, now, busy)
                out[-1].update({"install": installing, part: now - before - installing})
            else:
                out[-1][part] += now - before
            before = now
        return out


def merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same time without overlaps, in order."""
    out: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1]:
            out[-1] = out[-1][0], max(end, out[-1][1])
        else:
            out.append((begin, end))
    return out


def overlap(begin: float, end: float, spans: list[tuple[float, float]]) -> float:
    """How much of `spans`, which do not overlap, lies between two times."""
    return sum(max(0.0, min(end, last) - max(begin, first)) for first, last in spans)


class Watched:
    """Lanes of an engine with stamps around what the caller waits for and computes.

    Args:
        blocking: issuing a copy waits for its bytes (reads of a file, a worker's answer, where a GPU's host asks).
    """

    def __init__(self, lanes, recorder: Recorder, blocking: bool = False):
        self.lanes, self.recorder, self.guessing, self.fresh = lanes, recorder, False, True
        self.blocking = blocking
        self.guessed: weakref.WeakSet = weakref.WeakSet()

    def __getattr__(self, name: str):
        return getattr(self.lanes, name)

    def enter(self) -> None:
        self.fresh = True
        self.lanes.enter()

    def copy(self, work: Callable[[], None], needs):
        if self.blocking:
            self._until_here()
        mark = self.lanes.copy(work, needs)
        if self.blocking:
            self.recorder.cut("late prefetch wait" if self.guessing else "demand wait")
        if self.guessing:
            self.guessed.add(mark)
        return mark

    def _until_here(self) -> None:
        self.recorder.cut("look-up" if self.fresh else "launch gaps")
        self.fresh = False

    def compute(self, work: Callable[[], None], needs):
        self._until_here()
        late = any(need in self.guessed for need in needs)

        def after_waiting() -> None:
            self.recorder.cut("late prefetch wait" if late else "demand wait")
            work()

        mark = self.lanes.compute(after_waiting, needs)
        self.recorder.cut("expert compute")
        return mark


@contextlib.contextmanager
def watch(model: nn.Module) -> Iterator[Recorder]:
    """Record every forward of an offloaded model that happens inside; use `Recorder.steps` afterwards.

    Raises:
        ValueError: a model that is not offloaded, or whose steps are CUDA graphs.
    """
    handle = getattr(model, "dualdeadline", None)
    if handle is None or handle.options.backend == "graph":
        raise ValueError(
            "the model is not offloaded, or its steps are graphs; needed: dualdeadline.offload with backend "
            "cpu or streams (a graph: attribution.graph)"
        )
    recorder, hosted = Recorder(handle.options.device), handle.hosted
    before, undo = hosted.lanes, contextlib.ExitStack()
    with undo:
        undo.callback(setattr, hosted, "lanes", before)
        hosted.lanes = Watched(before, recorder, recorder.cuda and not hasattr(hosted.store, "sources"))
        for owner, name, wrap in _wraps(hosted, recorder):
            setattr(owner, name, wrap)
            undo.callback(owner.__dict__.pop, name)
        for handle_ in _hooks(model, handle, recorder):
            undo.callback(handle_.remove)
        yield recorder


def _wraps(hosted, recorder: Recorder) -> list[tuple[object, str, Callable]]:
    """Methods of the layers and their store that are replaced while somebody watches."""
    found: list[tuple[object, str, Callable]] = []
    if hasattr(hosted, "_fetch_ahead"):
        ahead = hosted._fetch_ahead

        def fetch_ahead(*args) -> None:
            hosted.lanes.guessing = True
            try:
                ahead(*args)
            finally:
                hosted.lanes.guessing = False

        found.append((hosted, "_fetch_ahead", fetch_ahead))
    # what comes after the bytes have crossed: a copy into the slot, or a decode; one copy that crosses is no install
    owner, name = (hosted.store, "put") if hasattr(hosted.store, "put") else (hosted, "bring")
    if name == "put" or hosted.store.coded:
        second = getattr(owner, name)

        def install(*args) -> None:
            with recorder.install():
                second(*args)

        found.append((owner, name, install))
    return found


def _hooks(model: nn.Module, handle, recorder: Recorder) -> list:
    def cut(part: str | None):
        return lambda *args: recorder.cut(part)

    found = [model.register_forward_pre_hook(cut(None)), model.register_forward_hook(cut("other"))]
    guesses = handle.guide is not None or getattr(handle.hosted, "below", None) is not None
    for layer in handle.spec.layers:
        found += [
            layer.decoder.register_forward_pre_hook(cut("other")),
            layer.router.register_forward_pre_hook(cut("attention")),
            layer.experts.register_forward_pre_hook(cut("router")),
            layer.experts.register_forward_hook(cut("prediction" if guesses else "launch gaps")),
        ]
    return found


def host(model: nn.Module, step: Callable[[], object], steps: int, case: str, plain: int | None = None) -> pd.DataFrame:
    """Parts of `steps` calls of `step`, each one forward of an offloaded model that the host drives.

    Args:
        case: name in the table. plain: calls that are timed without watching (default: as many).

    Returns:
        DataFrame(case, part, ms, low, high, n), see the package.

    Raises:
        ValueError: as `watch`, or a step that is not one forward. AssertionError: parts do not add up.
    """
    device = model.dualdeadline.options.device if hasattr(model, "dualdeadline") else torch.device("cpu")
    for _ in range(WARMUP):
        step()
    alone = [_timed(step, device) for _ in range(steps if plain is None else plain)]
    with watch(model) as recorder:
        measured = [_timed(step, device) for _ in range(steps)]
    found = recorder.steps()
    if len(found) != steps:
        raise ValueError(f"{steps} steps made {len(found)} forwards; needed: one each")
    return parts.frame(case, found, np.array(measured), np.array(alone))


def _timed(step: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of one call, until the device has done it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begun = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - begun)
