"""A layer that the device runs alone: look-up, eviction, fetch, decode, products and prefetch without the host.

Three streams, forked and joined around each layer, so that one capture holds them all:

    compute   look-up, gate/up, down        waits for its own bytes only
    link      fetches from pinned memory    in order: what the router asked for, then what was guessed
    guide     predictor and admission       beside the products; joined before anything looks up again
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dualdeadline.cache import slots as cache
from dualdeadline.engine.surgery import LayerExperts
from dualdeadline.kernels import experts, fetch
from dualdeadline.kernels import slots as kernel
from dualdeadline.kernels import wire as wire_kernel
from dualdeadline.schedule import COMPONENTS
from dualdeadline.store import BITS, HostStore

FETCH_PROGRAMS = 16  # of a raw fetch: what fills the link (notebook 06)
DECODE_PROGRAMS = 264  # of a zero-copy decode (notebook 08)


class DeviceDriven:
    """Runs layers of up to 8 tokens whose experts fit into the slots at once.

    Args:
        layers, store, banks: of the engine. tables: on the device. guide: (number, hidden, ids) -> (ids [N,G],
            probabilities [N,G]) for layer number + guide.horizon, or None; without host work.
        schedule: `demand_serial` fetches both components before the first product, `staged_barrier` lets down cross
            while gate/up computes. budget, threshold, control: of `kernels.slots.admit`.
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
    ):
        self.layers, self.store, self.banks, self.tables = layers, store, banks, tables
        self.two_deadlines, self.guide = schedule == "staged_barrier", guide
        self.budget, self.threshold, self.control = tuple(budget), threshold, control
        self.cuda = tables.slot_of.device.type == "cuda"
        self.E = layers[0].E
        self.resident = all(len(banks[part][0]) >= self.E for part in COMPONENTS)
        self.filled, self.failed = self.resident, ""  # whether every expert lies in the slot of its own number
        self.streams = [torch.cuda.Stream(tables.device) for _ in range(2)] if self.cuda else []
        self.forked: set[int] = set()  # streams with work that nothing has waited for
        self.keep: tuple = ()  # what the guide still reads while the products run
        self.found: dict[int, object] = {}
        self.ahead = None

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
        hidden, weights = hidden.contiguous(), weights.contiguous()
        gate_up, down = (self.banks[part][number] for part in COMPONENTS)
        if self.resident:
            return experts.experts(hidden, gate_up, down, ids.int().contiguous(), weights, check=False)
        found = self._buffers(ids)
        self._join(1)
        kernel.lookup(self.tables, number, ids.contiguous(), found)
        ready = [
            self._on_link(lambda part=part, index=index: self._fetch(number, part, index, found))
            for index, part in enumerate(COMPONENTS)
        ]
        self._guess(number, hidden, ids)
        slots = [found.slots[index] for index in range(len(COMPONENTS))]
        self._wait(ready[0] if self.two_deadlines else ready[1])
        partial = experts.gate_up(hidden, gate_up, slots[0], check=False)
        self._wait(ready[1])
        out = experts.down_combine(partial, down, slots[1], weights, check=False)
        if number == len(self.layers) - 1:
            self._join(1)
            self._join(0)
        return out

    def _buffers(self, ids: Tensor):
        N, K = ids.shape
        if N not in self.found:
            self.found[N] = cache.Found(N, K, ids.device)
        return self.found[N]

    def _fetch(self, number: int, part: str, index: int, found) -> None:
        """Bring the listed experts of one component from host memory into their slots."""
        source, bank = self.store.sources[part][number], self.banks[part][number]
        if self.store.coded:
            wire_kernel.decode(
                source,
                bank,
                found.source[index],
                found.dest[index],
                found.count[index : index + 1],
                BITS,
                DECODE_PROGRAMS,
                spread=True,
            )
        else:
            fetch.fetch(
                source, bank, found.source[index], found.dest[index], found.count[index : index + 1], FETCH_PROGRAMS
            )

    def _guess(self, number: int, hidden: Tensor, ids: Tensor) -> None:
        """Predict, admit and fetch ahead for a later layer, beside the products of this one."""
        if self.guide is None:
            return
        target, self.keep = number + self.guide.horizon, (hidden, ids)
        with self._beside(1):
            guessed = self._ask(number, hidden, ids)
            if guessed is None or target >= len(self.layers):
                return
            if self.ahead is None:
                self.ahead = cache.Ahead(self.budget, ids.device)
            kernel.admit(self.tables, target, *guessed, self.ahead, self.threshold, self.budget, self.control)
        self._after(1, 0)
        for index, part in enumerate(COMPONENTS):
            if self.budget[index]:
                with self._stream(0):
                    self._fetch(target, part, index, self.ahead)
        self._after(0, 1)  # the lists may not change before they were read

    def _ask(self, number: int, hidden: Tensor, ids: Tensor):
        """The guide's answer; one that fails is switched off."""
        try:
            return self.guide(number, hidden, ids)
        except Exception as error:
            self.guide, self.failed = None, f"the predictor failed: {error}"
            return None

    # streams: 0 link, 1 guide; on a CPU everything runs in turn

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
            if not self.cuda:
                return None
            event = torch.cuda.Event()
            event.record(self.streams[0])
            return event

    def _wait(self, event) -> None:
        if self.cuda:
            torch.cuda.current_stream().wait_event(event)

    def _join(self, number: int) -> None:
        if number in self.forked:
            torch.cuda.current_stream().wait_stream(self.streams[number])
            self.forked.discard(number)


class _Nothing:
    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False
