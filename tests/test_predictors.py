"""Every predictor: fit, score, step, save; sizes as published; controls; bad input."""

import runpy

import pandas as pd
import pytest
import torch
from dualdeadline import metrics, predictors, selection
from dualdeadline.models import Routers
from dualdeadline.predictors import base, gate_ahead, learned, reduced_rank
from factory import synthetic_routers, synthetic_trace

LEARNED = {name for name, kind in predictors.REGISTRY.items() if issubclass(kind, predictors.Learned)}
ONLINE = [name for name in predictors.REGISTRY if name != "oracle"]


@pytest.fixture(scope="module")
def train():
    return synthetic_trace(prompts=16, seed=0)


@pytest.fixture(scope="module")
def test():
    return synthetic_trace(prompts=6, tokens=20, seed=1)


@pytest.fixture(scope="module")
def fitted(train):
    """Each predictor once at horizon 1, trained enough to tell them apart."""
    return {name: make(name, epochs=15).fit(train) for name in predictors.REGISTRY}


def make(name, horizon=1, epochs=2, **options):
    extra = {"epochs": epochs, "batch": 32} if name in LEARNED else {}
    return predictors.build(name, horizon=horizon, **(extra | options))


def recall(predictor, trace, budget=4):
    return metrics.recall(predictor.score(trace), trace.routes[:, predictor.horizon:], budget).mean().item()


@pytest.mark.parametrize("horizon", [0, 1, 2, 3])
@pytest.mark.parametrize("name", predictors.REGISTRY)
def test_scores_are_probabilities_of_the_target_layers(name, horizon, train, test):
    scores = make(name, horizon).fit(train).score(test)
    assert scores.shape == (len(test.prompt), 5 - horizon, 16)
    assert ((scores >= 0) & (scores <= 1)).all()
    assert scores.mean().item() == pytest.approx(4 / 16, abs=0.04)


@pytest.mark.parametrize("horizon", [0, 1, 2])
@pytest.mark.parametrize("name", ONLINE)
def test_online_steps_equal_score(name, horizon, train, test):
    predictor = make(name, horizon).fit(train)
    scores = predictor.score(test)
    state = test.router_input if horizon else test.layer_input
    step = predictor.online()
    for row in range(45):  # three prompts, one after another
        if row in test.prompt_starts:
            step.reset()
            last = torch.full((4,), -1)
        for layer in range(5):
            ids = test.routes[row, layer] if horizon else last
            found = step(layer, state[row, layer][None], ids[None])
            if layer + horizon < 5:
                assert torch.allclose(found[0], scores[row, layer], atol=1e-5)
            else:
                assert found is None
            last = test.routes[row, layer]


def test_a_batch_of_sequences_steps_like_each_alone(fitted, test):
    rows = test.prompt_starts
    for name in ("previous_token", "residual_gate"):
        step, scores = fitted[name].online(), fitted[name].score(test)
        for offset in range(3):
            for layer in range(5):
                found = step(layer, test.router_input[rows + offset, layer], test.routes[rows + offset, layer])
                if layer < 4:
                    assert torch.allclose(found, scores[rows + offset, layer], atol=1e-5)


def test_order_of_merit(fitted, test):
    """The made-up decoder was built so; a predictor that lost its information falls out of this order."""
    found = {name: recall(predictor, test) for name, predictor in fitted.items()}
    assert found["oracle"] == 1
    assert found["random"] == pytest.approx(4 / 16, abs=0.03)
    assert found["residual_gate"] > found["gate_ahead"] + 0.02 > found["transition"] > found["popularity"]
    assert found["previous_token"] > found["popularity"] > found["previous_layer"]
    assert found["probe"] > found["transition"] and found["shared_mlp"] > found["transition"]


def test_shuffled_labels_leave_no_more_than_popularity(fitted, test):
    assert recall(fitted["shuffled"], test) <= recall(fitted["popularity"], test) + 0.02
    assert recall(fitted["shared_mlp"], test) > recall(fitted["popularity"], test) + 0.05


def test_probabilities_are_calibrated(fitted, test):
    for name in ("gate_ahead", "residual_gate", "shared_mlp", "popularity", "random"):
        scores = fitted[name].score(test)
        assert metrics.calibration_error(scores, test.routes[:, 1:]) < 0.03, name


