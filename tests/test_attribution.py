"""Every millisecond of a step has one part: engines on a CPU by the clock, graphs by made-up traces of known parts."""

import json
import time

import pandas as pd
import pytest
import torch
import transformers
from conftest import tiny_config
from test_engine import build, run

from dualdeadline import attribution, engine
from dualdeadline.attribution import PARTS, STEP, Kernel, parts, trace, watched
from dualdeadline.engine.hosted import KERNELS, Hosted


@pytest.fixture
def olmoe():
    model = build()
    yield model
    if hasattr(model, "dualdeadline"):
        model.dualdeadline.remove()


def stepper(model):
    """Decode steps, one token each, that route in many ways."""
    draw = torch.Generator().manual_seed(2)

    @torch.no_grad()
    def step():
        return model(torch.randint(1, 380, (1, 1), generator=draw)).logits

    return step


def table(found):
    return found.set_index("part").ms


@pytest.mark.parametrize("options", [{}, {"predictor": None}, {"schedule": "staged_pipelined"}, {"pool": "shared"}], ids=str)
def test_parts_of_a_real_step_add_up_and_watching_leaves_nothing(olmoe, options):
    engine.offload(olmoe, slots=3, backend="cpu", **options)
    step, hosted = stepper(olmoe), olmoe.dualdeadline.hosted
    before = dict(hosted.__dict__), [dict(module._forward_pre_hooks) for module in olmoe.modules()]
    found = attribution.host(olmoe, step, 10, "tiny")
    assert list(found.columns) == ["case", "part", "ms", "low", "high", "n"] and set(found.case) == {"tiny"}
    values = table(found)
    assert list(values.index) == [*PARTS, STEP, parts.PLAIN] and (values >= 0).all()
    assert values[list(PARTS)].sum() == pytest.approx(values[STEP], rel=0.03)
    assert min(values["attention"], values["router"], values["look-up"], values["expert compute"], values["other"]) > 0
    assert values["demand wait"] > 0 and (values["prediction"] > 0) == ("predictor" not in options)
    after = dict(hosted.__dict__), [dict(module._forward_pre_hooks) for module in olmoe.modules()]
    assert before == after and type(hosted.lanes).__name__ == "CallerLanes"


def slow(seconds, call):
    def slower(*args):
        time.sleep(seconds)
        return call(*args)

    return slower


def test_time_goes_to_the_part_that_is_slow(olmoe, monkeypatch):
    """One thing at a time is made slower by a known time; that time shows in its part, and in no other."""
    engine.offload(olmoe, slots=2, backend="cpu", predictor=None)
    handle, step, layers = olmoe.dualdeadline, stepper(olmoe), 3

    def measured():
        return table(attribution.host(olmoe, step, 3, "slow", plain=0))

    with monkeypatch.context() as patch:
        patch.setattr(KERNELS["torch"], "gate_up", slow(0.03, KERNELS["torch"].gate_up))
        values = measured()
    assert values["expert compute"] > 30 * layers and values["expert compute"] > 1.5 * values.drop(["expert compute", STEP]).max()
    with monkeypatch.context() as patch:
        patch.setattr(Hosted, "bring", slow(0.03, Hosted.bring))
        values = measured()
    assert values["demand wait"] > 30 * layers and values["demand wait"] > 1.5 * values.drop(["demand wait", STEP]).max()
    with monkeypatch.context() as patch:
        patch.setattr(handle.pool, "lookup", slow(0.03, handle.pool.lookup))
        values = measured()
    assert values["look-up"] > 30 * layers and values["look-up"] > 1.5 * values.drop(["look-up", STEP]).max()
    for layer, part in (("router", "router"), ("self_attn", "attention")):
        with monkeypatch.context() as patch:
            for found in handle.spec.layers:
                module = found.router if layer == "router" else found.decoder.self_attn
                patch.setattr(module, "forward", lambda *args, call=module.forward, **more: (time.sleep(0.03), call(*args, **more))[1])
            values = measured()
        assert values[part] > 30 * layers and values[part] > 1.5 * values.drop([part, STEP]).max()


