"""The SSD experiments on a tiny file: what they count adds up, and what they compare carries the same bits."""

import os
import threading
import time

import numpy as np
import pandas as pd
import pytest
import torch
from test_engine import build, text

from dualdeadline import cache, streams
from dualdeadline.schedule import COMPONENTS
from dualdeadline.store import installs, tier
from dualdeadline.tiers import plain, ssd, ssd_engine, ssd_files, ssd_replay, ssd_rows

TINY = streams.Shape("tiny", 64, 32, 8)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return ssd_files.prepare(tmp_path_factory.mktemp("ssd"), TINY, 12 * TINY.component_bytes["expert"])


@pytest.fixture(scope="module")
def routes():
    """[20, 3, 2] routes with some repetition."""
    draw = torch.Generator().manual_seed(0)
    chance = torch.rand(20, 3, 8, generator=draw) + torch.linspace(0, 0.8, 8)
    return chance.topk(2, -1).indices


def oracle(routes, E=8):
    return torch.zeros(*routes.shape[:2], E).scatter_(-1, routes, 1.0)


def test_files_are_made_once(files):
    assert files.count == 12 and files.raw.largest == TINY.component_bytes["expert"]
    folder = files.raw.folder.parent
    stamps = {path: path.stat().st_mtime_ns for path in folder.rglob("*.bin")} | {
        files.scattered: os.stat(files.scattered).st_mtime_ns
    }
    again = ssd_files.prepare(folder.parent, TINY, 12 * TINY.component_bytes["expert"])
    assert again.raw.key == files.raw.key
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())


@pytest.mark.parametrize("tensors", [3, 9])
@pytest.mark.parametrize("threads", [1, 4])
def test_scattered_reads_bring_the_same_bits(files, tmp_path, tensors, threads):
    source = ssd_files.DrawnExperts(TINY, 5, 7)
    ssd_files.scatter(source, tmp_path / "s.safetensors", tensors)
    reader, into = ssd.Scattered(tmp_path / "s.safetensors", threads), ssd_files.slots(TINY, 2, "cpu")
    reader.fetch(0, [4, 1], into)
    assert len(reader.places) == tensors and reader.nbytes == TINY.component_bytes["expert"]
    assert ssd_files.same(into[0], source(0, 4)) and ssd_files.same(into[1], source(0, 1))
    reader.close()
    with pytest.raises(ValueError, match="needed: 3 .* or 9"):
        ssd_files.pieces(5)


@pytest.mark.parametrize("name", ssd.LAYOUTS)
def test_the_check_of_a_layout_can_fail(files, name):
    reader, into = ssd.open_layout(name, files), ssd_files.slots(TINY, 2, "cpu")
    ssd_files.check(reader.fetch, files, [3, 8], into)
    with pytest.raises(AssertionError, match="expert 3 of"):
        ssd_files.check(reader.fetch, files, [3, 8], into, seed=1)
    reader.close()
    with pytest.raises(ValueError, match="needed: one of scattered"):
        ssd.open_layout("stacked", files)


def test_sweep_reads_what_it_says(files):
    found = plain.sweep(files.raw.path, [4096, 8192, 2**40], [1, 3], 40_000)
    assert found[["size_bytes", "depth"]].values.tolist() == [[4096, 1], [4096, 3], [8192, 1], [8192, 3]]
    assert (found.ms > 0).all() and (found.gbps > 0).all() and found.n.tolist() == [9, 9, 4, 4]


def test_every_layout_is_measured_cold(files):
    found = ssd.layouts(files, at_once=3, repeats=2).set_index("layout")
    assert list(found.index) == list(ssd.LAYOUTS) and (found.ms > 0).all() and (found.n == 2).all()
    assert found.bytes["record, raw"] == found.bytes["scattered, serial"] == TINY.component_bytes["expert"]
    assert found.bytes["record, encoded"] == files.coded.largest
    assert found.cache["scattered, serial"].startswith("posix_fadvise DONTNEED; mincore: 0.0%")
    assert np.allclose(found.gbps, TINY.component_bytes["expert"] / found.ms / 1e6)


