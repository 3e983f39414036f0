"""AdamW with float32 master weights, or Muon for the matrices and AdamW for the rest; the state saves flat.

Muon (Jordan et al. 2024) orthogonalises the momentum of every matrix by five Newton-Schulz steps; updates are
scaled by 0.2*sqrt(max(rows, columns)) so that their size matches AdamW's (Liu et al. 2025). All experts of
all layers go through one batched product per shape, a few per cent of a step.
"""

from __future__ import annotations

import torch

from dualdeadline.pretrain import model, qwen

MATRICES = (model.GATE_UP, model.DOWN, *(model.BLOCK[key] for key in "qkvo"),
            *(qwen.LINEAR[key] for key in ("qkv", "z", "out")),
            *(qwen.COMMON[key] for key in ("shared_gate", "shared_up", "shared_down")))


def orthogonal(batch, steps: int = 5):
    """Newton-Schulz approximation of the nearest orthogonal matrix; batch[B, m, n], in bfloat16."""
    tall = batch.shape[-2] > batch.shape[-1]
    x = batch.mT if tall else batch
    x = (x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-12)).bfloat16()
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.mT if tall else x


class Optimizer:
    """One optimizer over named parameters.

    Args:
        params: name -> float32 leaf. kind: `adamw` or `muon`. lr: peak rate of AdamW's parameters.
        muon_lr: peak rate of Muon's matrices. decay: weight decay of all matrices but the embedding.
    """

    def __init__(self, params: dict, kind: str, lr: float, muon_lr: float = 0.01, decay: float = 0.1):
        if kind not in ("adamw", "muon"):
            raise ValueError(f"optimizer is {kind!r}; needed: adamw or muon")
        self.params, self.decay = params, decay
        matrices = [name for name in params if name.endswith(MATRICES)]
        self.muon = matrices if kind == "muon" else []
        self.momentum = {name: torch.zeros_like(params[name]) for name in self.muon}
        router = [name for name in params if name.endswith(model.BLOCK["router"])]
        decayed = router + ([] if self.muon else matrices)
        plain = [name for name in params if name not in decayed and name not in self.muon]
        groups = [{"params": [params[name] for name in names], "weight_decay": rate}
                  for names, rate in ((decayed, decay), (plain, 0.0))]
        fused = next(iter(params.values())).is_cuda
        self.adam = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-10, fused=fused)
        self.lr, self.muon_lr = lr, muon_lr

    @torch.no_grad()
    def step(self, scale: float, clip: float = 1.0):
        """Clip to `clip`, update at `scale` times the peak rates, drop gradients; the gradient norm."""
        norm = torch.nn.utils.clip_grad_norm_(list(self.params.values()), clip, foreach=True)
        for group in self.adam.param_groups:
            group["lr"] = self.lr * scale
        self.adam.step()
        if self.muon:
            self._muon_step(self.muon_lr * scale)
        for param in self.params.values():
            param.grad = None
        return norm

    def _muon_step(self, lr: float) -> None:
        momenta = [self.momentum[name] for name in self.muon]
        grads = [self.params[name].grad for name in self.muon]
        torch._foreach_lerp_(momenta, grads, 0.05)
        ahead = torch._foreach_lerp(grads, momenta, 0.95)
        by_shape: dict[tuple, list[int]] = {}
        for place, name in enumerate(self.muon):
            by_shape.setdefault(self._split(name).shape[-2:], []).append(place)
        for places in by_shape.values():
            pieces = [ahead[place].view(self._split(self.muon[place]).shape) for place in places]
            update = orthogonal(torch.cat(pieces)).float() * (0.2 * max(pieces[0].shape[-2:]) ** 0.5)
            targets = [self.params[self.muon[place]] for place in places]
            parts = update.contiguous().split([len(piece) for piece in pieces])
            parts = [part.reshape(target.shape) for part, target in zip(parts, targets, strict=True)]
            torch._foreach_mul_(targets, 1 - lr * self.decay)
            torch._foreach_add_(targets, parts, alpha=-lr)

    def _split(self, name: str):
        """View as a batch of matrices [B, m, n]; gate and up rows of an expert are two matrices."""
        param = self.params[name]
        if name.endswith(model.GATE_UP):
            return param.view(-1, param.shape[1] // 2, param.shape[2])
        return param.view(-1, *param.shape[-2:])

    def state(self) -> dict[str, torch.Tensor]:
        """Flat name -> tensor of all moments and step counters."""
        flat = {f"muon.{name}": value for name, value in self.momentum.items()}
        for name, param in self.params.items():
            for key, value in self.adam.state.get(param, {}).items():
                flat[f"adam.{key}.{name}"] = value
        return flat

    def load(self, flat: dict[str, torch.Tensor]) -> None:
        """Take over a state written by `state()`."""
        for name in self.momentum:
            self.momentum[name].copy_(flat[f"muon.{name}"])
        for name, param in self.params.items():
            found = {key: flat.get(f"adam.{key}.{name}") for key in ("step", "exp_avg", "exp_avg_sq")}
            # the fused kernel wants the step counter on the parameter's device, the plain one on the CPU
            place = {"step": param.device if self.adam.defaults["fused"] else "cpu"}
            if found["step"] is not None:
                self.adam.state[param] = {key: value.to(place.get(key, param.device), copy=True)
                                          for key, value in found.items()}