def test_a_late_guess_is_told_from_a_demand(olmoe, monkeypatch):
    """Guesses that are right but slow: what waits for them is a late prefetch."""
    routed = {}

    def knows(number, hidden, ids):  # of the step before, which was the same
        return torch.zeros(len(hidden), 8).scatter_(1, routed[number + 1], 1.0) if number + 1 in routed else None

    @torch.no_grad()
    def step():
        return olmoe(torch.tensor([[7]])).logits

    def note(number):
        return lambda module, args: routed.__setitem__(number, args[1].clone())

    hooks = []
    engine.offload(olmoe, slots=2, backend="cpu", predictor=knows, budget=(2, 2), threshold=0.5)
    for number, layer in enumerate(olmoe.dualdeadline.layers):
        hooks.append(layer.module.register_forward_pre_hook(note(number)))
    step()
    monkeypatch.setattr(Hosted, "bring", slow(0.01, Hosted.bring))
    monkeypatch.setattr(olmoe.dualdeadline.pool, "lookup", olmoe.dualdeadline.pool.lookup)

    def forgetful():
        olmoe.dualdeadline.pool.tables.clear()
        return step()

    values = table(attribution.host(olmoe, forgetful, 4, "late", plain=0))
    assert values["late prefetch wait"] > 10  # of layers 1 and 2, whose guesses were all right
    assert values["demand wait"] > 10  # of layer 0, which nobody guesses
    for hook in hooks:
        hook.remove()


def test_a_decode_is_an_install(monkeypatch):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(tiny_config("olmoe")).bfloat16().eval()
    model.set_experts_implementation("eager")
    engine.offload(model, slots=2, backend="cpu", predictor=None, wire="coded")
    monkeypatch.setattr(Hosted, "bring", slow(0.01, Hosted.bring))
    values = table(attribution.host(model, stepper(model), 3, "coded", plain=0))
    assert values["install"] > 30 and values["install"] > 3 * values["demand wait"]


def test_reads_are_waited_for_and_second_copies_are_installs(olmoe, tmp_path, monkeypatch):
    import os

    from dualdeadline.store.options import SsdOptions
    from dualdeadline.store.ssd import SsdStore

    def slow_read(*args):
        time.sleep(0.03)
        return os.preadv(*args)

    engine.offload(olmoe, slots=2, backend="cpu", predictor=None, tier="ssd", ssd_path=tmp_path, ssd=SsdOptions(read=slow_read))
    values = table(attribution.host(olmoe, stepper(olmoe), 3, "read", plain=0))
    assert values["demand wait"] > 90 and values["demand wait"] > 3 * values["install"]
    olmoe.dualdeadline.remove()
    monkeypatch.setattr(SsdStore, "put", slow(0.03, SsdStore.put))
    engine.offload(olmoe, slots=2, backend="cpu", predictor=None, tier="ssd", ssd_path=tmp_path, ssd=SsdOptions(host_slots=8))
    values = table(attribution.host(olmoe, stepper(olmoe), 3, "put", plain=0))
    assert values["install"] > 90 and values["install"] > 3 * values["demand wait"]
    assert "put" not in olmoe.dualdeadline.store.__dict__


def test_a_worker_is_waited_for(olmoe, tmp_path, monkeypatch):
    from dualdeadline.remote import new_token, read_token
    from dualdeadline.remote.held import Held
    from dualdeadline.remote.worker import Worker

    torch.manual_seed(0)
    held = Held.of_model(transformers.AutoModelForCausalLM.from_config(tiny_config("olmoe")).eval())
    token = new_token(tmp_path / "token")
    worker = Worker(held, read_token(token))
    monkeypatch.setattr(held, "compute", slow(0.03, held.compute))
    try:
        place = "{}:{}".format(*worker.address)
        engine.offload(olmoe, slots=1, tier="remote", remote=place, remote_token=token)
        values = table(attribution.host(olmoe, stepper(olmoe), 3, "far", plain=0))
        assert values["demand wait"] > 90 and values["demand wait"] > 1.5 * values.drop(["demand wait", STEP]).max()
    finally:
        olmoe.dualdeadline.remove()
        worker.stop()


def test_watching_what_cannot_be_watched(olmoe):
    with pytest.raises(ValueError, match="not offloaded"):
        attribution.host(olmoe, stepper(olmoe), 1, "x")
    engine.offload(olmoe, slots=2, backend="cpu")
    step = stepper(olmoe)
    with pytest.raises(ValueError, match="2 steps made 4 forwards"):
        attribution.host(olmoe, lambda: (step(), step()), 2, "x")


def test_an_error_while_watching_leaves_the_engine_as_it_was(olmoe):
    engine.offload(olmoe, slots=2, backend="cpu")
    lanes = olmoe.dualdeadline.hosted.lanes
    with pytest.raises(ZeroDivisionError), attribution.watch(olmoe):
        1 / 0
    assert olmoe.dualdeadline.hosted.lanes is lanes and "_fetch_ahead" not in olmoe.dualdeadline.hosted.__dict__


