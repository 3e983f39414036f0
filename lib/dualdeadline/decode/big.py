"""Stock models of published sizes with random weights, driven by recorded routes, and many engine variants of one."""

from __future__ import annotations

import copy
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
from dualdeadline.engine.surgery import PARAMETERS
from dualdeadline.schedule import COMPONENTS
from dualdeadline.streams.windows import OLMOE_CONFIG

# by shape: class of a config, and what is not its default (Qwen3.6-35B-A3B's text sizes are the class's own)
SHAPES = {"olmoe": ("OlmoeConfig", OLMOE_CONFIG), "qwen": ("Qwen3_5MoeTextConfig", {})}
PROMPT = 8  # tokens before the first decode step; their keys and values are real, the routes of the steps recorded
CONTEXT = 512


def build(device, dtype=torch.bfloat16, seed: int = 0, shape: str = "olmoe", alike: int = 0, **sizes):
    """A model of a shape with random weights; `sizes` override those of its config.

    Args:
        shape: key of `SHAPES`. alike: above 0, MoE layer i's experts are those of layer i % alike, the same tensors, on
            the CPU: more layers than host memory could hold; every layer has slots of its own all the same.

    Raises:
        ValueError: an unknown shape.
    """
    import transformers

    if shape not in SHAPES:
        raise ValueError(f"shape is {shape!r}; needed: one of {', '.join(SHAPES)}")
    name, own = SHAPES[shape]
    torch.manual_seed(seed)
    with torch.device(device):
        config = getattr(transformers, name)(**(own | sizes))
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    if alike:
        _share(models.describe(model), alike)
    return model


@torch.no_grad()
def _share(spec: models.MoESpec, alike: int) -> None:
    kept: dict[tuple[int, str], Tensor] = {}
    for number, layer in enumerate(spec.layers):
        for name in PARAMETERS.values():
            own = getattr(layer.experts, name)
            if number < alike:
                kept[number, name] = own.data.cpu()
            setattr(layer.experts, name, torch.nn.Parameter(kept[number % alike, name], own.requires_grad))
            del own
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # slots take that memory next


class Charged:
    """Recorded guesses, at the price of a predictor kernel of the model's own sizes whose output is thrown away.

    It counts the steps itself: code that is compiled whole may move the routers' counter on as soon as the last of them
    is looked up in the recorded routes, long before their layers run.
    """

    on_device = True

    def __init__(self, driven: Driven, ranked: Ranked, kernel: guides.DeviceGuide | None, horizon: int, layers: int):
        self.driven, self.ranked, self.kernel, self.horizon, self.layers = driven, ranked, kernel, horizon, layers
        self.place, self.coming = driven.place.clone(), driven.place.clone()

    def rewind(self, step: int) -> None:
        """Let the next forward have the guesses of token `step`."""
        self.coming.fill_(step % self.driven.T)

    def __call__(self, number: int, hidden, ids):
        if number == 0:
            torch.add(self.coming, 0, out=self.place)  # a kernel: copies are what attribution looks for
            self.coming.add_(1).remainder_(self.driven.T)
        if self.kernel is not None:
            self.kernel(number, hidden, ids)
        target = number + self.horizon
        return self.ranked.at(self.place, target, guides.GUESSES) if target < self.layers else None


class Variants:
    """One model whose experts are in host memory once for each wire; each variant has its own tables and graph.

    All variants run the same compiled code: compiled twice, it may add in another order, since kernels are tuned by
    the clock. Variants whose runs begin with nothing in their slots share the slots of the largest of them.

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
        engine.offload(
            model,
            slots=min(spec.K, *(case.slots for case in cases)),  # of the prompts; steps have those of their variant
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
        held = self._prompt(seed)
        for case in self.cases:
            self.devices[case] = self._variant(case, kernel)
            self.caches[case] = self._cache(held)
        self.place, self.places = PROMPT, torch.arange(CONTEXT, device=self.device)
        self.token = torch.ones(1, 1, dtype=torch.long, device=self.device)

    def _variant(self, case: Case, kernel) -> DeviceDriven:
        handle, spec = self.handle, self.spec
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
            self._slots(case),
            tables,
            case.schedule,
            guide,
            case.budget,
            case.threshold,
            cache.control(BREAK_EVEN if case.break_even is None else case.break_even, self.device),
            case.lanes,
        )

    def _slots(self, case: Case) -> dict[str, list[Tensor]]:
        """Slots of every layer: all experts, or a warm variant's own, or the first of those that cold ones share."""
        resident = case.slots >= self.spec.E
        name = "resident" if resident else case if case.warm else "cold"
        if name not in self.banks and resident:
            self.banks[name] = self._resident()
        elif name not in self.banks:
            cold = [one.slots for one in self.cases if one.slots < self.spec.E and not one.warm]
            count = case.slots if case.warm else max(cold)
            self.banks[name] = banks.allocate(self.handle.layers, dict.fromkeys(COMPONENTS, count), self.device)
        return {part: [bank[: case.slots] for bank in found] for part, found in self.banks[name].items()}

    def _resident(self) -> dict[str, list[Tensor]]:
        """Every expert in the slot of its own number; layers that hold the very same weights share them."""
        found: dict[str, list[Tensor]] = {}
        for part in COMPONENTS:
            sources = self.handle.store.sources[part]
            own = {weights.data_ptr(): weights for weights in sources}
            own = {place: weights.to(self.device, copy=True) for place, weights in own.items()}
            found[part] = [own[weights.data_ptr()] for weights in sources]
        return found

    @torch.inference_mode()
    def _prompt(self, seed: int):
        """A static cache that holds a short prompt."""
        from transformers import StaticCache

        held = StaticCache(config=self.model.config, max_cache_len=CONTEXT)
        ids = torch.randint(
            1, self.model.config.vocab_size, (1, PROMPT), generator=torch.Generator().manual_seed(seed)
        ).to(self.device)
        self.model(ids, past_key_values=held, use_cache=True)
        return held

    @torch.inference_mode()
    def _cache(self, held):
        """A copy of a cache, and copies of those of its states that every step overwrites."""
        own = copy.deepcopy(held)
        return own, [(state, state.clone()) for layer in own.layers for state in _states(layer)]

    @torch.inference_mode()
    def step(self, case: Case):
        """One decode step of a variant: the model's own forward, replayed once it is captured. Logits [1,1,V]."""
        self.handle.device, self.handle.newer = self.devices[case], "device"
        self.handle.captured.compiling = case.compiled
        place = self.places[self.place : self.place + 1, None]
        self.place += 1
        return self.model(self.token, position_ids=place, past_key_values=self.caches[case][0], use_cache=True).logits

    @torch.inference_mode()
    def rewind(self, case: Case, step: int) -> None:
        """Let the next step of a variant be a recorded one, right behind the prompt, with nothing in cold slots."""
        if not (self.devices[case].resident or case.warm):
            self.devices[case].tables.clear()
        self.driver.rewind(step)
        if self.devices[case].guide is not None:
            self.devices[case].guide.rewind(step)
        self.place = PROMPT
        for state, first in self.caches[case][1]:
            state.copy_(first)

    def counts(self, case: Case) -> dict[str, int]:
        """Counters of a variant's tables so far; waits for the device."""
        return self.devices[case].tables.counts()


def _states(layer) -> list[Tensor]:
    """What a step changes in a cache's layer but keys and values, whose places are written anew: the length of full
    attention, or the convolution's and the recurrent state of linear attention."""
    if hasattr(layer, "cumulative_length"):
        return [layer.cumulative_length]
    return [state for states in (layer.conv_states, layer.recurrent_states) for state in states.values()]
