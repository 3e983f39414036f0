"""The confirmation on a second architecture: places, choice, replay, kernel check, blocks, deviations and tables."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import interpreted_python
from factory import synthetic_trace
from test_engine import build, offloaded, run, text

import made_up_records
from dualdeadline import cache, corpus, manifest, models, overlap, paths, record, selection, streams, study, traces
from dualdeadline.confirmation import blocks, deviations, fitting, measuring, place, replayed, rows, shared
from dualdeadline.report import confirmation as shown
from dualdeadline.report import confirmation_said
from dualdeadline.report import runtime
from dualdeadline.report.tables import Subject
from dualdeadline.traces import Sampling

HOW = place.Decoding(12, 0, 4, Sampling())
FIXED = manifest.read_yaml("protocol.yaml")["confirmation"]
OWN_CHOICES = {"checked_share": 1.0, "block_kind": "measured", "decode_kind": "measured", "expert_shape": "qwen"}


@pytest.fixture
def own(tmp_path, monkeypatch, tiny_checkpoint, tiny_prompts):
    """A place of a tiny model of the second architecture; both corpora are the tiny prompts."""
    monkeypatch.setattr(paths, "DATA", tmp_path)
    monkeypatch.setattr(corpus, "load", lambda name, limit=0: tiny_prompts[: limit or None])
    return place.Place("smoke", str(tiny_checkpoint("qwen3_5_moe")))


# where things lie


def test_traces_and_scores_are_apart_and_records_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "DATA", tmp_path)
    own, plain = place.Place("pilot", "pilot-qwen"), paths.Workspace("pilot")
    assert (own.records, own.figures, own.generated) == (plain.records, plain.figures, plain.generated)
    for name in ("traces", "scores"):
        assert not getattr(own, name).is_relative_to(
            getattr(plain, name)
        ), "a stage of the first model would see it change"


def test_a_whole_store_is_used_without_collecting_again(own, monkeypatch):
    made = place.stores(own, ["a"], [0], HOW)["a"]
    assert made.path == own.traces / "a" and len(made.prompts) == 9
    monkeypatch.setattr(traces, "collect", lambda *args, **more: pytest.fail("collected again"))
    assert place.stores(own, ["a"], [0], HOW)["a"].path == made.path


def test_traces_of_notebook_02_are_used_if_they_are_of_this_model_and_decoding(own, tiny_prompts):
    source = place.Model(own.model)
    traces.collect(*source.loaded, tiny_prompts, own.plain.traces / "a", 12, 4, Sampling())
    assert place.stores(own, ["a"], [0], HOW, source)["a"].path == own.plain.traces / "a"
    other = dataclasses.replace(HOW, new_tokens=8)
    for limit, how in ((0, other), (7, HOW)):
        found = place.stores(own, ["a"], [limit], how, source)["a"]
        assert found.path == own.traces / "a" and len(found.prompts) == (limit or 9)
        (found.path / "meta.json").unlink()


def test_traces_of_another_model_or_damaged_ones_are_not_used(own, tiny_model, tiny_prompts):
    path, wanted = own.plain.traces / "a", {prompt.id for prompt in tiny_prompts}
    traces.collect(*tiny_model("olmoe"), tiny_prompts, path, 12, 4, Sampling())
    source = place.Model(own.model)
    assert not place.whole(path, wanted, HOW, source)
    traces.collect(*source.loaded, tiny_prompts, own.traces / "b", 12, 4, Sampling())
    assert place.whole(own.traces / "b", wanted, HOW, source)
    next((own.traces / "b" / "prompts").iterdir()).write_bytes(b"torn")
    assert not place.whole(own.traces / "b", wanted, HOW, source)


def test_a_hub_model_is_known_by_its_commit(monkeypatch):
    monkeypatch.setattr(models, "load", lambda key: pytest.fail("loaded"))
    commit = manifest.read_yaml("models.yaml")["qwen"]["revision"]
    assert place.Model("qwen").made({"revision": commit}) and not place.Model("qwen").made({"revision": "0" * 40})


def test_every_corpus_needs_its_limit(own):
    with pytest.raises(ValueError, match=r"prompts are \[0\]; needed: one limit for each of a, b"):
        place.stores(own, ["a", "b"], [0], HOW)


# fitting, choosing, measuring


@pytest.fixture
def fitted(own, tiny_store):
    """Fits on the tiny store."""
    return fit(own, tiny_store)


def fit(own, store, **options):
    return fitting.fit(
        own, store, **({"horizons": [1, 2], "seed": 0, "seeds": 1, "budgets": [2, 8], "epochs": 1} | options)
    )


def test_the_best_candidate_on_validation_goes_on(own, tiny_store, fitted):
    tried = fitted[fitted.label.isin(fitting.CANDIDATES)].set_index("label")[fitting.CHOSEN_BY]
    assert set(tried.index) == set(fitting.CANDIDATES) and fitted.ours.unique().tolist() == [tried.idxmax()]
    chosen = fitted[fitted.label == fitting.OURS].set_index("horizon")
    assert chosen[fitting.CHOSEN_BY][1] == tried.max() and set(chosen.index) == {1, 2}
    one_ahead = set(fitted[fitted.horizon == 1].label)
    assert set(fitting.SHOWN) | {fitting.CONTROL} <= one_ahead
    assert set(fitted[fitted.horizon == 2].label) == {*fitting.RIVALS, fitting.OURS}


def test_what_is_fitted_already_stays_and_what_is_lost_is_made_again(own, tiny_store, fitted, monkeypatch):
    made, plain = [], selection._fit
    monkeypatch.setattr(selection, "_fit", lambda job, *args: made.append(job.folder) or plain(job, *args))
    again = fit(own, tiny_store)
    assert made == [] and sorted(again.folder) == sorted(fitted.folder)
    (own.scores / "probe-h1-s0" / "predictor.safetensors").unlink()
    fit(own, tiny_store)
    assert made == ["probe-h1-s0"]
    fit(own, tiny_store, epochs=2)
    assert len(made) == 1 + len(fitted), "other options, so everything is fitted anew"


def test_a_stopped_run_keeps_its_fits(own, tiny_store, monkeypatch):
    plain = selection._fit

    def stops(job, *args):
        if job.candidate.label == fitting.CONTROL:
            raise KeyboardInterrupt
        return plain(job, *args)

    monkeypatch.setattr(selection, "_fit", stops)
    with pytest.raises(KeyboardInterrupt):
        fit(own, tiny_store)
    kept = fitting.kept(own, fitting.stamp_of(tiny_store, 1, [2, 8]))
    assert set(kept.label) == set(fitting.CANDIDATES)


def test_the_choice_needs_one_layer_ahead(own, tiny_store):
    with pytest.raises(ValueError, match=r"horizons are \[2\]; needed: 1 among them"):
        fit(own, tiny_store, horizons=[2])


def test_test_split_and_replication_are_measured_and_compared(own, tiny_store, fitted):
    values = measuring.measure(own, fitted, {"a": tiny_store, "b": tiny_store}, [2, 4], [4], [4])
    assert set(zip(values.corpus, values.split)) == {("a", "test"), ("b", "all")}
    missed = values[values.metric == "miss_recall"]
    assert set(missed.variant) == {fitting.OURS, *fitting.RIVALS} and set(missed.horizon) == {1, 2}
    gaps = measuring.compared(values, 4, 50, 0)
    assert {f"{fitting.OURS}-{name}" for name in fitting.RIVALS} <= set(
        gaps[gaps.metric == "miss_recall_difference"].variant
    )
    by = values[values.metric.eq("recall") & values.budget.eq(4) & values.horizon.eq(1) & values.corpus.eq("b")]
    mean = by.groupby("variant").value.mean()
    line = gaps.query("metric == 'recall_difference' and variant == 'residual_gate-popularity' and corpus == 'b'").iloc[
        0
    ]
    assert (
        line["mean"] == pytest.approx(mean[fitting.OURS] - mean["popularity"]) and line.low <= line["mean"] <= line.high
    )
    assert set(measuring.leak(values, 4, 50, 0).variant) == {f"{fitting.CONTROL}-popularity"}


def test_other_stages_find_scores_and_the_first_layers_of_its_steps(own, tiny_store, fitted):
    own.traces.mkdir(parents=True)
    (own.traces / "tiny").symlink_to(tiny_store.path)
    selection.write_scores(["gate_ahead-h1-s0"], tiny_store.split("test"), "tiny", own)
    whole, cut = (
        overlap.steps_of(own, "tiny", "test", ["gate_ahead"], [1], 0, 1, 0, {"gate_up": 2, "down": 1, "expert": 3}, n)
        for n in (0, 2)
    )
    assert (whole.routes[:, :2] == cut.routes).all() and whole.routes.shape[1] == 3
    assert (whole.scores["gate_ahead", 1][:, :1] == cut.scores["gate_ahead", 1]).all()


# replayed


def test_hit_rates_are_those_of_the_cache_module_on_the_layers_predicted():
    trace = synthetic_trace(prompts=3, tokens=10)
    routes, prompt = trace.routes.numpy(), trace.prompt.numpy()
    known = torch.zeros(len(routes), 4, 16).scatter_(2, trace.routes[:, 1:], 1.0).numpy()
    found = replayed.hit_rates(routes, prompt, known, [5, 8])
    at = found.set_index(["variant", "start", "slots", "prompt"]).hit_rate
    for number in range(3):
        own = routes[prompt == number][:, 1:]
        assert at["lru", "cold", 5, number] == pytest.approx(cache.hit_rate(own, 5, "lru", "token").mean())
    means = found.groupby(["variant", "start", "slots"]).hit_rate.mean()
    for slots in (5, 8):
        assert means["belady", "cold", slots] >= max(means[name, "cold", slots] for name in ("lru", "lfu", "predicted"))
        assert means["lru", "warm", slots] >= means["lru", "cold", slots]


def test_the_published_accounting_gives_the_published_stalls():
    check = replayed.published_check(streams.QWEN)
    off = (check.loc["here"] - check.loc["published"]).abs()
    assert off.monolithic_ms < 0.001 and off.staged_ms < 0.01


def test_only_routed_bytes_are_on_the_link():
    sizes = replayed.expert_bytes(streams.QWEN)
    H, F = (manifest.read_yaml("models.yaml")["qwen"][key] for key in "HF")
    assert sizes["full"] == 3 * H * F * 2 == sizes["gate_up"] + sizes["down"]


def test_stalls_fall_with_what_is_known():
    trace = synthetic_trace(prompts=3, tokens=6)
    known = torch.zeros(len(trace.routes), 4, 16).scatter_(2, trace.routes[:, 1:], 1.0).numpy()
    found = replayed.stalls(
        trace.routes.numpy(), trace.prompt.numpy(), {"oracle": known, "worst": -known}, streams.QWEN, [0, 4]
    )
    ms = found[found.metric == "stall_ms"].groupby(["variant", "budget", "schedule"]).ms.mean()
    told, line = replayed.times()
    assert ms["worst", 0, "monolithic"] == pytest.approx(4 * line.ms(replayed.expert_bytes(streams.QWEN)["full"]))
    assert ms["oracle", 4, "monolithic"] == pytest.approx(0) and ms["oracle", 4, "staged"] <= ms["worst", 4, "staged"]
    once = found[found.metric == "stall_link_once_ms"].groupby(["variant", "budget", "schedule"]).ms.mean()
    assert (once >= ms - 1e-12).all()


# the predictor kernel

COMPARE = """
import torch
from dualdeadline import predictors
from dualdeadline.confirmation import fused
from factory import synthetic_trace
trace = synthetic_trace(prompts=2, tokens=3, layers=3, experts=12, routed=3, hidden=16)
for name in ("residual_gate", "gate_ahead"):
    guide = predictors.build(name, horizon=1).fit(trace)
    found = fused.compare(guide, trace, "cpu", k=4)
    assert (found.pairs, found.held_out, found.share) == (12, 12, 1.0) and found.difference < 1e-4, found
    few = fused.compare(guide, trace, "cpu", prompts=1, steps=2, k=4)
    assert (few.pairs, few.held_out) == (4, 12)
