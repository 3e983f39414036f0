"""Offloaded decode against the resident run: the same bits whatever the slots, schedule, guesses or shapes are."""

import threading

import pytest
import torch
import transformers
from conftest import FAMILIES, tiny_config

from dualdeadline import engine, models, schedule
from dualdeadline.engine import hosted, surgery
from dualdeadline.sizes import parse_bytes


def build(family="olmoe", dtype=torch.float32, **changes):
    torch.manual_seed(0)
    kind = transformers.AutoModelForImageTextToText if family == "qwen3_5_moe" else transformers.AutoModelForCausalLM
    model = kind.from_config(tiny_config(family, **changes)).to(dtype).eval()
    model.set_experts_implementation("eager")
    return model


@pytest.fixture(scope="module")
def olmoe():
    return build()


def offloaded(model, slots=3, **options):
    return engine.offload(model, slots=slots, **({"backend": "cpu"} | options))


def text(rows=3, length=9, seed=0):
    return torch.randint(1, 380, (rows, length), generator=torch.Generator().manual_seed(seed))


def run(model, ids, new=6, **options):
    """Logits of the prompt and generated tokens."""
    mask = options.pop("attention_mask", torch.ones_like(ids))
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits
        return logits, model.generate(ids, attention_mask=mask, max_new_tokens=new, **({"do_sample": False} | options))


def same(first, second):
    assert torch.equal(first[0], second[0]), "logits differ"
    assert torch.equal(first[1], second[1]), "tokens differ"


@pytest.fixture(autouse=True)
def put_back(olmoe):
    yield
    if hasattr(olmoe, "dualdeadline"):
        olmoe.dualdeadline.remove()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_bitwise_the_eager_run(family):
    model, ids = build(family), text()
    wanted = run(model, ids)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for slots in (1, 3, 8):
        offloaded(model, slots, schedule="staged_pipelined")
        same(run(model, ids), wanted)
        model.dualdeadline.tables.check()
        model.dualdeadline.remove()
    after = model.state_dict()
    assert set(before) == set(after) and all(torch.equal(after[name], value) for name, value in before.items())
    same(run(model, ids), wanted)


@pytest.mark.parametrize("name, slots", [
    *((name, 2) for name in schedule.NAMES), ("demand_pipelined", 1), ("component_priority", 5),
    ("staged_pipelined", {"gate_up": 2, "down": 8}), ("staged_barrier", {"gate_up": 8, "down": 1}),
], ids=str)
def test_every_schedule_and_cache(olmoe, name, slots):
    wanted = run(olmoe, text())
    offloaded(olmoe, slots, schedule=name)
    same(run(olmoe, text()), wanted)
    counts = olmoe.dualdeadline.stats()
    if slots == {"gate_up": 2, "down": 8}:
        assert counts["misses_down"] <= 24 < counts["misses_gate_up"]


@pytest.mark.parametrize("slots", [3, 5])
def test_whatever_order_experts_arrive_in_they_are_added_in_ascending_id(slots):
    """With four experts per token; the sum of two does not depend on their order."""
    model, ids = build(num_experts_per_tok=4), text()
    wanted = run(model, ids)
    offloaded(model, slots, schedule="demand_pipelined")
    same(run(model, ids), wanted)


@pytest.mark.parametrize("wire", ["raw", "coded"])
def test_bfloat16_and_the_wire_format(wire):
    model, ids = build(dtype=torch.bfloat16), text()
    wanted, before = run(model, ids), {name: value.clone() for name, value in model.state_dict().items()}
    offloaded(model, wire=wire)
    same(run(model, ids), wanted)
    assert model.dualdeadline.stats()["wire"] == wire
    model.dualdeadline.remove()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_batches_left_padding_sampling_and_static_caches(olmoe):
    ids, mask = text(4, 12), torch.ones(4, 12, dtype=torch.long)
    mask[0, :7] = mask[2, :3] = 0

    def sampled():
        torch.manual_seed(3)
        return run(olmoe, ids, 8, attention_mask=mask, do_sample=True, cache_implementation="static", disable_compile=True)

    wanted = sampled()
    offloaded(olmoe, 2)
    same(sampled(), wanted)


def test_a_long_prompt_through_few_slots(olmoe):
    wanted = run(olmoe, text(1, 200), 4)
    offloaded(olmoe, 2)
    same(run(olmoe, text(1, 200), 4), wanted)
    assert olmoe.dualdeadline.stats()["misses"] > 0


