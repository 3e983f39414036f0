"""What recorded routes give under stated rules: hit rates, and stalls in the published accounting at Qwen's sizes.

Nothing here is measured. The shared expert is in no cache and in no copy: only routed experts count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from dualdeadline import cache, metrics, simulate
from dualdeadline.cost import TransferModel
from dualdeadline.streams import Shape

POLICIES = ("lru", "lfu", "predicted", "belady")


def hit_rates(routes, prompt, scores, slots: Sequence[int], starts: Sequence[str] = ("cold", "warm")) -> pd.DataFrame:
    """Hit rate of every prompt by policy, slots and start, on the layers that the scores speak of.

    Args:
        routes: `[T, L, K]`. prompt: `[T]`. scores: `[T, L-h, E]`, for the policy `predicted`, which evicts what is
            predicted least and copies nothing ahead.

    Returns:
        DataFrame(prompt, variant, slots, start, hit_rate).
    """
    horizon, experts = routes.shape[1] - scores.shape[1], scores.shape[2]
    parts = []
    for start in starts:
        emptied = prompt if start == "cold" else np.zeros_like(prompt)
        shared = cache.Replay(routes, scores, emptied)
        for count in slots:
            for policy in POLICIES:
                if policy == "predicted":
                    hit = shared.run(count, 0, policy, 0.0, True).hits
                else:
                    hit = cache.hits(routes, count, policy, "token", emptied, experts=experts)
                rate = metrics.prompt_means(hit[:, horizon:].mean((1, 2)), prompt)
                line = {"prompt": np.arange(len(rate)), "hit_rate": rate}
                parts.append(pd.DataFrame(line).assign(variant=policy, slots=count, start=start))
    return pd.concat(parts, ignore_index=True)


def expert_bytes(shape: Shape) -> dict[str, int]:
    """Bytes of one routed expert's components, and of both, as `simulate.stall` takes them."""
    sizes = shape.component_bytes
    return {"gate_up": sizes["gate_up"], "down": sizes["down"], "full": sizes["expert"]}


def times() -> tuple[dict, TransferModel]:
    """The published times, and the line through the published mean copies."""
    told = simulate.published()
    return told, TransferModel.fit(told["transfer"]["size_bytes"], told["transfer"]["mean_ms"])


def published_check(shape: Shape, budget: int = 4) -> pd.DataFrame:
    """The published stall at Qwen's sizes, from the published mean recall alone, beside the published rows.

    Windows and gate/up time are the published OLMoE's, copies the published line at this shape's bytes. Monolithic
    needs nothing else; staged needs recall at budget * 3 / 2, interpolated here, and this model's gate/up time, which
    is not published.

    Returns:
        DataFrame of monolithic_ms and staged_ms: `here`, `published`.
    """
    told, transfer = times()
    qwen, layers = told["published_qwen36"], range(1, 16)
    covered = simulate.mean_coverage(qwen["recall"]["learned"], told["top_k"], layers)
    window = simulate.windows_for(16, qwen["predictor_ms"]["triton"])
    compute = told["expert_gate_up_compute_top8_p50_ms"]
    here = simulate.stall(covered, window, transfer, expert_bytes(shape), compute, [budget]).iloc[0]
    names = ("monolithic", "staged")
    said = {f"{name}_ms": [here[f"{name}_ms"], qwen["stall_budget4_ms"][name]] for name in names}
    return pd.DataFrame(said, index=["here", "published"])


def stalls(routes, prompt, scores: Mapping[str, np.ndarray], shape: Shape, budgets: Sequence[int]) -> pd.DataFrame:
    """Stall per token and layer of every prompt in the published accounting, and with the link charged once.

    Args:
        scores: by predictor, `[T, L-h, E]`.

    Returns:
        DataFrame(prompt, variant, metric, budget, schedule, ms).
    """
    told, transfer = times()
    compute, parts = told["expert_gate_up_compute_top8_p50_ms"], []
    for name, score in scores.items():
        layers, experts = routes.shape[1], score.shape[2]
        horizon = layers - score.shape[1]
        layer = np.tile(np.arange(horizon, layers), len(routes))
        flat, wanted = score.reshape(len(layer), experts), routes[:, horizon:].reshape(len(layer), -1)
        covered = simulate.coverage(flat, wanted, layer)
        window = simulate.windows_for(layers, told["published_qwen36"]["predictor_ms"]["triton"], horizon)
        for metric, rule in (("stall_ms", {}), ("stall_link_once_ms", {"link_once": True})):
            found = simulate.stall(
                covered,
                window,
                transfer,
                expert_bytes(shape),
                compute,
                budgets,
                group=np.repeat(prompt, layers - horizon),
                **rule,
            )
            parts.append(found.assign(variant=name, metric=metric))
    rows = pd.concat(parts, ignore_index=True).rename(
        columns={"group": "prompt", "monolithic_ms": "monolithic", "staged_ms": "staged"}
    )
    return rows.melt(["prompt", "variant", "metric", "budget"], ["monolithic", "staged"], "schedule", "ms")
