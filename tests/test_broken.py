"""What a user or a machine breaks in the middle, and what then still has to hold: no wrong bit, no leak, a named error."""

import gc
import json
import os
import shutil
import threading
import time

import pytest
import torch
from test_engine import build, run, same, text

import dualdeadline
from dualdeadline import engine
from dualdeadline.engine import hosted, surgery
from dualdeadline.engine.captured import CapturedForward
from dualdeadline.engine.device import DeviceDriven
from dualdeadline.store import pages, sources
from dualdeadline.store.layout import convert
from dualdeadline.store.options import SsdOptions
from dualdeadline.store.reader import Reader

WIDE = {"hidden_size": 64, "intermediate_size": 32}  # components of whole 4 KiB in bfloat16


@pytest.fixture
def model():
    return build(dtype=torch.bfloat16, **WIDE)


def offloaded(model, folder=None, slots=3, ssd=None, **options):
    if folder is not None:
        options |= {"tier": "ssd", "ssd_path": folder, "ssd": SsdOptions(**ssd or {})}
    return engine.offload(model, slots, **{"backend": "cpu", "wire": "raw", "predictor": None} | options)


# --- interruptions


@pytest.mark.parametrize("ssd", [{"depth": 1}, {"host_slots": 2}, {"host_slots": 2, "exclusive": True}], ids=str)
def test_a_second_interruption_while_an_ssd_settles(model, tmp_path, monkeypatch, ssd):
    """The first comes inside a layer, the second while what it left is waited for; the next forward does that first."""
    wanted = run(model, text())
    offloaded(model, tmp_path, ssd=ssd)
    store, lanes, wave = model.dualdeadline.store, model.dualdeadline.lanes, hosted.Hosted._wave

    def interrupted(*args):
        raise KeyboardInterrupt

    def late(self, number, *args):
        wave(self, number, *args)
        if number == 1:
            self.store.begin(2, [(0, {part: bank[2][0] for part, bank in self.banks.items()})])
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(type(lanes), "settle", interrupted)
        patched.setattr(hosted.Hosted, "_wave", late)
        with pytest.raises(KeyboardInterrupt):
            run(model, text())
    assert model.dualdeadline.broken and store._jobs
    same(run(model, text()), wanted)
    lanes.settle()
    assert not model.dualdeadline.broken and not store._jobs
    assert len(store.staging.free) == len(store.staging.rows)
    assert not store.tier or not any(held.users for found in store.tier.held for held in found.values())
    model.dualdeadline.remove()


def reads(folder, model, **options):
    """A reader of a finished conversion, and what hands in the read of an expert of layer 0."""
    layout = convert(sources.ModelExperts(surgery.find(model)[1]), folder)
    reader = Reader(layout.path, **options)

    def submit(expert, urgent=True):
        record = layout.record(0, expert)
        memory = {part: pages.as_bytes(pages.aligned(place.padded)) for part, place in record.parts.items()}
        return reader.submit(record, memory, urgent)

    return reader, submit


def test_a_read_whose_submission_was_interrupted_holds_up_no_other(model, tmp_path):
    reader, submit = reads(tmp_path, model, depth=1)
    news, reader._news = reader._news, None  # interrupted after the read was queued, before anybody was told
    with pytest.raises(AttributeError):
        submit(0)
    reader._news = news
    later = [submit(expert, urgent=False) for expert in (1, 2)]
    for read in later:
        read.result(20)
    assert reader.counts["reads"] == 3
    reader.close()


def test_a_cancelled_read_is_dropped_by_whoever_takes_it(model, tmp_path):
    gate = threading.Event()

    def waits(*args):
        gate.wait(20)
        return os.preadv(*args)

    reader, submit = reads(tmp_path, model, depth=1, read=waits)
    first, guess, last = submit(0), submit(1, urgent=False), submit(2)
    while not first.begun:
        time.sleep(0.001)
    assert not reader.cancel(first) and reader.cancel(guess)
    gate.set()
    last.result(20)
    first.result(20)
    assert guess.cancelled and reader.counts["reads"] == 2
    reader.close()


class Stream:
    """Counts how often it is waited for."""

    waited = 0

    def synchronize(self):
        self.waited += 1


def test_a_device_driven_forward_that_did_not_end_leaves_nothing_to_wait_for():
    device = DeviceDriven.__new__(DeviceDriven)
    device.streams, device.cuda = [Stream(), Stream()], False
    device.forked, device.landed, device.admitted = {0, 1}, {2: (object(), object())}, object()
    device.settle()
    assert [stream.waited for stream in device.streams] == [1, 1]
    assert not device.forked and not device.landed and device.admitted is None


