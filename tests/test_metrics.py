"""Recall on ties, NaN and caches; bootstrap against a plain loop."""

import numpy as np
import pytest
import torch
from dualdeadline import evaluation, metrics
from factory import synthetic_trace
from hypothesis import given, settings
from hypothesis import strategies as st

E, K = 12, 3


def draw(rows, seed=0, levels=0):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(rows, E, generator=generator)
    scores = (scores * levels).round() if levels else scores
    routes = torch.rand(rows, E, generator=generator).argsort(-1)[:, :K]
    return scores, routes


@pytest.mark.parametrize("budget", [1, 2, 4, 11, 12, 20])
def test_recall_equals_topk_without_ties(budget):
    scores, routes = draw(200)
    top = scores.topk(min(budget, E), -1).indices
    expected = (routes[..., None] == top[:, None]).any(-1).float().mean(-1)
    assert torch.equal(metrics.recall(scores, routes, budget), expected)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, E), st.integers(1, 4), st.integers(0, 99))
def test_ties_are_worth_their_share_and_no_id_gains(budget, levels, seed):
    scores, routes = draw(20, seed, levels)
    order = torch.randperm(E, generator=torch.Generator().manual_seed(seed))
    found = metrics.chances(scores, routes, [budget])[0]
    renamed = metrics.chances(scores[:, order], order.argsort()[routes], [budget])[0]
    assert torch.equal(found, renamed)
    # random tie-breaking agrees in the mean
    noise = 1e-3 * torch.rand(600, *scores.shape, generator=torch.Generator().manual_seed(seed))
    tries = metrics.chances(scores + noise, routes.expand(600, -1, -1), [budget])[0]
    assert torch.allclose(tries.mean(0), found, atol=0.12)


def test_scores_that_say_nothing_are_chance():
    _, routes = draw(50)
    for scores in (torch.zeros(50, E), torch.full((50, E), torch.nan), torch.full((50, E), -torch.inf)):
        assert torch.allclose(metrics.recall(scores, routes, 3), torch.full((50,), 3 / E))


def test_nan_never_wins():
    scores, routes = draw(50)
    poisoned = scores.scatter(1, routes[:, :1], torch.nan)
    assert (metrics.chances(poisoned, routes, [E - 1])[0][:, 0] == 0).all()


def test_budget_and_shape_are_checked():
    scores, routes = draw(4)
    with pytest.raises(ValueError, match="at least 1"):
        metrics.recall(scores, routes, 0)
    with pytest.raises(ValueError, match="the same rows"):
        metrics.recall(scores[:3], routes, 2)


def test_mass_recall_weighs_by_routing_weight():
    scores = torch.tensor([[0.9, 0.8, 0.1, 0.0]])
    routes, weights = torch.tensor([[0, 3]]), torch.tensor([[0.75, 0.25]])
    assert metrics.mass_recall(scores, routes, weights, 1).item() == pytest.approx(0.75)
    assert metrics.recall(scores, routes, 1).item() == 0.5


def test_miss_recall_spends_the_budget_on_absent_experts():
    scores = torch.tensor([[0.9, 0.8, 0.7, 0.1]])
    routes = torch.tensor([[0, 2]])
    resident = torch.tensor([[True, True, False, False]])
    hit = resident.gather(1, routes)
    assert metrics.miss_recall(scores, routes, hit, 1).item() == 0.0  # its place went to expert 0, already there
    assert metrics.miss_recall(scores, routes, hit, 1, resident).item() == 1.0
    assert metrics.miss_recall(scores, routes, torch.ones_like(hit), 1).isnan().all()
    assert metrics.precision(scores, routes, 2, resident).item() == 0.5
    assert metrics.precision(scores, routes, 2).item() == 0.5


def brute_lru(routes, prompt, slots, experts):
    held = torch.zeros(*routes.shape[:2], experts, dtype=torch.bool)
    for layer in range(routes.shape[1]):
        order = []
        for row in range(len(routes)):
            if row and prompt[row] != prompt[row - 1]:
                order = []
            held[row, layer, order] = True
            for expert in routes[row, layer].tolist():
                order = [item for item in order if item != expert] + [expert]
            order = order[-slots:]
    return held


@pytest.mark.parametrize("slots", [4, 6, 11])
def test_recency_is_what_an_lru_cache_holds(slots):
    trace = synthetic_trace(prompts=4, tokens=13, layers=3)
    places = evaluation.recency(trace.routes, trace.prompt, trace.num_experts)
    assert torch.equal(places < slots, brute_lru(trace.routes, trace.prompt, slots, trace.num_experts))


def test_bootstrap_is_a_mean_over_resampled_prompts():
    generator = np.random.default_rng(0)
    prompt = np.repeat(np.arange(9), generator.integers(1, 6, 9))
    values = generator.normal(size=len(prompt))
    mean, low, high = metrics.prompt_bootstrap(values, prompt, resamples=3000, seed=1)
    assert mean == pytest.approx(values.mean())
    means = []
    for _ in range(3000):
        chosen = generator.integers(0, 9, 9)
        means.append(np.concatenate([values[prompt == one] for one in chosen]).mean())
    expected = np.percentile(means, [2.5, 97.5])
    assert np.allclose([low, high], expected, atol=0.05)
    again = metrics.prompt_bootstrap(np.stack([values, values], 1), prompt, resamples=3000, seed=1)
    assert np.allclose(again[1], low) and np.allclose(again[2], high)


def test_bootstrap_needs_prompts_not_rows():
    """Copies of a prompt's rows carry no information: the interval must not shrink."""
    prompt = np.arange(20)
    values = np.random.default_rng(0).normal(size=20)
    once = metrics.prompt_bootstrap(values, prompt)
    assert metrics.prompt_bootstrap(np.repeat(values, 50), np.repeat(prompt, 50)) == pytest.approx(once)


def test_paired_difference_is_narrower_than_its_parts():
    generator = np.random.default_rng(0)
    shared, prompt = generator.normal(size=40), np.arange(40)
    a, b = shared + 0.1, shared + 0.01 * generator.normal(size=40)
    mean, low, high = metrics.paired_bootstrap(a, b, prompt)
    assert 0 < low < mean < high < 0.11
    whole = metrics.prompt_bootstrap(a, prompt)
    assert high - low < 0.1 * (whole[2] - whole[1])
    assert metrics.paired_bootstrap(a, a, prompt) == (0.0, 0.0, 0.0)


def test_bootstrap_refuses_hidden_nan():
    with pytest.raises(ValueError, match="weight 0"):
        metrics.prompt_bootstrap([1.0, np.nan], [0, 1])
    assert metrics.prompt_bootstrap([1.0, np.nan], [0, 1], weights=[1, 0])[0] == 1.0
    with pytest.raises(ValueError, match="at least 1"):
        metrics.prompt_bootstrap([], [])


def test_calibration_error_of_true_probabilities_is_small():
    generator = torch.Generator().manual_seed(0)
    routes = torch.rand(4000, E, generator=generator).argsort(-1)[:, :K]
    assert metrics.calibration_error(torch.full((4000, E), K / E), routes) < 1e-6
    assert metrics.calibration_error(torch.full((4000, E), 0.9), routes) == pytest.approx(0.9 - K / E, abs=1e-4)
