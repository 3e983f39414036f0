"""Predictors beside a decode loop, one launch per layer, legal inside a CUDA graph: SharedMLP, ResidualGate, GateAhead.

At one token a predictor is 1 to 2 MiB of weights read once, so time is latency: launch, one trip to memory, one
hand-over between programs. Phase one spreads the weights over many programs: each takes a few rows, multiplies
them with the state, at once applies its rows of the second matrix, and leaves one partial row [E]. An atomic
counter per token names the program that arrives last; it adds the partial rows in a fixed order (so results do not
depend on who is last), centres, calibrates, picks the largest, and sets the counter back for the next launch.

`weights` is how the two matrices are stored. float32 keeps the predictor's choices but for ties within rounding;
bfloat16 and float16 halve the bytes and move logits by their rounding, which swaps experts that lie that close (on
validation pairs of the pilot bfloat16 changes 1 to 2 % of the top-8 sets, float16 0.1 to 0.2 %; `stored` counts them).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dualdeadline.kernels import require, triton
from dualdeadline.kernels.predictor_kernels import FROM_IDS, GIVEN, OWN, gate_kernel, mlp_kernel
from dualdeadline.predictors.base import View, margin, sane
from dualdeadline.predictors.gate_ahead import TINY, GateAhead
from dualdeadline.predictors.learned import EMBEDDING, SharedMLP
from dualdeadline.predictors.residual import ResidualGate

MAX_TOKENS, MAX_TOP, MAX_EXPERTS, MAX_HIDDEN = 8, 16, 512, 16384
PAIRS_UP_TO = 128  # experts up to which all pairs are compared at once; beyond, registers run out
SUMS = 4096  # partial sums that one program holds at a time
FACTORS = 6  # a ResidualGate's features per expert: ahead, 1, told, ahead before, and the means of these two
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Tiles:
    """How the work is cut.

    rows: weight rows per program, a power of two. warps: per program. select: how the largest are found, by
    comparing all "pairs" of experts or in "rounds" of one maximum each. early: start before the preceding kernel
    ends and load weights meanwhile (programmatic dependent launch, compute capability 9.0 or newer).
    """

    rows: int = 4
    warps: int = 4
    select: str = "auto"
    early: bool = False

    def __post_init__(self):
        for name in ("rows", "warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} is {value}; needed: a power of two")
        if self.select not in ("auto", "pairs", "rounds"):
            raise ValueError(f"select is {self.select!r}; needed: auto, pairs or rounds")


@dataclass(frozen=True)
class Prepared:
    """A predictor's numbers as the kernels read them, contiguous on one device.

    tables of an MLP: weight [width,H] with the norm's factor in it, place [L,width] (layer embedding and norm
    bias), out [width,E], out_bias [E]. Of a gate: rows [L E + D/H rank, H] (each router times its norm's factor,
    then `down` turned), bias and correction [L,E], inverse [L,H] of the norms' factors, up [G,rank,E], factor
    [G,6,E]. Both: slope and offset [G], G = L - horizon.
    """

    kind: str
    horizon: int
    L: int
    E: int
    K: int
    H: int
    tables: dict[str, Tensor]
    rank: int = 0  # of a gate's `down`; the width of an MLP
    same: bool = False  # `down` reads the source state
    past: bool = False  # `down` reads the target's state at the previous token
    remembers: bool = False
    corrected: bool = False
    keep: float = 0.0
    eps: float = 0.0
    nbytes: int = field(init=False, default=0)  # of all tables

    def __post_init__(self):
        object.__setattr__(self, "nbytes", sum(value.nbytes for value in self.tables.values()))


def prepare(predictor, device, dtype: torch.dtype = torch.float32) -> Prepared:
    """Pack a fitted predictor for the kernels.

    Args:
        dtype: how the matrices are stored; everything else stays float32.

    Raises:
        ValueError: another kind of predictor, sizes outside the limits, or weights too large for the dtype.
    """
    predictor._fitted()
    if dtype not in DTYPES:
        raise ValueError(f"weights is {dtype}; needed: float32, bfloat16 or float16")
    if not 2 <= predictor.E <= MAX_EXPERTS:
        raise ValueError(f"the predictor has {predictor.E} experts; needed: 2 to {MAX_EXPERTS}")
    if predictor.H % 16 or not 16 <= predictor.H <= MAX_HIDDEN:
        raise ValueError(f"the state has {predictor.H} channels; needed: a multiple of 16, at most {MAX_HIDDEN}")
    if not isinstance(predictor, (SharedMLP, ResidualGate, GateAhead)):
        raise ValueError(f"predictor is {predictor.name}; needed: shared_mlp, residual_gate or gate_ahead")
    tables, more = (_mlp if isinstance(predictor, SharedMLP) else _gate)(predictor)
    tables |= {name: predictor.table[name] for name in ("slope", "offset")}
    for name in ("weight", "out", "rows", "up"):
        if name in tables:
            tables[name] = tables[name].to(dtype)
            if not torch.isfinite(tables[name]).all():
                raise ValueError(f"{name} does not fit {dtype}; needed: finite weights, or weights=torch.float32")
    tables = {name: value.to(device).contiguous() for name, value in tables.items()}
    sizes = {name: getattr(predictor, name) for name in ("horizon", "L", "E", "K", "H")}
    return Prepared(tables=tables, **sizes, **more)


def _mlp(predictor: SharedMLP) -> tuple[dict, dict]:
    table = {name: value.double().cpu() for name, value in predictor.table.items()}
    state_part, layer_part = table["hidden"].split([predictor.H, EMBEDDING], 1)
    place = table["embedding"] @ layer_part.T + state_part @ table["norm_bias"]
    tables = {"weight": state_part * table["norm_weight"], "place": place, "out": table["out"].T,
              "out_bias": table["out_bias"]}
    return {name: value.float() for name, value in tables.items()}, {"kind": "mlp", "rank": len(state_part)}


def _gate(predictor: ResidualGate | GateAhead) -> tuple[dict, dict]:
    routers, table, E, H = predictor.routers, predictor.table, predictor.E, predictor.H
    if routers.correction is not None and routers.kind != "sigmoid":
        raise ValueError(f"a correction with {routers.kind} scores; needed: sigmoid scores where there is one")
    weight = routers.weight.float().cpu()
    norm = None if routers.norm is None else routers.norm.float().cpu()
    rows = [(weight if norm is None else weight * norm[:, None]).flatten(0, 1)]
    features = getattr(predictor, "features", ())
    count, rank = predictor.L - predictor.horizon, 0
    tables = {"up": torch.zeros(count, 1, E), "inverse": torch.ones(predictor.L, H)}
    if "down" in table:
        rank = table["down"].shape[1]
        rows += [part.T for part in table["down"].float().cpu().split(H)]
        tables["up"] = table["up"].float()
    if norm is not None and predictor.horizon:
        alive = norm.abs() > TINY
        tables["inverse"] = torch.where(alive, 1 / torch.where(alive, norm, 1), 0)
    factor = torch.zeros(count, E, FACTORS)
    if "expert" in table:
        places = [0, 1, *((2, 3) if "previous" in features else ()), *((4, 5) if "running" in features else ())]
        factor[:, :, places] = table["expert"].float().cpu()
    factor[:, :, 0] += 1  # gate-ahead itself
    tables |= {"rows": torch.cat(rows), "factor": factor.transpose(1, 2)}
    for name in ("bias", "correction"):
        value = getattr(routers, name)
        tables[name] = torch.zeros(predictor.L, E) if value is None else value.float()
    past = "previous_state" in features and rank > 0
    return tables, {
        "kind": "gate", "rank": rank, "same": "state" in features and rank > 0, "past": past,
        "remembers": past or bool({"previous", "running"} & set(features)),
        "corrected": routers.correction is not None, "keep": float(getattr(predictor, "keep", 0.0)),
        "eps": max(routers.eps, 1e-12)}


class Fused:
    """A predictor's step in one launch (or two), with outputs and memory at fixed places on the device.

    Args:
        predictor: a fitted SharedMLP, ResidualGate or GateAhead; or what `prepare` made of it.
        tokens: N, rows of every state, 1 to 8; each row is a sequence of its own.
        k: ids given per token, 1 to 16.
        weights: see `prepare`.
        tiles: a `Tiles`.
        launches: 1, or 2 for phase two as a kernel of its own (bitwise equal, slower: a comparison).

    `ids` [L,N,k] int32 and `probabilities` [L,N,k] float32 hold each source layer's latest outputs. `memory` (of a
    predictor that remembers; float32, zero at first) is indexed by target layer: state [N,L,H], told and ahead
    [N,L,E], mean [N,L,2,E]. A launch at layer l with target t = l + horizon reads memory of t, writes ahead and mean
    of t, state of l, and told of the layer whose router ran last (l; at horizon 0 the layer before). Outputs, memory,
    the workspace and the counters are all that a launch writes.

    Call it for every layer of a token in order, in one stream. Every kind of step is compiled at its first call: run
    one token before a capture, then `reset`.

    Raises:
        ValueError: see `prepare`; numbers outside the limits. RuntimeError: no GPU that Triton can use.
    """

    def __init__(self, predictor, device, tokens: int = 1, k: int = 8, weights: torch.dtype = torch.float32,
                 tiles: Tiles | None = None, launches: int = 1):
        p = predictor if isinstance(predictor, Prepared) else prepare(predictor, device, weights)
        require(p.tables["slope"])
        if not 1 <= tokens <= MAX_TOKENS:
            raise ValueError(f"tokens is {tokens}; needed: 1 to {MAX_TOKENS}")
        if not 1 <= k <= min(MAX_TOP, p.E):
            raise ValueError(f"k is {k}; needed: 1 to {min(MAX_TOP, p.E)}")
        if launches not in (1, 2):
            raise ValueError(f"launches is {launches}; needed: 1 or 2")
        if p.remembers and not p.horizon and p.L < 2:
            raise ValueError(f"the predictor has {p.L} layer; needed: at least 2 at horizon 0")
        self.prepared, self.tokens, self.k, self.launches = p, tokens, k, launches
        self.tiles = tiles or Tiles()
        self.device = device = p.tables["slope"].device
        self.ids = torch.zeros(p.L, tokens, k, dtype=torch.int32, device=device)
        self.probabilities = torch.zeros(p.L, tokens, k, device=device)
        self.memory = {name: torch.zeros(tokens, p.L, *shape, device=device)
                       for name, shape in _memory_shapes(p).items()}
        self._parts = triton.cdiv(p.rank, self.tiles.rows)  # programs for the rows of an MLP, or of half of `down`
        rows = self._parts if p.kind == "mlp" else 4 + self._parts * (p.same + p.past)
        self._work = torch.zeros(tokens, max(rows, 1), p.E, device=device)
        self._count = torch.zeros(tokens, dtype=torch.int32, device=device)
        self._outputs = [(self.ids[layer], self.probabilities[layer]) for layer in range(p.L)]
        self._plans: dict = {}  # what a gate's launch is specialised to, by what it has to do

    def reset(self) -> None:
        """Forget: other sequences begin. Also sets the counters right after a launch that was killed."""
        for value in (*self.memory.values(), self._count):
            value.zero_()

    def step(self, layer: int, state: Tensor, router_logits: Tensor | None = None,
             ids: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
        """Ids [N,k] int32, by falling probability and equals by rising id, and probabilities [N,k] float32.

        None for the last `horizon` layers, which only leave something for the next token. No allocation, no
        synchronisation.

        Args:
            layer: source layer, 0 to L-1.
            state: [N,H] contiguous, bfloat16 or another float: router input, at horizon 0 the layer-start state.
            router_logits: [N,E] what this layer's router gave for `state`, bias included. A predictor that
                remembers computes it itself where it is not given (another E rows of weights).
            ids: [N,K] what the layer before chose (at layer 0 the last layer at the previous token; -1 at a
                sequence's first token): needed at horizon 0 by a predictor that remembers, and ignored otherwise.

        Raises:
            ValueError: no such layer, or an argument of another shape.
        """
        self._check(layer, state, router_logits, ids)
        predict = layer + self.prepared.horizon < self.prepared.L
        if self.prepared.kind == "gate":
            self._gate(layer, state, router_logits, ids, predict)
        elif predict:
            self._mlp(layer, state)
        return self._outputs[layer] if predict else None

    def _phases(self, programs: int) -> tuple[tuple[int, int], ...]:
        """Phase and programs of each launch."""
        return ((0, programs),) if self.launches == 1 else ((1, programs), (2, 1))

    def _common(self, parts: int) -> dict:
        """Constants that both kernels take; `parts` partial rows are added up."""
        p, tiles = self.prepared, self.tiles
        block = triton.next_power_of_2(p.E)
        pairs = tiles.select == "pairs" or (tiles.select == "auto" and p.E <= PAIRS_UP_TO)
        early = {"launch_pdl": True} if tiles.early else {}
        return dict(
            H=p.H, E=p.E, ROUTED=p.K, TOP=self.k, ROWS=tiles.rows, BLOCK_H=triton.next_power_of_2(p.H), BLOCK_E=block,
            CHUNK=max(1, min(triton.next_power_of_2(parts), SUMS // block)), EARLY=tiles.early, num_warps=tiles.warps,
            ROUNDS=0 if pairs else max(self.k, min(p.K + 1, p.E)), **early)

    def _mlp(self, layer: int, state: Tensor) -> None:
        p, t, programs = self.prepared, self.prepared.tables, self._parts
        if "mlp" not in self._plans:
            self._plans["mlp"] = self._common(programs) | {"WIDTH": p.rank, "PROGRAMS": programs}
        for phase, count in self._phases(programs):
            mlp_kernel[count, self.tokens](
                state, t["weight"], t["place"], t["out"], t["out_bias"], t["slope"], t["offset"], self._work,
                self._count, self.ids, self.probabilities, layer, layer + p.horizon, PHASE=phase, **self._plans["mlp"])

    def _gate(self, layer: int, state: Tensor, router_logits: Tensor | None, ids: Tensor | None,
              predict: bool) -> None:
        p, t, m = self.prepared, self.prepared.tables, self.memory
        # told and state are for the next token, of layers that something predicts
        observe = p.remembers and layer >= p.horizon
        if not (predict or observe):
            return
        told = 0 if not observe else FROM_IDS if not p.horizon else OWN if router_logits is None else GIVEN
        plan = self._plans.get((predict, told))
        if plan is None:
            plan = self._plans[predict, told] = self._gate_plan(predict, told)
        none = t["slope"]  # stands where a pointer is not followed
        for phase, count in self._phases(plan["PROGRAMS"]):
            gate_kernel[count, self.tokens](
                state, none if router_logits is None else router_logits, none if ids is None else ids, t["rows"],
                t["bias"], t["correction"], t["inverse"], t["up"], t["factor"], t["slope"], t["offset"],
                *(m.get(name, none) for name in ("state", "told", "ahead", "mean")), self._work, self._count,
                self.ids, self.probabilities, layer, layer + p.horizon, layer if p.horizon else (layer - 1) % p.L,
                p.keep, p.eps, PHASE=phase, **plan)

    def _gate_plan(self, predict: bool, told: int) -> dict:
        """Constants of a gate's launch: how many programs take which rows, and what is left for the next token."""
        p = self.prepared
        gates, same, past = (predict * count for count in (
            triton.cdiv(p.E, self.tiles.rows), self._parts * p.same, self._parts * p.past))
        owns = triton.cdiv(p.E, self.tiles.rows) * (told == OWN)
        return self._common(same + past + 1) | dict(
            L=p.L, RANK=max(p.rank, 1), GATES=gates, OWNS=owns, SAME=same, PAST=past,
            PROGRAMS=gates + owns + same + past + 1, WORK=self._work.shape[1], TOLD=told, PREDICT=predict,
            STORE=told > 0, REMEMBERS=p.remembers, CORRECTED=p.corrected, BLOCK_K=triton.next_power_of_2(p.K))

    def reference(self, online, layer: int, state: Tensor, ids: Tensor) -> tuple[Tensor, Tensor] | None:
        """The same by `online`, the predictor's own `Online`, which keeps its own memory; see `reference`."""
        return reference(online, layer, state, ids, self.k)

    def _check(self, layer: int, state: Tensor, router_logits: Tensor | None, ids: Tensor | None) -> None:
        p, N = self.prepared, self.tokens
        if not 0 <= layer < p.L:
            raise ValueError(f"layer is {layer}; needed: 0 to {p.L - 1}")
        needs_ids = p.remembers and not p.horizon
        for name, value, width in (("state", state, p.H), ("router_logits", router_logits, p.E), ("ids", ids, p.K)):
            if value is None and (name == "router_logits" or (name == "ids" and not needs_ids)):
                continue
            if value is None or value.shape != (N, width) or not value.is_contiguous():
                got = "None" if value is None else f"{list(value.shape)} with strides {value.stride()}"
                raise ValueError(f"{name} is {got}; needed: [{N},{width}], contiguous")
            if value.device != self.device:
                raise ValueError(f"{name} is on {value.device}; needed: {self.device}")


def _memory_shapes(p: Prepared) -> dict[str, tuple[int, ...]]:
    """Shape of one token's and layer's memory, by name; nothing for a predictor that remembers nothing."""
    every = {"state": (p.H,), "told": (p.E,), "ahead": (p.E,), "mean": (2, p.E)}
    return every if p.remembers else {}


def mlp_reference(predictor: SharedMLP, layer: int, state: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Ids and probabilities [N,k] by torch: `predictor.probabilities` on states [N,H] as they are."""
    none = torch.full((len(state), predictor.K), -1, device=state.device)[None]
    look = View(slice(layer, layer + 1), sane(state.float())[None], none, none)
    return _largest(predictor, look, k)


def reference(online, layer: int, state: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor] | None:
    """Ids and probabilities [N,k] by torch: one step of a predictor's `Online`, whose memory it moves on.

    None where `Online` gives None. Equal probabilities (also those that saturate) keep the order of the logits.
    """
    guide, state, ids = online.predictor, sane(state.float())[None].to(online.predictor.device), ids.long()
    online.observe(layer, state, ids)
    if layer + guide.horizon >= guide.L:
        return None
    return _largest(guide, online.view(layer, state, ids), k)


def stored(predictor, dtype: torch.dtype):
    """A copy of a predictor whose matrices are as `prepare` stores them: the kernels' function by torch, on a CPU.

    For counting the choices that a dtype changes; additions in another order move the last bits only.
    """
    p, twin = prepare(predictor, "cpu", dtype), copy.copy(predictor)
    t = {name: value.float() for name, value in p.tables.items()}
    twin.table = {name: value.cpu() for name, value in predictor.table.items()}
    if p.kind == "mlp":
        def forward(inputs, layer):
            hidden = inputs["state"] @ t["weight"].T + t["place"][twin.target(layer)][:, None]
            return torch.nn.functional.gelu(hidden) @ t["out"] + t["out_bias"]

        twin.forward = forward
        return twin

    def gate(unit, layer):
        weight = t["rows"][:p.L * p.E].view(p.L, p.E, p.H)[layer]
        return twin.order(unit @ weight.transpose(1, 2) + t["bias"][layer][:, None], layer)

    twin.gate = gate
    if p.rank:
        down = t["rows"][p.L * p.E:].view(-1, p.rank, p.H).transpose(1, 2)
        twin.table |= {"down": down.flatten(0, 1), "up": t["up"]}
    return twin


@torch.no_grad()
def _largest(predictor, look: View, k: int) -> tuple[Tensor, Tensor]:
    scores = margin(predictor.logits(look), predictor.K)[0]
    slope, offset = (predictor.table[name][look.layer] for name in ("slope", "offset"))
    order = scores.argsort(dim=-1, descending=True, stable=True)[:, :k]
    return order.int(), (scores.gather(-1, order) * slope + offset).sigmoid()