def test_calibration_finds_the_curve_and_keeps_the_order():
    draw = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 20000, generator=draw)
    labels = (torch.rand(2, 20000, generator=draw) < (2 * scores - 1).sigmoid()).float()
    labels[1] = 1 - (torch.rand(20000, generator=draw) < (2 * scores[1] - 1).sigmoid()).float()  # turned round
    slope, offset = base.platt(scores, labels)
    assert slope[0].item() == pytest.approx(2, abs=0.1) and offset[0].item() == pytest.approx(-1, abs=0.1)
    assert 0 < slope[1] < 1e-3


@pytest.mark.parametrize(("name", "options", "count"), [
    ("shared_mlp", {}, 553_536), ("low_rank", {}, 540_672),
    ("shared_mlp", {"width": 128}, 2 * 2048 + 16 * 32 + 2080 * 128 + 129 * 64),
])
def test_sizes_at_the_published_shape(name, options, count):
    predictor = at_shape(name, 2048, **options)
    assert predictor.parameter_count() == count


def test_ours_fills_its_size(train):
    """What `fit` makes is what the size test below counts, and no larger than a SharedMLP here."""
    predictor = make("residual_gate", rank=3).fit(train)
    assert predictor.table["down"].shape == (64, 3) and predictor.table["up"].shape == (4, 3, 16)
    assert predictor.parameter_count() == 64 * 3 + 4 * 16 * 3 + 4 * 16 * 6


def test_ours_recovers_a_residual_of_low_rank():
    """Targets made by a shared low-rank map and factors come back exactly; a smaller rank errs."""
    draw = torch.Generator().manual_seed(0)
    states, experts = torch.randn(3, 400, 12, generator=draw), torch.randn(3, 400, 5, 2, generator=draw)
    down, up = torch.randn(12, 4, generator=draw), torch.randn(3, 4, 5, generator=draw)
    factor = torch.randn(3, 5, 2, generator=draw)
    target = states @ down @ up + (experts * factor[:, None]).sum(-1)
    whole = reduced_rank.Sums.of(states, experts, target)
    halves = [reduced_rank.Sums.of(states[:, part], experts[:, part], target[:, part])
              for part in (slice(0, 150), slice(150, 400))]
    assert torch.allclose((halves[0] + halves[1]).cross, whole.cross, atol=1e-3)
    errors = [reduced_rank.error(whole, reduced_rank.solve(whole, rank, 1e-6)) for rank in (0, 2, 4)]
    variance = target.square().mean().item()
    assert errors[0] > errors[1] > 0.05 * variance and errors[2] < 1e-3 * variance
    table = reduced_rank.solve(whole, 2, 1e-6)
    guess = states @ table["down"] @ table["up"] + (experts * table["expert"][:, None]).sum(-1)
    assert reduced_rank.error(whole, table) == pytest.approx((guess - target).square().mean().item(), rel=1e-3)


def at_shape(name, hidden, horizon=1, **options):
    predictor = predictors.build(name, horizon=horizon, **options)
    predictor.L, predictor.E, predictor.K, predictor.H = 16, 64, 8, hidden
    predictor.table = predictor.initial(torch.Generator().manual_seed(0))
    return predictor


@pytest.mark.parametrize("horizon", [0, 1, 2, 3])
@pytest.mark.parametrize("hidden", [128, 2048])
def test_ours_is_no_larger_than_the_shared_mlp(hidden, horizon):
    count = 16 - horizon
    predictor = predictors.build("residual_gate", horizon=horizon)
    predictor.L, predictor.E, predictor.K, predictor.H = 16, 64, 8, hidden
    rank = predictor.affordable_rank(2 * hidden, 6)
    ours = rank * (2 * hidden + count * 64) + count * 64 * 6 + 2 * count
    assert ours <= at_shape("shared_mlp", hidden).parameter_count() == learned.shared_mlp_size(hidden, 64, 16)
    assert ours + 2 * hidden + count * 64 > learned.shared_mlp_size(hidden, 64, 16)  # and no rank is left unused


def test_gate_ahead_exchanges_the_norms(train):
    """By hand: undo layer 1's factor, apply layer 2's, then layer 2's router."""
    predictor, routers = predictors.build("gate_ahead").fit(train), train.routers
    state = train.router_input[:10, 1] / routers.norm[1] * routers.norm[2]
    order = (state @ routers.weight[2].T).argsort(-1)
    assert torch.equal(predictor.score(train)[:10, 1].argsort(-1), order)


