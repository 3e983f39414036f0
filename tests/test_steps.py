"""Decode steps over recorded routes: presence, guesses, files, differences and agreement of signs."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
import torch
from dualdeadline import cache, steps, streams
from dualdeadline.cost import CostModel, TransferModel

SHAPE = streams.Shape("tiny", 32, 16, 8, torch.float32)
LINES = {name: TransferModel(0.002, 3e-10) for name in ("gate_up", "down", "combine", "down_combine")}
BIG = {"gate_up": 8 << 20, "down": 4 << 20}
COST = CostModel(TransferModel(0.004, 1.8e-8), LINES, BIG, before_ms=(0.3,), committed=1)


@pytest.fixture
def recorded():
    draw = np.random.default_rng(0)
    routes = np.argsort(draw.random((24, 3, 8)), -1)[..., :2]
    prompt = np.repeat([0, 1], 12)
    rows = steps.sample_rows(prompt, 3, seed=0, warm=4)
    perfect = np.zeros((24, 2, 8), np.float32)
    np.put_along_axis(perfect, routes[:, 1:], 1.0, -1)
    scores = {("oracle", 1): perfect[rows], ("wrong", 1): 1 - perfect[rows]}
    return steps.Steps(routes, prompt, 8, rows, scores, BIG)


def test_rows_are_of_every_prompt_and_not_its_first(recorded):
    assert np.bincount(recorded.prompt[recorded.rows]).tolist() == [3, 3]
    assert (recorded.rows % 12 >= 4).all()


def test_presence_is_the_cache_before_the_token(recorded):
    held = recorded.resident(4)
    hits = np.take_along_axis(held, recorded.routes, -1)
    assert np.array_equal(hits, cache.hits(recorded.routes, 4, "lru", "token", recorded.prompt, experts=8))
    assert not held[[0, 12]].any() and (held.sum(-1) <= 4).all()


def test_speculation_takes_slots_from_the_cache(recorded):
    row = int(recorded.rows[0])
    there = recorded.schedule(steps.Case("component_priority", 6, "oracle", 1, 2), row).present
    held = {(layer, expert) for layer, expert in np.argwhere(recorded.resident(4)[row]).tolist()}
    assert {(layer, expert) for layer, expert, _ in there} == held
    assert recorded.resident(6)[row].sum() > len(held)


def test_right_guesses_help_and_wrong_ones_hurt(recorded):
    cases = [steps.Case("component_priority", 5), *(
        steps.Case("component_priority", 5, name, 1, 1, "expert") for name in ("oracle", "wrong"))]
    found = recorded.simulate(cases, COST)
    assert len(found) == len(cases) * len(recorded.rows) and (found.ms > 0).all()
    gaps = steps.differences(found, cases, 200, 0).set_index("case")["mean"]
    assert gaps[1] < gaps[2]
    guessed = recorded.schedule(cases[1], int(recorded.rows[0]))
    assert 0 < sum(op.speculative for op in guessed.copies) <= 2


def test_gate_ups_fill_the_same_bytes_as_whole_experts(recorded):
    for piece, most in (("expert", 2), ("gate_up", 3)):
        plan = recorded.schedule(steps.Case("component_priority", 4, "oracle", 1, 2, piece), int(recorded.rows[0]))
        ahead = [op for op in plan.copies if op.speculative and op.layer == 1]
        assert len(ahead) == most and sum(op.bytes for op in ahead) <= 2 * sum(BIG.values())


def test_threshold_keeps_sure_guesses_only(recorded):
    plan = recorded.schedule(steps.Case("component_priority", 6, "oracle", 1, 4, "expert", 0.5), int(recorded.rows[0]))
    for op in plan.copies:
        assert not op.speculative or op.expert in recorded.routes[recorded.rows[0], op.layer]


def test_file_round_trip_and_damage(recorded, tmp_path):
    path = recorded.save(tmp_path / "steps.safetensors", seed=1)
    back = steps.Steps.load(path, BIG, seed=1)
    with pytest.raises(ValueError, match="was made for"):
        steps.Steps.load(path, BIG, seed=2)
    assert np.array_equal(back.routes, recorded.routes) and np.array_equal(back.rows, recorded.rows)
    assert back.experts == 8 and np.array_equal(back.scores["oracle", 1], recorded.scores["oracle", 1])
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="holds no decode steps"):
        steps.Steps.load(path, BIG)


def test_two_level_interval_covers_both_levels():
    draw = np.random.default_rng(0)
    def interval(between, within):
        index = pd.MultiIndex.from_product([range(20), range(10)], names=["prompt", "row"])
        noise = draw.normal(0, within, 200) + np.repeat(draw.normal(0, between, 20), 10)
        mean, low, high, n = steps.two_level(pd.Series(noise, index), 500, 0)
        assert low <= mean <= high and n == 20
        return high - low
    assert interval(1.0, 0.01) > 5 * interval(0.01, 0.01) and interval(0.01, 1.0) > 5 * interval(0.01, 0.01)


def test_agreement_counts_clear_signs_only():
    measured = pd.DataFrame({"case": [0, 1, 2, 3], "mean": [1.0, -1, 2, 0.1], "low": [0.5, -2, 1, -1], "high": [2, -0.5, 3, 1]})
    said = steps.sign_agreement(measured, measured.assign(mean=[1.0, 1, 2, -5])[["case", "mean"]], 200, 0)
    assert said["n"] == 3 and said["median"] == pytest.approx(2 / 3) and said["low"] <= 2 / 3 <= said["high"]
    with pytest.raises(ValueError, match="excludes 0"):
        steps.sign_agreement(measured.iloc[3:], measured, 10, 0)


def test_cost_model_round_trip():
    cost = dataclasses.replace(COST, launches={"down": TransferModel(0.01, 0.02)}, before_ms=(0.0,), sync_ms=0.017)
    assert CostModel.from_parts(cost.parts(), BIG) == cost
    with pytest.raises(KeyError):
        CostModel.from_parts({}, BIG)
