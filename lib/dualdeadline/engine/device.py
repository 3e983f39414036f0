"""A layer that the device runs alone: look-up, eviction, fetch, decode, products and prefetch without the host.

Three streams, forked and joined around each layer, so that one capture holds them all:

    compute   look-up, decode, gate/up, down    waits for its own bytes only
    link      what crosses (engine/crossing)    in order: what the router asked for, then what was guessed
    guide     predictor, admission, decode of   beside the products; what they change is waited for where it is read
              what was guessed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dualdeadline.cache import slots as cache
from dualdeadline.engine.crossing import AHEAD_PROGRAMS, DECODE_PROGRAMS, FETCH_PROGRAMS, Crossing
from dualdeadline.engine.surgery import LayerExperts
from dualdeadline.kernels import experts
from dualdeadline.kernels import slots as kernel
from dualdeadline.schedule import COMPONENTS
from dualdeadline.store import HostStore
from dualdeadline.streams.lanes import beside


class DeviceDriven:
    """Runs layers of up to 8 tokens whose experts fit into the slots at once.

    Args:
        layers, store, banks: of the engine. tables: on the device. guide: (number, hidden, ids) -> (ids [N,G],
            probabilities [N,G]) for layer number + guide.horizon, or None; without host work.
        schedule: `demand_serial` fetches both components before the first product, `staged_barrier` lets down cross
            while gate/up computes. budget, threshold, control: of `kernels.slots.admit`. lanes: of `Crossing`.
    """

    def __init__(
        self,
        layers: Sequence[LayerExperts],
        store: HostStore,
        banks: Mapping[str, Sequence[Tensor]],
        tables,
        schedule: str,
        guide=None,
        budget=(0, 0),
        threshold: float = 0.5,
        control: Tensor | None = None,
        lanes: int = FETCH_PROGRAMS,
    ):
        self.layers, self.store, self.banks, self.tables = layers, store, banks, tables
        self.two_deadlines, self.guide = schedule == "staged_barrier", guide
        self.budget, self.threshold, self.control, self.lanes = tuple(budget), threshold, control, lanes
        self.cuda = tables.slot_of.device.type == "cuda"
        self.E = layers[0].E
        self.resident = all(len(banks[part][0]) >= self.E for part in COMPONENTS)
        self.filled, self.failed = self.resident, ""  # whether every expert lies in the slot of its own number
        self.streams: list[torch.cuda.Stream] = []  # link and guide; drawn where the first layer runs
        self.forked: set[int] = set()  # streams with work that nothing has waited for
        self.keep: tuple = ()  # what the guide still reads while the products run
        self.found: dict[int, object] = {}
        self.ahead = None
        self.now: Crossing | None = None  # of what the router asked for
        self.later: Crossing | None = None  # of what was guessed
        self.admitted = None  # event: the tables hold the guesses
        self.landed: dict[int, tuple] = {}  # by layer and component, events: its guesses are in their slots

    def settle(self) -> None:
        """After a forward that did not end: wait for what it left on the streams; nothing waits for it any more."""
        for stream in self.streams:
            stream.synchronize()
        self.drop()

    def drop(self) -> None:
        """Forget what a forward left behind: a capture that failed has launched nothing, and its events never pass."""
        self.forked.clear()
        self.landed.clear()
        self.admitted = None

    def capturing(self) -> bool:
        """Whether what is launched now is recorded, not run."""
        return self.cuda and torch.cuda.is_current_stream_capturing()

    def takes(self, tokens: int, top_k: int) -> str | None:
        """Why a forward of so many tokens has to go by the host, or None."""
        if tokens > experts.MAX_TOKENS:
            return f"{tokens} tokens in a forward, the device takes up to {experts.MAX_TOKENS}"
        if self.resident and not self.filled:
            return "slots are filled again after an error"
        least = min(len(self.banks[part][0]) for part in COMPONENTS)
        if not self.resident and tokens * top_k > least:
            return f"{tokens * top_k} experts may be in use at once, there are {least} slots"
        return None

    def layer(self, number: int, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Output [N,H]; allocates from the current pool only, so a capture may hold it."""
        if number == 0 and (
            self.forked or self.admitted or self.landed
        ):  # of a forward that ended before its last layer
            self.drop() if self.capturing() else self.settle()  # a capture begins when the device has come to rest
        if number == 0 or not self.streams:
            self._own_streams()
        hidden, weights = hidden.contiguous(), weights.contiguous()
        gate_up, down = (self.banks[part][number] for part in COMPONENTS)
        if self.resident:
            return experts.experts(hidden, gate_up, down, ids.contiguous(), weights, check=False)
        found = self._buffers(ids)
        self._wait(self.admitted)
        kernel.lookup(self.tables, number, ids.contiguous(), found)
        both, landed = range(len(COMPONENTS)), self.landed.pop(number, (None, None))
        if not self.now.stages(found):  # a look-up may have given a guess's slot away: the guess must land before
            self._wait(landed[1], 0)
        crossed = [self._on_link(lambda index=index: self.now.cross(number, index, found)) for index in both]
        self._guess(number, hidden, ids)

        def land(index: int) -> None:
            self._wait(landed[index])
            self._wait(crossed[index])
            self.now.land(number, index, found)

        for index in both[:1] if self.two_deadlines else both:
            land(index)
        partial = experts.gate_up(hidden, gate_up, found.slots[0], check=False)
        if self.two_deadlines:
            land(1)
        out = experts.down_combine(partial, down, found.slots[1], weights, check=False)
        if number == len(self.layers) - 1:
            self._join(1)
            self._join(0)
            self.drop()
        return out

    def _buffers(self, ids: Tensor):
        N, K = ids.shape
        if self.now is None:
            self.now = Crossing(self.store, self.banks, (K, K), ids.device, DECODE_PROGRAMS, self.lanes)
        if N not in self.found:
            self.found[N] = cache.Found(N, K, ids.device)
        return self.found[N]

    def _guess(self, number: int, hidden: Tensor, ids: Tensor) -> None:
        """Predict, admit and fetch ahead for a later layer, beside the products of this one."""
        if self.guide is None:
            return
        target, self.keep = number + self.guide.horizon, (hidden, ids)
        if self.ahead is None:
            self.ahead = cache.Ahead(self.budget, ids.device)
            room = (self.ahead.source.shape[1] if budget else 0 for budget in self.budget)
            self.later = Crossing(self.store, self.banks, tuple(room), ids.device, AHEAD_PROGRAMS, self.lanes)
        with self._beside(1):
            guessed = self._ask(number, hidden, ids)
            admits = guessed is not None and target < len(self.layers)
            if admits:
                kernel.admit(self.tables, target, *guessed, self.ahead, self.threshold, self.budget, self.control)
            self.admitted = self._event(1)
        if not admits:
            return
        self._after(1, 0)
        landed = []
        for index, budget in enumerate(self.budget):
            if budget:
                with self._stream(0):
                    self.later.cross(target, index, self.ahead)
                self._after(0, 1)  # the lists may not change before they were read
                with self._stream(1):
                    self.later.land(target, index, self.ahead)
            landed.append(self._event(1))
        self.landed[target] = tuple(landed)

    def _ask(self, number: int, hidden: Tensor, ids: Tensor):
        """The guide's answer; one that fails is switched off."""
        try:
            return self.guide(number, hidden, ids)
        except Exception as error:
            self.guide, self.failed = None, f"the predictor failed: {error}"
            return None

    # streams: 0 link, 1 guide; on a CPU everything runs in turn

    def _own_streams(self) -> None:
        """Streams other than the one this forward runs or is captured on: on that one nothing would overlap."""
        if not self.cuda or self.streams and torch.cuda.current_stream(self.tables.device) not in self.streams:
            return
        before, self.streams = self.streams, beside(2, self.tables.device)
        for stream, other in zip(self.streams, before):
            if not self.capturing():  # nothing is left on streams when a capture begins
                stream.wait_stream(other)

    def _stream(self, number: int):
        return torch.cuda.stream(self.streams[number]) if self.cuda else _Nothing()

    def _beside(self, number: int):
        if self.cuda:
            self.streams[number].wait_stream(torch.cuda.current_stream())
            self.forked.add(number)
        return self._stream(number)

    def _after(self, first: int, second: int) -> None:
        if self.cuda:
            self.streams[second].wait_stream(self.streams[first])
            self.forked.add(second)

    def _on_link(self, work):
        with self._beside(0):
            work()
            return self._event(0)

    def _event(self, number: int):
        """What the work so far of a stream can be waited for by; None on a CPU."""
        if not self.cuda:
            return None
        event = torch.cuda.Event()
        event.record(self.streams[number])
        return event

    def _wait(self, event, number: int | None = None) -> None:
        """Let a stream (default: the products') wait for an event."""
        if event is not None:
            (torch.cuda.current_stream() if number is None else self.streams[number]).wait_event(event)

    def _join(self, number: int) -> None:
        if number in self.forked:
            torch.cuda.current_stream().wait_stream(self.streams[number])
            self.forked.discard(number)


class _Nothing:
    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False
