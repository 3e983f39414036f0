"""What a prediction is worth: recall, routing mass, misses, bytes, calibration; intervals by prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

RESAMPLES = 2000
INTERVAL = (2.5, 97.5)  # percent
CHUNK = 1 << 15  # rows sorted at once: 8 MB of scores at E=64


def chances(scores, routes, budgets: Sequence[int], resident=None) -> Tensor:
    """Chance [len(budgets), ..., K] that each routed expert is among the `budget` best scores.

    1 above the cut, 0 below; experts level at the cut share the places left, as if ties were broken at random. So
    no expert gains from its id, and a predictor that knows nothing scores as chance. NaN counts as minus infinity.

    Args:
        scores: [..., E], any scale.
        routes: [..., K] distinct ids.
        budgets: experts that may be prefetched, at least 1 each.
        resident: [..., E] True for experts that are there already; places go to the others only.

    Raises:
        ValueError: a budget below 1, or shapes that do not match.
    """
    return Ranked.of(scores, routes).chances(budgets, resident)


@dataclass(frozen=True)
class Ranked:
    """Scores sorted once, to be asked about several caches; N rows of `shape`.

    order: [N,E] int16 experts by rising score; low, high: [N,K] places in it where those level with each routed
    expert begin, and where those above it begin.
    """

    order: Tensor
    low: Tensor
    high: Tensor
    shape: torch.Size

    @classmethod
    def of(cls, scores, routes) -> Ranked:
        """Sort scores [..., E] for routes [..., K]. Raises ValueError if their rows do not match."""
        scores, routes = torch.as_tensor(scores).float(), torch.as_tensor(routes).long()
        if scores.shape[:-1] != routes.shape[:-1]:
            raise ValueError(f"scores are {list(scores.shape)}, routes {list(routes.shape)}; needed: the same rows")
        pairs = zip(scores.flatten(0, -2).split(CHUNK), routes.flatten(0, -2).split(CHUNK))
        return cls(*(torch.cat(part) for part in zip(*(_places(*pair) for pair in pairs))), routes.shape)

    def chances(self, budgets: Sequence[int], resident=None) -> Tensor:
        """`chances` of these scores, [len(budgets), ..., K].

        Raises:
            ValueError: a budget below 1.
        """
        if min(budgets) < 1:
            raise ValueError(f"budgets are {list(budgets)}; needed: at least 1 expert")
        if resident is None:
            above, level = self.order.shape[-1] - self.high, self.high - self.low
        else:
            absent = (~torch.as_tensor(resident)).flatten(0, -2)
            parts = zip(*(part.split(CHUNK) for part in (absent, self.order, self.low, self.high)))
            above, level = (torch.cat(part) for part in zip(*(_absent(*part) for part in parts)))
        above, level = above.float(), level.clamp(min=1).float()
        found = [((budget - above) / level).clamp(0, 1) for budget in budgets]
        return torch.stack(found).reshape(len(budgets), *self.shape)


def _places(scores: Tensor, routes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Fields of `Ranked` for scores [N,E] and routes [N,K]."""
    scores = scores.masked_fill(scores.isnan(), -torch.inf)
    asked = scores.gather(-1, routes)
    ordered, order = scores.sort(-1)  # faster than comparing K x E pairs
    low, high = (torch.searchsorted(ordered, asked, right=right, out_int32=True) for right in (False, True))
    return order.short(), low, high


