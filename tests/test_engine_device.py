"""The device-driven engine in Triton's interpreter: equal bits with every cache, wire, deadline and guess.

The interpreter has to be chosen before Triton is imported, so these tests run in one pytest process of their own.
"""


import pytest
import torch
import transformers
from conftest import passes_interpreted, tiny_config

from dualdeadline import engine, kernels, models
from dualdeadline.decode import big, measure, recorded, rows, singles, study
from dualdeadline.decode.cases import Case
from dualdeadline.energy import meter
from dualdeadline.engine.device import DeviceDriven
from dualdeadline.engine.driven import Driven

interpreted = pytest.mark.skipif(not kernels.INTERPRETED, reason="runs inside test_in_the_interpreter")


@pytest.mark.skipif(kernels.INTERPRETED, reason="runs outside the interpreter")
def test_in_the_interpreter():
    passes_interpreted(__file__)


def offloaded(slots, dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(tiny_config("olmoe", num_hidden_layers=2)).to(dtype).eval()
    return engine.offload(model, slots=slots, **({"backend": "graph", "device": "cpu", "kernels": "fused", "context": 16,
                                                  "predictor": None} | options))


def logits(model, rows=1, new=3, length=4):
    ids = torch.randint(1, 380, (rows, length), generator=torch.Generator().manual_seed(1))
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, output_logits=True,
                         return_dict_in_generate=True)
    handle = model.dualdeadline
    (handle.device.tables if handle.newer == "device" else handle.tables).check()
    return torch.stack(out.logits)


@pytest.fixture(scope="module")
def resident():
    return {dtype: logits(offloaded(8, dtype)) for dtype in (torch.float32, torch.bfloat16)}


@interpreted
def test_a_prompt_whose_experts_cross_early_comes_before_a_captured_step():
    """The host fills free slots of the next layer; the device's tables then count on what lies there."""
    model = offloaded(3, context=40)
    assert torch.equal(logits(model, length=20), logits(offloaded(8, context=40), length=20))
    stats = model.dualdeadline.stats()
    assert stats["bytes_early"] > 0 and stats["path"] == "graph" and not model.dualdeadline.hosted.arriving
    assert all(0 <= rate <= 1 for rate in stats["hit_rate_by_layer"])


@interpreted
@pytest.mark.parametrize("slots, options", [
    (2, {"schedule": "demand_serial"}), (2, {}), ({"gate_up": 2, "down": 8}, {}),
    (3, {"predictor": "gate_ahead", "budget": (2, 1), "threshold": 0.5}), (4, {"dtype": torch.bfloat16, "wire": "coded"}),
])
def test_bits_are_those_of_the_resident_run(resident, slots, options):
    model = offloaded(slots, **options)
    assert torch.equal(logits(model), resident[options.get("dtype", torch.float32)])
    stats = model.dualdeadline.stats()
    assert stats["path"] == "graph" and stats["paths"] == {"streams": 1, "graph": 2} and stats["misses"] > 0
    assert (stats["bytes_ahead"] > 0) == ("predictor" in options)
    model.dualdeadline.remove()
    assert not hasattr(model, "dualdeadline")


@interpreted
def test_every_forward_looks_whether_its_streams_are_its_own(monkeypatch):
    seen = []
    monkeypatch.setattr(DeviceDriven, "_own_streams", lambda self: seen.append(self))
    model = offloaded(2)
    logits(model)
    assert set(map(id, seen)) == {id(model.dualdeadline.device)} and len(seen) >= model.dualdeadline.stats()["paths"]["graph"]


@interpreted
def test_more_rows_than_slots_go_by_the_host():
    wanted = logits(offloaded(8), rows=3, new=2)
    model = offloaded(2)
    assert torch.equal(logits(model, rows=3, new=2), wanted)
    stats = model.dualdeadline.stats()
    assert stats["path"] == "streams" and "in use at once" in stats["path_reason"]


@interpreted
def test_garbage_in_free_slots_and_a_changed_store():
    model = offloaded(2)
    wanted = logits(model)
    for banks in model.dualdeadline.banks.values():
        for bank in banks:
            bank.fill_(float("nan"))
    model.dualdeadline.device.tables.clear()
    assert torch.equal(logits(model), wanted)
    with torch.no_grad():
        model.dualdeadline.store.sources["gate_up"][1].mul_(2)
    model.dualdeadline.device.tables.clear()
    assert not torch.equal(logits(model), wanted)


@interpreted
def test_measured_variants_are_checked_and_recorded(monkeypatch):
    draw, (T, L, E, K) = torch.Generator().manual_seed(0), (2, 2, 8, 2)
    routes = torch.rand(T, L, E, generator=draw).topk(K, -1).indices
    drive = study.with_controls(recorded.Recorded(routes, torch.arange(T) // 2, {"random": torch.rand(T, L, E)}, 1), 0)
    sizes = dict(hidden_size=32, intermediate_size=16, num_hidden_layers=L, num_attention_heads=2, num_key_value_heads=2,
                 num_experts=E, num_experts_per_tok=K, vocab_size=64)
    for where, name, least in ((measure, "CHECKED", 1), (big, "PROMPT", 1), (singles, "REPEATS", 1), (singles, "COUNTS", (0, 1, 2))):
        monkeypatch.setattr(where, name, least)
    cases = [Case(E, "raw"), Case(2, "raw", "demand_serial"), Case(2, "raw"), Case(2, "raw", predictor="oracle", budget=(2, 0))]
    monkeypatch.setattr(meter, "STEP_S", 0.001)
    slow = [Case(2, "raw", lanes=1, compiled=False)]
    kept = Case(2, "raw", warm=True)
    cases.insert(1, Case(2, "coded"))
    group = study.build(drive, [*cases, kept, *slow], 0, compile=False, device="cpu", **sizes)
    parts = dict(study.measured(group, drive, 20, 0, slow, 1, cases[-1], 0.1))
    assert parts["check"][0]["median"] == 7
    (copied,) = parts["links"]
    assert copied["variant"] == "copy" and copied["median"] > 0
    assert {row["config"]["lanes"] for row in parts["map"]} == {1} and {row["n"] for row in parts["map"]} == {1}
    hits = {row["config"]["warm"]: row["median"] for row in parts["steps"] if row["metric"] == "hit_rate"
            and row["variant"] == "no prefetch" and row["config"]["schedule"] == "staged_barrier"}
    assert hits[True] >= hits[False]
    energy = {(row["variant"], row["metric"]): row for row in parts["energy"]}
    assert energy["oracle", "joules_per_token"]["config"]["source"].startswith(("none", "rapl"))
    assert energy["chosen-one deadline", "energy_ratio"]["config"]["guesses"] == "oracle"
    found = {(row["variant"], row["metric"]): row for row in parts["steps"]}
    assert found["oracle", "useful_per_token"]["median"] == found["oracle", "ahead_per_token"]["median"] > 0
    assert {"two deadlines-one deadline", "oracle-no prefetch"} <= {name for name, _ in found}
    assert found["oracle", "hit_rate"]["median"] > found["no prefetch", "hit_rate"]["median"]


@interpreted
def test_driven_routes_are_what_the_experts_see():
    model = offloaded(8)
    spec, seen = models.describe(model), []
    routes = torch.tensor([[[0, 1], [2, 3]], [[4, 5], [6, 7]]])
    driven = Driven(spec, routes)
    handle = spec.layers[1].experts.register_forward_pre_hook(lambda module, args: seen.append(args[1].tolist()))
    logits(model, new=3)
    assert seen[1:] == [[[2, 3]], [[6, 7]]] and rows.RATES
    handle.remove()
    driven.remove()