def adversaries(E):
    """Predictors that guess badly; every one must leave the bits alone."""
    def steady(value):
        return lambda number, hidden, ids: torch.full((len(hidden), E), value)

    draw = torch.Generator().manual_seed(1)
    return {
        "random": lambda number, hidden, ids: torch.rand(len(hidden), E, generator=draw),
        "nan": steady(float("nan")), "infinite": steady(float("inf")), "all": steady(1.0),
        "another shape": lambda number, hidden, ids: torch.ones(3, 2, 1),
        "raises": lambda number, hidden, ids: 1 / 0,
        "what was routed": lambda number, hidden, ids: torch.zeros(len(hidden), E).scatter_(1, ids.long(), 1.0),
        "what was not": lambda number, hidden, ids: torch.ones(len(hidden), E).scatter_(1, ids.long(), 0.0),
    }


@pytest.mark.parametrize("name", list(adversaries(8)))
def test_bad_guesses_change_nothing_but_counters(olmoe, name):
    wanted = run(olmoe, text())
    offloaded(olmoe, 3, predictor=adversaries(8)[name], budget=(3, 3), horizon=1)
    same(run(olmoe, text()), wanted)
    same(run(olmoe, text()), wanted)
    counts = olmoe.dualdeadline.stats()
    olmoe.dualdeadline.tables.check()
    assert counts["bytes_useful"] + counts["bytes_wasted"] <= counts["bytes_ahead"]
    assert ("failed" in counts["prefetch_reason"]) == (name in ("another shape", "raises"))


def test_every_intercepted_product_is_the_eager_one(monkeypatch):
    """Each expert's weighted output, one by one, against the module's own eager code for that expert alone."""
    model = build(num_hidden_layers=4)
    spec = models.describe(model)
    weights = [(layer.experts.gate_up_proj.detach().clone(), layer.experts.down_proj.detach().clone()) for layer in spec.layers]
    offloaded(model, 2, predictor=None)
    compared = 0

    class Watched(hosted.KERNELS["torch"]):
        def finish(self):
            nonlocal compared
            gate_up, down = weights[self.layer.number]
            for expert, (rank, token) in self.places.items():
                gate, up = torch.nn.functional.linear(self.x[token], gate_up[expert]).chunk(2, -1)
                alone = torch.nn.functional.linear(self.layer.module.act_fn(gate) * up, down[expert])
                assert torch.equal(self.weighted[expert], alone * self.weights[token, rank, None])
                compared += 1
            return super().finish()

    monkeypatch.setitem(hosted.KERNELS, "torch", Watched)
    for seed in range(12):
        run(model, text(3, 9, seed), 12)
    assert compared >= 3120


def test_offload_is_real(olmoe):
    wanted = run(olmoe, text())
    offloaded(olmoe, 3, predictor=None)
    handle = olmoe.dualdeadline
    assert all(layer.module.gate_up_proj.is_meta and layer.module.down_proj.is_meta for layer in handle.layers)
    for banks in handle.banks.values():
        for bank in banks:
            bank.fill_(float("nan"))
    same(run(olmoe, text()), wanted)  # NaN in free slots never reaches the output
    handle.tables.clear()
    with torch.no_grad():
        handle.store.sources["down"][0].mul_(2)
    assert not torch.equal(run(olmoe, text())[0], wanted[0])
    with torch.no_grad():
        handle.store.sources["down"][0].div_(2)


def test_two_runs_are_equal_and_stats_add_up(olmoe):
    offloaded(olmoe, 4, predictor="auto", threshold=0.1, budget=(2, 1))
    first, second = run(olmoe, text()), run(olmoe, text())
    same(first, second)
    counts = olmoe.dualdeadline.stats()
    sizes = {part: olmoe.dualdeadline.store.bytes(part) for part in schedule.COMPONENTS}
    assert counts["bytes_demand"] == sum(counts[f"misses_{part}"] * size for part, size in sizes.items())
    assert counts["hits_gate_up"] + counts["misses_gate_up"] == counts["hits_down"] + counts["misses_down"]
    assert counts["path"] == "cpu" and counts["forwards"] == 14 and counts["bytes_ahead"] > 0
    assert 0 < counts["hit_rate"] < 1


