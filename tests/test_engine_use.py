"""What a user does to an offloaded model, and how its layers are driven by the host: pools, prompts, times, guesses."""

import copy
import multiprocessing
import pickle

import pytest
import torch
import transformers
from test_engine import build, offloaded, run, same, text

import dualdeadline
from dualdeadline import models, schedule
from dualdeadline.cache.pool import Pool
from dualdeadline.engine import hosted, worth
from dualdeadline.engine.timing import TimedCaller
from dualdeadline.engine.worth import Worth


@pytest.fixture
def olmoe():
    return build()


# what a user does to it


@pytest.mark.parametrize("change", [
    lambda model: model.half(), lambda model: model.to(torch.bfloat16), lambda model: model.to("meta"),
    lambda model: model.double(), lambda model: model.model.layers[1].half(), lambda model: model.share_memory(),
    lambda model: model.model.layers.to(dtype=torch.float16), lambda model: model.to_empty(device="cpu"),
    lambda model: model.load_state_dict(build().state_dict()), lambda model: copy.deepcopy(model),
    lambda model: model.model.layers[0].mlp.experts.half(), lambda model: pickle.dumps(model),
    lambda model: torch.save(model, "/dev/null"), lambda model: copy.deepcopy(model.model.layers[2]),
], ids=range(14))
def test_what_would_half_change_it_is_refused_by_name(olmoe, change):
    wanted = run(olmoe, text(), 2)
    offloaded(olmoe)
    with pytest.raises(RuntimeError, match=r"needed: model.dualdeadline.remove\(\)"):
        change(olmoe)
    same(run(olmoe, text(), 2), wanted)
    olmoe.dualdeadline.remove()
    same(run(olmoe, text(), 2), wanted)
    assert olmoe.half().dtype == torch.float16 and copy.deepcopy(olmoe).dtype == torch.float16


def test_what_changes_nothing_is_allowed(olmoe):
    wanted = run(olmoe, text(), 2)
    offloaded(olmoe)
    assert olmoe.to("cpu") is olmoe and olmoe.float() is olmoe and olmoe.cpu() is olmoe
    assert olmoe.to(torch.float32) is olmoe and olmoe.model.to(device="cpu", dtype=torch.float32) is olmoe.model
    assert olmoe.lm_head.half().weight.dtype == torch.float16  # no experts there
    olmoe.lm_head.float()
    with pytest.raises(RuntimeError, match="moved, cast or shared"):
        olmoe.lm_head.half() and olmoe.float()
    olmoe.lm_head.float()
    assert run(olmoe, text(), 2)[0].shape == wanted[0].shape


@pytest.mark.parametrize("wire", ["raw", "coded"])
def test_state_dicts_and_saved_checkpoints_are_whole(tmp_path, wire):
    dtype = torch.bfloat16 if wire == "coded" else torch.float32
    build().save_pretrained(tmp_path / "first")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "first", dtype=dtype)
    model.set_experts_implementation("eager")
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    bits = run(model, text(), 2)
    offloaded(model, wire=wire)
    found = model.state_dict()
    assert list(found) == list(wanted) and all(torch.equal(found[name], value) for name, value in wanted.items())
    inner = model.model.layers[1].state_dict()
    assert torch.equal(inner["mlp.experts.down_proj"], wanted["model.layers.1.mlp.experts.down_proj"])
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=model.dtype)
    again.set_experts_implementation("eager")
    same(run(again, text(), 2), bits)
    same(run(model, text(), 2), bits)
    same(run(dualdeadline.load(tmp_path, 2, backend="cpu"), text(), 2), bits)


def forked(model, queue):
    for call in (lambda: model(text()), model.dualdeadline.remove):
        try:
            call()
            queue.put("nothing")
        except RuntimeError as error:
            queue.put(str(error))


def test_a_forked_process_is_told_and_does_not_hang(olmoe):
    wanted = run(olmoe, text(), 2)
    offloaded(olmoe)
    run(olmoe, text(), 2)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=forked, args=(olmoe, queue))
    child.start()
    for _ in range(2):
        assert "needed: workers that are spawned" in queue.get(timeout=30)
    child.join(30)
    assert child.exitcode == 0
    same(run(olmoe, text(), 2), wanted)