def test_installs_bring_the_same_bytes(files):
    found = ssd.install(TINY, samples=4).set_index("variant")
    assert list(found.index) == ["one contiguous copy", "record, a copy per component", "9 slices"]
    assert found.ratio["one contiguous copy"] == 1.0 and (found.ms > 0).all()
    source, plan = ssd_files.DrawnExperts(TINY, 3, 0)(0, 2), ssd_files.Plan(TINY)
    assert plan.parts.keys() == files.raw.record(0, 0).parts.keys() and plan.largest == files.raw.largest
    assert all(plan.parts[part].start == place.start for part, place in files.raw.record(0, 0).parts.items())
    row = tier.Row(torch.cat([source[part].flatten().view(torch.uint8) for part in COMPONENTS]))
    store, slot = installs.Installs(plan), ssd_files.cut(TINY, torch.zeros(plan.largest, dtype=torch.uint8))
    store.put({part: store.place(row, part, plan.parts[part])[0] for part in COMPONENTS}, slot)
    assert ssd_files.same(slot, source)
    (slot,) = ssd_files.slots(TINY, 1, "cpu")
    ssd._by_slice(row.data, slot, ssd_files.slices(TINY))
    assert ssd_files.same(slot, source)
    read = [(component, at, size) for component, at, _, size in ssd_files.places(files.scattered)]
    assert sorted(read, key=str) == sorted(ssd_files.slices(TINY), key=str)


def test_decode_counts_the_misses_of_lru(files, routes):
    found = ssd_replay.decode(files, routes, 8, [2, 4], warm=5)
    assert len(found) == 2 * len(ssd.LAYOUTS) and (found.n == 15).all()
    for row in found.itertuples():
        hits = cache.hits(routes.numpy(), row.slots, "lru", "token")[5:]
        assert row.misses == pytest.approx((~hits).sum() / 15)
        assert row.tokens_per_s == pytest.approx(1e3 / row.mean_ms)
        assert min(row.disk_share, row.disk_gbps) > 0
        assert (min(row.loop_share, row.loop_ms) > 0) == row.layout.startswith("record")
    for name in ("serial", "parallel"):
        base = found[found.layout == f"scattered, {name}"].set_index("slots").mean_ms
        assert np.allclose(found[f"times_{name}"], found.slots.map(base) / found.mean_ms)
    assert found[found.layout == "record, serial"].misses.is_monotonic_decreasing
    with pytest.raises(ValueError, match="needed: more than that"):
        ssd_replay.decode(files, routes, 8, [2], warm=20)


def test_prefetch_of_what_is_known_turns_misses_into_hits(files, routes):
    known = {"oracle": {d: oracle(routes) for d in (1, 2)}}
    prompt = torch.arange(20) // 10
    found = ssd_replay.prefetch(files, routes, prompt, 8, known, 3, 5.0, depths=(1, 2), warm=2)
    assert len(found) == 2 * (1 + 4)
    forced = found[~found.rule].groupby("ahead")
    demand = found[found.ahead == 0]
    assert (demand.useful == 0).all() and (demand.wasted == 0).all()
    assert forced.hit_rate.mean()[1] > demand.hit_rate.mean() + 0.1
    assert (found.bound_ms >= 15.0).all() and np.allclose(found.lead_ms[found.ahead == 0], 0)
    assert (found.in_time == (found.lead_ms >= found.read_ms)).all()
    ratios = ssd_rows.gain(found)
    assert len(ratios) == 8 and (ratios.ratio > 0).all()
    row = ratios.iloc[0]
    mine = found[(found.prompt == row.prompt) & (found.ahead == row.ahead) & (found.rule == row.rule)].ms.iloc[0]
    assert row.ratio == pytest.approx(mine / demand.set_index("prompt").ms[row.prompt])


def test_wrong_guesses_are_counted_as_wasted(files, routes):
    wrong = {"never": {1: 1.0 - oracle(routes)}}
    found = ssd_replay.prefetch(
        files, routes, torch.zeros(20, dtype=torch.long), 8, wrong, 3, 3.0, depths=(1,), rules=(False,), warm=2
    )
    ahead = found[found.ahead == 1].iloc[0]
    assert ahead.wasted > 0 and ahead.bytes > found[found.ahead == 0].bytes.iloc[0]


def test_a_read_ahead_is_in_time_if_its_layers_last_as_long():
    assert [tier.in_time(ahead, 8.0, 7.0) for ahead in (1, 2, 3)] == [True, True, True]
    assert [tier.in_time(ahead, 2.4, 7.0) for ahead in (1, 2, 3)] == [False, False, True]
    assert [tier.in_time(ahead, 2.0, 7.0) for ahead in (1, 2, 3)] == [False, False, False]