def _absent(absent: Tensor, order: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """How many of the absent [N,E] lie above, and level with, each routed expert [N,K]."""
    count = torch.zeros(len(order), order.shape[-1] + 1, dtype=torch.int32)  # of absent ones up to each place
    torch.cumsum(absent.gather(-1, order.long()), -1, dtype=torch.int32, out=count[:, 1:])
    upto = count.gather(-1, high.long())
    return count[:, -1:] - upto, upto - count.gather(-1, low.long())


def recall(scores, routes, budget: int) -> Tensor:
    """Share [N] of the K routed experts among the `budget` best scores [N,E]; at most budget/K. See `chances`."""
    return chances(scores, routes, [budget])[0].mean(-1)


def mass_recall(scores, routes, weights, budget: int) -> Tensor:
    """Share [N] of the routing weight [N,K] that falls on experts among the `budget` best scores."""
    return share(chances(scores, routes, [budget])[0], torch.as_tensor(weights).float())


def miss_recall(scores, routes, hit_mask, budget: int, resident=None) -> Tensor:
    """Share [N] of the routed experts missing from a cache that are among the `budget` best scores.

    Args:
        hit_mask: [N,K] True where the cache holds the routed expert.
        resident: [N,E] True where the cache holds the expert; the budget is then spent on absent experts only,
            as a prefetcher would.

    Rows where nothing misses are NaN; weigh them by their misses, 0 there, when averaging.
    """
    return share(chances(scores, routes, [budget], resident)[0], ~torch.as_tensor(hit_mask))


def precision(scores, routes, budget: int, resident=None) -> Tensor:
    """Useful bytes per byte moved, [N]: share of the prefetched experts that are routed.

    `resident` as in `miss_recall`: experts already there are not moved. Rows with nothing to move are NaN.
    """
    scores, routes = torch.as_tensor(scores), torch.as_tensor(routes).long()
    found = chances(scores, routes, [budget], resident)[0]
    if resident is None:
        return found.sum(-1) / min(budget, scores.shape[-1])
    resident = torch.as_tensor(resident)
    useful = (found * ~resident.gather(-1, routes)).sum(-1)
    return useful / (~resident).sum(-1).clamp(max=budget)


def share(found: Tensor, weight: Tensor) -> Tensor:
    """Weighted mean of `found` over the last dimension; NaN where all weights are 0."""
    return (found * weight).sum(-1) / weight.sum(-1)


def reliability(scores, routes, bins: int = 20) -> dict[str, np.ndarray]:
    """Mean probability, routed share and count per bin of predicted probability, over all experts of all rows.

    Bins are equal in width; empty ones are left out.
    """
    scores, routes = torch.as_tensor(scores).float(), torch.as_tensor(routes).long()
    truth = torch.zeros_like(scores).scatter(-1, routes, 1.0).flatten()
    flat = scores.flatten()
    place = (flat * bins).long().clamp(0, bins - 1)
    count = torch.bincount(place, minlength=bins)
    sums = [torch.bincount(place, weights=value.double(), minlength=bins) for value in (flat, truth)]
    full = count > 0
    return {"probability": (sums[0][full] / count[full]).numpy(), "routed": (sums[1][full] / count[full]).numpy(),
            "count": count[full].numpy()}


def calibration_error(scores, routes, bins: int = 20) -> float:
    """Expected calibration error: mean gap between probability and routed share, bins weighted by their count."""
    table = reliability(scores, routes, bins)
    gap = np.abs(table["probability"] - table["routed"])
    return float((gap * table["count"]).sum() / table["count"].sum())


def prompt_means(values, prompt, weights=None) -> np.ndarray:
    """Mean of each prompt's rows, [prompts, ...]; NaN for a prompt whose weights are all 0.

    Args:
        values: [N, ...] figures per row.
        prompt: [N] which prompt a row belongs to.
        weights: as `values`, not negative; a row of weight 0 is left out, whatever its value. Default: ones.
    """
    sums, weight = _prompt_sums(values, prompt, weights)
    with np.errstate(invalid="ignore"):
        return sums / weight


def prompt_bootstrap(values, prompt, resamples: int = RESAMPLES, seed: int = 0, weights=None):
    """Mean and 95 % interval when prompts, not rows, are drawn anew.

    Args:
        values, prompt, weights: as in `prompt_means`.

    Returns:
        mean, low, high: floats, or arrays where `values` has more dimensions. The mean is over rows (a ratio of
        sums, so a longer prompt weighs more), in the sample and in every resample; percentile interval. Pass
        `prompt_means` with one prompt per row for a mean in which prompts weigh the same.

    Raises:
        ValueError: no rows, not as many values as prompt numbers, or a NaN in a row that counts.
    """
    sums, weight = _prompt_sums(values, prompt, weights)
    prompts = len(sums)
    draws = np.random.default_rng(seed).multinomial(prompts, np.full(prompts, 1 / prompts), size=resamples)
    with np.errstate(invalid="ignore"):
        means = np.tensordot(draws, sums, 1) / np.tensordot(draws, weight, 1)
        mean = sums.sum(0) / weight.sum(0)
    # a resample of prompts without weight has no mean; nanpercentile goes column by column and is slow
    percentile = np.nanpercentile if np.isnan(means).any() else np.percentile
    low, high = percentile(means, INTERVAL, axis=0)
    return (float(mean), float(low), float(high)) if np.ndim(mean) == 0 else (mean, low, high)


def paired_bootstrap(a, b, prompt, resamples: int = RESAMPLES, seed: int = 0, weights=None):
    """Mean difference a - b of the same rows and its 95 % interval; arguments as in `prompt_bootstrap`."""
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if a.shape != b.shape:
        raise ValueError(f"a has shape {a.shape} and b {b.shape}; needed: the same rows")
    return prompt_bootstrap(a - b, prompt, resamples, seed, weights)


def _prompt_sums(values, prompt, weights) -> tuple[np.ndarray, np.ndarray]:
    """Sums of weight * value and of weight per prompt, [prompts, ...] each."""
    values, prompt = np.asarray(values, dtype=np.float64), np.asarray(prompt)
    if len(values) == 0 or len(values) != len(prompt):
        raise ValueError(f"{len(values)} values and {len(prompt)} prompt numbers; needed: as many, at least 1")
    weights = np.ones_like(values) if weights is None else np.asarray(weights, dtype=np.float64)
    values = np.where(weights > 0, values, 0.0)
    if np.isnan(values).any():
        raise ValueError(f"{int(np.isnan(values).sum())} values are NaN; needed: weight 0 where there is no value")
    _, place = np.unique(prompt, return_inverse=True)
    sums = np.zeros((2, place.max() + 1, *values.shape[1:]))
    np.add.at(sums[0], place, weights * values)
    np.add.at(sums[1], place, weights)
    return sums[0], sums[1]
