"""The replay study's points and summaries on a small store."""

import numpy as np
import pandas as pd
import pytest
import torch
from dualdeadline import cache, paths, predictors, record, replay
from safetensors.torch import save_file


@pytest.fixture(scope="module")
def scored(tiny_store, tmp_path_factory):
    """Arguments of every point: store, split, prompts; and a file with the oracle's scores."""
    trace = tiny_store.split("test")
    oracle = predictors.build("oracle", routers=tiny_store.routers).fit(trace)
    path = tmp_path_factory.mktemp("scores") / "oracle-h1-s0" / "tiny.safetensors"
    path.parent.mkdir()
    save_file({"scores": oracle.score(trace).half()}, path)
    return {"store": str(tiny_store.path), "split": "test", "prompts": 0}, str(path)


def test_routes_can_be_cut_to_the_first_prompts(scored):
    base, _ = scored
    routes, prompt, experts = replay.routes_of(**base)
    few, first, _ = replay.routes_of(**base | {"prompts": 1})
    assert experts == 8 and set(prompt) == {0, 1} and set(first) == {0} and (routes[prompt == 0] == few).all()


@pytest.mark.parametrize("scope, start", [("layer", "cold"), ("layer", "warm"), ("pool", "cold")])
def test_curves_say_what_the_cache_says(scored, scope, start):
    base, _ = scored
    routes, prompt, experts = replay.routes_of(**base)
    rows = replay.curves(**base, policy="lfu", order="token", scope=scope, start=start)
    cold, slots = prompt if start == "cold" else None, 3 * (routes.shape[1] if scope == "pool" else 1)
    hit = cache.hits(routes, slots, "lfu", "token", cold, scope, experts)
    for own in set(prompt):
        found = rows[(rows.prompt == own) & (rows.slots == 3)].hit_rate.item()
        assert np.isclose(found, hit[prompt == own].mean())
    assert len(rows) == 2 * experts


def test_layer_curves(scored):
    base, _ = scored
    rows = replay.layer_curves(**base, policy="belady", order="token")
    routes, prompt, experts = replay.routes_of(**base)
    rate = cache.hit_rate(routes, 4, "belady", "token", prompt, experts=experts)
    assert np.allclose(rows[rows.slots == 4].hit_rate, rate)


def test_a_perfect_predictor_prefetches_everything_and_stalls_least(scored):
    base, scores = scored
    point = base | {"variant": "oracle", "scores": scores, "horizon": 1, "sizes": [4]}
    rows = replay.prefetches(**point, budgets=[2], thresholds=[0.0, 0.5])
    lru = rows[(rows.policy == "lru")]
    assert len(rows) == 2 * 4 and (lru.hit_rate == 1).all() and (lru.wasted == 0).all()
    assert (rows[rows.policy == "predicted"].useful == 0).all()
    plain = replay.references(**base, horizons=[1], sizes=[4])
    assert (plain.groupby("variant").hit_rate.mean().diff().dropna() <= 0).all()  # belady, then none
    stalls = replay.stalls(**point, budgets=[0, 2])
    assert set(stalls.metric) == {"stall_ms", "stall_free_predictor_ms", "stall_link_once_ms",
                                  "stall_link_once_partial_ms", "stall_lru_ms"}
    found = stalls[(stalls.metric == "stall_ms") & (stalls.schedule == "monolithic") & (stalls.timings == "p50")]
    assert (found[found.budget == 2].ms == 0).all() and (found[found.budget == 0].ms > 0).all()


def test_missing_and_foreign_scores_name_the_stage(scored, tmp_path):
    base, scores = scored
    with pytest.raises(FileNotFoundError, match="03_predictors"):
        replay.scores_of(str(tmp_path / "none.safetensors"), 3)
    with pytest.raises(ValueError, match="run notebook|Run notebook"):
        replay.scores_of(scores, 10_000)
    with pytest.raises(FileNotFoundError, match="02_traces"):
        replay.folder_of(replay.curves, [base | {"store": str(tmp_path)}], paths.Workspace("smoke"))


def test_shards_of_other_scores_lie_elsewhere(scored, tmp_path):
    base, scores = scored
    workspace, copy = paths.Workspace("smoke"), tmp_path / "scores.safetensors"
    save_file({"scores": torch.zeros(3)}, copy)
    grid = [base | {"scores": str(copy)}]
    before = replay.folder_of(replay.stalls, grid, workspace)
    assert before == replay.folder_of(replay.stalls, grid, workspace)
    save_file({"scores": torch.ones(3)}, copy)
    assert before != replay.folder_of(replay.stalls, grid, workspace)


def test_intervals_pair_schedules_by_prompt(tmp_path, monkeypatch):
    rows = pd.DataFrame({"variant": "oracle", "metric": "stall_ms", "budget": 2, "prompt": [0, 1, 2] * 2,
                         "schedule": ["staged"] * 3 + ["monolithic"] * 3, "ms": [1.0, 5.0, 9.0, 2.0, 6.0, 10.0]})
    keys = ["variant", "metric", "budget"]
    spread = replay.intervals(rows, "ms", [*keys, "schedule"], 100, 0)
    assert spread.n.tolist() == [3, 3] and (spread.low < spread["mean"]).all()
    gain = replay.gains(rows, keys, 100, 0)
    assert gain[["mean", "low", "high"]].iloc[0].tolist() == [-1.0, -1.0, -1.0]
    recorder = record.Recorder("05_replay", "m", "r", paths.Workspace("smoke"))
    replay.add_records(recorder, spread, "ms", corpus="pilot")
    assert [row["config"] for row in recorder.rows] == [
        f'{{"budget": 2, "corpus": "pilot", "schedule": "{name}"}}' for name in ("monolithic", "staged")]


def test_the_race_compares_results_first(scored, monkeypatch):
    base, _ = scored
    routes, prompt, experts = replay.routes_of(**base)
    found = replay.race(routes, prompt, experts, [2, 5])
    assert found["speedup"] == found["plain_s"] / found["one_pass_s"] > 0
    monkeypatch.setattr(cache, "ordered_dict_lru", lambda *_: 0.5)
    with pytest.raises(AssertionError, match="disagree"):
        replay.race(routes, prompt, experts, [2, 5])