class Rows(torch.utils.data.Dataset):
    """Rows of ids, beside a model that no worker runs."""

    def __init__(self, model):
        self.model = model

    def __len__(self):
        return 4

    def __getitem__(self, number):
        return text(1, 5, number)[0]


def test_workers_of_a_data_loader_that_only_hold_the_model(olmoe):
    wanted = [run(olmoe, text(1, 5, number), 2) for number in range(4)]
    offloaded(olmoe)
    loader = torch.utils.data.DataLoader(Rows(olmoe), num_workers=1, multiprocessing_context="fork")
    for ids, one in zip(loader, wanted, strict=True):
        same(run(olmoe, ids, 2), one)


class Twice(torch.nn.Module):
    """An adapter as PEFT puts it on a parameter: what is read is not what the store holds."""

    def forward(self, weight):
        return 2 * weight


def test_adapters_and_weights_that_come_later_are_an_error_and_never_ignored(olmoe):
    module = models.describe(olmoe).layers[1].experts
    offloaded(olmoe)
    torch.nn.utils.parametrize.register_parametrization(module, "down_proj", Twice(), unsafe=True)
    with pytest.raises(RuntimeError, match=r"layers.1: OlmoeExperts|layers.1 was given another down_proj"):
        olmoe(text())
    torch.nn.utils.parametrize.remove_parametrizations(module, "down_proj", leave_parametrized=False)
    other = build()
    offloaded(other)
    wanted = run(other, text(), 2)
    own = models.describe(other).layers[0].experts
    kept, own.gate_up_proj = own.gate_up_proj, torch.nn.Parameter(torch.zeros(8, 32, 32))
    with pytest.raises(RuntimeError, match="another gate_up_proj"):
        other(text())
    own.gate_up_proj = kept
    same(run(other, text(), 2), wanted)


# one pool for all layers


@pytest.mark.parametrize("slots", [1, 2, {"gate_up": 2, "down": 5}, {"gate_up": 5, "down": 1}, 7, 8], ids=str)
def test_a_shared_pool_gives_the_same_bits(olmoe, slots):
    wanted = run(olmoe, text(1, 4), 12), run(olmoe, text(2, 40, 1), 4)
    offloaded(olmoe, slots, pool="shared", predictor="gate_ahead", threshold=0.1, budget=(2, 2))
    for _ in range(2):
        same(run(olmoe, text(1, 4), 12), wanted[0])
        same(run(olmoe, text(2, 40, 1), 4), wanted[1])
    handle, counts = olmoe.dualdeadline, olmoe.dualdeadline.stats()
    handle.tables.check()
    assert counts["pool"] == ("layer" if slots == 8 else "shared")
    if slots != 8:
        assert handle.banks["down"][0] is handle.banks["down"][2]
        size = slots["down"] if isinstance(slots, dict) else slots
        assert len(handle.banks["down"][0]) == 3 * size
    rates = counts["hit_rate_by_layer"]
    assert len(rates) == 3 and all(0 <= rate <= 1 for rate in rates)


def test_a_shared_pool_goes_to_the_layer_that_needs_it():
    """Two experts in turn in layer 0, six in layer 1: with four slots each, layer 1 misses for ever; shared, no more."""
    def misses(shared):
        pool = Pool(2, 8, (4, 4), shared)
        for step in range(24):
            for layer, experts in ((0, [step % 2]), (1, [step % 6])):
                pool.lookup(layer, experts)
        return pool.misses

    assert misses(False) == [2, 24] and misses(True) == [2, 6]


def test_the_pool_counts_what_each_layer_asked_for(olmoe):
    rates = {}
    for pool in ("layer", "shared"):
        offloaded(olmoe, 4, pool=pool, predictor=None)
        run(olmoe, text(1, 3), 40)
        counts = olmoe.dualdeadline.stats()
        own = olmoe.dualdeadline.pool
        asked = own.counters[:, :2].sum(1)
        assert int(asked.sum()) == counts["hits"] + counts["misses"]
        rates[pool] = counts["hit_rate_by_layer"]
        mean = sum(rate * int(count) for rate, count in zip(rates[pool], asked)) / int(asked.sum())
        assert mean == pytest.approx(counts["hit_rate"])
        assert counts["hit_rate_optimum"] >= counts["hit_rate"] - 0.05
        olmoe.dualdeadline.remove()
    assert rates["layer"] != rates["shared"]


