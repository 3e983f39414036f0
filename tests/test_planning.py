"""Plans under a memory limit: what is counted, what is chosen and why, with made-up costs and measured ones."""

import dataclasses
import math
import types

import numpy as np
import pytest
import torch
from conftest import FAMILIES, tiny_config
from dualdeadline import cache, models, schedule
from dualdeadline.cost import CostModel, TransferModel
from dualdeadline.planning import Plan, plan
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

LINES = {name: TransferModel(0.002, 3e-7) for name in ("gate_up", "down", "combine", "down_combine")}
SLOW = CostModel(TransferModel(1e-4, 1e-4), LINES, {}, before_ms=(0.05,), committed=1)  # copies of 0.3 ms and more
FAST = dataclasses.replace(SLOW, transfer=TransferModel(1e-4, 1e-9))
BF16 = tiny_config("olmoe", dtype=torch.bfloat16)
ROOM = 2**20  # more than a tiny model takes
L, E, K = 3, 8, 2


def made(vram=ROOM, cost=SLOW, config=BF16, context=16, **more) -> Plan:
    return plan(config, vram, cost=cost, context=context, device="cpu", **more)


def least(**more) -> int:
    """Bytes of the smallest limit that is taken, from the error's own words."""
    with pytest.raises(ValueError, match="are missing") as error:
        made(1, **more)
    return 1 + int(str(error.value).split("of which ")[1].split(" ")[0])


@pytest.fixture(scope="module")
def routes():
    """Routes [T,L,K] with reuse: most tokens keep an expert of the token before."""
    draw = np.random.default_rng(0)
    found = np.argsort(draw.random((40, L, E)), -1)[..., :K]
    for token in range(1, 40):
        for layer in range(L):
            if draw.random() < 0.7 and found[token - 1, layer, 0] != found[token, layer, 1]:
                found[token, layer, 0] = found[token - 1, layer, 0]
    return torch.from_numpy(found)


@settings(max_examples=30, deadline=None)
@given(vram=st.integers(1, ROOM), context=st.integers(1, 64), batch=st.integers(1, 3), cuda=st.booleans())
def test_the_limit_is_never_exceeded(vram, context, batch, cuda):
    vram += 120 * 2**20 if cuda else 0
    try:
        found = plan(BF16, vram, cost=FAST, context=context, batch=batch, device="cuda" if cuda else "cpu")
    except ValueError as error:
        assert "are missing" in str(error)
        return
    parts = [found.bytes[f"{name}_bytes"] for name in ("weights", "cache", "slots", "workspace")]
    assert sum(parts) == found.bytes["total_bytes"] <= found.bytes["limit_bytes"] == vram
    assert min(parts) > 0 and 1 <= found.slots <= E
    assert found.bytes["slots_bytes"] == found.slots * L * 3 * 32 * 16 * 2


def test_one_byte_less_than_needed_is_refused_with_what_is_missing():
    size = least()
    assert made(size).slots == 1 and made(size).bytes["total_bytes"] == size
    with pytest.raises(ValueError, match=f"vram is {size - 1} bytes; needed: {size} .* of which 1 are missing"):
        made(size - 1)


@pytest.mark.parametrize("recorded", (False, True))
def test_more_memory_never_means_fewer_slots_or_slower_steps(recorded, routes):
    trace = routes if recorded else None
    plans = [made(int(vram), trace=trace) for vram in np.linspace(least(), least() + 9 * 10_240, 20)]
    slots, speed = [found.slots for found in plans], [found.tokens_per_s for found in plans]
    assert slots == sorted(slots) and set(slots) >= {1, 2, 4, 8}
    assert all(late >= early * (1 - 1e-9) for early, late in zip(speed, speed[1:]))
    assert speed[-1] > 2 * speed[0]


def test_slots_are_as_many_as_fit_and_never_more_than_experts():
    some = made(least() + 40_000)
    assert K <= some.slots < E - 1
    needed = some.bytes["total_bytes"] + L * 3 * 32 * 16 * 2
    assert needed > some.bytes["limit_bytes"]
    assert (made(needed).slots, made(needed - 1).slots) == (some.slots + 1, some.slots)
    everything = made(10 * ROOM)
    assert (everything.slots, everything.hit_rate, everything.wire, everything.prefetch) == (E, 1.0, "raw", False)
    assert "everything is resident" in everything.why[0]


def test_a_slow_link_is_worth_a_decode_and_a_fast_one_is_not():
    vram = least() + 40_000
    slow, fast = made(vram, SLOW), made(vram, FAST)
    assert (slow.wire, fast.wire) == ("coded", "raw") and slow.slots == fast.slots
    assert slow.tokens_per_s < fast.tokens_per_s
    assert "11.2 bits" in slow.why[-1] and "assumed" in slow.why[-1]