def test_gate_ahead_is_exact_where_nothing_lies_between(train):
    """At horizon 0 on the router's own pre-norm state it is the router."""
    routers = train.routers
    x = train.router_input / routers.norm
    same = synthetic_trace(prompts=16, seed=0)
    same.layer_input = 7.0 * x  # any scale: the norm removes it
    predictor = predictors.build("gate_ahead", horizon=0).fit(same)
    assert recall(predictor, same) == 1


def test_routers_with_bias_correction_and_dead_norm_channels():
    routers = synthetic_routers()
    routers.bias = torch.zeros(5, 16)
    routers.bias[:, 3] = 100
    routers.norm[:, 0] = 0
    trace = synthetic_trace(prompts=8)
    scores = predictors.build("gate_ahead", routers=routers).fit(trace).score(trace)
    assert torch.isfinite(scores).all() and (scores.argmax(-1) == 3).all()
    sigmoid = Routers(routers.weight, None, routers.norm, torch.zeros(5, 16), 1e-5, "sigmoid", True, 2.5)
    plain = predictors.build("gate_ahead", routers=sigmoid).fit(trace)
    assert torch.equal(plain.logits(base.view(trace, torch.arange(9), 1)).argsort(-1),
                       predictors.build("gate_ahead", routers=Routers(
                           routers.weight, None, routers.norm, None, 1e-5, "softmax", True, 1.0)
                       ).fit(trace).logits(base.view(trace, torch.arange(9), 1)).argsort(-1))
    sigmoid.correction[:, 5] = 2  # beats any score in 0..1
    assert (predictors.build("gate_ahead", routers=sigmoid).fit(trace).score(trace).argmax(-1) == 5).all()


def test_unit_state_has_unit_scale():
    state = torch.randn(2, 5, 32) * 1e3
    unit = gate_ahead.unit_state(state, None, 1e-5)
    assert torch.allclose(unit.square().mean(-1), torch.ones(2, 5), atol=1e-4)


@pytest.mark.parametrize("name", ONLINE)
def test_degenerate_input_gives_finite_probabilities(name, fitted):
    for bad in (torch.nan, torch.inf, -torch.inf, 0.0, 1e30, 1e-30):
        step = fitted[name].online()
        ids = torch.tensor([[-5, 3, 3, 999]])
        for layer in range(4):
            found = step(layer, torch.full((1, 32), bad), ids)
            assert torch.isfinite(found).all() and ((found >= 0) & (found <= 1)).all(), (name, bad)


def test_training_on_broken_rows_stays_finite(train):
    broken = train.select(list(range(16)))
    broken.router_input = broken.router_input.clone()
    broken.router_input[5:9] = torch.nan
    for name in (*LEARNED, "residual_gate"):
        assert torch.isfinite(make(name).fit(broken).score(broken)).all(), name


@pytest.mark.parametrize("name", sorted(LEARNED))
def test_a_seed_repeats_its_fit_and_another_differs(name, train):
    first, again, other = (make(name, seed=seed).fit(train) for seed in (0, 0, 1))
    assert all(torch.equal(first.table[key], again.table[key]) for key in first.table)
    assert any(not torch.equal(first.table[key], other.table[key]) for key in first.table)


@pytest.mark.parametrize("name", predictors.REGISTRY)
def test_saved_and_loaded_scores_are_equal(name, fitted, test, tmp_path):
    predictors.save(fitted[name], tmp_path)
    loaded = predictors.load(tmp_path, test.routers)
    assert torch.equal(loaded.score(test), fitted[name].score(test))
    assert loaded.options() == fitted[name].options()


def test_a_truncated_file_is_named(fitted, tmp_path):
    path = predictors.save(fitted["popularity"], tmp_path)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(ValueError, match="03_predictors"):
        predictors.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="03_predictors"):
        predictors.load(tmp_path / "nothing")


def test_held_out_prompts_are_not_fitted_on(train):
    rows, held = base.hold_out(train)
    assert not set(train.prompt[rows].tolist()) & set(train.prompt[held].tolist())
    assert len(rows) + len(held) == len(train.prompt)
    changed = train.select(list(range(16)))
    changed.routes = changed.routes.clone()
    changed.routes[held] = changed.routes[held].flip(0)
    same = [predictors.build("transition").fit(trace).table["transition"] for trace in (train, changed)]
    assert torch.equal(*same)


