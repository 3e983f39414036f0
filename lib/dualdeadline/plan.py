"""What fits a memory limit, and how experts should then travel: slots, wire format, schedule and prefetch.

Memory is counted from the model's sizes; times are simulated from a measured cost model, never promised.
"""

from __future__ import annotations

import copy
import math
import numbers
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from dualdeadline import cache, models, schedule, simulate, steps, streams
from dualdeadline.cost import CostModel, TransferModel
from dualdeadline.schedule import COMPONENTS, DECODES, PIECES, Compute, Copy, Layer
from dualdeadline.streams import probes
from dualdeadline.streams.bench import Variant, interleaved

UNITS = {"b": 1} | {f"{p}{end}": base**n for n, p in enumerate("kmgt", 1) for end, base in (("b", 1000), ("ib", 1024))}
MIB = 2**20
CODED_BITS = 11.2  # per bfloat16 weight; trained and random weights need 11.1 to 11.3
DECODE = 10  # a decode against reading the same bytes in a gate/up product, where no decode was measured
GAIN = 0.02  # least predicted gain for which experts are copied ahead
CUDA_MARGIN = 96 * MIB  # cuBLAS workspaces of two streams, and the last segments of the allocator's pools
STEPS = 12  # recorded steps that are simulated
ORDER = schedule.NAMES[::-1]  # of equal ones the finest wins


@dataclass(frozen=True)
class Plan:
    """How a model should be offloaded under a memory limit.

    Attributes:
        slots: expert slots per layer, 1 to E; E: everything is resident.
        wire: `raw` or `coded`. schedule: one of `schedule.NAMES`.
        budget: experts copied ahead per layer, 0 without prefetch. horizon: layers ahead, 0 without prefetch.
        prefetch: whether experts are copied ahead; then as `piece` (expert, gate_up) from probability `threshold`.
        tokens_per_s: simulated, all sequences of the batch together. hit_rate: share of routed experts found.
        bytes: dict(weights_bytes, cache_bytes, slots_bytes, workspace_bytes, total_bytes, limit_bytes).
        why: one sentence per choice, with its numbers.
    """

    slots: int
    wire: str
    schedule: str
    budget: int
    horizon: int
    prefetch: bool
    tokens_per_s: float
    hit_rate: float
    bytes: Mapping[str, int]
    why: tuple[str, ...]
    piece: str = ""
    threshold: float = 0.0

    def __str__(self) -> str:
        ahead = f"{self.budget} per layer as {self.piece}, {self.horizon} layers ahead, from {self.threshold:g}"
        rows = [("slots per layer", self.slots), ("wire", self.wire), ("schedule", self.schedule),
                ("prefetch", ahead if self.prefetch else "off"), ("hit rate", f"{self.hit_rate:.3f}"),
                ("simulated tokens/s", f"{self.tokens_per_s:.1f}")]
        rows += [(name.removesuffix("_bytes") + " memory", _size(size)) for name, size in self.bytes.items()]
        return "\n".join([*(f"{name:20}{value}" for name, value in rows), "why", *(f"  - {line}" for line in self.why)])


@dataclass(frozen=True)
class _Sizes:
    """A model in numbers: spec's L, E, K, H, F, bytes of one expert's components, of all else, and its configs."""

    spec: dict
    dtype: torch.dtype
    component: dict[str, int]
    weights: int
    config: object
    text: object

    @property
    def coded(self) -> dict[str, int]:
        return {part: math.ceil(size * CODED_BITS / 16) for part, size in self.component.items()}


