"""What every predictor shares: what it reads, calibration, scoring a trace, stepping beside a decode loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

MAX_HORIZON = 3
CHUNK = 1024  # tokens scored at once; bounds memory at OLMoE size to about 0.2 GB
HELD_SHARE = 8  # one train prompt of so many is held out to stop early and to calibrate


@dataclass(frozen=True)
class View:
    """What is known just before the experts of G source layers run, for N tokens.

    Args:
        layer: the G source layers, one after another, as a slice with start and stop.
        state: [G,N,H] float32. Router input of the source layer; at horizon 0 the layer-start state instead.
        ids: [G,N,K] what the most recent router chose: the source layer's, at horizon 0 the layer before
            (before layer 0: the last layer at the previous token). -1 where there is none.
        previous: [G,N,K] what the *target* layer chose at the previous token of the prompt. -1 where none.
    """

    layer: slice
    state: Tensor
    ids: Tensor
    previous: Tensor

    def to(self, device: torch.device) -> View:
        return View(self.layer, *(getattr(self, name).to(device) for name in ("state", "ids", "previous")))


def previous_rows(prompt: Tensor) -> Tensor:
    """Row [T] of each token's predecessor in its prompt, -1 at a prompt's first token."""
    rows = torch.arange(len(prompt)) - 1
    first = torch.ones(len(prompt), dtype=torch.bool)
    first[1:] = prompt[1:] != prompt[:-1]
    return rows.masked_fill(first, -1)


def view(trace, rows: Tensor, horizon: int) -> View:
    """The view of all source layers 0..L-1-horizon at some rows of a trace."""
    layers = trace.routes.shape[1]
    source = layers - horizon
    routes = trace.routes
    before = previous_rows(trace.prompt)[rows]
    past = torch.where(before[:, None, None] >= 0, routes[before].long(), -1)  # [N,L,K]
    now = routes[rows].long()
    latest = now[:, :source] if horizon else torch.cat([past[:, -1:], now[:, :-1]], 1)
    state = (trace.router_input if horizon else trace.layer_input)[rows, :source]
    return View(slice(0, source), sane(state.float()).transpose(0, 1), latest.transpose(0, 1),
                past[:, horizon:].transpose(0, 1))


def sane(values: Tensor) -> Tensor:
    """Values with NaN and infinities replaced by 0 and the rest bounded, so that nothing non-finite spreads."""
    return torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0).clamp(-1e9, 1e9)


def membership(ids: Tensor, experts: int, weights: Tensor | None = None) -> Tensor:
    """One where an id of [...,K] names the expert, [...,E] float32; `weights` [...,K] or [K] instead of ones.

    Ids outside 0..E-1 are ignored; of a repeated id the largest weight counts.
    """
    valid = (ids >= 0) & (ids < experts)
    values = torch.ones_like(ids, dtype=torch.float32) if weights is None else weights.float().expand(ids.shape)
    out = torch.zeros(*ids.shape[:-1], experts, device=ids.device)
    return out.scatter_reduce(-1, ids.clamp(0, experts - 1), values * valid, "amax")


def hold_out(trace) -> tuple[Tensor, Tensor]:
    """Rows to fit on and rows held back, split by prompt (the same for every predictor and seed).

    A trace of a single prompt is used for both.
    """
    prompts = torch.unique(trace.prompt)
    held = torch.isin(trace.prompt, prompts[HELD_SHARE // 2 :: HELD_SHARE])
    rows = torch.arange(len(trace.prompt))
    return (rows[~held], rows[held]) if 0 < held.sum() < len(rows) else (rows, rows)


class Predictor:
    """Scores every expert of layer l + horizon from what is known at layer l.

    Args:
        horizon: layers ahead, 0 to 3. 0 reads the layer-start state of the target layer itself, before attention.
        seed: of whatever the predictor draws.
        routers: the model's `models.Routers`; needed by the predictors that apply a router. Default: those of
            the trace, where it carries them.

    Everything learned is in `table` (name -> tensor); `slope` and `offset` [G] calibrate each target layer.
    """

    name: ClassVar[str]
    sources: ClassVar[tuple[str, ...]] = ()  # constructor options beyond the common ones, for save and load

    def __init__(self, horizon: int = 1, seed: int = 0, routers=None):
        if not 0 <= horizon <= MAX_HORIZON:
            raise ValueError(f"horizon is {horizon}; needed: 0 to {MAX_HORIZON} layers")
        self.horizon, self.seed, self.routers = int(horizon), int(seed), routers
        self.table: dict[str, Tensor] = {}
        self.L = self.E = self.K = self.H = 0

    def learn(self, trace, rows: Tensor, held: Tensor) -> None:
        """Fill `table` from `rows` of the trace; `held` rows may only stop training. Default: nothing."""

    def logits(self, view: View) -> Tensor:
        """[G,N,E]: higher is more likely routed. Any scale; `slope` and `offset` make it a probability."""
        raise NotImplementedError(f"{type(self).__name__} defines no logits")

    @property
    def device(self) -> torch.device:
        return next(iter(self.table.values())).device if self.table else torch.device("cpu")

    def target(self, layer: slice) -> slice:
        """The target layers of some source layers."""
        return slice(layer.start + self.horizon, layer.stop + self.horizon)

    def fit(self, trace):
        """Learn from a trace (train prompts only) and calibrate on its held-out prompts; returns self.

        Raises:
            ValueError: an empty trace, or fewer than horizon + 1 layers.
        """
        self._shape(trace)
        rows, held = hold_out(trace)
        self.learn(trace, rows, held)
        self._calibrate(trace, held)
        return self

    def _shape(self, trace) -> None:
        tokens, self.L, self.K = trace.routes.shape
        self.E = trace.num_experts
        self.H = (trace.router_input if self.horizon else trace.layer_input).shape[-1]
        if not tokens:
            raise ValueError("the trace has no tokens; needed: at least one prompt in the split")
        if self.L <= self.horizon:
            raise ValueError(f"the trace has {self.L} layers; horizon {self.horizon} needs more layers")
        if self.routers is None:
            self.routers = getattr(trace, "routers", None)

    @torch.no_grad()
    def score(self, trace) -> Tensor:
        """Probability [T, L-horizon, E] that an expert of target layers horizon..L-1 is routed."""
        self._fitted()
        parts = [self.probabilities(self._look(trace, rows)).transpose(0, 1).cpu()
                 for rows in self.chunks(trace, torch.arange(len(trace.prompt)))]
        return torch.cat(parts) if parts else torch.empty(0, self.L - self.horizon, self.E)

    def chunks(self, trace, rows: Tensor) -> list[Tensor]:
        """Rows in parts of whole prompts, a little over `CHUNK` tokens each, so that a memory sees every token."""
        if not len(rows):
            return []
        counts = torch.unique_consecutive(trace.prompt[rows], return_counts=True)[1]
        part = (counts.cumsum(0) - counts) // CHUNK
        return list(rows.split(torch.bincount(part, counts).long()[part.unique()].tolist()))

    def _look(self, trace, rows: Tensor):
        return view(trace, rows, self.horizon).to(self.device)

    def online(self) -> Online:
        """`step(layer, router_input[N,H], ids[N,K]) -> probabilities[N,E]`, token by token; see `Online`."""
        self._fitted()
        return Online(self)

    def _fitted(self) -> None:
        if not self.L:
            raise ValueError(f"{self.name} is not fitted; needed: .fit(trace) or predictors.load(folder) first")

    def probabilities(self, view: View) -> Tensor:
        """Calibrated probabilities [G,N,E]; finite whatever the view holds."""
        slope, offset = (self.table[key][view.layer][:, None, None] for key in ("slope", "offset"))
        return (margin(self.logits(view), self.K) * slope + offset).sigmoid()

    @torch.no_grad()
    def _calibrate(self, trace, held: Tensor) -> None:
        parts = [margin(self.logits(self._look(trace, rows)), self.K) for rows in self.chunks(trace, held)]
        scores = torch.cat(parts, 1)
        routed = membership(trace.routes[held, self.horizon:].long().transpose(0, 1), self.E).to(scores.device)
        self.table["slope"], self.table["offset"] = platt(scores.flatten(1), routed.flatten(1))

    def parameter_count(self) -> int:
        """Learned numbers without the two per layer that calibrate."""
        return sum(value.numel() for key, value in self.table.items() if key not in ("slope", "offset"))

    def options(self) -> dict:
        """The constructor's arguments, without routers."""
        return {key: getattr(self, key) for key in ("horizon", "seed", *self.sources)}


