"""What fits a memory limit, and how experts should then travel: slots, wire format, schedule and prefetch."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import numpy as np
import torch

from dualdeadline import cache, models, schedule, simulate, steps, streams
from dualdeadline.cost import CostModel, TransferModel, work_bytes
from dualdeadline.schedule import COMPONENTS, DECODES, PIECES, Compute, Copy, Layer
from dualdeadline.sizes import parse_bytes
from dualdeadline.streams import probes

MIB = 2**20
CODED_BITS = 11.2  # per bfloat16 weight; trained and random weights need 11.1 to 11.3
DECODE = 10  # a decode against a gate/up product that reads as many bytes, where no decode was measured
GAIN = 0.02  # least predicted gain for which experts are copied ahead
GUESSED = 2  # records of guesses that wait in staging memory, the default budget
CUDA_MARGIN = 96 * MIB  # cuBLAS workspaces of two streams, and the last segments of the allocator's pools
DENSE = ("intermediate_size", "shared_expert_intermediate_size", "n_shared_experts")
STEPS = 12  # recorded steps that are simulated
ORDER = schedule.NAMES[::-1]  # of equal ones the finest wins


@dataclass(frozen=True)
class Plan:
    """How a model should be offloaded under a memory limit, and one sentence of `why` per choice.

    `slots` per layer, 1 to E (E: everything is resident); `wire` raw or coded; `schedule` of `schedule.NAMES`. With
    `prefetch`, at most `budget` experts a layer are copied ahead as `piece` (expert, gate_up), `horizon` layers ahead,
    from probability `threshold`; else 0 and empty. `tokens_per_s` is simulated, of the whole batch; `hit_rate` is the
    share of routed experts found. `bytes`: dict(weights_, cache_, slots_, workspace_, total_, limit_bytes).
    """

    slots: int
    wire: str
    schedule: str
    budget: int
    horizon: int
    prefetch: bool
    tokens_per_s: float
    hit_rate: float
    bytes: dict[str, int]
    why: tuple[str, ...]
    piece: str = ""
    threshold: float = 0.0

    def __str__(self) -> str:
        own = {name: value for name, value in vars(self).items() if name not in ("bytes", "why")}
        rows = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in own.items()}
        rows |= {name.replace("_bytes", " memory"): f"{size / MIB:,.2f} MiB" for name, size in self.bytes.items()}
        return "\n".join([*(f"{name:17}{value}" for name, value in rows.items()), *(f"- {line}" for line in self.why)])


@dataclass(frozen=True)
class _Sizes:
    """A model in numbers: L, E, K, H, F in `spec`, bytes of one expert's components, and of all that stays resident."""
    spec: dict[str, int]
    dtype: torch.dtype
    component: dict[str, int]
    coded: dict[str, int]
    weights: int
    config: object


