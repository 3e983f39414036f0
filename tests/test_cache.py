"""The one-pass replay against plain caches, and the properties that make it trustworthy."""

import numpy as np
import pytest
import torch
from cache_reference import plain_hits
from dualdeadline import cache, replay
from hypothesis import given, settings
from hypothesis import strategies as st


def drifting_routes(tokens, layers, experts, k, seed=0):
    """Routes with locality: each layer's scores are a fixed preference and a slow drift."""
    draw = np.random.default_rng(seed)
    taste, drift = draw.normal(size=(layers, experts)), np.zeros((layers, experts))
    routes = np.empty((tokens, layers, k), np.int64)
    for token in range(tokens):
        drift = 0.9 * drift + 0.6 * draw.normal(size=drift.shape)
        routes[token] = np.argsort(-(taste + drift), axis=1)[:, :k]
    return routes


@st.composite
def cases(draw):
    experts, layers = draw(st.integers(2, 9)), draw(st.integers(1, 3))
    k = draw(st.integers(1, min(4, experts)))
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    routes = drifting_routes(sum(lengths), layers, experts, k, draw(st.integers(0, 10_000)))
    return routes, np.repeat(np.arange(len(lengths)), lengths), experts


def plain(routes, prompt, slots, policy, order, scope, experts):
    """Hits `[T, L, K]` by plain caches, per prompt and per layer or pool."""
    prompt = np.zeros(len(routes), int) if prompt is None else prompt
    out = np.zeros(routes.shape, bool)
    for own in np.unique(prompt):
        rows = prompt == own
        if scope == "pool":
            relabelled = routes[rows] + np.arange(routes.shape[1])[:, None] * experts
            flat = relabelled.reshape(-1, routes.shape[2])
            out[rows] = plain_hits(flat, slots, policy, order).reshape(routes[rows].shape)
        else:
            for layer in range(routes.shape[1]):
                out[rows, layer] = plain_hits(routes[rows, layer], slots, policy, order)
    return out


@pytest.mark.parametrize("policy", cache.POLICIES)
@pytest.mark.parametrize("order", cache.ORDERS)
@given(case=cases(), cold=st.booleans(), scope=st.sampled_from(["layer", "pool"]), data=st.data())
@settings(max_examples=25, deadline=None)
def test_equals_the_plain_cache_at_every_slot_count(policy, order, case, cold, scope, data):
    routes, prompt, experts = case
    prompt = prompt if cold else None
    most = experts * (routes.shape[1] if scope == "pool" else 1)
    slots = data.draw(st.integers(1, most))
    expected = plain(routes, prompt, slots, policy, order, scope, experts)
    found = cache.hits(routes, slots, policy, order, prompt, scope, experts)
    if policy == "belady":  # which of two experts that are never used again goes first is left open
        assert found.sum() == expected.sum()
    else:
        assert (found == expected).all()
    rates = cache.curve(routes, policy, order, scope, prompt, experts)
    assert rates.shape == (routes.shape[1], most)
    assert np.allclose(rates[:, slots - 1], found.mean((0, 2)))


@given(case=cases(), policy=st.sampled_from(cache.POLICIES), order=st.sampled_from(cache.ORDERS))
@settings(max_examples=60, deadline=None)
def test_more_slots_never_hit_less_and_the_optimum_is_the_best(case, policy, order):
    routes, prompt, experts = case
    few = routes.shape[2] - 1 if order == "token" else 0  # below K slots a token runs in waves
    rates = cache.curve(routes, policy, order, prompt=prompt, experts=experts)[:, few:]
    assert (np.diff(rates, axis=1) >= 0).all()
    best = cache.curve(routes, "belady", order, prompt=prompt, experts=experts)[:, few:]
    assert (best >= rates - 1e-12).all()
    first_uses = np.mean([[len(np.unique(routes[prompt == p, layer])) for p in np.unique(prompt)]
                          for layer in range(routes.shape[1])], axis=1) * len(np.unique(prompt))
    assert np.allclose((1 - rates[:, -1]) * routes.shape[0] * routes.shape[2], first_uses)


@given(case=cases(), order=st.sampled_from(cache.ORDERS))
@settings(max_examples=30, deadline=None)
def test_lru_by_last_uses_equals_lru_by_the_priority_stack(case, order):
    routes, prompt, experts = case
    lanes = cache.sequences(routes, prompt, "layer", experts)
    group = routes.shape[2] if order == "token" else 1
    ids = lanes.ids.reshape(-1, lanes.ids.shape[2])
    live = np.repeat(lanes.token < len(routes), routes.shape[2], axis=0).repeat(routes.shape[1], axis=1)
    by_stack = np.maximum(cache.priority_depths(ids, "lru", group, experts), group)
    by_use = np.maximum(cache.lru_depths(ids, group, experts), group)
    assert (by_stack == by_use)[live].all()