def test_a_measured_decode_decides():
    slow = {stage: TransferModel(50.0, 0.0) for stage in schedule.DECODES}
    found = made(least() + 40_000, dataclasses.replace(SLOW, stages=LINES | slow))
    assert found.wire == "raw" and "50.0000 ms to decode (measured)" in found.why[-1]


def test_only_bfloat16_is_coded():
    config = tiny_config("olmoe", dtype=torch.float32)
    found = made(least(config=config), config=config)
    assert found.wire == "raw" and "torch.float32 has no coded form" in found.why[2]


def test_the_step_is_what_its_parts_take():
    """One expert of three layers with nothing present: a serial step can be added up by hand."""
    config = tiny_config("olmoe", num_experts_per_tok=1, dtype=torch.float32)
    size = {"gate_up": 2 * 32 * 16 * 4, "down": 32 * 16 * 4}
    times = {"gate_up": 0.5, "down_combine": 0.25, "down": 9.0, "combine": 9.0}
    lines = {stage: TransferModel(ms, 0.0) for stage, ms in times.items()}
    cost = CostModel(TransferModel(1.0, 1e-4), lines, size, before_ms=(0.125,))
    trace = torch.arange(40).view(-1, 1, 1).expand(-1, L, 1) % E  # round and round: one slot never hits
    found = made(least(config=config), cost, config, trace=trace)
    whole = 0.125 + 1.0 + 1e-4 * sum(size.values()) + 0.5 + 0.25  # demand_serial, whole experts
    assert found.slots == 1 and found.hit_rate == 0 and found.schedule == "demand_serial"
    assert found.tokens_per_s == pytest.approx(1e3 / (L * whole))


def test_the_hit_rate_is_that_of_the_trace(routes):
    prompt = torch.arange(40) // 20
    trace = types.SimpleNamespace(routes=routes, prompt=prompt)
    for spare in (0, 20_000, 40_000):
        found = made(least() + spare, trace=trace)
        expected = cache.hit_rate(routes, found.slots, order="token", prompt=prompt, experts=E).mean()
        assert found.hit_rate == pytest.approx(expected) and "40 recorded tokens" in found.why[1]
    uniform = made(least() + 40_000)
    assert uniform.hit_rate == uniform.slots / E and "uniform" in uniform.why[1]
    assert found.tokens_per_s != uniform.tokens_per_s


def test_a_recorded_trace_is_taken_with_its_prompts(tiny_store, tiny_model):
    trace, model = tiny_store.split("all", ("routes", "weights")), tiny_model("olmoe")[0]
    found = made(least(config=model) + 60_000, config=model, trace=trace)
    expected = cache.hit_rate(trace.routes, found.slots, order="token", prompt=trace.prompt, experts=E).mean()
    assert 1 < found.slots < E and found.hit_rate == pytest.approx(expected)