def test_parts_that_do_not_add_up_are_refused():
    good = {"attention": 1.0, "router": 2.0}
    found = parts.frame("a", [good, good], [3.0, 3.05], [2.5])
    assert found[found.part == "router"].ms.item() == 2.0 and found[found.part == parts.PLAIN].n.item() == 1
    with pytest.raises(AssertionError, match="a: parts are 3.0000 ms, the step 3.2000"):
        parts.frame("a", [good], [3.2])
    with pytest.raises(ValueError, match="magic"):
        parts.frame("a", [{"magic": 1.0}], [1.0])
    with pytest.raises(ValueError, match="0 steps"):
        parts.frame("a", [], [])
    rows = parts.records(found, {"slots": 2})
    assert len(rows) == len(found) and rows[0]["config"] == {"slots": 2, "part": "attention"}


def test_spans():
    assert watched.merged([(3, 4), (0, 1), (0.5, 2), (4, 5)]) == [(0, 2), (3, 5)]
    assert watched.overlap(1, 4, [(0, 2), (3, 5)]) == 2
    taken, left = trace._take([(0, 10)], [(-1, 2), (4, 5), (9, 12)])
    assert taken == 4 and left == [(2, 4), (5, 9)]


class Script:
    """A trace written kernel by kernel; times in milliseconds."""

    def __init__(self):
        self.now, self.kernels = 0.0, []

    def run(self, name, ms, gap=0.0, programs=1):
        self.now += gap
        self.kernels.append(Kernel(name, self.now, self.now + ms, programs))
        self.now += ms

    def beside(self, name, start, ms, programs=1):
        self.kernels.append(Kernel(name, start, start + ms, programs))

    def sorted(self):
        return sorted(self.kernels, key=lambda kernel: kernel.start)


DECODES = {264: "link", 132: "guess", 1056: "install"}


def attend(script):
    script.run("triton_red_fused_rsqrt_mean", 0.1)
    script.run("ampere_bf16_gemm_qkv", 0.2, gap=0.01)
    script.run("fmha_cutlass_forward", 0.3)
    script.run("void gemvNSP_kernel", 0.1)
    script.run("elementwise_kernel", 0.05)
    # the router
    script.run("void gemv2T_kernel_val", 0.04)
    script.run("cunn_SoftMaxForward", 0.03)
    script.run("at::native::sbtopk::gatherTopK", 0.02)
    script.run("bitonicSortKVInPlace", 0.01)


def test_a_step_without_guesses():
    script = Script()
    script.run("spin_kernel(long)", 0.5)
    for _ in range(2):
        script.run("void at::cuda::(anonymous namespace)::spin_kernel(long)", 0.01)
        for _ in range(2):
            attend(script)
            script.run("lookup_kernel", 0.02)
            start = script.now
            script.beside("fetch_kernel", start + 0.01, 0.40)
            script.beside("fetch_kernel", start + 0.41, 0.20)
            script.run("decode_kernel", 0.05, gap=0.42, programs=1056)  # 0.01 + 0.01 of the gap are no crossing's
            script.run("gate_up_kernel", 0.10)
            script.run("decode_kernel", 0.03, gap=0.0, programs=1056)
            script.run("down_combine_kernel", 0.06)
        script.run("void gemv_lm_head", 0.25, gap=0.02)
    script.run("spin_kernel(long)", 0.01, gap=0.03)
    found = trace.split(script.sorted(), 2, decode=DECODES)
    assert len(found) == 2
    for number, step in enumerate(found):
        tail = 0.03 if number else 0
        wanted = {"attention": 2 * 0.75, "router": 2 * 0.10, "look-up": 2 * 0.02, "install": 2 * 0.08,
                  "expert compute": 2 * 0.16, "other": 0.25, "demand wait": 2 * 0.41,
                  "launch gaps": 2 * 0.01 + 2 * 0.01 + 0.02 + tail}
        assert {part: step[part] for part in wanted} == pytest.approx(wanted)
        assert sum(step.values()) == pytest.approx(sum(wanted.values()))


def test_late_guesses_and_their_kernels():
    """Layer 1 waits at its look-up for an admission, then for a guess that is still crossing, then for its demand."""
    script = Script()
    script.run("spin_kernel", 0.01)
    attend(script)
    script.run("lookup_kernel", 0.02)
    zero = script.now
    script.beside("fetch_kernel", zero, 0.1)
    script.beside("fetch_kernel", zero + 0.1, 0.1)
    script.run("gate_up_kernel", 0.1, gap=0.2)
    script.beside("gate_kernel", zero, 0.3)  # beside the products: nothing of it shows
    script.run("down_combine_kernel", 0.1)
    attend(script)
    late = script.now
    script.beside("admit_kernel_0d1d", late - 0.1, 0.15)
    script.beside("fetch_kernel", late + 0.05, 0.30)  # guessed, gate/up
    script.run("lookup_kernel", 0.02, gap=0.05)
    script.beside("fetch_kernel", late + 0.35, 0.02)
    script.beside("fetch_kernel", late + 0.37, 0.03)
    script.run("gate_up_kernel", 0.1, gap=0.33)
    script.run("down_combine_kernel", 0.1)
    script.run("head_gemv", 0.1)
    script.run("spin_kernel", 0.01)
    (step,) = trace.split(script.sorted(), 2, horizon=1, decode=DECODES)
    assert step["prediction"] == pytest.approx(0.05)
    assert step["late prefetch wait"] == pytest.approx(0.28)  # from the look-up's end at +0.07 to +0.35
    assert step["demand wait"] == pytest.approx(0.2 + 0.05)
    assert step["expert compute"] == pytest.approx(0.4) and step["launch gaps"] == pytest.approx(2 * 0.01)
    assert sum(step.values()) == pytest.approx(script.now - 0.02)