def test_tables_are_moved_before_a_capture_and_never_inside(tiny_model, monkeypatch):
    """`ready` is called when nothing is captured yet, and before captures only."""
    order, model = [], tiny_model("olmoe")[0]

    class Refused:
        def __init__(self, *args, **kwargs):
            pass

        def __enter__(self):
            order.append("capture")
            raise RuntimeError("not here")

        def __exit__(self, *error):
            return False

    for name, value in {"CUDAGraph": object, "graph": Refused, "graph_pool_handle": int, "synchronize": int}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    told = lambda path, reason: order.append(path)  # noqa: E731
    taken = CapturedForward(model, capture=True, on_path=told, ready=lambda: order.append("ready"))
    with pytest.warns(UserWarning, match="no CUDA graph"):
        model.generate(text(1, 5), max_new_tokens=4, do_sample=False, cache_implementation="static")
    taken.remove()
    assert order == ["forward", "first", "ready", "capture", "forward", "forward"]


# --- giving back


def test_what_was_not_given_back_is_no_model_and_can_be_given_back_later(model, tmp_path):
    """Experts on the meta device add nothing and raise nothing: the model must refuse to run."""
    wanted = run(model, text())
    offloaded(model, tmp_path / "store")
    records = tmp_path / "store" / "records.bin"
    records.rename(tmp_path / "elsewhere")
    with pytest.raises(RuntimeError, match="was replaced or altered"):
        model.dualdeadline.remove()
    for call in (lambda: run(model, text()), model.half, model.state_dict):
        with pytest.raises(RuntimeError, match="given back|remove|replaced"):
            call()
    (tmp_path / "elsewhere").rename(records)
    model.dualdeadline.remove()
    same(run(model, text()), wanted)


@pytest.mark.parametrize("wire", ["raw", "coded"])
def test_giving_back_twice_loses_no_weights(model, monkeypatch, wire):
    """The first attempt ends in the middle (no memory on the device, say)."""
    wanted, calls = run(model, text()), []
    offloaded(model, wire=wire)
    give = surgery.LayerExperts.give

    def fails_once(self, *args):
        calls.append(args[0])
        if len(calls) == 4:
            raise torch.OutOfMemoryError("no memory")
        give(self, *args)

    monkeypatch.setattr(surgery.LayerExperts, "give", fails_once)
    with pytest.raises(torch.OutOfMemoryError):
        model.dualdeadline.remove()
    with pytest.raises(RuntimeError, match="not all experts were given back"):
        run(model, text())
    model.dualdeadline.remove()
    same(run(model, text()), wanted)


def test_a_state_dict_is_whole_with_an_ssd(model, tmp_path):
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    offloaded(model, tmp_path, ssd={"host_slots": 1})
    found = model.state_dict()
    assert list(found) == list(wanted) and all(torch.equal(found[name], value) for name, value in wanted.items())
    model.dualdeadline.remove()


@pytest.mark.parametrize("kept", [True, False])
def test_a_model_that_is_dropped_leaves_no_threads_and_no_files(tmp_path, kept):
    def once():
        model = build(dtype=torch.bfloat16, **WIDE)
        offloaded(model, tmp_path, ssd={"host_slots": 1})
        run(model, text(1, 4), 2)
        if kept:
            model.dualdeadline.remove()

    def left():
        gc.collect()
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    once()
    gc.collect()
    time.sleep(0.2)
    before, end = left(), time.monotonic() + 10
    once()
    while left() != before and time.monotonic() < end:
        time.sleep(0.02)
    assert left() == before


# --- counters


@pytest.mark.parametrize(
    "ssd", [{"host_slots": 2, "exclusive": True, "depth": 1}, {"host_slots": 1, "depth": 1}], ids=str
)
@pytest.mark.parametrize("slots", [3, {"gate_up": 2, "down": 5}], ids=str)
def test_host_slots_count_each_miss_once(model, tmp_path, ssd, slots):
    """Also one that waits for a row: with one read in flight there is one row for many misses."""
    offloaded(model, tmp_path, slots, ssd)
    run(model, text(3, 5), 8)
    stats, store = model.dualdeadline.stats(), model.dualdeadline.store
    host = stats["tiers"]["host"]
    assert host["hits"] + host["misses"] == stats["misses"] > 20
    assert not any(held.users for found in store.tier.held for held in found.values())
    model.dualdeadline.remove()