expected = guide.score(trace)
guide.score = lambda trace: 0.9 * expected
assert fused.compare(guide, trace, "cpu", prompts=1, steps=1, k=4).difference > 0.01
ids, best = expected[:2, 0].topk(3).indices, expected[:2, 0].topk(3).values
assert fused.difference(ids, best, expected[:2, 0]) == 0
assert fused.difference(ids.clone().fill_(1), best, expected[:2, 0]) == float("inf")
assert fused.difference(ids, best * float("nan"), expected[:2, 0]) == float("inf")
worse = expected[:2, 0].topk(3, largest=False)
assert fused.difference(worse.indices, worse.values, expected[:2, 0]) > 0.01
print("compared")
"""


def test_the_kernel_is_compared_on_every_pair_and_a_wrong_one_is_found():
    done = interpreted_python("-c", COMPARE, cwd=paths.TESTS)
    assert done.returncode == 0 and "compared" in done.stdout, done.stderr[-3000:]


# blocks

TINY = streams.Shape("tiny", 16, 8, 8, torch.float32)


def test_ahead_is_what_the_same_bytes_bring():
    routes = np.array([[[0, 1], [0, 1], [2, 3]], [[0, 1], [4, 5], [2, 3]]])
    scores = np.zeros((2, 2, 8), np.float32)
    scores[:, :, :4] = [4, 3, 2, 1]  # experts 0 to 3 first, in this order
    found = blocks.tokens(routes, np.array([0, 1]), scores, 2, TINY)  # 2 experts, or 3 gate/ups
    assert {name: part.layer for name, part in found.items()} == {"first": 1, "middle": 1, "last": 2}
    assert found["first"].whole.tolist() == [2, 0] and found["first"].first.tolist() == [2, 0]
    assert found["last"].whole.tolist() == [0, 0] and found["last"].first.tolist() == [1, 1]


def test_simulated_blocks_are_priced_by_what_is_ahead():
    rows_of = record.read(paths.Workspace("pilot"), "07_overlap", "pilot-olmoe")
    cost = overlap.recorded_cost(rows_of, streams.QWEN, overlap.Setting())
    ahead = {"first": blocks.Tokens(1, np.array([0, 1]), np.array([0, 8]), np.array([0, 8]))}
    frame = blocks.simulated(ahead, streams.QWEN, cost, 8)
    ms = frame.pivot(index="schedule", columns="prompt", values="ms")
    assert (
        ms[0]["demand_serial"]
        == ms[0]["nothing_ahead"]
        == ms[1]["nothing_ahead"]
        > ms[1]["staged_barrier"]
        > ms[1]["demand_serial"]
    )
    found = blocks.means(frame, 50, 0).set_index(["metric", "variant"])["median"]
    change = ms.loc["staged_barrier"].mean() / ms.loc["demand_serial"].mean() - 1
    assert found["block_change", "staged_barrier-demand_serial"] == pytest.approx(change)
    assert ("block_change", "nothing_ahead-nothing_ahead") not in found.index


def test_measured_blocks_keep_the_output_and_pair_their_samples():
    counts = np.array([0, 1, 2, 2])
    ahead = {name: blocks.Tokens(layer, np.arange(4), counts, counts) for name, layer in (("first", 1), ("last", 2))}
    work = streams.Work(TINY, 2, top_k=2, kernels="torch")
    frame = blocks.measured(ahead, work, 6, 60.0)
    assert set(frame.schedule) == set(blocks.VARIANTS) and (frame.ms > 0).all()
    same = frame.groupby(["place", "schedule"]).prompt.apply(list)
    assert all(
        prompts == same["first"].iloc[0] for prompts in same["first"]
    ), "a sample is one token for every schedule"


def test_a_block_that_misses_a_copy_is_not_timed(monkeypatch):
    plain = streams.Work.copy
    monkeypatch.setattr(
        streams.Work, "copy", lambda self, op: None if op.expert == self.experts(0)[1] else plain(self, op)
    )
    ahead = {"first": blocks.Tokens(1, np.arange(1), np.zeros(1, int), np.zeros(1, int))}
    with pytest.raises(AssertionError, match="demand_serial, 0 ahead: [0-9]+ values differ"):
        blocks.measured(ahead, streams.Work(TINY, 1, top_k=2, kernels="torch"), 2, 60.0)


# the shared expert


def test_the_shared_expert_stays_and_none_of_its_bytes_cross_the_link():
    model = build("qwen3_5_moe")
    weights = shared.check(model)
    assert weights["shared"] > 0 and weights["routed"] > 0 and shared.sizes(build("olmoe"))["shared"] == 0
    kept = {id(value) for _, parts in shared.blocks(model) for part in parts for value in part.parameters()}
    offloaded(model, slots=2)
    left = {id(value) for value in model.parameters()}
    assert kept <= left, "its weights stay in the model"
    run(model, text(), 4)
    counts = model.dualdeadline.stats()
    assert counts["misses"] > 0 and counts["bytes_demand"] == counts["misses"] * weights["routed"]


def test_a_parameter_that_is_shared_and_routed_is_found():
    model = build("qwen3_5_moe")
    experts, (part, *_) = shared.blocks(model)[0]
    part.gate_proj.weight = experts.down_proj
    with pytest.raises(AssertionError, match="layer 0: 8 experts, 1 parameters shared and routed"):
        shared.check(model)


def test_a_skeleton_has_the_sizes_of_the_model(tiny_checkpoint):
    bones = shared.skeleton(str(tiny_checkpoint("qwen3_5_moe")))
    assert all(value.is_meta for value in bones.parameters())
    assert shared.check(bones)["routed"] > 0 and models.describe(bones).E == 8


# deviations

NO_ROWS = pd.DataFrame({"metric": [], "variant": [], "kind": []})


def test_a_run_as_fixed_deviates_in_nothing_but_missing_records():
    for model, fixed in FIXED["parameters"].items():
        found = deviations.listed(model, fixed, deviations.choices(**OWN_CHOICES), NO_ROWS)
        assert set(found.part) == {"record"}
        names = [name for name, entry in FIXED["targets"].items() if entry["stage"] == rows.STAGE]
        assert list(dict.fromkeys(found.entry.str[:2])) == names


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"slots": [64, 128]}, ("parameter", "slots", "64, 128, 192", "64, 128")),
        ({"corpora": ["replication", "pilot"]}, ("parameter", "corpora", "pilot, replication", "replication, pilot")),
        ({"seed": 1}, ("parameter", "seed", "0", "1")),
    ],
)
def test_every_changed_parameter_is_listed(change, line):
    given = FIXED["parameters"]["pilot-qwen"] | change
    found = deviations.listed("pilot-qwen", given, deviations.choices(**OWN_CHOICES), NO_ROWS)
    assert tuple(found[found.part == "parameter"].iloc[0]) == line and (found.part == "parameter").sum() == 1


def test_every_other_choice_is_listed(monkeypatch):
    monkeypatch.setattr(fitting, "CANDIDATES", ("residual_gate_default",))
    ran = deviations.choices(**OWN_CHOICES | {"block_kind": "simulated"})
    found = deviations.listed("pilot-qwen", FIXED["parameters"]["pilot-qwen"], ran, NO_ROWS)
    found = found[found.part == "choice"].set_index("entry")
    assert set(found.index) == {"candidates", "block_kind"} and found.run["block_kind"] == "simulated"


def test_a_model_without_entries_is_a_deviation():
    found = deviations.listed("olmoe", {}, deviations.choices(**OWN_CHOICES), NO_ROWS)
    assert tuple(found.iloc[0]) == ("model", "model", "pilot-qwen, qwen", "olmoe")


def test_targets_name_what_the_code_compares():
    test = FIXED["targets"]["C2"]["test"]
    assert test["variants"] == [f"{fitting.OURS}-{name}" for name in fitting.RIVALS]
    for fixed in FIXED["parameters"].values():
        assert set(test["config"]["slots"]) <= set(fixed["slots"]) and test["config"]["horizon"] == fixed["horizons"]
        assert fixed["told_budget"] in test["config"]["budget"] and fixed["told_budget"] in fixed["miss_budgets"]
        assert fixed["decode_slots"] in FIXED["targets"]["C6"]["test"]["config"]["slots"]
    assert FIXED["targets"]["C4"]["test"]["bound"] == deviations.TOLERANCE


# tables

STAGES = made_up_records.kernels, made_up_records.wire, made_up_records.confirmation


@pytest.fixture
def about(tmp_path):
    with made_up_records.workspace(tmp_path, *STAGES) as workspace:
        yield Subject(workspace)


@pytest.mark.parametrize("name", shown.TABLES)
def test_every_table_is_made_and_named_for_its_place(about, name):
    made = shown.TABLES[name](about)
    assert made.name == f"confirmation_{name}" and len(made.frame) and len(made.rows)
    assert "pilot-qwen" in made.caption and not made.frame.isna().any(axis=None)
    assert shown.show(name, about).uuid == f"confirmation_{name}"


def test_beside_has_every_published_figure_with_its_conditions(about):
    frame = shown.TABLES["beside"](about).frame.set_index("figure")
    assert frame.published["recall at 4, its learned predictor"] == "0.3128"
    assert frame.published["stall at budget 4, staged, ms"] == "0.505"
    assert frame.published[[f"block, staged, {place} layer" for place in blocks.PLACES]].tolist() == [
        "-28.8%",
        "-24.1%",
        "-16.2%",
    ]
    assert frame.published["its predictor's step, triton, ms"] == "0.0654"
    told = frame[frame.published != "–"]
    assert (told.conditions.str.len() > 20).all() and (frame["conditions here"].str.len() > 5).all()
    assert frame.here["recall at 4, its learned predictor"].startswith("0.200 [")
    assert frame.here["decode, 128 of 256 slots, tokens/s"] == "not measured yet"


def test_verdicts_follow_the_records(tmp_path):
    for gap, word in ((0.05, "supported"), (0.005, "not supported")):
        with made_up_records.workspace(
            tmp_path / word, lambda made: made_up_records.confirmation(made, gap)
        ) as workspace:  # noqa: B023
            about = shown.second(Subject(workspace))
            assert [shown.verdict(name, about) for name in ("C1", "C2", "C3")] == [word] * 3
            assert shown.verdict("C4", about) == "supported"
            assert {shown.verdict(name, about) for name in ("C5", "C6")} == {"open (no data yet)"}
            assert f"C2 (prediction (H2 repeated)) **{word}**" in confirmation_said.answer(about)


def test_decode_is_shown_once_it_is_measured(about):
    second = shown.second(about)
    assert shown.decode(second, 128) == "Decode of pilot-qwen with 128 slots per layer: not measured yet."
    into = record.Recorder("09_decode", "pilot-qwen", "made-up", about.workspace)
    for name, speed in (("slow", 90.0), ("fast", 130.0)):
        into.add(name, "tokens_per_s", speed, "1/s", "measured", speed - 5, speed + 5, n=6, slots=128)
    into.add("simulated", "tokens_per_s", 500.0, "1/s", "simulated", 490, 510, n=6, slots=128)
    into.write()
    large = record.Recorder("09_decode", "qwen-sizes", "made-up", about.workspace)
    for routes, speed in (("synthetic", 400.0), ("pilot-olmoe", 300.0)):
        large.add("other routes", "tokens_per_s", speed, "1/s", "measured", speed, speed, n=6, slots=128, routes=routes)
    large.write()
    assert "130.0 [125.0, 135.0] tokens/s" in shown.decode(second, 128) and shown.verdict("C6", second) == "supported"
    large.add(
        "fastest", "tokens_per_s", 140.0, "1/s", "measured", 139, 141, n=6, slots=128, routes="pilot-qwen", warm=True
    )
    large.write()
    assert "140.0 [139.0, 141.0] tokens/s" in shown.decode(
        second, 128
    ), "Qwen3.6's sizes, driven by this model's routes"
    assert shown.decode(second, 128).endswith("Decode's slots stay warm.")
    assert shown.decode_kind(second, 128) == "measured" and shown.decode_kind(second, 64) == "not measured yet"


def test_a_gpus_pairs_are_shown_before_the_interpreters(about, monkeypatch):
    monkeypatch.setattr(models, "revision", lambda key: "made-up")
    second = shown.second(about)
    assert shown.checked_share(record.read(about.workspace, rows.STAGE)) == 0.25
    every = type("Compared", (), dict(pairs=96, held_out=96, share=1.0, difference=0.5))
    into = rows.recorder("pilot-qwen", about.workspace, "kernel, gpu")
    rows.add_kernel(into, dict.fromkeys(deviations.CHECKED, every), "gpu")
    into.write()
    assert shown.checked_share(record.read(about.workspace, rows.STAGE)) == 1.0
    assert "(gpu)" in shown.TABLES["kernel"](about).caption and shown.verdict("C4", second) == "not supported"


def test_the_model_in_question_is_shown_where_it_was_run(about):
    assert shown.second(about).model == "pilot-qwen"
    made = record.Recorder(rows.STAGE, "qwen", "made-up", about.workspace)
    made.add("probe", "recall", 0.5, "share", "replayed", corpus="gsm8k-humaneval", split="test")
    made.write()
    found = shown.second(Subject(about.workspace, "qwen"))
    assert (found.model, found.corpus) == ("qwen", "gsm8k-humaneval")


def test_run_times_are_those_of_the_profile_whatever_its_model(tmp_path):
    with made_up_records.workspace(tmp_path) as workspace:
        into = record.Recorder("12_paper", "qwen", "made-up", workspace, {"profile": "smoke"})
        into.add("02_traces", "run_minutes", 7.0, "min", "measured")
        into.write()
        assert runtime.minutes(workspace).frame.minutes.tolist() == ["7.0", "7.0"]


@pytest.mark.parametrize(("profile", "model"), [("pilot", "pilot-qwen"), ("qwen", "qwen")])
def test_the_notebook_runs_the_protocols_parameters(profile, model):
    (planned,) = study.plan(profile, only="11")
    assert planned.parameters["model"] == model
    assert deviations.named(model, planned.parameters) == FIXED["parameters"][model]