def test_ours_remembers_earlier_tokens_only(fitted, test):
    """Changing a token changes no score before it, and none of another prompt."""
    changed = test.select(list(range(6)))
    row = int(test.prompt_starts[2]) + 9
    changed.router_input = changed.router_input.clone()
    changed.router_input[row] = changed.router_input[row].flip(-1)
    before, after = (fitted["residual_gate"].score(trace) for trace in (test, changed))
    differs = (before - after).abs().amax((1, 2)) > 1e-6
    assert differs[row] and differs[row + 1] and not differs[:row].any()
    assert not differs[test.prompt_starts[3]:].any()


def test_ours_without_memory_scores_rows_in_any_batch(train, test):
    predictor = make("residual_gate", features=("state",)).fit(train)
    step, scores = predictor.online(), predictor.score(test)
    for layer in range(4):
        found = step(layer, test.router_input[:, layer], test.routes[:, layer])
        assert torch.allclose(found, scores[:, layer], atol=1e-5)


def test_bfloat16_traces_work():
    trace = synthetic_trace(prompts=8, dtype=torch.bfloat16)
    scores = make("residual_gate").fit(trace).score(trace)
    assert scores.dtype == torch.float32 and torch.isfinite(scores).all()


def test_bad_requests_say_what_is_needed(train):
    with pytest.raises(ValueError, match="gate_ahead, shared_mlp"):
        predictors.build("nonsense")
    with pytest.raises(ValueError, match="horizon is 4"):
        predictors.build("random", horizon=4)
    with pytest.raises(ValueError, match="unexpected keyword"):
        predictors.build("random", width=3)
    with pytest.raises(ValueError, match="loss is"):
        predictors.build("shared_mlp", loss="hinge")
    with pytest.raises(ValueError, match="not fitted"):
        predictors.build("popularity").score(train)
    with pytest.raises(ValueError, match="no tokens"):
        predictors.build("popularity").fit(train.select([]))
    with pytest.raises(ValueError, match="more layers"):
        predictors.build("popularity", horizon=3).fit(synthetic_trace(prompts=3, layers=3))
    with pytest.raises(ValueError, match="routers"):
        bare = train.select([0, 1])
        bare.routers = None
        predictors.build("gate_ahead").fit(bare)
    with pytest.raises(ValueError, match="oracle"):
        predictors.build("oracle").fit(train).online()


def test_fits_are_kept_compared_and_not_repeated(train, test, tmp_path):
    plan = selection.jobs([selection.candidate(name) for name in ("popularity", "gate_ahead", "low_rank")], [1, 2], [0])
    fits = selection.fit_all(plan, train, test, tmp_path, [2, 4], epochs=2)
    assert list(fits.folder) == [job.folder for job in plan]
    assert selection.best(fits, "baseline", "recall@4") == "gate_ahead"
    again = selection.fit_all(plan + selection.jobs([selection.candidate("random")], [1], [0]), train, test, tmp_path,
                              [2, 4], done=fits)
    assert again.iloc[:6].equals(fits) and list(again.label[6:]) == ["random"]
    control = fits.iloc[:1].assign(label="shuffled", kind="control")
    partial = fits.iloc[:1].assign(label="probe")
    measured = selection.to_measure(pd.concat([fits, control, partial]))
    assert sorted(measured.label.unique()) == ["gate_ahead", "low_rank", "popularity", "shuffled"]
    assert list(selection.to_measure(fits, ["gate_ahead"]).horizon) == [1, 2]
    with pytest.raises(ValueError, match="humaneval"):
        selection.of_source(train, "poems")
    with pytest.raises(ValueError, match="shared_mlp"):
        selection.candidate("nonsense")


def test_a_registered_predictor_is_a_baseline_of_every_table(monkeypatch):
    names = [item.name for item in selection.BASELINES + selection.ABLATIONS]
    assert set(names) == set(predictors.REGISTRY) and not selection.ADDED
    monkeypatch.setitem(predictors.REGISTRY, "mine", predictors.REGISTRY["popularity"])
    again = runpy.run_path(selection.__file__)
    assert again["ADDED"] == ["mine"] and "mine" in again["SHOWN"]
    assert [item.kind for item in again["BASELINES"] if item.name == "mine"] == ["baseline"]
