"""A model of Qwen3.6's kind in the decode study: shared experts of layers, linear attention's states, equal bits."""

import shutil
from dataclasses import replace

import pytest
import torch
from conftest import passes_interpreted

from dualdeadline import kernels, models
from dualdeadline.decode import big, measure, memory, routes, stopped, study
from dualdeadline.decode.cases import Case, guess, warm_cases
from dualdeadline.engine.driven import Driven, Ranked
from dualdeadline.engine.surgery import find
from dualdeadline.store import HostStore

SIZES = dict(
    hidden_size=32,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    num_experts=8,
    num_experts_per_tok=2,
    vocab_size=64,
)
outside = pytest.mark.skipif(kernels.INTERPRETED, reason="runs outside the interpreter")


@outside
def test_in_the_interpreter():
    passes_interpreted(__file__)


def test_layers_that_share_experts_stand_once_in_either_store():
    model = big.build("cpu", shape="qwen", alike=2, num_hidden_layers=5, **SIZES)
    spec, layers = find(model)
    assert [type(layer.decoder).__name__ for layer in spec.layers] == ["Qwen3_5MoeDecoderLayer"] * 5
    weights = [layer.experts.down_proj for layer in spec.layers]
    assert len({id(one) for one in weights}) == 5 and not torch.equal(weights[0], weights[1])
    store = HostStore(layers)
    for held in (store, store.encoded()):
        assert len({source.data_ptr() for source in held.sources["down"]}) == 2
        assert held.sources["gate_up"][3].data_ptr() == held.sources["gate_up"][1].data_ptr()
    store.give_back()
    assert all(torch.equal(layer.experts.down_proj, one) for layer, one in zip(spec.layers, weights, strict=True))


def test_published_sizes_are_the_configs_own_and_others_are_named():
    with torch.device("meta"):
        spec = models.describe(big.build("meta", shape="qwen"))
    assert (spec.L, spec.E, spec.K, spec.H, spec.F) == (40, 256, 8, 2048, 512)
    kinds = [hasattr(layer.decoder, "linear_attn") for layer in spec.layers]
    assert kinds == [True, True, True, False] * 10
    with pytest.raises(ValueError, match="shape is 'qwen4'; needed: one of olmoe, qwen"):
        big.build("cpu", shape="qwen4")


@pytest.mark.parametrize("label, stays", [("oracle", True), ("random", False), ("shuffled", False)])
def test_the_control_stops_wrong_guesses_within_a_token_or_two_and_leaves_right_ones(label, stays):
    hits = {16: 0.5, 32: 0.7, 48: 0.9}
    drive = routes.driving(None, dict(hits=hits, prompts=2, steps=20), 0, L=6, E=64, K=8)
    free, held = (
        {row["metric"]: row["median"] for row in stopped.rows(drive, [48], [[label, 2, 0, 0.0]], [least], 2, 20, 0)}
        for least in (0.0, 0.8)
    )
    assert free["on_share"] == 1.0 and held["on_share"] == (1.0 if stays else pytest.approx(0.03, abs=0.03))
    assert (free["in_time_share"] > 0.95) == stays and abs(held["more_components"]) < 0.5
    assert stays or free["more_components"] > 2
    first = stopped.replay(drive, replace(guess(Case(48), label, 2, 0, 0.0), break_even=0.8), 2)
    assert first.on.tolist() == [1.0, 1.0] if stays else 0 < first.on[0] <= 2 / 20 and first.on[1] <= 1 / 20
    assert (first.ahead > 0)[0] and (first.in_time <= first.ahead).all()


@outside
def test_rows_of_a_memory_limit_name_it_and_compare_tokens(monkeypatch):
    sizes = dict(
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        vocab_size=64,
    )
    ((part, rows),) = memory.rows(["3MB"], 64, 3, device="cpu", **sizes)
    assert part == "vram" and [row["variant"] for row in rows] == ["all experts in slots", "within 3MB"]
    assert [row["config"]["limit_bytes"] for row in rows] == [0, 3_000_000] and rows[0]["config"]["slots"] == 8
    told = iter([(torch.zeros(1), rows[0]), (torch.ones(1), rows[1])])
    monkeypatch.setattr(memory, "_run", lambda *how: next(told))
    with pytest.raises(AssertionError, match="within 3MB other tokens were generated"):
        list(memory.rows(["3MB"], 64, 3, device="cpu", **sizes))


