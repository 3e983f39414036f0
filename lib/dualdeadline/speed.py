"""Speed of the kernels against what else computes the same: resident experts, fetch, predictor; record rows.

One token of a block is over in 30 microseconds, so a launch would hide it: graphs hold many blocks with other experts
each, and a time is the graph's over their number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import OlmoeConfig
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

from dualdeadline.kernels import experts, fetch, predictor
from dualdeadline.models import Routers
from dualdeadline.overlap.rows import measured
from dualdeadline.predictors import gate_ahead, learned, residual
from dualdeadline.streams import Shape, draw_routes
from dualdeadline.streams.bench import Variant, graph, interleaved

STOCK = ("eager", "batched_mm", "grouped_mm")  # transformers' experts implementations
STEPS = 32  # predictor steps in a graph
SECONDS = 5.0  # for one number of tokens; variants that are slow then have fewer samples, at least 20
MOST_BATCHED = 64  # tokens of batched_mm, which copies the weights of every token's experts
BLOCKS = 12  # blocks in a graph: with 6 layers and routes of their own, 1 GiB of weights between two uses


def everything(
    shapes: Sequence[Shape], tokens: Sequence[int], top_k: int, programs: Sequence[int], samples: int, seed: int = 0
) -> Iterator[tuple[str, list[dict]]]:
    """Parts of all that this module times, as (name, rows), for each shape, after a check of the expert kernels.

    Raises:
        AssertionError: a kernel's output is off by more than rounding explains, or differs between equal tiles.
    """
    yield "copy", [copy_rate()]
    for shape in shapes:
        blocks = Blocks(shape, seed=seed)
        worst = check(blocks.inputs(1, top_k), ways(shape))
        assert worst < 0.02, f"{shape.name}: off by {worst:.3f} of the largest output"
        yield f"predictors, {shape.name}", predictors(shape, samples)
        yield f"fetch, {shape.name}", fetches(shape, programs, top_k, samples // 4)
        yield f"experts, {shape.name}", resident(blocks, tokens, top_k, samples)


def copy_rate(samples: int = 30, mib: int = 1024) -> dict:
    """Device-to-device copy, bytes read and written per second: the ceiling of what reads memory."""
    source, there = (torch.empty(mib << 20, dtype=torch.uint8, device="cuda") for _ in range(2))
    times = interleaved({"copy": Variant(lambda turn: there.copy_(source), queued=True)}, samples)["copy"]
    return measured("copy", "memory_gbps", "GB/s", 2 * source.numel() / times / 1e6, {})


class Blocks:
    """Layers of routed experts at a model's sizes, with random weights, in transformers' own module.

    Args:
        shape: sizes. layers: modules with weights of their own.
    """

    def __init__(self, shape: Shape, layers: int = 6, seed: int = 0):
        self.shape, config = shape, OlmoeConfig(
            hidden_size=shape.H, intermediate_size=shape.F, num_experts=shape.E, num_hidden_layers=1
        )
        draw = torch.Generator("cuda").manual_seed(seed)
        with torch.device("cuda"):
            self.modules = [OlmoeExperts(config).to(shape.dtype) for _ in range(layers)]
        for module in self.modules:
            for weight in module.parameters():
                weight.data.normal_(0, 0.02, generator=draw)
                weight.requires_grad_(False)

    def inputs(self, tokens: int, top_k: int, seed: int = 0) -> list[tuple]:
        """(module, x [N,H], ids [N,K], weights [N,K]) of `BLOCKS` blocks; layers take turns."""
        routes = draw_routes(self.shape, BLOCKS, tokens, top_k, seed)
        draw = torch.Generator().manual_seed(seed)
        found = []
        for number in range(BLOCKS):
            x = torch.randn(tokens, self.shape.H, generator=draw).to("cuda", self.shape.dtype)
            weights = torch.rand(tokens, top_k, generator=draw).softmax(-1).to("cuda", self.shape.dtype)
            found.append((self.modules[number % len(self.modules)], x, routes[number].to("cuda"), weights))
        return found


def ways(shape: Shape) -> dict[str, experts.Tiles]:
    """Ways of our own kernels with equal bits: the default, and down starting only when gate/up has ended."""
    chosen = experts.Tiles.default(shape.H, shape.F)
    return {"fused": chosen, "fused, down waits": replace(chosen, pdl=False)}


def fused(inputs: Sequence[tuple], tiles: experts.Tiles | None = None) -> Callable[[], list[Tensor]]:
    """All blocks by our kernels, into buffers of their own."""
    ready = []
    for module, x, ids, weights in inputs:
        slots, (F, H) = ids.int(), (module.down_proj.shape[2], x.shape[1])
        few = len(x) <= experts.MAX_TOKENS
        space = experts.workspace(len(x), ids.shape[1], H, F, x.dtype, x.device) if few else None
        ready.append((x, module.gate_up_proj, module.down_proj, slots, weights, space))
    return lambda: [experts.experts(*arguments, tiles=tiles) for arguments in ready]


def stock(inputs: Sequence[tuple], implementation: str) -> Callable[[], list[Tensor]]:
    """All blocks by one of transformers' implementations."""

    def run() -> list[Tensor]:
        out = []
        for module, *arguments in inputs:
            module.config._experts_implementation = implementation
            out.append(module(*arguments))
        return out

    return run