def margin(logits: Tensor, routed: int) -> Tensor:
    """How far each logit [...,E] lies above the midpoint of the row's K-th and (K+1)-th; keeps a row's order.

    A router keeps the K largest, so distance from that cut, not the logit itself, tells how sure a guess is.
    """
    logits = sane(logits)
    top = logits.topk(min(routed + 1, logits.shape[-1]), -1).values
    return logits - top[..., -2:].mean(-1, keepdim=True)


def platt(scores: Tensor, labels: Tensor, steps: int = 30) -> tuple[Tensor, Tensor]:
    """Slope and offset [G] with sigmoid(slope * score + offset) most likely, by damped Newton steps.

    Args:
        scores, labels: [G,M]; labels are 0 or 1.

    The slope stays positive, so that calibration never reorders experts; a useless score gets nearly none.
    Source: Platt, "Probabilistic outputs for support vector machines", 1999.
    """
    scale = scores.std(1).clamp(min=1e-6)
    features = torch.stack([scores / scale[:, None], torch.ones_like(scores)], 1)  # [G,2,M]
    rate = labels.mean(1).clamp(1e-4, 1 - 1e-4)
    weight = torch.stack([torch.zeros_like(rate), rate.logit()], 1)
    ridge = 1e-3 * torch.eye(2, device=scores.device)
    for _ in range(steps):
        guess = torch.einsum("gf,gfm->gm", weight, features).sigmoid()
        slope = torch.einsum("gfm,gm->gf", features, guess - labels) + weight @ ridge
        curve = torch.einsum("gfm,gm,gkm->gfk", features, guess * (1 - guess) + 1e-6, features) + ridge
        weight = (weight - torch.linalg.solve(curve, slope).clamp(-2, 2)).clamp(-20, 20)
    return (weight[:, 0] / scale).clamp(min=1e-4), weight[:, 1]