def test_the_optimum_is_not_below_what_was_hit(olmoe):
    offloaded(olmoe, 4, predictor=None)
    run(olmoe, text(1, 2), 40)
    counts = olmoe.dualdeadline.stats()
    assert counts["hit_rate_optimum"] >= counts["hit_rate"] - 0.05 > 0


def test_an_error_in_a_copy_leaves_no_wrong_slot(olmoe, monkeypatch):
    wanted = run(olmoe, text())
    offloaded(olmoe, 3)
    bring, calls = hosted.Hosted.bring, []

    def fails_once(self, *args):
        calls.append(threading.current_thread().name)
        if len(calls) == 7:
            raise OSError("the link broke")
        return bring(self, *args)

    monkeypatch.setattr(hosted.Hosted, "bring", fails_once)
    with pytest.raises(OSError, match="the link broke"):
        run(olmoe, text())
    same(run(olmoe, text()), wanted)
    assert all(name.startswith("dualdeadline-link") for name in calls)


def test_backward_is_refused_and_forward_with_gradients_is_not(olmoe):
    wanted = olmoe(text()).logits
    offloaded(olmoe)
    found = olmoe(text()).logits
    assert torch.equal(found, wanted)
    with pytest.raises(RuntimeError, match="before training"):
        found.sum().backward()
    olmoe.train()
    with pytest.raises(RuntimeError, match="training mode"):
        olmoe(text())
    olmoe.eval()


@pytest.mark.parametrize("options, words", [
    ({"slots": 0}, "at least 1"), ({"slots": 2.5}, "at least 1"), ({"slots": {"gate_up": 2}}, "gate_up and down"),
    ({"slots": None}, "exactly one"), ({"slots": 2, "vram": "1GiB"}, "exactly one"), ({"schedule": "best"}, "needed"),
    ({"wire": "coded"}, "bfloat16"), ({"wire": "zip"}, "raw"), ({"backend": "graph"}, "on a CPU"),
    ({"backend": "gpu"}, "streams"), ({"kernels": "fused"}, "needed: kernels 'torch'"), ({"kernels": "fast"}, "torch"),
    ({"tier": "ssd"}, "pinned"), ({"predictor": "popularity"}, "fitted"), ({"predictor": 3}, "callable"),
    ({"budget": (0, 0)}, "budget"), ({"budget": 3}, "budget"), ({"budget": (1.5, 0)}, "whole numbers"),
    ({"horizon": "1"}, "whole number"), ({"threshold": "x"}, "probability"), ({"context": -3}, "context"), ({"device": "meta"}, "torch sees"), ({"horizon": 9}, "horizon"), ({"compile": True}, "graph"), ({"device": "cuda"}, "torch sees"),
])
def test_wrong_choices_are_named_and_leave_the_model_alone(olmoe, options, words):
    wanted = run(olmoe, text(), 2)
    with pytest.raises((ValueError, RuntimeError), match=words):
        offloaded(olmoe, **options)
    assert not hasattr(olmoe, "dualdeadline")
    same(run(olmoe, text(), 2), wanted)


def test_models_that_cannot_be_offloaded(olmoe):
    olmoe.train()
    with pytest.raises(ValueError, match="eval"):
        offloaded(olmoe)
    olmoe.eval()
    module = models.describe(olmoe).layers[1].experts
    module.lora_a = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="lora_a"):
        offloaded(olmoe)
    del module.lora_a
    offloaded(olmoe)
    with pytest.raises(ValueError, match="already"):
        offloaded(olmoe)
    dense = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                 num_attention_heads=2)).eval()
    with pytest.raises(ValueError, match="no MoE layer"):
        offloaded(dense)


def test_a_predictor_of_other_sizes_is_refused(olmoe):
    from dualdeadline.engine import guide

    other = guide.untrained(models.describe(build(num_experts=4)), 1)
    with pytest.raises(ValueError, match="fitted for"):
        offloaded(olmoe, predictor=other)


@pytest.mark.parametrize("size, bytes", [("6GiB", 6 * 2**30), ("1.5 MB", 1_500_000), (7, 7)])
def test_sizes(size, bytes):
    assert parse_bytes(size) == bytes


@pytest.mark.parametrize("size", ["", "6 Gb", "-1GiB", 0, -5, True, None, 2.5, "GiB"])
def test_sizes_that_mean_nothing(size):
    with pytest.raises(ValueError, match="6GiB"):
        parse_bytes(size)


