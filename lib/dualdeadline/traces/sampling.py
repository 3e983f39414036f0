"""Choosing the next token so that the choice depends on the model, the seed, the prompt and the step only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dualdeadline import manifest

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Sampling:
    """Temperature and nucleus (top-p) sampling.

    The uniform number behind each candidate is a hash of (seed, prompt id, step, token id), and the choice is
    the largest `logit / temperature + Gumbel noise` (Maddison et al., 2014), which has the softmax's
    distribution. So the batch a prompt travels in, its row there and what was killed before cannot matter, and
    rounding in the logits matters only where two candidates nearly tie; drawing one number against a
    cumulative sum would let rounding anywhere in the vocabulary move the choice.

    Args:
        temperature: above 0; for greedy decoding pass `sampling=None` instead.
        top_p: in (0, 1]; the smallest set of tokens with at least this mass is kept.
        seed: any integer.
    """

    temperature: float = 0.8
    top_p: float = 0.95
    seed: int = 0

    def __post_init__(self):
        if not self.temperature > 0 or not 0 < self.top_p <= 1:
            raise ValueError(f"got temperature {self.temperature}, top_p {self.top_p}; needed: temperature > 0 and "
                             "0 < top_p <= 1 (greedy decoding is sampling=None)")

    def key(self, prompt_id: str) -> int:
        """The prompt's own stream: 64 bits of a hash of seed and id."""
        return int(manifest.sha256(f"{self.seed}/{prompt_id}")[:16], 16)

    def choose(self, logits: torch.Tensor, keys: np.ndarray, step: int) -> torch.Tensor:
        """Next token [N] for logits [N,V], with one `key` per row (uint64 [N])."""
        scaled = logits.float() / self.temperature
        values, ids = self._candidates(scaled)
        chosen = np.argmax(values + gumbel(keys, step, ids), axis=1)
        return torch.from_numpy(np.take_along_axis(ids, chosen[:, None], 1)[:, 0]).to(logits.device)

    def _candidates(self, scaled: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Scaled logits and ids [N,C], in falling order, -inf outside the nucleus.

        C starts at 256 and grows until it covers the nucleus: sorting the whole vocabulary would cost more
        than the model at the pilot's size.
        """
        width, total = 256, scaled.logsumexp(-1, keepdim=True)
        while True:
            values, ids = scaled.topk(min(width, scaled.shape[-1]), dim=-1)
            before = (values - total).double().exp().cumsum(-1).roll(1, -1)
            before[:, 0] = 0.0
            if ids.shape[-1] == scaled.shape[-1] or bool((before[:, -1] >= self.top_p).all()):
                break
            width *= 4
        kept = values.double().masked_fill(before >= self.top_p, -torch.inf)
        return kept.cpu().numpy(), ids.cpu().numpy()


def gumbel(keys: np.ndarray, step: int, ids: np.ndarray) -> np.ndarray:
    """Standard Gumbel noise [N,C] for token ids [N,C], a function of (key, step, id) alone."""
    with np.errstate(over="ignore"):
        stream = mix(keys + np.uint64(step + 1) * _GOLDEN)
        bits = mix(stream[:, None] ^ mix(ids.astype(np.uint64) + _GOLDEN))
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return -np.log(-np.log(uniform))


def mix(value: np.ndarray) -> np.ndarray:
    """The splitmix64 finaliser (Steele, Lea and Flood, 2014): 64 bits in, 64 well mixed bits out."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