def test_guesses_are_those_of_the_step_under_way_whenever_the_routers_counter_moves_on():
    """Compiled code may move it on before the first layer's experts: then each guess would be of the next token."""
    drive = routes.driving(None, dict(hits={2: 0.5, 4: 0.8}, prompts=1, steps=6), 0, L=3, E=8, K=2)
    spec = models.describe(big.build("cpu", shape="qwen", num_hidden_layers=3, **SIZES))
    driven, ranked = Driven(spec, drive.routes), Ranked(drive.scores["oracle"], torch.device("cpu"))
    guide = big.Charged(driven, ranked, None, 1, 3)
    driven.rewind(4)
    guide.rewind(4)
    for step in (4, 5, 0):
        driven.place.fill_(2)
        found = [guide(number, None, None) for number in range(3)]
        assert found[2] is None
        for layer, (ids, values) in enumerate(found[:2], 1):
            assert set(ids[0, :2].tolist()) == set(drive.routes[step, layer].tolist()) and values[0, :2].tolist() == [
                1,
                1,
            ]


@pytest.mark.skipif(not kernels.INTERPRETED, reason="runs inside test_in_the_interpreter")
def test_bits_are_equal_and_a_prompt_begins_again_with_its_own_states(monkeypatch):
    kinds = ["linear_attention", "full_attention"]
    drive = routes.driving(None, dict(hits={2: 0.5, 4: 0.8}, prompts=1, steps=4), 0, L=2, E=8, K=2)
    cases = [Case(8, "raw"), Case(2, "coded", "demand_serial"), Case(4, "raw"), Case(4, "coded", warm=True)]
    monkeypatch.setattr(measure, "CHECKED", 3)
    group = study.build(
        drive,
        cases,
        0,
        compile=False,
        device="cpu",
        shape="qwen",
        alike=1,
        num_hidden_layers=2,
        layer_types=kinds,
        **SIZES,
    )
    assert measure.check(group, 0) == 12
    assert group.banks["resident"]["down"][0] is group.banks["resident"]["down"][1]
    assert (
        group.banks["cold"]["down"][0] is not group.banks["cold"]["down"][1]
        and len(group.banks["cold"]["down"][0]) == 4
    )
    first = []
    for step in (0, 0, 2):
        group.rewind(cases[0], step)
        first.append(group.step(cases[0]).clone())
    assert torch.equal(first[0], first[1]) and not torch.equal(first[0], first[2])
    second = group.step(cases[0])
    assert group.handle.telemetry.path == "graph" and not torch.equal(second, first[2])
    (check, compared), (part, found) = study.apart(group, drive, 20, 0, "kept", "warm")
    assert (check, compared[0]["median"]) == ("kept, check", 12)
    assert part == "kept" and {row["metric"] for row in found} >= {"step_ms", "hit_rate", "link_bytes"}
    assert all(row["config"]["warm"] and row["config"]["slots"] == 4 for row in found)

    def differs(*_):
        raise AssertionError("a bit differs")

    monkeypatch.setattr(measure, "check", differs)
    monkeypatch.setattr(measure, "run", None)  # nothing is timed after that
    with pytest.raises(AssertionError, match="a bit differs"):
        list(study.apart(group, drive, 20, 0, "kept", "warm"))


def test_warm_cases_have_the_resident_one_first_and_their_own_without_guesses():
    found = warm_cases([2, 4], 8, [["oracle", 2, 0, 0.7]])
    assert [(case.slots, case.warm, case.predictor) for case in found] == [
        (8, False, ""),
        (2, True, ""),
        (2, True, "oracle"),
        (4, True, ""),
        (4, True, "oracle"),
    ]
    assert all(case.base in found for case in found)


@pytest.mark.skipif(not kernels.INTERPRETED, reason="runs inside test_in_the_interpreter")
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_perfect_guesses_are_in_time_where_the_whole_step_is_compiled():
    """Its compiled code moves the routers' counter on in its first kernel."""
    drive = routes.driving(None, dict(hits={2: 0.3, 4: 0.5}, prompts=1, steps=4), 0, L=8, E=8, K=2)
    cases = [Case(8, "raw"), guess(Case(4), "oracle", 2, 0, 0.7)]
    group = study.build(drive, cases, 0, True, "cpu", shape="qwen", num_hidden_layers=8, **SIZES)
    for step in (0, 1):
        group.rewind(cases[1], step)
        group.step(cases[1])
    counts = group.counts(cases[1])
    assert "compiled whole" in group.handle.why[-1]
    assert counts["in_time_gate_up"] > 10 and counts["late_gate_up"] == 0