class Online:
    """A predictor beside a decode loop; rows are sequences, and what it remembers is their previous token.

    Call it for every layer in order. It returns None for the last `horizon` layers: nothing is left to
    predict in this token, but their ids matter at the next one. `reset()` before other sequences.
    """

    def __init__(self, predictor: Predictor):
        self.predictor, self._seen = predictor, {}

    def reset(self) -> None:
        """Forget: other sequences begin."""
        self._seen.clear()

    def ran(self, layer: int) -> int:
        """The layer whose router ran last when `layer` is stepped."""
        return layer if self.predictor.horizon else (layer - 1) % self.predictor.L

    def observe(self, layer: int, state: Tensor, ids: Tensor) -> None:
        """Note what is new at a step, state [1,N,H] and ids [N,K], before predicting."""
        self._seen[self.ran(layer)] = ids

    def view(self, layer: int, state: Tensor, ids: Tensor) -> View:
        """What the predictor sees at a step."""
        previous = self._seen.get(layer + self.predictor.horizon)
        if previous is None or previous.shape != ids.shape:
            previous = torch.full_like(ids, -1)
        return View(slice(layer, layer + 1), state, ids[None], previous[None]).to(self.predictor.device)

    @torch.no_grad()
    def __call__(self, layer: int, router_input: Tensor, ids: Tensor) -> Tensor | None:
        """Probabilities [N,E] of target layer `layer + horizon`.

        Args:
            layer: source layer, 0 to L-1.
            router_input: [N,H] router input of that layer; at horizon 0 its layer-start state.
            ids: [N,K] what the most recent router chose: this layer's, at horizon 0 the layer before (at layer
                0 the last layer at the previous token; -1 at a sequence's first token).

        Raises:
            ValueError: no such layer.
        """
        guide = self.predictor
        if not 0 <= layer < guide.L:
            raise ValueError(f"layer is {layer}; needed: 0 to {guide.L - 1}")
        ids, state = ids.long(), sane(router_input.float())[None].to(guide.device)
        self.observe(layer, state, ids)
        if layer + guide.horizon >= guide.L:
            return None
        return guide.probabilities(self.view(layer, state, ids))[0]