def test_everything_resident_and_an_early_down():
    script = Script()
    script.run("spin_kernel", 0.01)
    for _ in range(3):
        attend(script)
        script.run("gate_up_kernel", 0.1)
        script.now -= 0.04  # the downs begin before the gates have ended
        script.run("down_combine_kernel", 0.1)
    script.run("head", 0.2)
    script.run("spin_kernel", 0.01)
    (step,) = trace.split(script.sorted(), 3)
    assert step["expert compute"] == pytest.approx(3 * 0.16) and step["look-up"] == 0 == step["demand wait"]
    assert step["attention"] == pytest.approx(3 * 0.75) and step["router"] == pytest.approx(3 * 0.1)
    assert sum(step.values()) == pytest.approx(script.now - 0.02)


def test_traces_that_do_not_fit_are_named():
    script = Script()
    script.run("spin_kernel", 0.01)
    script.run("gate_up_kernel", 0.1)
    script.run("spin_kernel", 0.01)
    with pytest.raises(ValueError, match="1 products.*needed: 2"):
        trace.split(script.sorted(), 2)
    with pytest.raises(ValueError, match="1 marks"):
        trace.split(script.sorted()[:1], 1)
    script = Script()
    script.run("spin_kernel", 0.01)
    for _ in range(2):
        script.run("lookup_kernel", 0.1)
        script.beside("fetch_kernel", script.now, 0.01)
        script.run("gate_up_kernel", 0.1)
    script.run("spin_kernel", 0.01)
    with pytest.raises(ValueError, match="2 fetches for 2 layers"):
        trace.split(script.sorted(), 2)


@pytest.mark.parametrize("names, place", [
    (["norm", "gemm", "topk"], 1), (["gemm", "norm", "gemv", "splitKreduce_kernel", "softmax", "topk", "sort"], 2),
    (["gemm", "norm"], 2), (["norm", "topk"], 1), ([], 0),
])
def test_where_a_router_begins(names, place):
    assert trace._router([Kernel(name, 0, 1) for name in names]) == place


def test_reading_a_trace():
    events = [
        {"ph": "X", "cat": "kernel", "name": "b", "ts": 2000.0, "dur": 500.0, "args": {"grid": [4, 2, 1], "stream": 7}},
        {"ph": "X", "cat": "gpu_memcpy", "name": "a", "ts": "1000.5", "dur": 10, "args": {}},
        {"ph": "X", "cat": "cpu_op", "name": "host", "ts": 0, "dur": 1}, {"ph": "M", "name": "process_name"},
    ]
    first, second = trace.read(json.loads(json.dumps({"traceEvents": events})))
    assert first == Kernel("a", 0.0, pytest.approx(0.01), 0) and second.programs == 8
    assert second.start == pytest.approx(0.9995) and second.end - second.start == pytest.approx(0.5)
    assert trace.read({"traceEvents": []}) == []


def test_what_the_engine_launches_is_known():
    """Names and programs that the trace is read by are those of the kernels and of the crossing."""
    from dualdeadline import kernels
    from dualdeadline.kernels import experts, fetch, predictor, slots, wire

    sources = "".join(open(module.__file__).read() for module in (experts, fetch, predictor, slots, wire, kernels))
    for name in (*trace.EXPERTS, *trace.GUIDE, trace.LINK, trace.DECODE, trace.LOOKUP):
        assert f"{name}[" in sources, f"nothing launches {name}"
    assert sorted(trace.decodes().values()) == ["guess", "install", "link"]


def test_no_gpu_is_said(olmoe):
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="no GPU"):
            attribution.graph(lambda: None, 1, 1, "x")


def test_record_rows_go_into_a_recorder(olmoe):
    engine.offload(olmoe, slots=3, backend="cpu")
    rows = attribution.records(attribution.host(olmoe, stepper(olmoe), 4, "tiny"), {"slots": 3})
    found = pd.DataFrame(rows)
    assert set(found.metric) == {"part_ms"} and set(found.unit) == {"ms"} and len(found) == len(PARTS) + 2