def test_guesses_in_a_shared_pool_never_evict_what_is_in_use():
    pool = Pool(2, 4, (1, 1), shared=True)
    slots, _ = pool.lookup(0, [0])
    pool.lookup(0, [1])  # a second wave of the same layer: both entries are in use
    guess = torch.tensor([[2, 3]], dtype=torch.int32), torch.tensor([[0.9, 0.8]])
    assert pool.admit(1, *guess, 0.5, (2, 2), None) == [[], []]
    pool.in_use.clear()
    assert pool.admit(1, *guess, 0.5, (1, 1), None) == [[(2, slots[0][0])], [(2, slots[1][0])]]
    assert pool.present(1, 0) == {2} and pool.present(0, 0) == {1}
    pool.withdraw(1, 0, 2)
    pool.withdraw(1, 0, 2)  # nothing more to take back
    assert pool.present(1, 0) == set() and pool.present(1, 1) == {2}


@pytest.mark.parametrize("slots, streamed", [({"gate_up": 2, "down": 8}, "gate_up"), ({"gate_up": 8, "down": 2}, "down")])
def test_one_component_resident_and_the_other_streamed(olmoe, slots, streamed):
    wanted = run(olmoe, text(1, 4), 30)
    offloaded(olmoe, slots, predictor=None)
    for _ in range(2):
        same(run(olmoe, text(1, 4), 30), wanted)
    counts, other = olmoe.dualdeadline.stats(), next(part for part in schedule.COMPONENTS if part != streamed)
    sizes = {part: olmoe.dualdeadline.store.bytes(part) for part in schedule.COMPONENTS}
    assert counts[f"misses_{other}"] <= 24 < counts[f"misses_{streamed}"]
    assert counts["bytes_demand"] == sum(counts[f"misses_{part}"] * size for part, size in sizes.items())


# prompts, streamed with two buffers


class Recorded:
    """Notes when copies and products are handed over, as (what, layer, expert, component)."""

    def __init__(self, monkeypatch):
        self.log, bring, layer = [], hosted.Hosted.bring, hosted.Hosted.layer
        fill = hosted.Hosted._fill_next

        def noted(own, number, part, expert, slot):
            self.log.append(("copy", number, expert, part))
            bring(own, number, part, expert, slot)

        def entered(own, number, *rest):
            self.log.append(("layer", number))
            out = layer(own, number, *rest)
            own.lanes.settle()
            self.log.append(("end", number))
            return out

        def filled(own, target):
            self.log.append(("fill", target))
            fill(own, target)

        monkeypatch.setattr(hosted.Hosted, "bring", noted)
        monkeypatch.setattr(hosted.Hosted, "layer", entered)
        monkeypatch.setattr(hosted.Hosted, "_fill_next", filled)


@pytest.mark.parametrize("slots", [1, 3, 4, 5, {"gate_up": 2, "down": 6}], ids=str)
def test_the_next_layers_first_wave_crosses_while_a_prompt_is_computed(olmoe, slots, monkeypatch):
    ids = text(2, 40)
    wanted = run(olmoe, ids, 6)
    offloaded(olmoe, slots, predictor=None)
    recorded = Recorded(monkeypatch)
    with torch.no_grad():
        assert torch.equal(olmoe(ids).logits, wanted[0])
    log = recorded.log
    for number in (1, 2):
        start, end = log.index(("layer", number - 1)), log.index(("end", number - 1))
        filled = log.index(("fill", number))
        early = [entry for entry in log[start:end] if entry[:2] == ("copy", number)]
        share = olmoe.dualdeadline.options.slots
        assert start < filled < end and len(early) == sum(share.values())
        own = [place for place in range(start, end) if log[place][:2] == ("copy", number - 1)]
        later = [place for place in own if place > min(log.index(entry) for entry in early)]
        assert not later, "what this layer needs crosses before what the next one will"
    counts = olmoe.dualdeadline.stats()
    sizes = {part: olmoe.dualdeadline.store.bytes(part) for part in schedule.COMPONENTS}
    assert counts["bytes_early"] == 2 * sum(count * sizes[part] for part, count in share.items())
    assert counts["bytes_ahead"] == counts["bytes_early"] == counts["bytes_useful"] + counts["bytes_wasted"]
    same(run(olmoe, ids, 6), wanted)
    olmoe.dualdeadline.tables.check()


