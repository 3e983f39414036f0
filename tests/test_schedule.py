"""Schedules as data, the event simulator over them, and their execution without a GPU."""

import dataclasses
import json
import threading

import pytest
import torch
from dualdeadline import overlap, schedule, simulate, streams
from dualdeadline.cost import CostModel, TransferModel
from dualdeadline.schedule import COMPONENTS, Compute, Copy, Layer, Route, Schedule
from dualdeadline.streams import probes
from hypothesis import given, settings
from hypothesis import strategies as st

BYTES = {"gate_up": 8 << 20, "down": 4 << 20}
LINK = TransferModel(0.004, 1.8e-8)
STAGES = {"gate_up": TransferModel(0.002, 3e-10), "down": TransferModel(0.002, 3e-10),
          "down_combine": TransferModel(0.002, 3e-10), "combine": TransferModel(0.002, 0.0)}
COST = CostModel(LINK, STAGES, BYTES, silent_ms=0.003, handoff_ms=0.001)
SHAPE = streams.Shape("tiny", 32, 16, 8, torch.float32)

routed = st.lists(st.integers(0, 15), min_size=1, max_size=8, unique=True)
presence = st.sets(st.tuples(st.integers(0, 15), st.sampled_from(COMPONENTS)))
names = st.sampled_from(schedule.NAMES)


def plan(name, experts, present=(), tokens=None):
    return schedule.block(name, Layer(tuple(experts), frozenset(present), tokens or {}), BYTES)


def disjoint(spans):
    ordered = sorted(spans, key=lambda span: span.start_ms)
    return all(one.end_ms <= other.start_ms + 1e-9 for one, other in zip(ordered, ordered[1:]))


@given(names, routed, presence)
@settings(deadline=None)
def test_every_missing_byte_is_copied_once(name, experts, present):
    there = {pair for pair in present if pair[0] in experts}
    copies = plan(name, experts, present).copies
    moved = [(copy.expert, part) for copy in copies for part in copy.components]
    assert sorted(moved) == sorted({(expert, part) for expert in experts for part in COMPONENTS} - there)
    assert sum(copy.bytes for copy in copies) == sum(BYTES[part] for _, part in moved)


@given(names, routed, presence)
@settings(deadline=None)
def test_every_expert_is_computed_once_in_each_stage(name, experts, present):
    computes = [op for op in plan(name, experts, present).ops if isinstance(op, Compute)]
    for stages in (("gate_up",), ("down", "down_combine")):
        assert sorted(e for op in computes if op.stage in stages for e in op.experts) == sorted(experts)
    assert sum(op.stage in ("combine", "down_combine") for op in computes) == 1


@given(names, routed, presence)
@settings(deadline=None)
def test_lanes_never_overlap_themselves_and_no_floor_is_beaten(name, experts, present):
    line = simulate.run(plan(name, experts, present), COST)
    for lane in ("link", "compute", "host"):
        assert disjoint(line.lane(lane))
    assert line.bytes == line.schedule.bytes
    assert line.ms >= max(line.busy_ms("link"), line.busy_ms("compute")) - 1e-9
    assert len(line.lane("link")) == len(line.schedule.copies) and not line.cancelled


@given(names, routed, presence, st.integers(0, 15), st.sampled_from(COMPONENTS))
@settings(deadline=None)
def test_more_presence_never_slows_a_schedule(name, experts, present, expert, part):
    """With a link that costs nothing but bytes: a fixed cost per copy may make two short copies dearer than one."""
    cost = dataclasses.replace(COST, transfer=TransferModel(0.0, 1.8e-8), silent_ms=0.0, handoff_ms=0.0)
    fixed = dataclasses.replace(cost, stages={key: TransferModel(0.0, line.slope_ms) for key, line in STAGES.items()})
    less = simulate.run(plan(name, experts, present), fixed).ms
    assert simulate.run(plan(name, experts, present | {(expert, part)}), fixed).ms <= less + 1e-9


@given(names, routed, presence)
@settings(deadline=None)
def test_without_link_time_only_compute_is_left(name, experts, present):
    free = dataclasses.replace(COST, transfer=TransferModel(0.0, 0.0), silent_ms=0.0, handoff_ms=0.0)
    line = simulate.run(plan(name, experts, present), free)
    assert line.ms == pytest.approx(line.busy_ms("compute"))


def test_known_makespans():
    """Two missing experts, by hand: c = one expert's copy, g and d its stages."""
    cost = CostModel(TransferModel(0.0, 1e-6), {key: TransferModel(0.0, 1e-7) for key in STAGES}, BYTES)
    gate_up, down = BYTES["gate_up"] * 1e-6, BYTES["down"] * 1e-6
    link, both = 2 * (gate_up + down), (gate_up + down) / 10
    times = {name: simulate.run(plan(name, (3, 5)), cost).ms for name in schedule.NAMES}
    assert times["demand_serial"] == pytest.approx(link + 2 * both)
    assert times["demand_pipelined"] == pytest.approx(link + both)
    assert times["staged_pipelined"] == pytest.approx(link + down / 10)
    assert times["staged_barrier"] == pytest.approx(link + 2 * down / 10)
    assert times["component_priority"] == pytest.approx(times["staged_pipelined"])


