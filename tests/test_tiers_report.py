"""Notebook 10's parts and what is said of them: choices, borders, sums and megabytes follow from the numbers."""

import itertools

import matplotlib
import pandas as pd
import pytest
import torch
from factory import synthetic_trace
from matplotlib import pyplot as plt
from test_engine import build
from test_tiers import TINY, oracle

import made_up_records
from dualdeadline import attribution, record, streams
from dualdeadline.decode.cases import Case, guess
from dualdeadline.decode.recorded import Recorded
from dualdeadline.cost import CostModel, TransferModel
from dualdeadline.engine.next_token import NextToken
from dualdeadline.remote import peer
from dualdeadline.report import joules, tables, tiers, tiers_said, tiers_tables
from dualdeadline.tiers import ahead, ssd, ssd_files, ssd_rows, study


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """Made-up records of stages 04, 05 and 10."""
    matplotlib.use("agg")
    stages = made_up_records.evaluation, made_up_records.replay, made_up_records.tiers
    with made_up_records.workspace(tmp_path_factory.mktemp("data"), *stages) as made:
        yield made


@pytest.fixture
def rows(workspace):
    return tiers.every(workspace, made_up_records.MODEL)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return ssd_files.prepare(tmp_path_factory.mktemp("ssd"), TINY, 12 * TINY.component_bytes["expert"])