def test_short_texts_and_full_slots_are_not_filled_ahead(olmoe, monkeypatch):
    offloaded(olmoe, 3, predictor=None)
    run(olmoe, text(1, 4), 4)
    assert olmoe.dualdeadline.stats()["bytes_early"] == 0
    run(olmoe, text(2, 40), 1)
    once = olmoe.dualdeadline.stats()["bytes_early"]
    run(olmoe, text(2, 40, 3), 1)
    assert olmoe.dualdeadline.stats()["bytes_early"] == once  # no slot was free


def test_half_the_slots_are_filled_while_the_other_half_is_read(olmoe, monkeypatch):
    """Waves of half the slots, and no copy waits for the wave just before its own."""
    fences, wanted = [], run(olmoe, text(2, 40), 1)
    offloaded(olmoe, 4, predictor=None)
    run(olmoe, text(2, 40, 5), 1)
    lanes, waves, lookup = type(olmoe.dualdeadline.lanes), [], Pool.lookup
    monkeypatch.setattr(lanes, "mark", lambda self: len(waves))
    monkeypatch.setattr(lanes, "fence", lambda self, mark: fences.append((mark, len(waves))))

    def noted(self, number, wave):
        before = {slot for _, found in waves[-1:] for slot in found}
        slots, missing = lookup(self, number, wave)
        copied = {found[expert] for found, lost in zip(slots, missing) for expert in lost}
        if waves and waves[-1][0] == number:
            assert not copied & before, "a copy goes where the wave before is still read"
        waves.append((number, {slot for found in slots for slot in found.values()}))
        return slots, missing

    monkeypatch.setattr(Pool, "lookup", noted)
    same(run(olmoe, text(2, 40), 1), wanted)
    dense = [number for number, _ in waves[:12]]
    assert dense == [0] * 4 + [1] * 4 + [2] * 4 and all(len(found) <= 2 for _, found in waves[:12])
    assert fences[:2] == [(1, 2), (2, 3)]  # before wave 2 (from 0) the end of wave 0, before wave 3 that of wave 1


def test_what_crosses_early_for_prompts_does_not_speak_for_a_predictor(olmoe):
    offloaded(olmoe, 4, predictor=lambda number, hidden, ids: None)
    run(olmoe, text(2, 40), 1)
    control = olmoe.dualdeadline.guide.control.tolist()
    counts = olmoe.dualdeadline.tables.counters.sum(0).view(2, -1).sum(0)[5:]
    assert olmoe.dualdeadline.tables.settled.tolist() == counts.tolist() and counts.sum() > 0
    assert control[0] == 1.0


# guesses have to pay, by the clock