def test_only_the_first_copy_pays_for_a_silent_link():
    line = simulate.run(plan("demand_serial", (3, 5)), COST)
    lengths = [span.end_ms - span.start_ms for span in line.lane("link")]
    assert lengths == pytest.approx([LINK.ms(12 << 20) + COST.silent_ms, LINK.ms(12 << 20)])


def test_component_priority_leaves_the_shortest_work_for_the_end():
    order = [copy.expert for copy in plan("component_priority", (0, 1, 2), tokens={0: 1, 1: 900, 2: 90}).copies]
    assert order == [1, 2, 0, 0]


def decode(guesses, routes=((0, 1), (2, 3)), present=frozenset(), **options):
    layers = [Layer(routes[0], schedule.ready(routes[0])), Layer(routes[1], present, guesses=guesses, **options)]
    return schedule.step("component_priority", layers, BYTES)


def test_a_right_guess_hides_behind_the_layer_and_a_wrong_one_is_cancelled():
    cost = dataclasses.replace(COST, before_ms=(0.5,), committed=0)
    none = simulate.run(decode(()), cost)
    right = simulate.run(decode(((2, "gate_up", 0.9), (3, "gate_up", 0.8))), cost)
    wrong = simulate.run(decode(tuple((e, "expert", 0.5) for e in range(8, 16))), cost)
    assert right.ms < none.ms and right.bytes == none.bytes and not right.cancelled
    assert wrong.cancelled and wrong.bytes > none.bytes
    begun = {span.place for span in wrong.lane("link")}
    assert not begun & set(wrong.cancelled)
    assert none.ms <= wrong.ms <= none.ms + LINK.ms(12 << 20) + COST.silent_ms + 1e-9  # at most the copy in flight


def test_a_guess_in_flight_is_not_copied_again():
    ops = decode(((2, "expert", 0.9), (7, "gate_up", 0.1))).ops
    assert [(op.expert, op.piece) for op in ops if isinstance(op, Copy)] == [
        (2, "expert"), (7, "gate_up"), (3, "gate_up"), (3, "down")]
    waits = next(op for op in ops if isinstance(op, Compute) and op.stage == "gate_up" and 2 in op.experts)
    assert any(isinstance(ops[need], Copy) and ops[need].speculative for need in waits.needs)


def test_demand_goes_before_speculation():
    """Copies for the next layer may be listed and issued, but the link serves the router's demand first."""
    layers = [Layer((0, 1)), Layer((2,), guesses=((2, "expert", 1.0),)), Layer((4,), guesses=((4, "gate_up", 0.7),))]
    line = simulate.run(schedule.step("staged_pipelined", layers, BYTES), dataclasses.replace(COST, before_ms=(0.01,)))
    order = [line.schedule.ops[span.place] for span in line.lane("link")]
    assert [op.speculative for op in order if op.layer == 0] == [False] * 4
    assert max(place for place, op in enumerate(order) if op.layer == 0) < order.index(
        next(op for op in order if op.speculative))


@pytest.mark.parametrize("ops, message", [
    ((Copy(0, 1, "up", 4),), "'up'"),
    ((Copy(0, 1, "down", 0),), "bytes above 0"),
    ((Copy(0, 1, "down", 4, needs=(0,)),), "before its own"),
    ((Copy(0, 1, "down", 4), Copy(0, 1, "expert", 4)), "already there"),
    ((Compute(0, "gate_up", (1,)),), "not there"),
    ((Copy(0, 1, "down", 4), Compute(0, "down", (1,), (0,))), "before its gate/up"),
    ((Compute(0, "up", (1,)),), "stage is 'up'"),
    ((Compute(0, "combine", (1,)),), "before all of their downs"),
])
def test_a_wrong_schedule_is_refused(ops, message):
    with pytest.raises(ValueError, match=message):
        Schedule("made up", ops)


@pytest.mark.parametrize("wrong, message", [
    ({"experts": ()}, "at least one"), ({"experts": (3, 3)}, "distinct"), ({"experts": (-1,)}, "none below 0"),
    ({"present": frozenset({(1, "expert")})}, "present names"), ({"guesses": ((1, "up", 0.5),)}, "guess is"),
    ({"guesses": ((1, "down", float("nan")),)}, "probability"), ({"guesses": ((1, "down", 2e9),)}, "probability"),
])
def test_a_wrong_layer_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Layer(**({"experts": (1, 2)} | wrong))


def test_unknown_names_and_late_guesses_are_refused():
    with pytest.raises(ValueError, match="one of demand_serial"):
        plan("monolithic", (1,))
    with pytest.raises(ValueError, match="an earlier one"):
        decode(((2, "expert", 0.5),), guessed_at=1)
    with pytest.raises(ValueError, match="calibrated"):
        simulate.run(plan("demand_serial", (1,)), dataclasses.replace(COST, stages={}))