def plan(model_or_config, vram, trace=None, cost=None, context=4096, batch=1, scores=None, device=None) -> Plan:
    """Choose slots, wire format, schedule and prefetch for a model under a memory limit.

    As many slots as fit are taken; the rest is what makes a simulated decode step shortest. Times are of host-driven
    decoding with little context; linear-attention and latent caches are counted as full attention.

    Args:
        model_or_config: a transformers MoE model, or its config (built without memory to count it).
        vram: bytes, or text such as `6GiB` or `800MB`.
        trace: `traces.Trace` or routes `[T, L, K]` of one prompt (None: routes are taken as uniform).
        cost: times (None: the link and the layers are measured, a few seconds).
        context: tokens of the KV cache of each of `batch` sequences, also the longest prefill.
        scores: probabilities `[T, L-horizon, E]` of a predictor for the rows of `trace` (None: no prefetch).
        device: `cuda` or `cpu`, where the model will run (default: a GPU if there is one).

    Raises:
        ValueError: not a model, limit, context, trace or scores as above, or a limit below one slot per layer, with
            the bytes that are missing.
    """
    limit, kind = _bytes(vram), torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")).type
    for name, value in (("context", context), ("batch", batch)):
        if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} is {value!r}; needed: a whole number of at least 1")
    if cost is None and kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda' and there is no GPU to measure; needed: a GPU, or cost=")
    sizes = _sizes(model_or_config)
    recorded = _recorded(sizes, trace, scores)
    slots, memory, why = _fit(sizes, limit, context, batch, kind)
    cost, said = (cost, "times come from the given cost model") if cost else _measured(sizes, kind)
    chosen = _choose(sizes, slots, recorded, _priced(cost, sizes), batch)
    ahead, reason = _prefetch(sizes, slots, recorded, _priced(cost, sizes), batch, chosen)
    ms = ahead.pop("ms", chosen["ms"])
    return Plan(
        **{"slots": slots, "wire": chosen["wire"], "schedule": chosen["schedule"], "budget": 0, "horizon": 0} | ahead,
        prefetch=bool(ahead), tokens_per_s=1e3 * batch / ms if ms else math.inf, hit_rate=chosen["hit_rate"],
        bytes=memory, why=(*why, *chosen["why"], _link(sizes, cost), reason, said))


def _bytes(vram) -> int:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", vram.lower()) if isinstance(vram, str) else None
    if found and found[2] in UNITS:
        vram = int(float(found[1]) * UNITS[found[2]])
    if not isinstance(vram, numbers.Integral) or isinstance(vram, bool) or vram < 1:
        raise ValueError(f"vram is {vram!r}; needed: bytes as a whole number above 0, or text such as '6GiB' or '800MB'")
    return int(vram)


def _size(count: float) -> str:
    unit = next((unit for unit in ("GiB", "MiB", "KiB") if count >= UNITS[unit.lower()]), "B")
    return f"{count / UNITS[unit.lower()]:.{0 if unit == 'B' else 2}f} {unit}"


def _skeleton(config, dtype=None) -> nn.Module:
    """The model of a config without memory."""
    from transformers import AutoModelForCausalLM  # seconds, where a given model needs none of it

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), **({"dtype": dtype} if dtype else {})).eval()