def plan(model_or_config, vram: int | str, trace=None, cost: CostModel | None = None, context: int = 4096,
         batch: int = 1, scores=None, device: str | None = None) -> Plan:
    """As many expert slots as fit a memory limit, and what then makes a simulated decode step of the model shortest.

    Args:
        model_or_config: a transformers MoE model, or its config (built without memory to count it).
        vram: bytes, or text such as `6GiB` or `800MB`.
        trace: `traces.Trace` or routes `[T, L, K]` of one prompt (None: routes are taken as uniform).
        cost: times (None: link and layers are measured in a few seconds, for host-driven decoding of a short context).
        context: tokens in the KV cache of each of `batch` sequences, also the longest prefill.
        scores: probabilities `[T, L-horizon, E]` of a predictor for the rows of `trace` (None: no prefetch).
        device: `cuda` or `cpu`, where the model will run (default: a GPU if there is one).

    Raises:
        ValueError: an argument that is not as above, or a limit below one slot per layer, with the bytes missing.
    """
    limit, context, batch = parse_bytes(vram), _whole(context, "context"), _whole(batch, "batch")
    kind = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")).type
    if cost is None and kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda' and no GPU is here to be measured; needed: cost=, or device='cpu'")
    sizes = _sizes(model_or_config)
    recorded = _recorded(sizes, trace, scores, batch)
    slots, memory, fits = _fit(sizes, limit, context, batch, kind)
    cost, source = (cost, "times are of the given cost model") if cost else _measured(sizes, kind)
    guess = TransferModel(cost.stages["gate_up"].intercept_ms, DECODE * cost.stages["gate_up"].slope_ms)
    known = "measured" if "decode_expert" in cost.stages else f"assumed: {DECODE} gate/up products of as many bytes"
    cost = replace(cost, component_bytes=sizes.component, stages=dict.fromkeys(DECODES, guess) | dict(cost.stages))
    chosen, ms, rate, why = _choose(sizes, slots, recorded, cost, batch)
    ahead, gain, reason = _ahead(sizes, slots, recorded, cost, batch, chosen)
    raw, coded = (cost.transfer.ms(sum(found.values())) for found in (sizes.component, sizes.coded))
    decode = f"{cost.compute_ms(Compute(0, 'decode_expert', (0,))):.4f} ms to decode ({known})"
    link = f"an expert takes the link {raw:.4f} ms, at {CODED_BITS} bits a weight {coded:.4f} ms and {decode}; {source}"
    return Plan(slots, **chosen | ahead, prefetch=gain > 0, hit_rate=rate, bytes=memory,
                tokens_per_s=1e3 * batch / (ms * (1 - gain)) if ms else float("inf"), why=(fits, *why, reason, link))


def _whole(given, name: str) -> int:
    if not isinstance(given, int | np.integer) or isinstance(given, bool) or given < 1:
        raise ValueError(f"{name} is {given!r}; needed: a whole number above 0")
    return int(given)


def skeleton(config, dtype=None) -> torch.nn.Module:
    """The model of a config without memory."""
    from transformers import AutoModelForCausalLM
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), **({"dtype": dtype} if dtype else {})).eval()