def test_chrome_trace_and_frame(tmp_path):
    line = simulate.run(decode(((2, "gate_up", 0.9),)), COST)
    trace = json.loads(line.save(tmp_path / "trace.json").read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(events) == len(line.spans) == len(line.frame())
    assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(1e3 * line.ms)
    assert {event["tid"] for event in events} == {0, 1, 2} and line.frame().bytes.sum() == line.bytes


@pytest.mark.parametrize("tokens", [1, 3, 20])
@pytest.mark.parametrize("name", schedule.NAMES)
def test_execution_without_a_gpu_is_bitwise_resident(name, tokens):
    work = streams.Work(SHAPE, layers=2, tokens=tokens, top_k=2, kernels="torch")
    overlap.check(work, overlap.Setting(tokens, 2, "torch", "streams", ready=(0, 1, 2), schedules=(name,)))
    line = streams.run(overlap.block(work, name, 1, 1), work)
    assert line.kind == "measured" and line.bytes == line.schedule.bytes
    assert disjoint(line.lane("link")) and disjoint(line.lane("compute"))
    assert len(line.spans) == len(line.schedule.ops)


def test_the_check_of_bits_can_fail(monkeypatch):
    """A copy that does not arrive leaves NaN in its slot."""
    work = streams.Work(SHAPE, layers=1, tokens=1, top_k=2, kernels="torch")
    lost, whole = work.experts(0)[1], streams.Work.copy
    monkeypatch.setattr(streams.Work, "copy", lambda self, op: whole(self, op) if op.expert != lost else None)
    with pytest.raises(AssertionError, match="values differ"):
        overlap.check(work, overlap.Setting(1, 2, "torch", "streams", ready=(0,)))


def test_a_copy_outside_its_layer_or_of_other_bytes_is_refused():
    work = streams.Work(SHAPE, layers=2, tokens=1, top_k=2, kernels="torch")
    size = work.shape.component_bytes["down"]
    for copy in (Copy(0, 8, "down", size), Copy(2, 0, "down", size), Copy(0, 0, "down", size + 1)):
        with pytest.raises(ValueError, match="does not fit"):
            work.prepare(Schedule("made up", (copy,)))


@pytest.mark.parametrize("stage", [*probes.STAGES, "before"])
def test_what_times_a_launch_can_run(stage):
    """The schedule whose issue is timed on a GPU; here on threads."""
    work = streams.Work(SHAPE, layers=2, tokens=1, top_k=2, kernels="torch")
    plan = probes.repeated(work, stage, work.experts(0) if stage != "before" else ())
    assert sum(getattr(op, "stage", "") == stage for op in streams.run(plan, work).schedule.ops) >= 8


def test_speculation_is_executed_and_cancelled(monkeypatch):
    """The first wrong copy holds the link until the verdict is long there; those behind it must not begin."""
    work = streams.Work(SHAPE, layers=2, tokens=1, top_k=2, kernels="torch")
    sizes, routes = work.shape.component_bytes, [work.experts(layer) for layer in range(2)]
    wrong = [expert for expert in range(8) if expert not in routes[1]]
    guesses = ((routes[1][0], "gate_up", 0.9), *((expert, "expert", 0.1) for expert in wrong))
    layers = [Layer(routes[0]), Layer(routes[1], guesses=guesses)]
    expected = [work.resident(layer) for layer in range(2)]
    for layer in range(2):
        work.forget(layer, ())
    verdict, whole = threading.Event(), streams.Work.copy
    monkeypatch.setattr(streams.Work, "copy", lambda self, op: (op.expert in wrong and op.speculative and verdict.wait(5),
                                                                whole(self, op)))
    threading.Timer(1.0, verdict.set).start()
    line = streams.run(schedule.step("component_priority", layers, sizes), work)
    assert len(line.cancelled) >= len(wrong) - 1
    assert all(torch.equal(work.out[layer], expected[layer]) for layer in range(2))
    copied = [line.schedule.ops[span.place] for span in line.lane("link")]
    assert sum(op.bytes for op in copied) == line.bytes
    assert len(copied) + len(line.cancelled) == len(line.schedule.copies)
    assert sum(isinstance(op, Route) for op in line.schedule.ops) == len(line.lane("host")) == 2


def test_bad_work_is_refused():
    with pytest.raises(ValueError, match="fused, torch"):
        streams.Work(SHAPE, kernels="cutlass")
    with pytest.raises(ValueError, match="1 to 8"):
        streams.Work(SHAPE, top_k=9, kernels="torch")
    with pytest.raises(ValueError, match="ids 0 to 7"):
        streams.Work(SHAPE, layers=1, top_k=2, kernels="torch", routes=torch.tensor([[[0, 8]]]))
    work = streams.Work(SHAPE, layers=1, top_k=2, kernels="torch")
    with pytest.raises(ValueError, match="CUDA device"):
        streams.capture(overlap.block(work, "demand_serial", 0, 0), work)
