"""A stock model of OLMoE's sizes with random weights, driven by recorded routes, and many engine variants of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dualdeadline import engine, models
from dualdeadline.cache import slots as cache
from dualdeadline.decode.cases import Case
from dualdeadline.decode.recorded import Recorded
from dualdeadline.engine import banks
from dualdeadline.engine import guide as guides
from dualdeadline.engine.device import DeviceDriven
from dualdeadline.engine.driven import Driven, Ranked
from dualdeadline.engine.handle import BREAK_EVEN
from dualdeadline.schedule import COMPONENTS
from dualdeadline.streams.windows import OLMOE_CONFIG

PROMPT = 8  # tokens before the first decode step; their keys and values are real, the routes of the steps recorded
CONTEXT = 512


def build(device, dtype=torch.bfloat16, seed: int = 0, **sizes):
    """OlmoeForCausalLM with random weights; `sizes` override OLMoE-1B-7B's."""
    from transformers import AutoModelForCausalLM, OlmoeConfig

    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(OlmoeConfig(**(OLMOE_CONFIG | sizes)), dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    return model


class Charged:
    """Recorded guesses, at the price of a predictor kernel of the model's own sizes whose output is thrown away."""

    on_device = True

    def __init__(self, driven: Driven, ranked: Ranked, kernel: guides.DeviceGuide | None, horizon: int, layers: int):
        self.driven, self.ranked, self.kernel, self.horizon, self.layers = driven, ranked, kernel, horizon, layers

    def __call__(self, number: int, hidden, ids):
        if self.kernel is not None:
            self.kernel(number, hidden, ids)
        target = number + self.horizon
        return self.ranked.at(self.driven.place, target, guides.GUESSES) if target < self.layers else None


class Variants:
    """One model whose experts are in host memory once for each wire; each variant has its own tables and graph.

    All variants run the same compiled code: compiled twice, it may add in another order, since kernels are tuned by
    the clock. Variants whose runs begin with nothing in their slots share those of their number.

    Args:
        recorded: what drives the routers. compile: also compile the code around the experts.
    """

    def __init__(
        self,
        model,
        recorded: Recorded,
        cases: Sequence[Case],
        seed: int = 0,
        compile: bool = False,
        device=None,
    ):
        self.model, self.recorded, self.cases, self.banks = model, recorded, list(cases), {}
        spec = models.describe(model)
        first = min(case.slots for case in cases)
        engine.offload(
            model,
            slots=first,
            wire="raw",
            backend="graph",
            kernels="fused",
            predictor=None,
            context=CONTEXT,
            compile=compile,
            device=device,
        )
        self.handle, self.device = model.dualdeadline, model.dualdeadline.options.device
        self.handle.captured.keep = len(cases) + 1
        self.stores = {"raw": self.handle.store}
        if any(case.wire == "coded" for case in cases):
            self.stores["coded"] = self.handle.store.encoded()
        self.spec, self.caches, self.devices = spec, {}, {}
        kernel = guides.for_device(guides.untrained(spec, recorded.horizon), self.device)[0]
        self.driver = Driven(spec, recorded.routes)
        for case in self.cases:
            self.devices[case] = self._variant(case, kernel)
            self.caches[case] = self._cache(seed)
        self.place, self.places = PROMPT, torch.arange(CONTEXT, device=self.device)
        self.token = torch.ones(1, 1, dtype=torch.long, device=self.device)

    def _variant(self, case: Case, kernel) -> DeviceDriven:
        handle, spec = self.handle, self.spec
        own = case if case.warm else case.slots  # what stays in slots must not be shared
        if own not in self.banks:
            self.banks[own] = self._slots(case.slots)
        tables = cache.SlotTables(spec.L, spec.E, (case.slots, case.slots), self.device)
        guide = None
        if case.predictor:
            guide = Charged(
                self.driver,
                Ranked(self.recorded.scores[case.predictor], self.device),
                kernel,
                self.recorded.horizon,
                spec.L,
            )
        return DeviceDriven(
            handle.layers,
            self.stores[case.wire],
            self.banks[own],
            tables,
            case.schedule,
            guide,
            case.budget,
            case.threshold,
            cache.control(BREAK_EVEN if case.break_even is None else case.break_even, self.device),
            case.lanes,
        )

    def _slots(self, count: int) -> dict[str, list[Tensor]]:
        """Slots of every layer; filled where every expert has one."""
        found = banks.allocate(self.handle.layers, dict.fromkeys(COMPONENTS, count), self.device)
        if count >= self.spec.E:
            banks.fill(found, self.handle.store)
        return found

    @torch.inference_mode()
    def _cache(self, seed: int):
        """A static cache that holds a short prompt."""
        from transformers import StaticCache

        held = StaticCache(config=self.model.config, max_cache_len=CONTEXT)
        ids = torch.randint(
            1, self.model.config.vocab_size, (1, PROMPT), generator=torch.Generator().manual_seed(seed)
        ).to(self.device)
        self.model(ids, past_key_values=held, use_cache=True)
        return held

    @torch.inference_mode()
    def step(self, case: Case):
        """One decode step of a variant: the model's own forward, replayed once it is captured. Logits [1,1,V]."""
        self.handle.device, self.handle.newer = self.devices[case], "device"
        self.handle.captured.compiling = case.compiled
        place = self.places[self.place : self.place + 1, None]
        self.place += 1
        return self.model(self.token, position_ids=place, past_key_values=self.caches[case], use_cache=True).logits

    @torch.inference_mode()
    def rewind(self, case: Case, step: int) -> None:
        """Let the next step of a variant be a recorded one, right behind the prompt, with nothing in cold slots."""
        if not (self.devices[case].resident or case.warm):
            self.devices[case].tables.clear()
        self.driver.rewind(step)
        self.place = PROMPT
        for layer in self.caches[case].layers:
            layer.cumulative_length.fill_(PROMPT)

    def counts(self, case: Case) -> dict[str, int]:
        """Counters of a variant's tables so far; waits for the device."""
        return self.devices[case].tables.counts()