def test_sequences_of_a_batch_share_the_slots(routes):
    vram = least(batch=2) + 40_000
    two = made(vram, trace=routes, batch=2)
    assert two.hit_rate == pytest.approx(cache.hit_rate(routes, two.slots // 2, order="token", experts=E).mean())
    assert two.bytes["cache_bytes"] == 2 * made(vram, trace=routes).bytes["cache_bytes"]


def test_a_plan_without_guesses_names_what_they_need(routes):
    few = [line for line in made(least() + 3 * 2**14, trace=routes).why if "prefetch" in line]
    assert few == ["prefetch not planned: needed: a predictor's scores for a trace"]
    every = [line for line in made(2**30, trace=routes).why if "prefetch" in line]
    assert every == [f"prefetch not planned: needed: a predictor's scores for a trace, {K} < slots < {E} (is {E})"]


def test_prefetch_needs_scores_that_help(routes):
    perfect = torch.zeros(40, L - 1, E).scatter_(-1, routes[:, 1:], 1.0)
    cost = dataclasses.replace(SLOW, before_ms=(0.5,))
    vram = least() + 55_000
    off, on = made(vram, cost, trace=routes), made(vram, cost, trace=routes, scores=perfect)
    wrong = made(vram, cost, trace=routes, scores=1 - perfect)
    assert on.prefetch and on.budget >= 1 and on.horizon == 1 and on.piece in ("expert", "gate_up") and on.threshold > 0
    assert on.tokens_per_s > 1.02 * off.tokens_per_s and "prefetch on" in on.why[4]
    assert not wrong.prefetch and wrong.tokens_per_s == off.tokens_per_s and "gain -" in wrong.why[4]
    assert (off.prefetch, off.budget, off.horizon, off.piece) == (False, 0, 0, "") and "scores" in off.why[4]
    assert on.slots == off.slots == wrong.slots
    broken = made(vram, cost, trace=routes, scores=perfect * math.nan)
    assert not broken.prefetch


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_and_its_model_are_counted_alike(family):
    config = tiny_config(family, dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    found = made(2 * ROOM, config=model)
    assert found == made(2 * ROOM, config=config)
    spec = models.describe(model)
    experts = sum(layer.experts.gate_up_proj.nbytes + layer.experts.down_proj.nbytes for layer in spec.layers)
    everything = sum(value.nbytes for value in [*model.parameters(), *model.buffers()])
    assert found.bytes["slots_bytes"] == experts and found.bytes["weights_bytes"] == everything - experts


@pytest.mark.parametrize("family", ("olmoe", "deepseek_v3", "qwen3_next", "gpt_oss"))
@torch.no_grad()
def test_the_kv_cache_is_not_less_than_transformers_own(family):
    config = tiny_config(family, dtype=torch.float32)
    model = AutoModelForCausalLM.from_config(config).eval()
    for context in (1, 64):
        out = model(torch.zeros(2, context, dtype=torch.long), use_cache=True)
        names = ("keys", "values", "conv_states", "recurrent_states")
        held = [getattr(layer, name, None) for layer in out.past_key_values.layers for name in names]
        real = sum(value.nbytes for value in held if isinstance(value, torch.Tensor))
        counted = made(4 * ROOM, config=config, context=context, batch=2).bytes["cache_bytes"]
        assert 0 < real <= counted
    if family == "olmoe":
        assert real == counted


def test_workspace_grows_with_the_prefill():
    short, long = (made(8 * ROOM, context=context).bytes["workspace_bytes"] for context in (16, 256))
    assert long - short >= 240 * 32 * 2  # hidden states of 240 tokens more
    eager, plain = tiny_config("olmoe", attn_implementation="eager"), tiny_config("olmoe")
    assert (made(16 * ROOM, config=eager, context=256).bytes["workspace_bytes"]
            > made(16 * ROOM, config=plain, context=256).bytes["workspace_bytes"])


@pytest.mark.parametrize("text, size", (("900kB", 900_000), ("0.5MiB", 2**19), (" 1 MB ", 10**6), ("800000B", 800_000)))
def test_limits_as_text(text, size):
    assert made(text) == made(size) and made(text).bytes["limit_bytes"] == size


@pytest.mark.parametrize("vram", (0, -1, 1.5, True, None, "6", "6 G", "GiB", "-1GiB", "0MB", "6GiB or so", [1]))
def test_other_limits_are_refused(vram):
    with pytest.raises(ValueError, match="memory is .*; needed: .*6GiB"):
        made(vram)


def test_other_wrong_arguments_are_refused(routes):
    for more, text in (
        ({"context": 0}, "context is 0"), ({"batch": 1.5}, "batch is 1.5"), ({"batch": "2GB"}, "batch is '2GB'"),
        ({"config": "olmoe"}, "model is a str; needed"),
        ({"trace": routes[:, :2]}, r"\[40, 2, 2\]; needed: \[T, 3, 2\]"),
        ({"trace": routes + 1}, "needed: 0 to 7"), ({"scores": torch.rand(40, 2, E)}, "trace has routes"),
        ({"trace": routes, "scores": torch.rand(40, 3, E)}, "horizon of 1 to 2"),
        ({"trace": routes, "scores": torch.rand(39, 2, E)}, r"needed: .*\[40"),
        ({"trace": routes, "scores": 2 * torch.ones(40, 2, E)}, "2 to 2; needed: 0 to 1"),
    ):
        with pytest.raises(ValueError, match=text):
            made(**more)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_a_gpu_that_is_not_there_cannot_be_measured():
    with pytest.raises(ValueError, match="no GPU is here"):
        plan(BF16, "1GiB", device="cuda")


def test_a_gpu_keeps_room_for_its_allocator():
    cpu, gpu = (plan(BF16, "1GiB", cost=SLOW, context=16, device=kind).bytes for kind in ("cpu", "cuda"))
    assert gpu["workspace_bytes"] - cpu["workspace_bytes"] >= 96 * 2**20


def test_the_plan_reads_as_a_table(routes):
    found = made(least() + 40_000, trace=routes)
    text = str(found)
    for line in ("slots  ", "wire ", "schedule ", "prefetch ", "weights memory ", "limit memory "):
        assert sum(row.startswith(line) for row in text.splitlines()) == 1, line
    assert all(f"- {reason}" in text for reason in found.why) and len(found.why) == 6
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.slots = 1


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_times_are_measured_where_none_are_given(dtype):
    config = tiny_config("deepseek_v3", dtype=dtype)
    found = plan(config, least(config=config), context=16, device="cpu")
    assert found.slots == 1 and 0 < found.tokens_per_s < math.inf
    assert "measured on this cpu" in found.why[-1]
    assert ("(measured)" in found.why[-1]) == (dtype is torch.bfloat16)