def check(inputs: Sequence[tuple], tiles: Mapping[str, experts.Tiles]) -> float:
    """Largest difference of our kernels from the float32 reference, relative to the largest output.

    Raises:
        AssertionError: two ways of our own kernels with equal reduction tiles differ in a bit.
    """
    ours = {name: fused(inputs, found)() for name, found in tiles.items()}
    first = next(iter(ours.values()))
    for name, found in ours.items():
        assert all(torch.equal(a, b) for a, b in zip(first, found)), f"{name} changes a bit"
    worst = 0.0
    for (module, x, ids, weights), out in zip(inputs, first):
        wide = experts.experts_reference(x, module.gate_up_proj, module.down_proj, ids.int(), weights)
        worst = max(worst, float((out.cpu().float() - wide).abs().max() / wide.abs().max()))
    return worst


def resident(blocks: Blocks, tokens: Sequence[int], top_k: int, samples: int) -> list[dict]:
    """Rows of one block's time by implementation and tokens, and of the ratio that H4 asks for.

    transformers' eager loop looks at the routes on the host and cannot be captured: it runs one block at a time. The
    others are timed in a graph.
    """
    rows = []
    for count in tokens:
        inputs = blocks.inputs(count, top_k)
        named = ways(blocks.shape) if count == 1 else {"fused": None}
        variants = {name: _captured(fused(inputs, found)) for name, found in named.items()}
        some = STOCK if count <= MOST_BATCHED else ("eager", "grouped_mm")
        variants |= {name: _captured(stock(inputs, name)) for name in some if name != "eager"}
        variants["eager"] = _in_turns([stock([one], "eager") for one in inputs])
        found = interleaved(variants, samples, budget_s=SECONDS)
        found = {name: times / (1 if name == "eager" else BLOCKS) for name, times in found.items()}
        config = {"shape": blocks.shape.name, "tokens": count, "top_k": top_k}
        bytes = np.mean([len(ids.unique()) for _, _, ids, _ in inputs]) * blocks.shape.component_bytes["expert"]
        for name, times in found.items():
            rows.append(measured(name, "resident_ms", "ms", times, config))
            rows.append(measured(name, "resident_gbps", "GB/s", bytes / times / 1e6, config))
        if count == 1 and blocks.shape.name == "olmoe":
            rows.append(ratio(found))
    return rows


def ratio(found: Mapping[str, np.ndarray], resamples: int = 2000, seed: int = 0) -> dict:
    """Row of our median over the fastest stock median, with a bootstrap interval over the timing samples."""
    draw = np.random.default_rng(seed)
    fastest = min(STOCK, key=lambda name: np.median(found[name]))
    a, b = (
        [np.median(draw.choice(found[name], len(found[name]))) for _ in range(resamples)] for name in ("fused", fastest)
    )
    low, high = np.percentile(np.divide(a, b), (2.5, 97.5))
    middle = np.median(found["fused"]) / np.median(found[fastest])
    return dict(
        variant="fused-transformers", metric="block_time_ratio", median=middle, low=low, high=high,
        n=len(found["fused"]), unit="ratio", kind="measured", config={"against": fastest},
    )


def fetches(shape: Shape, programs: Sequence[int], count: int, samples: int) -> list[dict]:
    """Rows of the zero-copy fetch of `count` whole experts from pinned memory, by number of programs."""
    size = shape.component_bytes["expert"] // 2
    host = fetch.pin(torch.randint(-(2**15), 2**15, (64, size), dtype=torch.int16))
    bank = torch.zeros(16, size, dtype=torch.int16, device="cuda")
    draw, variants = np.random.default_rng(0), {}
    number = torch.tensor([count], dtype=torch.int32, device="cuda")
    slots = torch.arange(count, dtype=torch.int32, device="cuda")
    sets = [torch.tensor(draw.choice(64, count, replace=False), dtype=torch.int32, device="cuda") for _ in range(4)]
    for some in programs:
        replays = [graph(lambda ids=ids, some=some: fetch.fetch(host, bank, ids, slots, number, some)) for ids in sets]
        replays[0]()
        assert torch.equal(bank[:count].cpu(), host[sets[0].long().cpu()]), "fetched bytes differ"
        variants[some] = Variant(lambda turn, replays=replays: replays[turn % 4](), queued=True)
    found = interleaved(variants, samples)
    out = []
    for some, times in found.items():
        config = {"programs": some, "experts": count, "shape": shape.name}
        out.append(measured("zero_copy", "fetch_gbps", "GB/s", count * size * 2 / times / 1e6, config))
        out.append(measured("zero_copy", "fetch_ms", "ms", times, config))
    return out


