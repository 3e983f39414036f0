"""Predictors fitted by gradient descent: probe, shared MLP, shared low rank, shuffled control."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dualdeadline.predictors import training
from dualdeadline.predictors.base import Predictor, View
from dualdeadline.predictors.gate_ahead import RouterAhead, unit_state

WIDTH, EMBEDDING, RANK = 256, 32, 176


class Learned(Predictor):
    """A predictor whose table is fitted by gradient descent.

    Args:
        loss: `bce`, `kl`, `deadline` or `both`, see `training`.
        epochs, batch, rate, decay: passes over the rows, tokens per step, peak learning rate, weight decay.
    """

    sources = ("loss", "epochs", "batch", "rate", "decay")

    def __init__(self, horizon=1, seed=0, routers=None, loss="bce", epochs=8, batch=32, rate=0.02, decay=0.01):
        super().__init__(horizon, seed, routers)
        if loss not in training.LOSSES:
            raise ValueError(f"loss is {loss!r}; needed: one of {', '.join(training.LOSSES)}")
        if epochs < 1 or batch < 1:
            raise ValueError(f"epochs is {epochs}, batch is {batch}; needed: at least 1 of each")
        self.loss, self.epochs, self.batch, self.rate, self.decay = loss, epochs, batch, rate, decay

    def initial(self, draw: torch.Generator) -> dict[str, Tensor]:
        """The table before training."""
        raise NotImplementedError

    def inputs(self, view: View) -> dict[str, Tensor]:
        """What `forward` reads, [G,N,...] each: the part of the work that learns nothing."""
        raise NotImplementedError

    def forward(self, inputs: dict[str, Tensor], layer: slice) -> Tensor:
        """Logits [G,N,E] for G source layers."""
        raise NotImplementedError

    def logits(self, view: View) -> Tensor:
        """[G,N,E]: `forward` of `inputs`."""
        return self.forward(self.inputs(view), view.layer)

    def learn(self, trace, rows: Tensor, held: Tensor) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        draw = torch.Generator().manual_seed(self.seed)
        self.table = {key: value.to(device) for key, value in self.initial(draw).items()}
        training.train(self, trace, rows, held, self.labels(rows))

    def labels(self, rows: Tensor) -> Tensor:
        """Rows whose routes are the targets of `rows`: their own."""
        return rows

    def teach(self, router_logits: Tensor, layer: slice) -> Tensor:
        """Router logits [G,N,E] of the target layers as a teacher's logits: unchanged."""
        return router_logits


def dense(draw: torch.Generator, *shape: int) -> Tensor:
    """Normal weights [..., out, in] with standard deviation in**-0.5."""
    return torch.randn(*shape, generator=draw) * shape[-1] ** -0.5


class SharedMLP(Learned):
    """One network for all layers: LayerNorm, layer embedding, one GELU layer. The original study's predictor.

    553,536 parameters at H=2048, E=64, L=16: norm 2H, embedding 32 L, (H+32) -> width without bias, width -> E.
    """

    name = "shared_mlp"
    sources = (*Learned.sources, "width")

    def __init__(self, *args, width: int = WIDTH, **kwargs):
        super().__init__(*args, **kwargs)
        self.width = width

    def initial(self, draw: torch.Generator) -> dict[str, Tensor]:
        return {
            "norm_weight": torch.ones(self.H), "norm_bias": torch.zeros(self.H),
            "embedding": torch.randn(self.L, EMBEDDING, generator=draw),
            "hidden": dense(draw, self.width, self.H + EMBEDDING),
            "out": dense(draw, self.E, self.width), "out_bias": torch.zeros(self.E),
        }

    def inputs(self, view: View) -> dict[str, Tensor]:
        return {"state": F.layer_norm(view.state, (self.H,))}

    def forward(self, inputs: dict[str, Tensor], layer: slice) -> Tensor:
        t = self.table
        state_part, layer_part = t["hidden"].split([self.H, EMBEDDING], 1)
        place = t["embedding"][self.target(layer)] @ layer_part.T
        hidden = F.linear(inputs["state"] * t["norm_weight"] + t["norm_bias"], state_part)
        return F.linear(F.gelu(hidden + place[:, None]), t["out"], t["out_bias"])


def shared_mlp_size(hidden: int, experts: int, layers: int, width: int = WIDTH) -> int:
    """Parameters of a SharedMLP at H, E, L: the budget that ResidualGate may not exceed."""
    return 2 * hidden + EMBEDDING * layers + (hidden + EMBEDDING) * width + (width + 1) * experts


class Shuffled(SharedMLP):
    """A SharedMLP taught with the routes of other tokens: what is left is popularity. A control against leaks."""

    name = "shuffled"

    def labels(self, rows: Tensor) -> Tensor:
        """The same rows in another order."""
        return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(self.seed + 1))]


class LowRank(Learned):
    """A projection shared by all layers and a linear read-out per layer.

    540,672 parameters at H=2048, E=64, L=16: 176 x (H + L E).
    """

    name = "low_rank"
    sources = (*Learned.sources, "rank")

    def __init__(self, *args, rank: int = RANK, **kwargs):
        super().__init__(*args, **kwargs)
        self.rank = rank

    def initial(self, draw: torch.Generator) -> dict[str, Tensor]:
        rank = min(self.rank, self.H)  # more would only repeat
        return {"down": dense(draw, rank, self.H), "up": dense(draw, self.L, self.E, rank)}

    def inputs(self, view: View) -> dict[str, Tensor]:
        return {"state": unit_state(view.state, None, 0.0)}

    def forward(self, inputs: dict[str, Tensor], layer: slice) -> Tensor:
        up = self.table["up"][self.target(layer)]
        return F.linear(inputs["state"], self.table["down"]) @ up.transpose(1, 2)


class Probe(Learned, RouterAhead):
    """Logistic regression per layer on the log probabilities of the source layer's router.

    At horizon 0 the router of the target layer reads its layer-start state.
    """

    name = "probe"

    def initial(self, draw: torch.Generator) -> dict[str, Tensor]:
        count = self.L - self.horizon
        return {"weight": torch.zeros(count, self.E, self.E), "bias": torch.zeros(count, self.E)}

    def inputs(self, view: View) -> dict[str, Tensor]:
        seen = self.gate(self.unit(view.state, view.layer), view.layer).log_softmax(-1)
        return {"seen": seen - seen.mean(-1, keepdim=True)}

    def forward(self, inputs: dict[str, Tensor], layer: slice) -> Tensor:
        weight, bias = (self.table[key][layer] for key in ("weight", "bias"))
        return inputs["seen"] @ weight.transpose(1, 2) + bias[:, None]