def test_whole_steps_are_bitwise_and_counted(tmp_path):
    model = build(dtype=torch.bfloat16, hidden_size=64, intermediate_size=32)
    settings = {"no host slots": {}, "3 host slots": {"host_slots": 3}}
    found = ssd_engine.engine(
        model, text(1, 3), tmp_path, settings, 2, 6, backend="cpu", wire="raw", predictor=None
    ).set_index("setting")
    assert list(found.index) == ["host memory", *settings] and found.equal.all()
    assert found.reads["host memory"] == 0 < found.reads["3 host slots"] < found.reads["no host slots"]
    shares = found.loc["no host slots", ["step_share", "net_share"]]
    assert 0 < shares.step_share < shares.net_share and found.step_share.drop("no host slots").isna().all()
    assert found.ssd_bytes["no host slots"] % 4096 == 0 and (found.tokens_per_s > 0).all()
    assert not hasattr(model, "dualdeadline")


def test_rows_of_a_frame():
    found = pd.DataFrame([dict(layout="record, raw", bytes=8, ms=2.0, low=1.0, high=3.0, n=4, gbps=5.0, cache="x")])
    first, second = ssd_rows.rows(found, "expert", "layout", {"gbps": "GB/s"})
    assert first == dict(
        variant="record, raw",
        kind="measured",
        n=4,
        config={"bytes": 8, "cache": "x"},
        metric="expert_ms",
        unit="ms",
        median=2.0,
        low=1.0,
        high=3.0,
    )
    assert (second["metric"], second["median"], second["unit"]) == ("expert_gbps", 5.0, "GB/s")


def test_the_ratio_of_a_setting_to_demand_is_taken_prompt_by_prompt():
    found = pd.DataFrame(
        [
            dict(prompt=p, predictor=name, ahead=ahead, rule=True, ms=ms, slots=4, layer_pause_ms=1.5)
            for p, (demand, ahead_ms) in enumerate([(10.0, 5.0), (20.0, 18.0)])
            for name, ahead, ms in (("", 0, demand), ("mine", 2, ahead_ms), ("oracle", 2, 1.0))
        ]
    )
    row = ssd_rows.ratio_row(found, "predicted-demand", "mine", 2, True)
    assert (row["variant"], row["metric"], row["n"]) == ("predicted-demand", "step_time_ratio", 2)
    assert row["median"] == pytest.approx((0.5 + 0.9) / 2) and 0.5 <= row["low"] <= row["median"] <= row["high"] <= 0.9
    assert row["config"] == dict(predictor="mine", ahead=2, rule=True, slots=4, pause_ms=1.5)
    with pytest.raises(ValueError, match="needed: one that was"):
        ssd_rows.ratio_row(found, "x", "mine", 3, True)


def test_shares_compare_a_token_with_the_reads_of_its_own_minute():
    rows = [
        dict(layout=layout, slots=2, ms=ms, loop_ms=loop_ms, bytes=8e6, misses=4, disk_gbps=gbps, cache="x")
        for layout, ms, loop_ms, gbps in (
            ("record, raw", 4.0, 3.0, 4.0),
            ("record, raw", 10.0, 9.0, 1.0),
            ("record, raw", 20.0, 19.0, 0.5),
            ("scattered, serial", 34.0, 1.0, 1.0),
        )
    ]
    none = rows[0] | dict(ms=0.0, loop_ms=0.0, bytes=0, misses=0)
    for row, shares in zip(rows, ([0.7, 0.8], [0.9], [0.95, 1.0], [])):
        row["shares"] = shares
    none = none | {"shares": []}
    found = ssd_replay._decode_rows(pd.DataFrame([*rows, none])).set_index("layout").loc["record, raw"]
    assert found.loop_share == pytest.approx(0.9) and found.disk_share == pytest.approx(0.8)
    assert found.mean_ms == pytest.approx(34 / 4) and found.times_serial == pytest.approx(4.0) and found.n == 4
    assert np.isnan(found.times_parallel)


def test_a_plain_loop_reads_as_many_at_a_time_as_it_says(files, monkeypatch):
    loop, now, most, lock = plain.Plain(files.raw.path, 4096, 3), [0], [0], threading.Lock()
    read = os.preadv

    def counted(*asked):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.005)
        with lock:
            now[0] -= 1
        return read(*asked)

    monkeypatch.setattr(os, "preadv", counted)
    ms, whole = loop.read(9)
    assert len(ms) == 9 and most == [3] and whole < sum(ms) and len(loop.free) == 3
    monkeypatch.setattr(os, "preadv", lambda *asked: 1)
    with pytest.raises(OSError, match="short read of 4096"):
        loop.read(1)
    assert len(loop.free) == 3
    loop.close()