@given(case=cases(), order=st.sampled_from(cache.ORDERS), start=st.sampled_from(["cold", "warm"]))
@settings(max_examples=20, deadline=None)
def test_curves_per_prompt_average_to_those_per_layer(case, order, start):
    routes, prompt, experts = case
    own = cache.prompt_curve(routes, prompt, "lfu", order, start=start, experts=experts)
    layers = cache.curve(routes, "lfu", order, prompt=prompt if start == "cold" else None, experts=experts)
    assert np.allclose(np.bincount(prompt) @ own / len(prompt), layers.mean(0))


def test_chunks_of_a_long_sequence_join_up():
    routes = drifting_routes(900, 2, 64, 8)
    for slots in (1, 5, 16, 40):
        assert np.isclose(cache.hit_rate(routes, slots).mean(), cache.ordered_dict_lru(routes, slots))
    pool = cache.hits(routes[:300], 60, "lru", "token", scope="pool")
    assert (pool == plain(routes[:300], None, 60, "lru", "token", "pool", 64)).all()


def test_worked_examples_by_hand():
    routes = np.array([0, 1, 0, 2, 0, 1]).reshape(6, 1, 1)
    assert cache.hits(routes, 2, "lru").ravel().tolist() == [False, False, True, False, True, False]
    assert cache.hits(routes, 2, "belady").ravel().tolist() == [False, False, True, False, True, False]
    assert cache.hits(routes, 3, "lru").ravel().tolist() == [False, False, True, False, True, True]
    again = np.array([0, 0, 0, 1, 2, 1, 2, 0]).reshape(8, 1, 1)  # 0 was used most and outlives 1 and 2
    assert cache.hits(again, 2, "lfu").ravel().tolist() == [0, 1, 1, 0, 0, 0, 0, 1]
    assert cache.hits(again, 2, "lru").ravel().tolist() == [0, 1, 1, 0, 0, 1, 1, 0]


def test_counts_survive_eviction_and_ties_go_to_the_least_recent():
    # evicted 1 comes back with its count, now 2 like that of 0; for 3 the less recent of them goes: 0
    routes = np.array([1, 0, 0, 2, 1, 3, 1, 0]).reshape(8, 1, 1)
    assert cache.hits(routes, 2, "lfu").ravel().tolist() == [0, 0, 1, 0, 0, 0, 1, 0]


def test_token_order_pins_what_the_token_needs():
    routes = np.array([[[0, 1]], [[2, 0]], [[1, 2]]])
    assert cache.hits(routes, 2, "lru", "rank").tolist() == [[[0, 0]], [[0, 0]], [[0, 0]]]
    assert cache.hits(routes, 2, "lru", "token").tolist() == [[[0, 0]], [[0, 1]], [[0, 1]]]


def test_waves_run_resident_experts_first():
    # one slot: expert 0 runs first and hits, 1 runs second and stays; then 1 hits, whatever its rank
    routes = np.array([[[1, 0]], [[1, 0]], [[0, 1]]])
    assert cache.hits(routes, 1, "lru", "token").tolist() == [[[0, 0]], [[0, 1]], [[0, 1]]]


def test_torch_routes_and_all_slots():
    routes = torch.tensor(drifting_routes(40, 3, 10, 2))
    assert cache.hit_rate(routes, 10).shape == (3,)
    assert (cache.hit_rate(routes, 10) == cache.hit_rate(routes, 999, "lfu", "token")).all()


@pytest.mark.parametrize("change, message", [
    ({"slots": 0}, "at least 1"), ({"slots": 2.5}, "whole number"), ({"policy": "fifo"}, "lru, lfu, belady"),
    ({"order": "layer"}, "rank, token"), ({"scope": "all"}, "layer, pool"), ({"experts": 3}, "0 to 2"),
    ({"routes": np.zeros((0, 2, 2), int)}, r"\[T, L, K\]"), ({"routes": np.zeros((3, 2), int)}, r"\[T, L, K\]"),
    ({"routes": np.full((1, 1, 2), -1)}, "ids -1"), ({"prompt": np.zeros(2, int)}, "prompt index per token"),
    ({"routes": np.zeros((4, 1, 2), int), "order": "token"}, "twice"),
])
def test_bad_input_says_what_is_needed(change, message):
    arguments = {"routes": drifting_routes(4, 1, 6, 2), "slots": 2} | change
    with pytest.raises(ValueError, match=message):
        cache.hits(**arguments)


# Prefetch