# --- damaged files


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("model.safetensors.index.json", "[]", "index.json is damaged"),
        ("model.safetensors.index.json", '{"weight_map": [1]}', "index.json is damaged"),
        ("model.safetensors.index.json", '{"weight_map": {"a": 3, "b": "c"}}', "index.json is damaged"),
        ("config.json", "[]", "is not a checkpoint"),
        ("config.json", "{}", "is not a checkpoint"),
        ("generation_config.json", "{", "generation_config.json is damaged"),
    ],
)
def test_damaged_json_of_a_checkpoint_is_named(tiny_checkpoint, tmp_path, name, content, words):
    folder = shutil.copytree(tiny_checkpoint("olmoe"), tmp_path / "copy")
    if "index" in name:
        (folder / "model.safetensors").rename(folder / "one.safetensors")
    (folder / name).write_text(content)
    with pytest.raises(ValueError, match=words):
        dualdeadline.load(folder, 2, backend="cpu")


@pytest.mark.parametrize(
    "change",
    [
        lambda said: "{",
        lambda said: "[]",
        lambda said: json.dumps({name: said[name] for name in said if name != "bytes"}),
    ],
    ids=range(3),
)
def test_a_damaged_index_of_records_is_named(model, tmp_path, change):
    layout = convert(sources.ModelExperts(surgery.find(model)[1]), tmp_path)
    index = layout.folder / "store.json"
    index.write_text(change(json.loads(index.read_text())))
    wanted = run(model, text(1, 4), 2)
    with pytest.raises(ValueError, match="store.json (is damaged|lacks)"):
        offloaded(model, tmp_path)
    assert not hasattr(model, "dualdeadline")
    same(run(model, text(1, 4), 2), wanted)


@pytest.mark.parametrize("pool", ["layer", "shared"])
@pytest.mark.parametrize("ssd", [{}, {"host_slots": 2, "exclusive": True}], ids=str)
def test_a_guess_that_cannot_be_read_and_that_nobody_asks_for_leaves_no_slot_filled(tmp_path, ssd, pool):
    """Its copy fails on the link's thread while the layer before it computes; the router then chooses others."""
    model = build(dtype=torch.bfloat16, **WIDE)
    routes, inputs = [], [text(1, 1, seed) for seed in range(24)]
    hook = model.model.layers[1].mlp.gate.register_forward_hook(lambda module, args, out: routes.append(set(out[2][0].tolist())))
    with torch.no_grad():
        wanted = [model(ids).logits for ids in inputs]
    hook.remove()
    later, wrong = next((n, e) for n in range(1, 24) for e in sorted(routes[n] - routes[0]))
    guess, left, fails = torch.zeros(1, 8), [True], [False]
    guess[0, wrong] = 1

    def predictor(layer, hidden, ids):
        if layer == 0 and left and left.pop():
            fails[0] = True
            return guess
        return None

    def read(descriptor, buffers, place):
        if fails[0]:
            raise OSError(5, "Input/output error")
        return os.preadv(descriptor, buffers, place)

    own = {"predictor": predictor, "threshold": 0.5, "budget": (1, 1), "pool": pool}
    offloaded(model, tmp_path, ssd=ssd | {"read": read}, **own)
    handle = model.dualdeadline
    handle.guide.control[2] = 0  # no guess is stopped

    def ended(*_):
        deadline = time.monotonic() + 10
        while not all(handle.lanes.done(mark) for mark in handle.hosted.arriving.values()):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        fails[0] = False

    hook = model.model.layers[1].self_attn.register_forward_pre_hook(ended)
    with torch.no_grad(), pytest.raises(OSError, match="Input/output error"):
        model(inputs[0])
    hook.remove()
    assert not left
    with torch.no_grad():
        for turn in (later, *range(24)):
            assert torch.equal(model(inputs[turn]).logits, wanted[turn])
    handle.remove()


def test_host_slots_that_an_interruption_lost_come_back(model, tmp_path):
    offloaded(model, tmp_path, ssd={"host_slots": 2, "exclusive": True})
    tier = model.dualdeadline.store.tier
    rows = [{id(row) for row in free} for free in tier.free]
    tier.free[1].pop()  # as between `take`'s two steps
    tier.forget(everything=True)
    assert [{id(row) for row in free} for free in tier.free] == rows and all(len(found) == 2 for found in rows)