class Clock:
    """Seconds that only pass when told."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def steps(judge, clock, count, with_ms, without_ms, tokens=1):
    """Modes of so many decode steps."""
    modes = []
    for _ in range(count):
        judge.begin(tokens)
        modes.append(judge.on)
        clock.now += 1e-3 * (with_ms if judge.on else without_ms)
        judge.end()
    return modes


def test_guesses_that_lose_time_go_off_and_come_back_when_they_gain():
    clock = Clock()
    judge = Worth(clock)
    trial = worth.SETTLE + worth.TRIAL
    first = steps(judge, clock, 2 * trial, 1.5, 1.0)
    assert first == [True] * trial + [False] * trial and not judge.verdict
    assert judge.ms == {True: pytest.approx(1.5), False: pytest.approx(1.0)} and "1.500 ms with guesses" in str(judge)
    lost = steps(judge, clock, 3000, 1.5, 1.0)
    assert not judge.verdict and sum(lost) <= 0.03 * len(lost)  # tried again ever more seldom
    gained = steps(judge, clock, worth.LONGEST + 500, 0.8, 1.0)
    assert judge.verdict and all(gained[-400:])
    kept = steps(judge, clock, 3000, 0.8, 1.0)
    assert judge.verdict and sum(kept) >= 0.97 * len(kept)


def test_prompts_and_other_batches_are_not_compared_with_decode_steps():
    clock = Clock()
    judge = Worth(clock)
    for _ in range(12):  # as many short texts: a long prompt, a few steps
        judge.begin(500)
        clock.now += 1
        judge.end()
        steps(judge, clock, 9, 1.0, 2.0)
    assert judge.verdict and judge.ms == {True: pytest.approx(1.0), False: pytest.approx(2.0)}
    steps(judge, clock, 5, 9.0, 2.0, tokens=4)
    assert judge.on and all(ms < 3 for times in judge.times.values() for ms in times[:-5])


def test_random_guesses_cost_at_most_two_per_cent_of_a_long_text():
    clock = Clock()
    judge = Worth(clock)
    steps(judge, clock, 4096, 1.3, 1.0)
    assert clock.now <= 1.02 * 4.096


def test_the_engine_stops_guessing_when_steps_get_longer(olmoe, monkeypatch):
    """The clock says that every guess costs a second; the counters stop, the bits stay."""
    clock, asked = Clock(), []

    def guesses(number, hidden, ids):
        asked.append(number)
        clock.now += 1
        return torch.ones(len(hidden), 8)

    wanted = run(olmoe, text(1, 4), 120)
    offloaded(olmoe, 3, predictor=guesses, control="time", threshold=0.0)
    judge = olmoe.dualdeadline.guide.worth
    judge.clock = clock
    same(run(olmoe, text(1, 4), 120), wanted)
    counts = olmoe.dualdeadline.stats()
    trial = worth.SETTLE + worth.TRIAL
    assert not counts["prefetch_on"] and "ms without" in counts["prefetch_reason"] and judge.ms[True] > judge.ms[False]
    assert 3 * trial <= len(asked) <= 3 * (trial + 3)  # three layers; the forwards over the prompt guess too
    with pytest.raises(ValueError, match="control is 'luck'"):
        offloaded(build(), predictor=guesses, control="luck")


# times


def test_lanes_take_the_time_of_copies_products_and_waiting():
    clock = Clock()

    def takes(seconds):
        def work():
            clock.now += seconds
        return work

    lanes = TimedCaller(clock)
    lanes.compute(takes(1.0), ())
    mark = lanes.copy(takes(0.5), ())
    mark.end.result()
    lanes.compute(takes(0.25), [mark])
    lanes.close()
    assert lanes.totals() == {"stall_ms": 0.0, "link_ms": 500.0, "compute_ms": 1250.0}


def test_times_per_token_are_there_when_asked_for(olmoe):
    wanted = run(olmoe, text(1, 4), 10)
    offloaded(olmoe, 3)
    run(olmoe, text(1, 4), 10)
    assert not {"stall_ms", "link_ms_per_token", "timed_tokens"} & set(olmoe.dualdeadline.stats())
    olmoe.dualdeadline.remove()
    offloaded(olmoe, 3, timed=True)
    same(run(olmoe, text(1, 4), 10), wanted)
    counts = olmoe.dualdeadline.stats()
    assert counts["timed_tokens"] == 4 + 4 + 9 and counts["link_ms"] > 0 and counts["compute_ms"] > 0
    assert counts["compute_ms_per_token"] == pytest.approx(counts["compute_ms"] / 17)
    assert 0 <= counts["stall_ms"]


@pytest.mark.parametrize("options, words", [
    ({"pool": "global"}, "pool is 'global'"), ({"control": "clock"}, "control is 'clock'"),
    ({"pool": "shared", "tier": "remote", "remote": "localhost:1", "remote_token": "none"}, "needed: pool 'layer'"),
])
def test_wrong_choices_are_named(olmoe, options, words):
    with pytest.raises(ValueError, match=words):
        offloaded(olmoe, **options)
    assert not hasattr(olmoe, "dualdeadline")


def test_layers_of_two_sizes_share_nothing(olmoe):
    module = models.describe(olmoe).layers[1].experts
    module.gate_up_proj = torch.nn.Parameter(torch.zeros(8, 16, 32))
    module.down_proj = torch.nn.Parameter(torch.zeros(8, 32, 8))
    with pytest.raises(ValueError, match="pool 'layer'"):
        offloaded(olmoe, pool="shared")