def routed_scores(routes, experts):
    scores = np.zeros((*routes.shape[:2], experts), np.float32)
    np.put_along_axis(scores, routes, 1.0, 2)
    return scores


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_without_budget_prefetch_is_the_plain_cache(policy):
    routes, prompt = drifting_routes(60, 3, 16, 4), np.repeat([0, 1, 2], 20)
    for slots in (4, 7, 12):
        replay = cache.prefetch_replay(routes, routed_scores(routes, 16), slots, 0, policy, prompt=prompt)
        assert (replay.hits == cache.hits(routes, slots, policy, "token", prompt)).all()
        assert replay.useful.sum() == replay.wasted.sum() == 0
        assert (replay.resident.sum(2) <= slots).all()
        assert (np.take_along_axis(replay.resident, routes, 2) == replay.hits).all()


@given(seed=st.integers(0, 999), slots=st.integers(4, 16), budget=st.integers(0, 6), charged=st.booleans(),
       policy=st.sampled_from(["lru", "lfu", "predicted"]))
@settings(max_examples=40, deadline=None)
def test_prefetch_accounts_for_every_copy(seed, slots, budget, charged, policy):
    routes = drifting_routes(20, 3, 16, 4, seed)
    noise = np.random.default_rng(seed).random((20, 2, 16), np.float32)
    replay = cache.prefetch_replay(routes, noise, slots, budget, policy, charged=charged)
    assert (replay.useful + replay.wasted <= budget).all()
    assert (replay.useful <= replay.hits.sum(2)).all()
    assert (replay.resident.sum(2) <= slots).all()
    assert replay.useful[:, 0].sum() == replay.wasted[:, 0].sum() == 0  # the first layer has no prediction


def test_perfect_prediction_hits_wherever_the_budget_reaches():
    routes, scores = drifting_routes(30, 4, 16, 4), routed_scores(drifting_routes(30, 4, 16, 4), 16)
    whole = cache.prefetch_replay(routes, scores[:, 1:], 4, 4)
    assert whole.hits[:, 1:].all() and whole.wasted.sum() == 0 and whole.precision == 1
    part = cache.prefetch_replay(routes, scores, 4, 1)
    misses = (~cache.hits(routes, 4, "lru", "token")).sum(2)
    assert (part.useful == np.minimum(misses, 1)).all()


def test_wrong_guesses_cost_hits_only_when_they_are_charged():
    routes = drifting_routes(200, 2, 16, 4)
    wrong = np.random.default_rng(1).random((200, 2, 16), np.float32)
    plain_rate = cache.hit_rate(routes, 8, "lru", "token").mean()
    free = cache.prefetch_replay(routes, wrong, 8, 3, charged=False)
    charged = cache.prefetch_replay(routes, wrong, 8, 3)
    assert charged.hit_rate.mean() < free.hit_rate.mean() and free.hit_rate.mean() >= plain_rate
    assert cache.prefetch_replay(routes, wrong, 8, 3, threshold=2.0).wasted.sum() == 0


def test_guesses_that_are_no_numbers_change_nothing():
    routes = drifting_routes(30, 2, 16, 4)
    replay = cache.prefetch_replay(routes, np.full((30, 2, 16), np.nan, np.float32), 6, 4)
    assert (replay.hits == cache.hits(routes, 6, "lru", "token")).all()


def test_keeping_what_is_predicted_beats_lru_when_the_prediction_knows_the_future():
    routes = np.argsort(np.random.default_rng(0).random((200, 2, 16)), axis=2)[:, :, :4]  # no locality
    ahead = routed_scores(np.concatenate([routes[1:], routes[-1:]]), 16)
    kept = cache.prefetch_replay(routes, ahead, 8, 0, "predicted", decay=0.5).hit_rate
    assert (kept > cache.hit_rate(routes, 8, "lru", "token")).all()
    assert (kept <= cache.hit_rate(routes, 8, "belady", "token")).all()


@pytest.mark.parametrize("change, message", [
    ({"slots": 3}, "at least K=4"), ({"budget": -1}, "at least 0"), ({"policy": "belady"}, "predicted"),
    ({"scores": np.zeros((5, 2, 16))}, "needed"), ({"scores": np.zeros((6, 2, 9))}, "scores know 9"),
])
def test_bad_prefetch_says_what_is_needed(change, message):
    routes = drifting_routes(6, 2, 16, 4)
    routes[0, 0, 0] = 15
    arguments = {"routes": routes, "scores": np.zeros((6, 2, 16)), "slots": 8, "budget": 2} | change
    with pytest.raises(ValueError, match=message):
        cache.prefetch_replay(**arguments)


@pytest.mark.slow
@pytest.mark.parametrize("cold", [True, False])
def test_fifty_times_the_speed_of_an_ordered_dict(cold):
    routes = drifting_routes(1152, 16, 64, 8)
    found = replay.race(routes, np.repeat(np.arange(12), 96) if cold else None, 64, range(1, 65, 8))
    assert found["speedup"] >= 50, found