@pytest.fixture
def drive():
    """Two prompts of 8 tokens, 3 layers, and a predictor that knows."""
    draw = torch.Generator().manual_seed(0)
    routes = (torch.rand(16, 3, 8, generator=draw) + torch.linspace(0, 0.8, 8)).topk(2, -1).indices
    known = oracle(routes)
    return ahead.Drive(routes, torch.arange(16) // 8, {"knows": {1: known, 3: known}}, 8)


def test_replayed_rates_stand_beside_the_published_ones(workspace):
    found = tiers.replayed(workspace, made_up_records.MODEL, "pilot")
    said = tiers.published()
    for slots in (16, 32, 48):
        assert found.loc["hit rate, LRU", ("here", f"{slots} slots")] == pytest.approx(slots / 60)
        assert found.loc["hit rate, LRU", ("published", f"{slots} slots")] == said["hit_rate"]["lru"][str(slots)]
    assert found.loc["recall@8, transition table", ("published", "depth 3")] == 0.517
    assert pd.isna(found.loc["hit rate, LFU", ("published", "16 slots")])
    assert tiers_said.replayed_answer(found).startswith(
        "Hit rates lie within 0.673 of"
    )  # the optimum: 16 / 60 beside 0.94
    none = tiers.replayed(workspace, "olmoe", "gsm8k-humaneval")
    assert none["published"].notna().any(axis=None) and "Neither notebook 04" in tiers_said.replayed_answer(none)


def test_targets_are_met_by_the_numbers_alone(rows):
    shares = [
        f"record, 16 slots, cold: share of {name}"
        for name in ("a plain loop of the same reads", "a disk that always has reads in flight")
    ]
    times = [f"record, 16 slots, cold: times scattered, {name}" for name in ("one by one", "as many threads")]
    install = "install, over one contiguous copy (8x8)"

    def met(rows):
        found = tiers_said.targets(rows).reset_index()
        return dict(zip(found.target, found.met))

    changes = {"cold_loop_share": 0.89, "cold_disk_share": 0.9, "cold_times_serial": 4.1, "cold_times_parallel": 3.9}
    for metric, value in (changes | {"install_ratio": 1.06}).items():
        rows.loc[rows.metric == metric, "median"] = value
    found = met(rows)
    assert [found[name] for name in (*shares, *times, install)] == ["no", "yes", "yes", "no", "no"]
    for metric in ("cold_loop_share", "cold_times_parallel"):
        rows.loc[rows.metric == metric, "median"] = 5.0
    rows.loc[rows.metric == "install_ratio", "median"] = 1.05
    found = met(rows)
    assert {found[name] for name in (*shares, *times, install)} == {"yes"}
    assert "not met" in tiers_said.answer(rows)
    said = tiers_said.cold_answer(rows)
    assert "would take 5.00 to 5.00 of the time of one record per expert (3 of 3" in said and "router 0.90 to 0.90 (3 of 3)" in said
    assert "one by one take 4.10 to 4.10 times as long (3 of 3" in said


def test_settings_lie_on_the_side_of_the_border_that_their_times_say(rows):
    found = tiers.border(rows)
    assert len(found) == 8 and (found.in_time == (found.lead_ms >= 2.0)).all()
    assert found.in_time.sum() == 6 and (found.over == found.lead_ms / found.read_ms).all()
    late = found[~found.in_time]
    assert f"of {len(late)} whose reads came too late {int((late.time_ratio < 1).sum())}" in tiers_said.sides(rows)
    fig, axes = plt.subplots(1, 2)
    tiers.draw_border(rows, axes)
    border = axes[0].lines[-1]
    assert list(border.get_xdata()) == list(border.get_ydata()) == [0, 2.0]
    plt.close(fig)


@pytest.mark.parametrize(("high", "word"), [(0.89, "at least 10 % faster"), (0.91, "not 10 % faster")])
def test_a_gain_needs_its_whole_interval(rows, high, word):
    changed = rows[(rows["config.slots"] != 16) | (rows["config.pause_ms"] != 0.1)].copy()
    changed.loc[changed.metric == "tier_time_ratio", "high"] = high
    said = tiers_said.prefetch_verdict(changed)
    assert word in said and "With 3 ms" in said and "With 0.1 ms" not in said


def test_parts_of_steps_and_round_trips(rows):
    found = tiers.parts(rows)
    assert (found["sum"] == 1.0).all() and set(found.index.get_level_values("case")) == {"host memory", "SSD"}
    fig, ax = plt.subplots()
    tiers.draw_parts(rows, ax)
    ends = [bar.get_x() + bar.get_width() for bar in ax.patches]
    assert max(ends) == pytest.approx(1.0) and len(ax.patches) == 2 * len(attribution.PARTS)
    plt.close(fig)
    trips = tiers.remote(rows)
    assert trips.loc[("made-up", "loopback", 8), "round trip"] == 16.0
    assert (trips["ping"] == 0.25).all() and trips["published"].tolist() == [2.59, 7.3]
    assert tiers_said.missing_links(rows) == "far: no netem" and "75% of it products" in tiers_said.remote_answer(rows)
    assert "needed: this notebook run on a host with two GPUs" in tiers_said.peers(rows)


def test_published_tables_and_numbers(workspace):
    about = tables.Subject(workspace)
    made = tiers_tables.cold_decode(about)
    assert len(made.frame) == 15 and set(made.frame.layout) >= {"one record", "nine tensors, serial"}
    ahead_ = tiers_tables.reads_ahead(about).frame
    assert len(ahead_) == 9 and (ahead_["reads ahead"] == "none").sum() == 3
    said, behind = tiers_tables.numbers(about)
    assert said["tier_record_times"] == "4.0 at 16 and 4.0 at 48 slots (made-up)" and len(behind)
    assert said["tier_record_parallel"] == "2.0 at 16 and 2.0 at 48 slots (made-up)"
    assert (
        "0.516 [0.466, 0.566] at 16 slots, pause 0.1 ms" in said["tier_ahead"]
        and said["tier_ahead"].count("slots, pause") == 6
    )
    assert said["tier_install"] == "1.04 (made-up, 8x8)" and said["tier_remote"] == "2.0 ms for 1, 16.0 ms for 8"
    with pytest.raises((ValueError, FileNotFoundError)):
        tiers_tables.cold_decode(tables.Subject(workspace, "olmoe"))


def test_joules_are_spread_over_the_bytes_that_crossed(workspace):
    chosen = guess(Case(32), "residual_gate", 2, 0, 0.7)
    recorder = record.Recorder("09_decode", "olmoe", "made-up", workspace, {"part": "energy"})
    for case, value in ((Case(64, "raw"), 0.6), (chosen, 1.2)):
        config = case.config()
        recorder.add(case.name, "joules_per_token", value, "J/token", "measured", n=9, source="nvml", **config)
        for metric, one in dict(
            link_bytes=100e6, ahead_per_token=5.0, useful_per_token=4.0, wasted_per_token=0.5
        ).items():
            recorder.add(case.name, metric, one, "1", "measured", **config)
    recorder.add("coded, gate_up", "component_bytes", 4e6, "bytes", "measured")
    recorder.add("chosen-one deadline", "energy_ratio", 0.95, "ratio", "measured", 0.94, 0.96, slots=32, source="nvml")
    recorder.write()
    found = record.read(workspace, "09_decode", "olmoe")
    (line,) = joules.per_megabyte(found).itertuples(index=False)
    assert line[:3] == (1.2, pytest.approx(96.0), pytest.approx(2.0))
    assert line[3:] == (pytest.approx(1.2 / 96), pytest.approx(0.6), pytest.approx(0.006))
    assert joules.ratio(found) == "0.950 [0.940, 0.960] at 32 slots (made-up, nvml)"
    assert joules.ratio(found[found.metric != "energy_ratio"]) == "no ratio of joules is recorded"


def test_counters_say_why_there_are_none(rows):
    found = joules.counters(rows)
    assert found.index.get_level_values("read from").tolist() == ["none: nothing to read"] * 2
    assert found.counters_read.tolist() == [0, 0]
    found = [dict(variant="a", metric="x_ms", median=value, n=0) for value in (1.0, None, float("nan"))]
    first, *rest = study.counted(found, "links_made", "links")
    assert first == found[0] and all((row["metric"], row["median"], row["n"]) == ("links_made", 0, 1) for row in rest)


def test_guesses_across_tokens_stand_at_the_token_they_speak_of():
    trace = synthetic_trace(prompts=2, tokens=5)
    predictor = NextToken.fit(trace)
    found = ahead.across(predictor, trace)
    assert found.shape == (10, trace.routes.shape[1], trace.num_experts)
    assert (found[[0, 5]] == 0).all()
    assert torch.allclose(found[7, 1], predictor(1, None, trace.routes[6:7, 1].long())[0])


def test_the_setting_is_chosen_on_one_set_and_measured_on_the_other(files, drive):
    found = dict(ahead.parts(files, drive, drive, [3, 4], [1.0, 3.0], 2, 50, 0))
    assert list(found) == ["ahead, choice", "ahead, test", "ahead, half of the experts in host memory"]
    (half,) = found["ahead, half of the experts in host memory"]
    assert (half["variant"], half["metric"]) == ("predicted-demand", "step_time_ratio")
    assert (half["config"]["slots"], half["config"]["pause_ms"]) == (4, 3.0)
    measured = [row for row in found["ahead, test"] if row["metric"] == "tier_ms"]
    assert [(row["config"]["pause_ms"], row["config"]["slots"]) for row in measured if row["variant"] == "demand"] == [
        (1.0, 3),
        (3.0, 3),
        (3.0, 4),
    ]
    chosen = {
        (row["config"]["pause_ms"], row["config"]["ahead"])
        for row in found["ahead, choice"]
        if row["metric"] == "tier_time_ratio"
    }
    assert chosen == set(itertools.product((1.0, 3.0), (1, 3)))
    tested = [row["config"]["ahead"] for row in measured if row["variant"] != "demand"]
    assert len(tested) == 3 and set(tested) <= {1, 3}
    rows = {row["variant"]: row for row in found["ahead, choice"] if row["metric"] == "tier_hit_rate"}
    assert rows["knows"]["median"] > rows["demand"]["median"] + 0.1


def test_the_best_setting_has_the_smallest_mean_ratio():
    ms = {("", 0): (10.0, 10.0), ("a", 1): (9.0, 9.0), ("a", 2): (1.0, 18.0), ("b", 1): (9.5, 8.0)}
    found = pd.DataFrame(
        [dict(prompt=p, predictor=name, ahead=d, rule=not d, ms=ms[name, d][p]) for p in (0, 1) for name, d in ms]
    )
    assert ahead.best(found) == ahead.Setting("b", 1, False)
    assert ssd_rows.gain(found).ratio.min() == pytest.approx(0.1)
    assert [ahead.Setting().name, ahead.Setting("a", 1).name] == ["demand", "a, held back if late"]


def test_disk_and_cold_parts_have_the_rows_that_tables_read(files):
    found = dict(study.disk(files, [4], [1, 2], 1, 2, 0))
    assert list(found) == ["reads", "layouts", "installs"]
    assert {row["variant"] for row in found["layouts"]} == set(ssd.LAYOUTS)
    routes = torch.rand(6, 3, 8, generator=torch.Generator().manual_seed(0)).topk(2, -1).indices
    recorded = Recorded(routes, torch.zeros(6, dtype=torch.long), {"x": torch.zeros(6, 3, 8)}, 1)
    ((name, cold),) = study.cold(files, recorded, [2, 4], 2, 3, 0)
    assert name == "cold" and {row["metric"] for row in cold} == {"cold_ms", *(f"cold_{part}" for part in study.COLD)}
    assert {row["config"]["expert"] for row in found["installs"]} == {TINY.name, streams.OLMOE.name}


def test_steps_of_a_model_over_an_ssd_are_exact_and_taken_apart(tmp_path):
    model, ids = build(dtype=torch.bfloat16, hidden_size=64, intermediate_size=32), torch.tensor([3, 4, 5])
    ((name, engine),) = study.exact(model, ids[None], tmp_path, 2, 2, {})
    assert name == "engine" and {row["variant"] for row in engine} == {"host memory", "SSD"}
    found = dict(study.hosted(model, ids, tmp_path, 2, 10))
    assert {"attribution, host memory", "attribution, SSD", "energy, SSD"} <= set(found)
    for name, part in found.items():
        ms = {row["config"].get("part"): row["median"] for row in part}
        if name.startswith("attribution"):
            assert sum(ms[one] for one in attribution.PARTS) == pytest.approx(ms["step"], rel=0.03)
    assert not hasattr(model, "dualdeadline")


def test_a_missing_second_gpu_is_recorded_and_said(workspace, rows, monkeypatch):
    monkeypatch.setattr(peer, "why_not", lambda: "1 GPUs are visible, copies go from 1 to 0; needed: two different ones")
    ((name, found),) = study.peers(workspace, made_up_records.MODEL, None, [16], samples=3, resamples=10, seed=0)
    assert name == "peer" and found[0]["median"] == 0
    more = pd.DataFrame([dict(found[0], machine="here") | {"config.why": found[0]["config"]["why"]}])
    said = tiers_said.peers(pd.concat([rows, more]))
    assert "No copy between two GPUs is recorded" in said and "Not at hand on here: 1 GPUs are visible" in said


def test_steps_over_another_gpus_memory_are_simulated_from_its_line(workspace, rows, monkeypatch):
    """With half of the host link's time per byte, a step of misses is shorter, and the link's own row is notebook 09's."""
    line = TransferModel(0.0, 2e-8), TransferModel(0.0, 1e-8)
    monkeypatch.setattr(peer, "why_not", lambda: "")
    copied = pd.DataFrame([dict(way=peer.ENGINE, part=part, size_bytes=size, depth=depth, ms=line[1].ms(size) * depth,
                                low=0.0, high=1.0, n=3, direct=True)
                           for part, size in (("down", 2**22), ("expert", 3 * 2**22)) for depth in (1, 8)])
    monkeypatch.setattr(peer, "copies", lambda **options: copied)
    stages = dict.fromkeys(("gate_up", "down", "down_combine"), TransferModel(1e-3, 1e-10))
    base = CostModel(line[0], stages, streams.OLMOE.component_bytes, before_ms=(0.05,))
    monkeypatch.setattr(study.simulated, "cost", lambda *asked: {"raw": base})
    monkeypatch.setattr(study, "resident_ms", lambda measured: 1.0)
    draw = torch.Generator().manual_seed(0)
    routes = torch.rand(12, 2, 16, generator=draw).topk(8, -1).indices
    drive = Recorded(routes, torch.zeros(12, dtype=torch.long), {"none": torch.zeros(12, 2, 16)}, 1)
    parts = dict(study.peers(workspace, made_up_records.MODEL, drive, [8], samples=3, resamples=10, seed=0))
    assert len(parts["peer"]) == 2 * len(copied)
    ms = {row["variant"]: row["median"] for row in parts["peer steps"]}
    assert set(ms) == {"host link", peer.ENGINE} and ms[peer.ENGINE] < ms["host link"]