def _captured(work: Callable[[], object]) -> Variant:
    replay = graph(work)
    return Variant(lambda turn: replay(), queued=True)


def _in_turns(works: Sequence[Callable[[], object]]) -> Variant:
    works[0]()
    return Variant(lambda turn: works[turn % len(works)]())


def predictors(shape: Shape, samples: int, layers: int = 16, seed: int = 0) -> list[dict]:
    """Rows of a predictor's step, with random weights at a model's sizes: launched, captured, fused.

    The torch ways score a fixed view and take the largest; what a ResidualGate notes for the next token is left out
    of them, not of the kernels.
    """
    draw = torch.Generator().manual_seed(seed)
    states = torch.randn(STEPS, 1, shape.H, generator=draw).to("cuda", torch.bfloat16)
    rows = []
    for guide in random_predictors(shape, layers, draw):
        ways = _torch_ways(guide, states) | _kernel_ways(guide, states)
        found = interleaved(ways, samples)
        for name, times in found.items():
            config = {"predictor": guide.name, "shape": shape.name, "horizon": guide.horizon}
            rows.append(measured(name, "predictor_ms", "ms", times / STEPS, config))
    return rows


def random_predictors(shape: Shape, layers: int, draw: torch.Generator, device="cuda") -> list:
    """A SharedMLP, a GateAhead and a ResidualGate of the same size, with random numbers in their tables."""
    E, H, count = shape.E, shape.H, layers - 1
    weight = (torch.randn(layers, E, H, generator=draw) * H**-0.5).to(device)
    routers = Routers(weight, None, torch.ones(layers, H, device=device), None, 1e-5, "softmax", False, 1.0)
    made = [learned.SharedMLP(), gate_ahead.GateAhead(routers=routers), residual.ResidualGate(routers=routers)]
    for guide in made:
        guide.L, guide.E, guide.K, guide.H = layers, E, min(8, E), H
    made[0].table = made[0].initial(draw)
    rank = made[2].affordable_rank(2 * H, 6)
    made[2].table = {
        "down": learned.dense(draw, 2 * H, rank),
        "up": learned.dense(draw, count, rank, E),
        "expert": torch.randn(count, E, 6, generator=draw) * 0.1,
    }
    for guide in made:
        guide.table |= {"slope": torch.ones(count), "offset": torch.zeros(count)}
        guide.table = {name: value.to(device) for name, value in guide.table.items()}
    return made


def _torch_ways(guide, states: Tensor) -> dict[str, Variant]:
    """Eager, eager in a CUDA graph, and compiled; the last for one layer's steps, since each layer compiles anew."""
    online = guide.online()
    ids = torch.zeros(1, guide.K, dtype=torch.long, device="cuda")

    def steps(score, layers: int = guide.L - 1) -> None:
        for look in looks[layers]:
            score(look).topk(8)

    looks = {
        layers: [online.view(turn % layers, state.float()[None], ids) for turn, state in enumerate(states)]
        for layers in (1, guide.L - 1)
    }

    with torch.no_grad():
        compiled = torch.compile(guide.probabilities, dynamic=False)
        eager = functools.partial(steps, guide.probabilities)
        ways = {"eager": _in_turns([eager]), "eager in a graph": _captured(eager)}
        try:
            ways["compiled in a graph"] = _captured(lambda: steps(compiled, 1))
        except Exception as error:  # what the compiler refuses is no result, and no reason to lose the others
            print(f"torch.compile of {guide.name}: {type(error).__name__}")
    return ways


def _kernel_ways(guide, states: Tensor) -> dict[str, Variant]:
    """One launch and two, with weights in float32, which keep every choice, and one with weights in bfloat16."""
    ways = {}
    for name, launches, dtype in (
        ("one launch", 1, torch.float32),
        ("two launches", 2, torch.float32),
        ("one launch, bfloat16 weights", 1, torch.bfloat16),
    ):
        fused = predictor.Fused(guide, "cuda", 1, 8, dtype, launches=launches)
        logits = torch.zeros(1, guide.E, device="cuda")

        def steps(fused=fused, logits=logits) -> None:
            for turn, state in enumerate(states):
                fused.step(turn % guide.L, state, logits)

        ways[name] = _captured(steps)
    return ways