def _sizes(given) -> _Sizes:
    if not isinstance(given, torch.nn.Module) and not hasattr(given, "get_text_config"):
        raise ValueError(f"model is a {type(given).__name__}; needed: a transformers model or its config")
    model = given if isinstance(given, torch.nn.Module) else skeleton(given)
    spec = models.describe(model)
    own = {part: [getattr(layer.experts, f"{part}_proj") for layer in spec.layers] for part in COMPONENTS}  # no biases
    component = {part: max(value.nbytes for value in held) // spec.E for part, held in own.items()}
    weights = sum(value.nbytes for value in (*model.parameters(), *model.buffers()))
    weights -= sum(value.nbytes for held in own.values() for value in held)
    dtype = spec.layers[0].experts.down_proj.dtype
    bits = CODED_BITS if dtype is torch.bfloat16 else 8 * dtype.itemsize
    coded = {part: int(np.ceil(size * bits / (8 * dtype.itemsize))) for part, size in component.items()}
    return _Sizes(spec.facts(), dtype, component, coded, weights, model.config)


def _space(sizes: _Sizes, context: int, batch: int) -> tuple[int, int]:
    """Bytes of the KV cache, every layer as full attention, and of one layer's activations in a prefill of it all."""
    text, width = sizes.config.get_text_config(), sizes.dtype.itemsize
    H, F, K, E = (sizes.spec[name] for name in "HFKE")
    heads, kv = text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    if getattr(text, "kv_lora_rank", None):  # latent attention is cached as every head's own keys and values
        kv, size = heads, max(size, text.qk_nope_head_dim + text.qk_rope_head_dim, text.v_head_dim)
    linear = getattr(text, "linear_num_value_heads", 0) * getattr(text, "linear_value_head_dim", 0)
    state = 8 * linear * getattr(text, "linear_key_head_dim", 0)  # of a linear layer, in float32, with its convolution
    held = batch * text.num_hidden_layers * max(2 * kv * size * context * width, state)
    dense, one, many = (getattr(text, name, None) or 0 for name in DENSE)
    scores = heads * context * (4 + 2 * width) if text._attn_implementation == "eager" else 0  # of every head
    attention = 3 * (heads + 2 * kv) * size * width + scores
    routed = K * (4 * H + F * width + 32) + 3 * F * width + 12 * E  # every rank's output is kept in float32
    token = H * (4 * width + 8) + max(attention, routed + 3 * max(dense, one, F * many) * width)
    return held, batch * (context * (token + context) + text.vocab_size * (width + 16))  # with a mask, and logits


def _fit(sizes: _Sizes, limit: int, context: int, batch: int, kind: str) -> tuple[int, dict[str, int], str]:
    """The largest number of slots per layer, bytes by purpose, and why."""
    L, E, K = (sizes.spec[name] for name in "LEK")
    held, work = _space(sizes, context, batch)
    work += (sizes.weights + held + work) // 16 + (CUDA_MARGIN + 4 * MIB * L if kind == "cuda" else 0)
    whole, staging = sum(sizes.component.values()), sum(sizes.coded.values()) if sizes.dtype is torch.bfloat16 else 0

    def memory(slots: int) -> dict[str, int]:
        space = work + staging * (min(slots, K) + GUESSED if slots < E else 0)
        parts = dict(weights=sizes.weights, cache=held, slots=slots * L * whole, workspace=space)
        return {f"{name}_bytes": size for name, size in {**parts, "total": sum(parts.values()), "limit": limit}.items()}

    slots = next((slots for slots in range(E, 0, -1) if memory(slots)["total_bytes"] <= limit), 0)
    found = memory(slots or 1)
    parts = ", ".join(f"{name.removesuffix('_bytes')} {size / MIB:,.2f} MiB" for name, size in found.items())
    if not slots:
        raise ValueError(f"vram is {limit} bytes; needed: {found['total_bytes']} for one slot per layer, of which "
                         f"{found['total_bytes'] - limit} are missing (context {context}, batch {batch}; {parts})")
    return slots, found, ("everything is resident: " if slots == E else "") + f"{slots} of {E} slots fit: {parts}"


def _recorded(sizes: _Sizes, trace, scores, batch: int) -> tuple | None:
    """Routes `[T,L,K]`, prompt `[T]`, scores `[T,L-h,E]` (or None) and rows of the simulated steps `[STEPS,batch]`."""
    if trace is scores is None:
        return None
    L, E, K = (sizes.spec[name] for name in "LEK")
    routes = np.zeros(0) if trace is None else torch.as_tensor(getattr(trace, "routes", trace)).cpu().numpy()
    if routes.ndim != 3 or routes.shape[1:] != (L, K):
        raise ValueError(f"trace has routes {list(routes.shape)}; needed: [T, {L}, {K}], the model's layers and top-k")
    prompt = np.asarray(getattr(trace, "prompt", np.zeros(len(routes), int)))
    cache.check(routes, "lru", "token", prompt, experts=E)
    if scores is not None:
        scores = torch.as_tensor(scores).float().nan_to_num(0.0).cpu().numpy()
        shapes = [(len(routes), ahead, E) for ahead in range(1, L)]
        if scores.shape not in shapes or abs(scores - 0.5).max() > 0.5:
            raise ValueError(f"scores are {list(scores.shape)}, {scores.min():g} to {scores.max():g}; needed: 0 to 1, "
                             f"[{len(routes)}, {L} - horizon, {E}] with a horizon of 1 to {L - 1}")
    rows = steps.sample_rows(prompt, -(-STEPS * batch // len(np.unique(prompt))), seed=0).astype(int)
    rows = rows if len(rows) else np.arange(len(prompt))  # prompts that end while caches are still empty
    return routes, prompt, scores, rows[np.linspace(0, len(rows) - 1, STEPS * batch).astype(int)].reshape(STEPS, batch)


def _needs(sizes: _Sizes, slots: int, recorded, batch: int) -> tuple[list[list[Layer]], float, str]:
    """What some decode steps need of each layer, the hit rate, and where it comes from."""
    L, E, K = (sizes.spec[name] for name in "LEK")
    if recorded:
        routes, prompt, _, rows = recorded
        share = slots if slots == E else max(1, slots // batch)  # sequences drive out each other's experts
        hits = cache.hits(routes, share, order="token", prompt=prompt, experts=E) | (slots == E)
        rate, low, high = hits.mean(), hits.mean((0, 2)).min(), hits.mean((0, 2)).max()
        said = f"LRU, {share} slots a sequence, {len(hits)} recorded tokens, {low:.3f} to {high:.3f} by layer"
        ids, held = routes[rows].swapaxes(1, 2), hits[rows].swapaxes(1, 2)
    else:  # K ids at equal distances from starts that take all values: every layer has its mean misses, rounded
        start = np.random.default_rng(0).permutation(4 * L * batch).reshape(4, L, batch, 1) + 0.5
        ids = ((np.arange(K) + start / start.size) * E / K).astype(int)
        held, rate = ids < slots, slots / E
        said = f"no trace, routes are taken as uniform, so it is slots/E = {slots}/{E}; most recorded ones hit more"
    found = [[Layer(streams.distinct(torch.as_tensor(own)), schedule.ready({*own.flat} - {*own[~there]}))
              for own, there in zip(*step)] for step in zip(ids, held)]  # an expert that any token misses is missing
    return found, float(rate), f"hit rate {rate:.3f}, {K * L * (1 - rate):.1f} misses per token: {said}"


def _choose(sizes: _Sizes, slots: int, recorded, cost: CostModel, batch: int) -> tuple[dict, float, float, list[str]]:
    """What makes the shortest mean simulated step, without prefetch; its ms, the hit rate, and why."""
    needs, rate, said = _needs(sizes, slots, recorded, batch)
    few = slots < sizes.spec["E"]
    wires = ("raw", "coded") if few and sizes.dtype is torch.bfloat16 else ("raw",)

    def step_ms(wire: str, name: str, layers: list[Layer]) -> float:
        made = schedule.step(name, layers, sizes.coded if wire == "coded" else sizes.component)
        return simulate.run(schedule.with_decode(made) if wire == "coded" else made, cost).ms

    times = {(wire, name): np.mean([step_ms(wire, name, each) for each in needs]) for wire in wires for name in ORDER}
    wire, name = min(times, key=times.get)
    reason = ", ".join(f"{kind} {min(times[kind, other] for other in ORDER):.3f} ms a step" for kind in wires)
    reason += "" if len(wires) > 1 else f", {sizes.dtype} has no coded form" if few else ", nothing is copied"
    ranked = ", ".join(f"{other} {times[wire, other]:.3f} ms" for other in ORDER)
    why = [said, f"wire {wire}: {reason}", f"schedule {name}: mean of {len(needs)} simulated steps, {ranked}"]
    return {"wire": wire, "schedule": name, "budget": 0, "horizon": 0}, float(times[wire, name]), rate, why


def _ahead(sizes: _Sizes, slots: int, recorded, cost: CostModel, batch: int, chosen: dict) -> tuple[dict, float, str]:
    """What differs with prefetch (nothing: off), its gain, and the reason."""
    L, E, K = (sizes.spec[name] for name in "LEK")
    routes, prompt, scores, rows = recorded or (None, None, None, None)
    lacks = ["a predictor's scores for a trace"] * (scores is None) + [f"batch 1 (is {batch})"] * (batch > 1)
    lacks += [] if K < slots < E else [f"{K} < slots < {E} (is {slots})"]
    if lacks:
        return {}, 0.0, f"prefetch not planned: needed: {', '.join(lacks)}"
    horizon, rows = L - scores.shape[1], np.unique(rows)
    run = steps.Steps(routes, prompt, E, rows, {("scores", horizon): scores[rows]}, sizes.component)
    run.coded_bytes = sizes.coded
    budgets = [budget for budget in (1, 2, 4, 8) if slots - budget >= K]
    tried = steps.prefetch_cases([slots], ["scores"], [horizon], budgets, (0.3, 0.7))
    cases = [replace(case, coded=chosen["wire"] == "coded") for case in (steps.Case(chosen["schedule"], slots), *tried)]
    ms = run.simulate(cases, cost).groupby("case").ms.mean().to_numpy()
    case, gain = cases[1 + ms[1:].argmin()], float(1 - ms[1:].min() / ms[0])
    said = (f"{case.budget} experts a layer, {horizon} layers ahead, {ms[1:].min():.3f} ms a step, off {ms[0]:.3f}; "
            f"gain {gain:.1%} over {len(rows)} steps, needed: more than {GAIN:.0%}")
    if gain <= GAIN:
        return {}, 0.0, f"prefetch off: {said}"
    made = dict(budget=case.budget, horizon=horizon, piece=case.piece, threshold=case.threshold, schedule=case.schedule)
    return made, gain, f"prefetch on: {said}"


def _measured(sizes: _Sizes, kind: str) -> tuple[CostModel, str]:
    """Cost model of this machine for a model's sizes, driven by the host, and a sentence on it."""
    shape = streams.Shape("planned", sizes.spec["H"], sizes.spec["F"], sizes.spec["K"], sizes.dtype)
    work = streams.Work(shape, 2, 1, shape.E, "fused" if kind == "cuda" else "torch", kind)
    if sizes.dtype is torch.bfloat16:
        work.pack([(0, 0), (1, 0)])
    if kind == "cuda":
        transfers = probes.copies(sorted(size / MIB for size in shape.component_bytes.values()), 15, host_gib=1)
        cost = probes.calibrate(work, transfers, graphs=False, samples=10)
        cost = probes.decoding(work, cost, 10) if work.packed else cost
    else:
        cost = _host_cost(work)
    before = _before_ms(sizes, kind)
    return replace(cost, before_ms=(before,)), f"measured on this {kind}, as {before:.4f} ms per layer up to its router"


def _host_cost(work: streams.Work) -> CostModel:
    """Copies, stages and decodes of a `Work` without a GPU."""
    size, chosen = work.shape.component_bytes, work.experts(0)
    copies = [Copy(0, 0, piece, size[piece]) for piece in PIECES]
    stages = [Compute(0, stage, chosen) for stage in probes.STAGES]
    work.stages.prepare(0, chosen)
    if work.packed:
        work.packed.staging.copy_(work.packed.host)
        stages += [Compute(0, stage, (0,)) for stage in DECODES]
    jobs = {op: probes.Variant(lambda turn, op=op: work.copy(op)) for op in copies}
    jobs |= {op: probes.Variant(lambda turn, op=op: work.compute(op)) for op in stages}
    ms = {op: float(np.median(times)) for op, times in probes.interleaved(jobs, 8, 2, device="cpu").items()}
    read = {op: work_bytes(op.stage, len(op.experts), size) for op in stages}
    lines = {op.stage: TransferModel(*((0.0, ms[op] / read[op]) if read[op] else (ms[op], 0.0))) for op in stages}
    return CostModel(TransferModel.fit([op.bytes for op in copies], [ms[op] for op in copies]), lines, size)


def _before_ms(sizes: _Sizes, kind: str) -> float:
    """One token through everything but the routed experts, per MoE layer; weights are 0, the cache is empty."""
    model = skeleton(sizes.config, sizes.dtype)
    for layer in models.describe(model).layers:
        layer.experts._parameters.clear()
        layer.experts.forward = lambda hidden, *routes: torch.zeros_like(hidden)
    ids = torch.zeros(1, 1, dtype=torch.long, device=kind)
    with torch.inference_mode():
        model._apply(lambda value: torch.zeros_like(value, device=kind))
        job = probes.Variant(lambda turn: model(input_ids=ids, use_cache=False))
        return float(np.median(probes.interleaved({"": job}, 4, 1, device=kind)[""])) / sizes.spec["L"]