def _sizes(given) -> _Sizes:
    from transformers import PretrainedConfig

    if not isinstance(given, nn.Module | PretrainedConfig):
        raise ValueError(f"model is a {type(given).__name__}; needed: a transformers model or its config")
    model = given if isinstance(given, nn.Module) else _skeleton(given)
    spec, stacked, component = models.describe(model), set(), dict.fromkeys(COMPONENTS, 0)
    for layer in spec.layers:
        own = {name: value for name, value in layer.experts.named_parameters() if value.dim() == 3}
        stacked |= {id(value) for value in own.values()}
        for part in COMPONENTS:
            held = sum(value.nbytes for name, value in own.items() if name.startswith("down") == (part == "down"))
            component[part] = max(component[part], held // spec.E)
    rest = sum(value.nbytes for value in (*model.parameters(), *model.buffers()) if id(value) not in stacked)
    dtype = spec.layers[0].experts.down_proj.dtype
    return _Sizes(spec.facts(), dtype, component, rest, model.config, model.config.get_text_config())


def _cache_bytes(sizes: _Sizes, context: int, batch: int) -> int:
    """Keys and values of every layer, as full attention; a linear layer's state where that is more."""
    text, width = sizes.text, sizes.dtype.itemsize
    heads, size = _heads(text)
    full = 2 * heads * size * context * width
    key, value = (getattr(text, f"linear_{part}_head_dim", 0) for part in ("key", "value"))
    keys, values = (getattr(text, f"linear_num_{part}_heads", 0) for part in ("key", "value"))
    convolved = (2 * keys * key + values * value) * getattr(text, "linear_conv_kernel_dim", 0)
    return batch * text.num_hidden_layers * max(full, 4 * values * key * value + convolved * width)


def _heads(text) -> tuple[int, int]:
    """Heads and head size of the KV cache; latent attention keeps every head's expanded keys and values."""
    latent = getattr(text, "kv_lora_rank", None)
    heads = text.num_attention_heads if latent else getattr(text, "num_key_value_heads", text.num_attention_heads)
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if latent:
        size = max(size, text.qk_nope_head_dim + text.qk_rope_head_dim, text.v_head_dim)
    return heads, size


def _workspace(sizes: _Sizes, context: int, batch: int) -> int:
    """Activations of one layer in a prefill of all tokens, the attention mask, and logits with copies for sampling."""
    text, (kv, size), width = sizes.text, _heads(sizes.text), sizes.dtype.itemsize
    H, F, K, E = (sizes.spec[name] for name in "HFKE")
    dense = max(getattr(text, name, None) or 0 for name in ("intermediate_size", "shared_expert_intermediate_size"))
    shared = max(dense, F * (getattr(text, "n_shared_experts", None) or 0))
    attention = 3 * (text.num_attention_heads + 2 * kv) * size * width
    if text._attn_implementation == "eager":  # scores of every head, in float32 and in the weights' type
        attention += text.num_attention_heads * context * (4 + 2 * width)
    routed = K * (4 * H + F * width + 32) + 3 * F * width + 12 * E  # float32 outputs of every rank, their products
    hidden = 4 * H * width + 8 * H  # residual, normed and two copies; a norm in float32
    tokens = batch * context * (hidden + max(attention, routed + 3 * shared * width))
    return tokens + batch * text.vocab_size * (width + 16) + batch * context**2


def _fit(sizes: _Sizes, limit: int, context: int, batch: int, kind: str) -> tuple[int, dict[str, int], list[str]]:
    """The largest number of slots per layer, memory by purpose, and why."""
    L, E, K = (sizes.spec[name] for name in "LEK")
    slot, kv = L * sum(sizes.component.values()), _cache_bytes(sizes, context, batch)
    staging = sum(sizes.coded.values()) if sizes.dtype is torch.bfloat16 else 0
    work = _workspace(sizes, context, batch)
    work += (sizes.weights + kv + work) // 16 + (CUDA_MARGIN + 4 * MIB * L if kind == "cuda" else 0)

    def memory(slots: int) -> dict[str, int]:
        space = work + staging * (min(slots, K) if slots < E else 0)
        parts = {"weights": sizes.weights, "cache": kv, "slots": slots * slot, "workspace": space}
        return {f"{name}_bytes": size for name, size in (parts | {"total": sum(parts.values()), "limit": limit}).items()}

    slots = next((slots for slots in range(E, 0, -1) if memory(slots)["total_bytes"] <= limit), 0)
    found = memory(slots or 1)
    parts = ", ".join(f"{name.removesuffix('_bytes')} {_size(size)}" for name, size in list(found.items())[:4])
    if not slots:
        least = found["total_bytes"]
        raise ValueError(f"vram is {limit} bytes; needed: {least} bytes for one slot per layer at context {context} and "
                         f"batch {batch} ({parts}); {least - limit} bytes are missing")
    fits = f"all {E} experts of each layer fit, so everything is resident"
    if slots < E:
        more = memory(slots + 1)["total_bytes"] - limit
        fits = f"{slots} of {E} slots per layer fit, one more would take {_size(more)} too much"
    return slots, found, [f"{fits}: {parts}, {_size(found['total_bytes'])} of {_size(limit)}"]


def _recorded(sizes: _Sizes, trace, scores) -> tuple | None:
    """Checked routes `[T,L,K]`, prompt `[T]` and scores `[T,L-h,E]` (or None) of a trace; None without one."""
    if trace is None:
        if scores is not None:
            raise ValueError("scores are given without a trace; needed: the trace whose rows they predict")
        return None
    L, E, K = (sizes.spec[name] for name in "LEK")
    routes = torch.as_tensor(getattr(trace, "routes", trace)).cpu().numpy()
    if routes.ndim != 3 or routes.shape[1:] != (L, K):
        raise ValueError(f"trace has routes {list(routes.shape)}; needed: [T, {L}, {K}], as the model's layers and top-k")
    prompt = np.asarray(getattr(trace, "prompt", np.zeros(len(routes), int)))
    cache.hits(routes, E, order="token", prompt=prompt, experts=E)  # refuses ids that are none
    if scores is not None:
        scores = torch.as_tensor(scores).float().cpu().numpy()
        if scores.ndim != 3 or scores.shape[::2] != (len(routes), E) or not 1 <= scores.shape[1] < L:
            raise ValueError(f"scores are {list(scores.shape)}; needed: [{len(routes)}, {L} - horizon, {E}] with a "
                             f"horizon of 1 to {L - 1}")
        scores = np.nan_to_num(scores, nan=0.0, posinf=2.0, neginf=-1.0)
        if scores.min() < 0 or scores.max() > 1:
            raise ValueError(f"scores go from {scores.min():g} to {scores.max():g}; needed: probabilities, 0 to 1")
    return routes, prompt, scores


def _rows(prompt: np.ndarray, count: int) -> np.ndarray:
    """Rows of `count` decode steps spread over the prompts, none of a cache's first tokens if there are others."""
    rows = steps.sample_rows(prompt, -(-count // len(np.unique(prompt))), seed=0).astype(int)
    rows = rows if len(rows) else np.arange(len(prompt))
    return rows[np.linspace(0, len(rows) - 1, count).astype(int)]


def _needs(sizes: _Sizes, slots: int, recorded, batch: int) -> tuple[list[list[Layer]], float, str]:
    """What some decode steps need of each layer, the hit rate, and where it comes from."""
    L, E, K = (sizes.spec[name] for name in "LEK")
    share = slots if slots == E else max(1, slots // batch)
    if recorded:
        routes, prompt, _ = recorded
        hits = cache.hits(routes, share, order="token", prompt=prompt, experts=E) | (slots == E)
        picked = _rows(prompt, STEPS * batch).reshape(STEPS, batch)
        routes, held, rate = routes[picked], hits[picked], hits.mean((0, 2))
        said = (f"hit rate {rate.mean():.3f} ({rate.min():.3f} to {rate.max():.3f} by layer): LRU with {share} slots over "
                f"{len(hits)} recorded tokens, {K * L * (1 - rate.mean()):.1f} misses per token")
        said += f"; {batch} sequences are given {share} slots each" if batch > 1 and slots < E else ""
    else:  # K ids at equal distances from a start that takes all values: every layer has its mean misses, rounded
        count = 4 * batch * L
        start = np.random.default_rng(0).permutation(count).reshape(4, batch, L, 1) + 0.5
        routes = ((np.arange(K) + start / count) * E / K).astype(int)
        held, rate = routes < slots, np.array([slots / E])
        said = (f"no trace is given, so routes are taken as uniform: hit rate = slots/E = {slots}/{E} = {slots / E:.3f}, "
                f"{K * L * (1 - slots / E):.1f} misses per token; recorded routes mostly hit more often")
    found = [[_layer(ids[:, layer], there[:, layer]) for layer in range(L)] for ids, there in zip(routes, held)]
    return found, float(rate.mean()), said


def _layer(ids: np.ndarray, held: np.ndarray) -> Layer:
    """A layer's need for routes `[batch,K]`; an expert that any token misses is missing."""
    experts, counts = np.unique(ids, return_counts=True)
    there = set(experts.tolist()) - set(ids[~held].tolist())
    return Layer(streams.distinct(torch.as_tensor(ids)), schedule.ready(there), dict(zip(experts.tolist(), counts.tolist())))


def _priced(cost: CostModel, sizes: _Sizes) -> CostModel:
    """The cost model for this model's components, with a decode if none was measured."""
    read = cost.stages["gate_up"]
    guess = TransferModel(read.intercept_ms, DECODE * read.slope_ms)
    return replace(cost, component_bytes=sizes.component, stages=dict.fromkeys(DECODES, guess) | dict(cost.stages))


def _choose(sizes: _Sizes, slots: int, recorded, cost: CostModel, batch: int) -> dict:
    """Wire and schedule of the shortest mean simulated step: dict(wire, schedule, ms, hit_rate, why)."""
    needs, rate, said = _needs(sizes, slots, recorded, batch)
    times = {("raw", name): [schedule.step(name, layers, sizes.component) for layers in needs] for name in ORDER}
    misses, can = slots < sizes.spec["E"], sizes.dtype is torch.bfloat16
    if misses and can:
        times |= {("coded", name): [schedule.with_decode(schedule.step(name, layers, sizes.coded)) for layers in needs]
                  for name in ORDER}
    times = {key: float(np.mean([simulate.run(plan, cost).ms for plan in plans])) for key, plans in times.items()}
    wire, name = min(times, key=times.get)
    best = {kind: min(ms for (other, _), ms in times.items() if other == kind) for kind in {key[0] for key in times}}
    reason = f"wire {wire}: a step takes " + ", ".join(f"{ms:.3f} ms {kind}" for kind, ms in sorted(best.items()))
    if not misses:
        reason = "wire raw: nothing crosses the link in decoding"
    elif not can:
        reason = f"wire raw: weights are {str(sizes.dtype)[6:]}, only bfloat16 has a coded form"
    others = ", ".join(f"{other} {times[wire, other]:.3f}" for other in ORDER if other != name)
    ranked = f"schedule {name}: {times[wire, name]:.3f} ms per step, mean of {len(needs)} simulated ({others})"
    return {"wire": wire, "schedule": name, "ms": times[wire, name], "hit_rate": rate, "why": (said, reason, ranked)}


def _prefetch(sizes: _Sizes, slots: int, recorded, cost: CostModel, batch: int, chosen: dict) -> tuple[dict, str]:
    """What differs with prefetch (nothing: off), and the reason."""
    L, E, K = (sizes.spec[name] for name in "LEK")
    off = "no experts are copied ahead: "
    if slots == E or chosen["hit_rate"] == 1:
        return {}, off + "every routed expert is resident"
    if recorded is None or recorded[2] is None:
        return {}, off + "a gain can only be predicted from a trace and scores="
    if batch > 1 or slots <= K:
        return {}, off + f"it is planned for one sequence and more than K = {K} slots; got batch {batch}, {slots} slots"
    routes, prompt, scores = recorded
    horizon, rows = L - scores.shape[1], np.unique(_rows(prompt, STEPS))
    run = steps.Steps(routes, prompt, E, rows, {("scores", horizon): scores[rows]}, sizes.component)
    run.coded_bytes = sizes.coded
    base = steps.Case(chosen["schedule"], slots, coded=chosen["wire"] == "coded")
    budgets = [budget for budget in (1, 2, 4, 8) if slots - budget >= K]
    tried = [base] + [replace(case, coded=base.coded) for case in steps.prefetch_cases(
        [slots], ["scores"], [horizon], budgets, (0.3, 0.7))]
    times = run.simulate(tried, cost).groupby("case").ms.mean()
    case, gain = tried[1:][int(times[1:].argmin())], 1 - times[1:].min() / times[0]
    said = (f"a step takes {times[1:].min():.3f} ms instead of {times[0]:.3f} with at most {case.budget} experts ahead, "
            f"{horizon} layers ahead, a gain of {gain:.1%} on {len(rows)} steps; needed: more than {GAIN:.0%}")
    if gain <= GAIN:
        return {}, off + said
    return {"ms": chosen["ms"] * (1 - gain), "schedule": case.schedule, "budget": case.budget, "horizon": horizon,
            "piece": case.piece, "threshold": case.threshold}, "experts are copied ahead: " + said


def _link(sizes: _Sizes, cost: CostModel) -> str:
    whole, coded = sum(sizes.component.values()), sum(sizes.coded.values())
    decode = _priced(cost, sizes).compute_ms(Compute(0, "decode_expert", (0,)))
    known = "measured" if "decode_expert" in cost.stages else f"assumed, {DECODE} x a gate/up product of as many bytes"
    return (f"an expert takes {cost.transfer.ms(whole):.4f} ms over the link as {_size(whole)}, "
            f"{cost.transfer.ms(coded):.4f} ms coded ({CODED_BITS} bits per weight) and {decode:.4f} ms to decode ({known})")


def _measured(sizes: _Sizes, kind: str) -> tuple[CostModel, str]:
    """Cost model of this machine for a model's sizes, host-driven, and a sentence on it."""
    shape = streams.Shape("planned", sizes.spec["H"], sizes.spec["F"], sizes.spec["K"], sizes.dtype)
    work = streams.Work(shape, 2, 1, shape.E, "fused" if kind == "cuda" else "torch", kind)
    coded = sizes.dtype is torch.bfloat16
    if coded:
        work.pack([(0, 0), (1, 0)])
    if kind == "cuda":
        sizes_mib = sorted({size / MIB for size in (*shape.component_bytes.values(), 2 * shape.component_bytes["expert"])})
        cost = probes.calibrate(work, probes.copies(sizes_mib, 15, host_gib=1), graphs=False, samples=10)
        cost = probes.decoding(work, cost, 10) if coded else cost
    else:
        cost = _host_cost(work, coded)
    before = _before_ms(sizes, kind)
    said = f"times were measured on this {kind}: a link of {cost.transfer.gbps:.1f} GB/s, {before:.4f} ms per layer up to"
    return replace(cost, before_ms=(before,)), f"{said} its router"


def _host_cost(work: streams.Work, coded: bool) -> CostModel:
    """Copies, stages and decodes of a `Work` on the CPU, one after the other."""
    size, all_of = work.shape.component_bytes, work.experts(0)
    work.stages.prepare(0, all_of)
    jobs = {part: lambda turn, part=part: work.copy(Copy(turn % 2, turn % work.shape.E, part, size[part])) for part in PIECES}
    stages = [Compute(0, stage, all_of) for stage in probes.STAGES]
    if coded:
        work.packed.staging.copy_(work.packed.host)
        stages += [Compute(0, stage, (0,)) for stage in DECODES]
    jobs |= {op.stage + "!": lambda turn, op=op: work.compute(op) for op in stages}
    found = interleaved({name: Variant(job) for name, job in jobs.items()}, 10, 2, device="cpu")
    times = {name: float(np.median(ms)) for name, ms in found.items()}
    link = TransferModel.fit([size[part] for part in PIECES], [times[part] for part in PIECES])
    return CostModel(link, lines, size)


def _before_ms(sizes: _Sizes, kind: str) -> float:
    """Everything of a one-token step but the routed experts, per MoE layer, with an empty cache."""
    model = _skeleton(sizes.config, sizes.dtype)
    for layer in models.describe(model).layers:
        model.set_submodule(next(name for name, module in model.named_modules() if module is layer.experts), _Nothing())
    model.to_empty(device=kind)
    for value in (*model.parameters(), *model.buffers()):
        value.detach().zero_()
    ids = torch.zeros(1, 1, dtype=torch.long, device=kind)
    with torch.inference_mode():
        found = interleaved({"": Variant(lambda turn: model(input_ids=ids, use_cache=False))}, 10, 3, device=kind)
    return float(np.median(found[""])) / sizes.spec["L"]


class _Nothing(nn.Module):
    def forward(self, hidden: Tensor, *routes: Tensor) -> Tensor:
        return torch.zeros_like(hidden)