def test_host_memory_is_not_doubled():
    """Weights that are in host memory stay where they are."""
    model = build()
    places = [layer.experts.down_proj.data_ptr() for layer in models.describe(model).layers]
    offloaded(model)
    assert [source.data_ptr() for source in model.dualdeadline.store.sources["down"]] == places
    assert surgery.NAME == models.describe(model).layers[0].experts.config._experts_implementation


def test_threads_take_turns(olmoe):
    wanted, found, ids = run(olmoe, text()), [], text()
    offloaded(olmoe, 3)
    threads = [threading.Thread(target=lambda: found.append(run(olmoe, ids))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    for one in found:
        same(one, wanted)


def test_other_models_with_the_same_config_stay_as_they_are(olmoe):
    torch.manual_seed(0)
    other = transformers.AutoModelForCausalLM.from_config(olmoe.config).eval()
    assert other.config is olmoe.config
    wanted = run(other, text(), 2)
    offloaded(olmoe)
    same(run(other, text(), 2), wanted)
    offloaded(other)
    olmoe.dualdeadline.remove()
    same(run(other, text(), 2), wanted)
    assert olmoe.config._experts_implementation == "eager"
    other.dualdeadline.remove()


def test_another_experts_implementation_asked_for_later_changes_nothing(olmoe):
    wanted = run(olmoe, text(), 2)
    offloaded(olmoe)
    olmoe.set_experts_implementation("grouped_mm")
    same(run(olmoe, text(), 2), wanted)
    olmoe.set_experts_implementation("eager")


def test_parameters_come_back_as_they_were(olmoe):
    before = dict(olmoe.named_parameters())
    wanted = {name: value.requires_grad for name, value in before.items()}
    with torch.inference_mode():
        offloaded(olmoe)
        olmoe.dualdeadline.remove()
    after = dict(olmoe.named_parameters())
    assert {name: value.requires_grad for name, value in after.items()} == wanted
    assert all(after[name] is value and not value.is_inference() for name, value in before.items())


def test_an_old_handle_does_nothing_more(olmoe):
    offloaded(olmoe)
    old = olmoe.dualdeadline
    old.remove()
    offloaded(olmoe)
    old.remove()
    assert olmoe.dualdeadline is not old


def test_a_predictor_gets_copies_and_random_numbers_of_its_own():
    model, ids = build("qwen2_moe"), text()

    def sampled():
        torch.manual_seed(5)
        return run(model, ids, do_sample=True)

    def spoils(number, hidden, routes):
        torch.rand(3)
        routes.zero_()
        return hidden.zero_()[:, :1].float().expand(-1, 8)

    wanted = sampled()
    offloaded(model, predictor=spoils)
    same(sampled(), wanted)


def test_an_interruption_while_waiting_leaves_no_wrong_slot(olmoe, monkeypatch):
    wanted = run(olmoe, text())
    offloaded(olmoe, 3)
    settle, wave = type(olmoe.dualdeadline.hosted.lanes).settle, hosted.Hosted._wave

    def interrupted(self, *args):
        raise KeyboardInterrupt

    def late(self, number, *args):
        wave(self, number, *args)
        if number == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(type(olmoe.dualdeadline.hosted.lanes), "settle", interrupted)
    monkeypatch.setattr(hosted.Hosted, "_wave", late)
    with pytest.raises(KeyboardInterrupt):
        run(olmoe, text())
    monkeypatch.setattr(type(olmoe.dualdeadline.hosted.lanes), "settle", settle)
    monkeypatch.setattr(hosted.Hosted, "_wave", wave)
    same(run(olmoe, text()), wanted)


def test_reasons_are_those_that_hold(olmoe):
    offloaded(olmoe, 8)
    run(olmoe, text(), 2)
    counts = olmoe.dualdeadline.stats()
    assert not counts["prefetch_on"] and "nothing to guess" in counts["prefetch_reason"]
    olmoe.dualdeadline.remove()
    offloaded(olmoe, 3, predictor=lambda number, hidden, ids: torch.zeros(len(hidden), 8).scatter_(1, 7 - ids.long(), 1.0),
              budget=(3, 3))
    run(olmoe, text(1, 4), 60)
    counts = olmoe.dualdeadline.stats()
    assert counts["prefetch_on"] or "live precision" in counts["prefetch_reason"]
    assert counts["hits"] + counts["misses"] == counts["hits_down"] + counts["misses_down"]
    assert counts["misses"] >= max(counts["misses_gate_up"], counts["misses_down"])
