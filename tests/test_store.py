"""Experts on an SSD: what is written, what is read back, and what happens when either goes wrong."""

import contextlib
import errno
import functools
import itertools
import json
import os
import re
import resource
import shutil
import threading
import time

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_engine import build, run, same, text

from dualdeadline import engine, models, wire
from dualdeadline.cache import pool
from dualdeadline.engine import handle, loading, surgery
from dualdeadline.engine.lanes import CallerLanes
from dualdeadline.schedule import COMPONENTS
from dualdeadline.store import fetching, pages, probe, sources, tier
from dualdeadline.store.file import ReplacedError
from dualdeadline.store.layout import Layout, convert
from dualdeadline.store.options import SsdOptions
from dualdeadline.store.reader import Reader
from dualdeadline.streams.lanes import Mark
from dualdeadline.task import Task
from dualdeadline.wire import appended
from dualdeadline.wire.format import ALIGN

WIDE = {"hidden_size": 64, "intermediate_size": 32}  # components of whole 4 KiB in bfloat16


def experts(model):
    return sources.ModelExperts(surgery.find(model)[1])


@pytest.fixture(scope="module")
def model():
    return build(dtype=torch.bfloat16, **WIDE)


@pytest.fixture
def folder(model, tmp_path):
    """A finished conversion, raw."""
    return convert(experts(model), tmp_path / "raw").folder


def offloaded(model, path, slots=3, ssd=None, **options):
    asked = {"backend": "cpu", "wire": "raw", "predictor": None} | options
    return engine.offload(model, slots=slots, tier="ssd", ssd_path=path, ssd=SsdOptions(**ssd or {}), **asked)


@pytest.fixture(autouse=True)
def put_back(model):
    yield
    if hasattr(model, "dualdeadline"):
        model.dualdeadline.remove()


def read_all(found, number, expert, **options):
    """A record's bytes by component, through a reader."""
    record = found.record(number, expert)
    memory = {part: pages.as_bytes(pages.aligned(place.padded)) for part, place in record.parts.items()}
    opened = Reader(found.path, **options)
    try:
        opened.submit(record, memory).result()
        return {part: data[: record.parts[part].nbytes] for part, data in memory.items()}, opened
    finally:
        opened.close()


def flip(path, at):
    with open(path, "r+b") as data:
        data.seek(at)
        (byte,) = data.read(1)
        data.seek(at)
        data.write(bytes([byte ^ 1]))


# --- layout and conversion


@pytest.mark.parametrize("kind", ["raw", "coded"])
def test_records_are_aligned_and_hold_the_weights(model, tmp_path, kind):
    source = experts(model)
    found = convert(source, tmp_path, kind)
    assert (found.L, found.E, found.coded) == (3, 8, kind == "coded")
    starts = [record.start for record in found.records.values()]
    assert starts == sorted(starts) and sum(record.nbytes for record in found.records.values()) == found.nbytes
    for number in range(found.L):
        for expert in range(found.E):
            record = found.record(number, expert)
            assert record.start % ALIGN == 0 == record.nbytes % ALIGN
            assert all(place.start % ALIGN == 0 for place in record.parts.values())
            data, _ = read_all(found, number, expert)
            for part, weights in source(number, expert).items():
                raw = torch.from_numpy(data[part])
                got = (
                    wire.decode(wire.WireRecord(raw))
                    if kind == "coded"
                    else raw.view(weights.dtype).view(weights.shape)
                )
                assert torch.equal(got, weights)


def checkpoint(model, path, fused):
    """The model's experts as a sharded checkpoint, in two files."""
    shards = [{}, {}]
    for layer in surgery.find(model)[1]:
        name = f"model.layers.{layer.number + 1}.mlp.experts"  # a first layer without experts, as some models have
        gate_up, down = layer.module.gate_up_proj.detach(), layer.module.down_proj.detach()
        if fused:
            shards[0][f"{name}.gate_up_proj"], shards[1][f"{name}.down_proj"] = gate_up.clone(), down.clone()
            continue
        for expert in range(layer.E):
            gate, up = gate_up[expert].chunk(2)
            shards[expert % 2][f"{name}.{expert}.gate_proj.weight"] = gate.clone()
            shards[0][f"{name}.{expert}.up_proj.weight"] = up.clone()
            shards[1][f"{name}.{expert}.down_proj.weight"] = down[expert].clone()
    shards[0]["model.layers.1.mlp.shared_expert.gate_proj.weight"] = torch.ones(2, 2)
    path.mkdir()
    names = [f"model-{n}-of-2.safetensors" for n in (1, 2)]
    for name, tensors in zip(names, shards, strict=True):
        save_file(tensors, path / name)
    if not fused:
        index = {tensor: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return path


@pytest.mark.parametrize("fused", [False, True])
def test_a_checkpoint_and_its_model_give_the_same_file(model, tmp_path, fused):
    from_model = convert(experts(model), tmp_path / "model")
    source = sources.CheckpointExperts(checkpoint(model, tmp_path / "checkpoint", fused))
    from_files = convert(source, tmp_path / "files")
    assert from_files.key == from_model.key
    assert from_files.path.read_bytes() == from_model.path.read_bytes()
    wanted = run(model, text())
    offloaded(model, tmp_path / "files")  # serves the model without another conversion
    same(run(model, text()), wanted)


def test_a_saved_model_of_transformers_is_read(model, tmp_path):
    model.save_pretrained(tmp_path / "saved")
    source = sources.CheckpointExperts(tmp_path / "saved")
    assert sources.key(source) == sources.key(experts(model))


def test_a_checkpoint_is_served_from_the_file_without_the_model_in_memory_twice(model, tmp_path):
    model.save_pretrained(tmp_path / "saved")
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="bfloat16").eval()
    stock.set_experts_implementation("eager")
    wanted = run(stock, text())
    asked = dict(slots=3, backend="cpu", wire="raw", tier="ssd", ssd_path=tmp_path / "ssd", dtype="bfloat16")
    for _ in range(2):  # converted, then found there
        loaded = loading.load(tmp_path / "saved", **asked)
        same(run(loaded, text()), wanted)
    loaded.dualdeadline.remove()
    loaded.set_experts_implementation("eager")
    same(run(loaded, text()), wanted)


def test_checkpoints_without_all_experts_are_refused(model, tmp_path):
    path = checkpoint(model, tmp_path / "checkpoint", False)
    with pytest.raises(FileNotFoundError, match="needed: a checkpoint's folder"):
        sources.CheckpointExperts(tmp_path)
    (path / "model.safetensors.index.json").unlink()
    tensors = load_file(path / "model-1-of-2.safetensors")
    del tensors["model.layers.2.mlp.experts.4.gate_proj.weight"]
    save_file(tensors, path / "model-1-of-2.safetensors")
    with pytest.raises(ValueError, match=r"\(2, 4\) have \['down', 'up'\]; needed: \['down', 'gate', 'up'\]"):
        sources.CheckpointExperts(path)
    save_file({"model.norm.weight": torch.ones(2)}, path / "model-1-of-2.safetensors")
    (path / "model-2-of-2.safetensors").unlink()
    with pytest.raises(ValueError, match="no experts; needed: names like"):
        sources.CheckpointExperts(path)


class Killed(sources.ModelExperts):
    """A source that ends like a killed process after some experts."""

    def __init__(self, layers, after):
        super().__init__(layers)
        self.left, self.armed, self.served = after, False, []

    def __call__(self, number, expert):
        if self.armed:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            self.served.append((number, expert))
        return super().__call__(number, expert)


def killed(model, path, after=10):
    source = Killed(surgery.find(model)[1], after)
    key = sources.key(source)
    source(0, 0)
    source.armed = True
    source.left += 1  # the first expert is looked at once more for the shapes
    with pytest.raises(KeyboardInterrupt):
        convert(source, path, key=key, workers=1)
    return key


def test_a_killed_conversion_is_no_store_and_goes_on_where_it_stopped(model, tmp_path):
    key = killed(model, tmp_path)
    with pytest.raises(FileNotFoundError, match="no finished store"):
        Layout(tmp_path)
    done = len((tmp_path / "journal.jsonl").read_text().splitlines()) - 1
    assert 0 < done < 24
    source = Killed(surgery.find(model)[1], 10**6)
    source.armed = True
    found = convert(source, tmp_path, key=key)
    assert len(source.served) == 1 + 24 - done
    assert found.path.read_bytes() == convert(experts(model), tmp_path / "whole").path.read_bytes()


def test_a_process_that_is_killed_in_the_middle_of_a_record(model, tmp_path):
    """SIGKILL, not an exception: nothing of the process gets to clean up."""

    class Slow(sources.ModelExperts):
        def __call__(self, number, expert):
            time.sleep(0.01)
            return super().__call__(number, expert)

    source = Slow(surgery.find(model)[1])
    key = sources.key(experts(model))
    child = os.fork()
    if not child:
        try:
            convert(source, tmp_path, key=key, workers=1)
        finally:
            os._exit(1)
    journal = tmp_path / "journal.jsonl"
    for _ in range(2000):
        if journal.exists() and len(journal.read_text().splitlines()) > 4:
            break
        time.sleep(0.005)
    os.kill(child, 9)
    assert os.waitpid(child, 0)[1] == 9
    with pytest.raises(FileNotFoundError, match="no finished store"):
        Layout(tmp_path)
    found = convert(experts(model), tmp_path, key=key)
    assert found.path.read_bytes() == convert(experts(model), tmp_path / "whole").path.read_bytes()


def test_a_killed_conversion_writes_damaged_records_again(model, tmp_path):
    key = killed(model, tmp_path)
    flip(tmp_path / "records.bin", 5000)
    found = convert(experts(model), tmp_path, key=key)
    assert found.path.read_bytes() == convert(experts(model), tmp_path / "whole").path.read_bytes()


def test_a_full_disk_is_named_and_the_conversion_goes_on_later(model, tmp_path):
    """The kernel itself cuts the file off, in the middle of a record."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(OSError, match=r"no room after \d+ of 24 records .*needed: about \d+ more bytes") as caught:
            convert(experts(model), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    with pytest.raises(FileNotFoundError, match="no finished store"):
        Layout(tmp_path)
    found = convert(experts(model), tmp_path)
    assert found.path.read_bytes() == convert(experts(model), tmp_path / "whole").path.read_bytes()


def test_other_experts_or_another_wire_are_refused(model, folder):
    other = build(dtype=torch.bfloat16, **WIDE)
    with torch.no_grad():
        models.describe(other).layers[2].experts.down_proj[7, 0, 0] += 1
    before = (folder / "records.bin").read_bytes()
    for source, kind in ((experts(other), "raw"), (experts(model), "coded")):
        with pytest.raises(ValueError, match="or another folder"):
            convert(source, folder, kind)
    with pytest.raises(ValueError, match="needed: one of raw, coded"):
        convert(experts(model), folder, "zip")
    with pytest.raises(ValueError, match="or another folder"):
        offloaded(other, folder)
    assert (folder / "records.bin").read_bytes() == before and not hasattr(other, "dualdeadline")
    with pytest.raises(ValueError, match="needed: bfloat16"):
        convert(experts(build()), folder.parent / "float32", "coded")


def test_a_finished_folder_needs_nothing_written(model, folder, monkeypatch):
    """As on a read-only mount: not even a lock."""
    stamps = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    wanted, mkdir = run(model, text(1, 3)), type(folder).mkdir

    def refuse(path, *args, **options):
        if str(path).startswith(str(folder)):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return mkdir(path, *args, **options)

    def only_reads(path, mode="r", *args, **options):
        if set(mode) & set("wax+"):
            refuse(path)
        return open(path, mode, *args, **options)

    monkeypatch.setattr(type(folder), "mkdir", refuse)
    monkeypatch.setattr(appended, "open", only_reads, raising=False)
    offloaded(model, folder)
    same(run(model, text(1, 3)), wanted)
    model.dualdeadline.remove()
    same(run(model, text(1, 3)), wanted)
    assert stamps == {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    with pytest.raises(OSError, match="Read-only"):
        convert(experts(model), folder / "other")


def test_sums_of_an_older_kind_are_refused_by_name(model, folder):
    said = json.loads((folder / "store.json").read_text())
    del said["sums"]
    (folder / "store.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match="sums of kind CRC-32; needed: XXH3-64, converted into an empty folder"):
        Layout(folder)


def test_a_truncated_file_is_refused(folder):
    with open(folder / "records.bin", "r+b") as data:
        data.truncate(data.seek(0, 2) - 1)
    with pytest.raises(ValueError, match=r"\(truncated\?\)"):
        Layout(folder)


# --- reader


def test_reads_go_past_the_page_cache(folder):
    """Nothing of the file is in the page cache before or after a direct read."""
    found = Layout(folder)
    assert pages.drop(found.path).after in (0.0, None)
    data, opened = read_all(found, 1, 3)
    if opened.path_kind != "direct":
        pytest.skip(opened.path_kind)
    assert pages.resident(found.path) in (0.0, None)
    found.path.read_bytes()
    assert pages.resident(found.path) in (1.0, None)
    dropped = pages.drop(found.path)
    assert dropped.proven and dropped.before == 1.0 and "mincore: 0.0%" in dropped.how
    assert opened.counts["reads"] == 1 and opened.counts["bytes"] == found.record(1, 3).nbytes


def test_buffered_reads_say_so_and_leave_nothing_in_the_cache(folder):
    found = Layout(folder)
    pages.drop(found.path)
    _, opened = read_all(found, 2, 2, direct=False)
    assert opened.path_kind == "buffered (asked for)"
    assert pages.resident(found.path) < 0.5  # read-ahead may have brought neighbours


def test_a_refused_direct_read_is_made_buffered(folder):
    calls = []

    def refuses(descriptor, buffers, at):
        calls.append(at)
        if len(calls) == 1:
            raise OSError(errno.EINVAL, "no direct reads here")
        return os.preadv(descriptor, buffers, at)

    found = Layout(folder)
    data, opened = read_all(found, 0, 1, read=refuses)
    if calls[1:]:
        assert opened.path_kind.startswith("buffered (a direct read was refused")
    found.record(0, 1).verify(np.concatenate([data["gate_up"]]), "gate_up", found.path)


def test_memory_that_does_not_fit_is_refused(folder):
    found = Layout(folder)
    record, opened = found.record(0, 0), Reader(found.path)
    try:
        for memory in (
            np.zeros(4096, np.uint8),
            pages.as_bytes(pages.aligned(record.parts["down"].padded + 4096))[16:-4080],
        ):
            with pytest.raises(ValueError, match="at a multiple of 4096"):
                opened.submit(record, {"down": memory})
        with pytest.raises(ValueError, match="depth is 0"):
            Reader(found.path, depth=0)
    finally:
        opened.close()


class Slow:
    """Reads one after the other, each only when it is let through; remembers their order."""

    def __init__(self):
        self.gate, self.order = threading.Semaphore(0), []

    def __call__(self, descriptor, buffers, at):
        self.order.append(at)
        self.gate.acquire()
        return os.preadv(descriptor, buffers, at)


def submit(opened, found, expert, urgent=True):
    record = found.record(0, expert)
    memory = {part: pages.as_bytes(pages.aligned(place.padded)) for part, place in record.parts.items()}
    return opened.submit(record, memory, urgent)


def test_what_was_asked_for_overtakes_guesses_and_guesses_can_be_cancelled(folder):
    found, slow = Layout(folder), Slow()
    opened = Reader(found.path, depth=1, read=slow)
    first = submit(opened, found, 0)
    while not slow.order:
        time.sleep(0.001)
    guesses = [submit(opened, found, expert, urgent=False) for expert in (1, 2, 3)]
    demand = submit(opened, found, 4)
    opened.hurry(guesses[2])
    assert opened.cancel(guesses[0]) and not opened.cancel(first)
    for _ in range(4):
        slow.gate.release()
    for read in (first, demand, guesses[2], guesses[1]):
        read.result()
    starts = {found.record(0, expert).start: expert for expert in range(8)}
    assert [starts[at] for at in slow.order] == [0, 3, 4, 2] and guesses[0].cancelled
    opened.close()


def test_who_waits_makes_a_read_that_nobody_was_woken_for(folder):
    found, slow = Layout(folder), Slow()
    opened = Reader(found.path, depth=2, read=slow)
    record = found.record(0, 0)
    memory = {part: pages.as_bytes(pages.aligned(place.padded)) for part, place in record.parts.items()}
    quiet = opened.submit(record, memory, wake=False)
    time.sleep(0.05)
    assert not slow.order and not quiet.begun
    slow.gate.release()
    quiet.result()
    first = submit(opened, found, 1)
    while not first.begun:
        time.sleep(0.001)
    other = opened.submit(found.record(0, 2), memory, wake=False)
    guess = submit(opened, found, 3, urgent=False)
    assert opened.cancel(guess)
    for _ in range(2):
        slow.gate.release()
    first.result()  # and meanwhile what was asked for beside it, not what was guessed
    other.result()
    assert len(slow.order) == 3 and guess.cancelled
    opened.close()


@pytest.mark.parametrize("depth", [1, 3])
def test_as_many_reads_at_a_time_as_the_depth_says(folder, depth):
    found, now, most = Layout(folder), [0], [0]
    lock = threading.Lock()

    def counts(descriptor, buffers, at):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.01)
        with lock:
            now[0] -= 1
        return os.preadv(descriptor, buffers, at)

    opened = Reader(found.path, depth=depth, read=counts)
    for read in [submit(opened, found, expert) for expert in range(8)]:
        read.result()
    opened.close()
    assert depth <= most[0] <= depth + 1  # who waits makes one itself


def test_pinned_memory_is_asked_for_in_place(monkeypatch):
    """Without a GPU: which calls are made, and that a refusal is an error with a way out."""
    calls = []

    class Runtime:
        def cudaHostRegister(self, address, size, flags):
            calls.append(("register", address, size))
            return len(calls) > 1

        def cudaHostUnregister(self, address):
            calls.append(("unregister", address))

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    memory = pages.Memory(pinned=True)
    first = memory.new(8192)
    assert calls == [("register", first.data_ptr(), 8192)] and first.data_ptr() % ALIGN == 0
    with pytest.raises(RuntimeError, match="needed: `ulimit -l`"):
        memory.new(4096)
    memory.close()
    assert calls[-1] == ("unregister", first.data_ptr()) and len(calls) == 3


@pytest.mark.parametrize(
    "way, words",
    [
        ("O_DIRECT", "on (opening|reading)"),
        ("io_uring", "io_uring_setup says E"),
        ("GPUDirect Storage", "no library|kernel module|cuFileDriverOpen"),
    ],
)
def test_ways_to_the_disk_are_there_or_say_why_not(folder, way, words):
    found = probe.report(folder / "records.bin")
    assert set(found) == {"O_DIRECT", "io_uring", "GPUDirect Storage"}
    assert found[way] == "available" or re.search(f"not available: .*({words})", found[way])


def test_a_missing_library_or_module_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(probe, "GDS_LIBRARIES", ("libnothing.so.9",))
    assert "no library (libnothing.so.9)" in probe.gpudirect()
    monkeypatch.setattr(probe, "GDS_LIBRARIES", ("libc.so.6",))
    monkeypatch.setattr(probe, "GDS_DEVICE", tmp_path / "nvidia-fs0")
    assert "kernel module nvidia-fs is not" in probe.gpudirect()
    monkeypatch.setattr(probe, "IO_URING_SETUP", 10**6)
    assert probe.io_uring() == "not available: io_uring_setup says ENOSYS"


# --- the engine over the file


SETTINGS = {
    "straight into the slots": ({}, {}),
    "depth 1": ({"depth": 1}, {}),
    "host slots": ({"host_slots": 5}, {}),
    "one host slot, lfu": ({"host_slots": 1, "policy": "lfu"}, {}),
    "all in host slots": ({"host_slots": 8}, {}),
    "exclusive": ({"host_slots": 3, "exclusive": True}, {}),
    "exclusive, lfu, guesses for slots": (
        {"host_slots": 2, "exclusive": True, "policy": "lfu"},
        {"predictor": "gate_ahead", "threshold": 0.0, "budget": (2, 1)},
    ),
    "guesses for host slots": ({"host_slots": 4, "ahead": 1, "threshold": 0.0, "rule": False}, {}),
    "predicted, two layers ahead": ({"host_slots": 3, "policy": "predicted", "ahead": 2, "threshold": 0.0}, {}),
    "guesses for slots": ({}, {"predictor": "gate_ahead", "threshold": 0.0, "budget": (3, 3)}),
    "guesses for both": (
        {"host_slots": 3, "ahead": 2, "threshold": 0.0},
        {"predictor": "gate_ahead", "threshold": 0.0},
    ),
    "two banks": ({"host_slots": 3}, {"slots": {"gate_up": 2, "down": 5}}),
    "two banks, exclusive": ({"host_slots": 2, "exclusive": True}, {"slots": {"gate_up": 4, "down": 1}}),
    "components": ({}, {"schedule": "staged_pipelined"}),
    "components, host slots": ({"host_slots": 2}, {"schedule": "component_priority"}),
    "encoded": ({"host_slots": 2}, {"wire": "coded"}),
    "encoded, no host slots": ({}, {"wire": "coded", "schedule": "staged_barrier"}),
    "one slot": ({}, {"slots": 1}),
    "all in slots": ({}, {"slots": 8}),
    "buffered": ({"direct": False}, {}),
    "one pool": ({}, {"pool": "shared"}),
    "one pool, exclusive": ({"host_slots": 2, "exclusive": True}, {"pool": "shared"}),
    "one pool, guesses": (
        {"host_slots": 3, "exclusive": True},
        {"pool": "shared", "predictor": "gate_ahead", "threshold": 0.0, "budget": (3, 3), "slots": 2},
    ),
    "one pool, guesses straight into slots": (
        {},
        {"pool": "shared", "predictor": "gate_ahead", "threshold": 0.0, "budget": (3, 3), "slots": 2},
    ),
}


@pytest.mark.parametrize("name", list(SETTINGS))
def test_the_bits_are_those_of_the_resident_run(model, tmp_path, name):
    ssd, options = SETTINGS[name]
    wanted, short = run(model, text(), 8), run(model, text(1, 2), 4)
    offloaded(model, tmp_path, ssd=ssd, **options)
    same(run(model, text(), 8), wanted)
    same(run(model, text(1, 2), 4), short)
    counts = model.dualdeadline.stats()
    model.dualdeadline.tables.check()
    below = counts["tiers"]
    if options.get("slots") != 8:
        assert below["ssd"]["reads"] > 0 and below["ssd"]["retries"] == 0
    if ssd.get("host_slots", 0) > 2:
        assert below["host"]["hits"] > 0
        assert below["host"]["useful"] + below["host"]["wasted"] <= below["host"]["ahead"]
    if ssd.get("exclusive"):
        assert below["host"]["given_up"] > 0
    if ssd.get("ahead") and not ssd.get("rule", True):
        assert below["host"]["ahead"] > 0 < below["host"]["useful"]
    model.dualdeadline.remove()
    same(run(model, text(), 8), wanted)


def test_components_that_are_no_whole_pages_are_installed_by_a_copy(tmp_path):
    tiny, ids = build(dtype=torch.bfloat16), text()
    wanted = run(tiny, ids)
    offloaded(tiny, tmp_path)
    same(run(tiny, ids), wanted)
    tiny.dualdeadline.remove()


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_other_families(family, tmp_path):
    other, ids = build(family), text()
    wanted, before = run(other, ids), {name: value.clone() for name, value in other.state_dict().items()}
    offloaded(other, tmp_path, ssd={"host_slots": 2})
    same(run(other, ids), wanted)
    other.dualdeadline.remove()
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_one_read_per_miss_and_none_is_copied(model, folder, monkeypatch):
    """Whole experts straight into their slots: as many reads as misses, and nothing left to install."""
    calls = []
    offloaded(model, folder, ssd={"read": lambda *args: (calls.append(args), os.preadv(*args))[1]})
    monkeypatch.setattr(type(model.dualdeadline.store), "put", lambda *args: pytest.fail("a component was copied"))
    run(model, text(1, 2), 24)  # not a prompt long enough to be streamed
    counts = model.dualdeadline.stats()
    assert len(calls) == counts["tiers"]["ssd"]["reads"] == counts["misses"] > 0
    assert counts["tiers"]["ssd"]["bytes"] == counts["misses"] * Layout(folder).largest
    assert {len(buffers) for _, buffers, _ in calls} == {2}


def test_weights_are_not_in_memory_and_the_file_is_what_counts(model, folder):
    wanted = run(model, text())
    found = Layout(folder)
    offloaded(model, folder)
    assert all(value.numel() == 0 for layer in model.dualdeadline.layers for value in layer.parameters.values())
    assert model.dualdeadline.stats()["host_bytes"] == 9 * found.largest  # eight reads in flight, and a guess
    for bank in model.dualdeadline.banks["gate_up"]:
        bank.fill_(float("nan"))
    same(run(model, text()), wanted)


def test_the_graph_backend_falls_back_and_says_why(model, folder, monkeypatch):
    from dualdeadline.engine import ssd

    monkeypatch.setattr(ssd.triton_kernels, "INTERPRETED", True)
    wanted = run(model, text(), 2)
    offloaded(model, folder, backend="graph", kernels="torch")
    same(run(model, text(), 2), wanted)
    counts = model.dualdeadline.stats()
    assert counts["path"] == "cpu" and "graph cannot hold" in counts["path_reason"]
    assert ssd.choices(torch.device("cuda"), "graph")[0] == ssd.choices(torch.device("cuda"), "auto")[0] == "streams"


@pytest.mark.parametrize(
    "options, words",
    [
        ({"tier": "ssd"}, "'ssd' with a path"),
        ({"ssd_path": "x"}, "'ssd' with a path"),
        ({"ssd": SsdOptions()}, "with a path"),
    ],
)
def test_wrong_choices(model, options, words):
    with pytest.raises(ValueError, match=words):
        engine.offload(model, slots=2, backend="cpu", **options)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"host_slots": -1}, "host_slots is -1"),
        ({"ahead": 4, "host_slots": 2}, "from 0 to 3"),
        ({"ahead": 1}, "inclusive"),
        ({"ahead": 1, "host_slots": 2, "exclusive": True}, "inclusive"),
        ({"exclusive": True}, "host_slots above 0"),
        ({"policy": "fifo"}, "needed: one of lru"),
        ({"depth": True}, "depth is True"),
        ({"budget": 0}, "budget is 0"),
    ],
)
def test_wrong_ssd_options(options, words):
    with pytest.raises(ValueError, match=words):
        SsdOptions(**options)


def test_exclusive_host_slots_hold_weights_only(model, tmp_path):
    with pytest.raises(ValueError, match="needed: inclusive, or raw"):
        offloaded(model, tmp_path, wire="coded", ssd={"host_slots": 2, "exclusive": True})
    assert not hasattr(model, "dualdeadline") and not (tmp_path / "store.json").exists()


def test_exclusive_host_slots_hold_what_slots_gave_up(model, folder):
    """Never the same expert in both, and together more than either."""
    offloaded(model, folder, slots=3, ssd={"host_slots": 3, "exclusive": True})
    run(model, text())
    handle = model.dualdeadline
    handle.hosted.lanes.settle()
    for number in range(3):
        held = {expert for expert, found in handle.store.tier.held[number].items() if found.parts}
        slots = handle.pool.present(number, 0) | handle.pool.present(number, 1)
        assert held and not held & slots and len(held | slots) > 3


@pytest.mark.parametrize("ssd", [{}, {"host_slots": 2, "exclusive": True}], ids=str)
def test_a_guess_that_is_still_being_read_does_not_overwrite_who_took_its_slot(model, folder, ssd, monkeypatch):
    """Guesses that the router hardly follows, read slowly into slots that it takes for others."""

    monkeypatch.setattr(handle, "BREAK_EVEN", 0.0)  # the live control would stop such guesses

    def wrong(number, hidden, ids):
        return torch.zeros(len(hidden), 8).scatter_(1, (ids[:, :1].long() + number + 3) % 8, 1.0)

    slow, guesses = set(), []

    def uneven(descriptor, buffers, at):
        if at in slow:
            time.sleep(0.02)
        return os.preadv(descriptor, buffers, at)

    wanted = run(model, text(1, 3), 8)
    offloaded(model, folder, 2, ssd | {"read": uneven}, predictor=wrong, threshold=0.5, budget=(2, 2))
    submit = model.dualdeadline.store.reader.submit

    def remember(record, memory, urgent=True, wake=True):
        first = min(record.parts[part].start for part in memory)
        (slow.discard if urgent else slow.add)(record.start + first)
        guesses.extend([record] * (not urgent))
        return submit(record, memory, urgent, wake)

    model.dualdeadline.store.reader.submit = remember
    for _ in range(2):
        same(run(model, text(1, 3), 8), wanted)
    assert len(guesses) > 5 and model.dualdeadline.stats()["bytes_wasted"] > 0


class Event:
    """Stands for a CUDA event; knows whether somebody waited for it."""

    made: list = []

    def __init__(self):
        self.waited = False
        Event.made.append(self)

    def record(self):
        pass

    def synchronize(self):
        self.waited = True


class Inline(CallerLanes):
    """Copies are issued by the caller at once, as on streams."""

    def copy(self, work, needs):
        for need in needs:
            need.end.result()
        mark = Mark(1, None, Task(work))
        mark.end.run()
        mark.end.result()
        return mark


@pytest.mark.parametrize(
    "ssd",
    [{}, {"host_slots": 3}, {"host_slots": 2, "exclusive": True}, {"host_slots": 3, "ahead": 1, "threshold": 0.0}],
    ids=str,
)
def test_as_on_a_gpu_no_row_is_written_before_its_last_copy_has_ended(model, folder, monkeypatch, ssd):
    """Copies issued by the host, events in place of streams: every row's event is waited for before a read."""
    wanted, Event.made = run(model, text(), 8), []
    offloaded(model, folder, ssd=ssd)
    hosted, store = model.dualdeadline.hosted, model.dualdeadline.store
    monkeypatch.setattr(torch.cuda, "Event", Event)
    hosted.lanes, store.pinned = Inline(), True
    submit, rows = store.reader.submit, list(store.staging.rows)
    rows += [row for layer in store.tier.free for row in layer] if store.tier else []

    def checked(record, memory, *how, **more):
        places = [(view.ctypes.data, view.ctypes.data + view.nbytes) for view in memory.values()]
        for row in rows:
            begin = row.data.data_ptr()
            if any(begin < end and start < begin + len(row.data) for start, end in places):
                assert row.event is None or row.event.waited
        return submit(record, memory, *how, **more)

    store.reader.submit = checked
    same(run(model, text(), 8), wanted)
    assert len(Event.made) > 20 and any(event.waited for event in Event.made)
    store.pinned = False
    hosted.lanes.close()


# --- faults


class Faulty:
    """preadv that does something else on some calls."""

    def __init__(self, wrong, when):
        self.wrong, self.when, self.calls, self.armed = wrong, when, 0, False

    def __call__(self, descriptor, buffers, at):
        if not self.armed:
            return os.preadv(descriptor, buffers, at)
        self.calls += 1
        return self.wrong(descriptor, buffers, at) if self.when(self.calls) else os.preadv(descriptor, buffers, at)


def broken(descriptor, buffers, at):
    raise OSError(errno.EIO, "input/output error")


def nothing(descriptor, buffers, at):
    return 0


def part_of_it(descriptor, buffers, at):
    return os.preadv(descriptor, [memoryview(buffers[0])[:4096]], at)


def garbled(descriptor, buffers, at):
    count = os.preadv(descriptor, buffers, at)
    buffers[0][17] ^= 64
    return count


FAULTS = {"EIO": broken, "end of file": nothing, "short read": part_of_it, "garbled": garbled}


@pytest.mark.parametrize(
    "ssd",
    [
        {},
        {"host_slots": 3},
        {"host_slots": 2, "exclusive": True},
        {"host_slots": 3, "ahead": 1, "threshold": 0.0, "rule": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", list(FAULTS))
def test_a_fault_that_passes_costs_a_retry_only(model, folder, name, ssd):
    faulty = Faulty(FAULTS[name], lambda call: call % 7 == 3)
    wanted = run(model, text())
    offloaded(model, folder, ssd=ssd | {"read": faulty})
    faulty.armed = True
    same(run(model, text()), wanted)
    assert (model.dualdeadline.stats()["tiers"]["ssd"]["retries"] > 0) == (name != "short read")
    faulty.armed = False


@pytest.mark.parametrize(
    "ssd",
    [
        {},
        {"host_slots": 3},
        {"host_slots": 2, "exclusive": True},
        {"host_slots": 3, "ahead": 1, "threshold": 0.0, "rule": False},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "name, error, words",
    [
        ("EIO", OSError, r"layer \d expert \d of .*records.bin cannot be read, tried 2 times"),
        ("end of file", OSError, r"layer \d expert \d of .*cannot be read.*short read: 0 of"),
        ("garbled", ValueError, r"record layer \d expert \d of .*is altered: MiB 0 of (gate_up|down) has XXH3-64"),
    ],
)
def test_a_fault_that_stays_stops_the_run_with_the_records_name(model, folder, name, error, words, ssd):
    """And when it is gone, the same model goes on with the right bits."""
    faulty = Faulty(FAULTS[name], lambda call: call > 4)
    wanted = run(model, text())
    offloaded(model, folder, ssd=ssd | {"read": faulty})
    faulty.armed = True
    with pytest.raises(error, match=words):
        for seed in range(20):
            run(model, text(seed=seed))
    faulty.armed = False
    same(run(model, text()), wanted)


def test_an_altered_record_stops_the_run_and_the_others_still_serve(model, folder):
    wanted = run(model, text())
    record = Layout(folder).record(1, 5)
    stamp = os.stat(folder / "records.bin")
    flip(folder / "records.bin", record.start + record.parts["down"].start + 3)
    os.utime(folder / "records.bin", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    offloaded(model, folder)
    with pytest.raises(ValueError, match="record layer 1 expert 5 of .*MiB 0 of down"):
        for seed in range(40):
            run(model, text(seed=seed))
    flip(folder / "records.bin", record.start + record.parts["down"].start + 3)
    os.utime(folder / "records.bin", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    same(run(model, text()), wanted)


@pytest.mark.parametrize("change", ["another file", "appended", "touched", "gone"])
def test_a_file_that_is_replaced_under_us_stops_the_run(model, folder, change):
    path = folder / "records.bin"
    wanted = run(model, text())
    offloaded(model, folder)
    run(model, text())
    kept = path.with_name("kept")
    os.rename(path, kept)
    if change == "another file":
        shutil.copy2(kept, path)
    elif change != "gone":
        os.rename(kept, path)
        before = path.stat()
        if change == "appended":
            with open(path, "ab") as data:
                data.write(bytes(4096))
        else:
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))
    model.dualdeadline.tables.clear()
    with pytest.raises(ReplacedError, match=r"records.bin was replaced or altered before layer 0 expert \d was read"):
        run(model, text())
    if change == "appended":
        with open(path, "r+b") as data:
            data.truncate(before.st_size)
    if change in ("appended", "touched"):
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    else:
        os.replace(kept, path)
    same(run(model, text()), wanted)  # the file that was opened is there again


def test_a_damaged_record_is_not_given_back_as_weights(model, folder):
    """remove() stops with the record's name, and works when the bytes are right again."""
    wanted = run(model, text())
    offloaded(model, folder)
    faulty = garbled
    model.dualdeadline.store.reader.file.read = faulty
    with pytest.raises(ValueError, match="record layer 0 expert 0"):
        model.dualdeadline.remove()
    model.dualdeadline.store.reader.file.read = os.preadv
    model.dualdeadline.remove()
    same(run(model, text()), wanted)


# --- host slots


def fake_tier(policy, slots=2):
    return tier.HostTier(1, 8, slots, ALIGN, policy, pages.Memory())


def put(host, expert, keep=frozenset()):
    host.use(0, expert)
    if host.find(0, expert) is None:
        held = host.take(0, expert, None, keep)
        held.parts = dict.fromkeys(COMPONENTS)


@pytest.mark.parametrize(
    "policy, order, left",
    [
        ("lru", [1, 1, 1, 2, 3], {2, 3}),
        ("lfu", [1, 1, 1, 2, 3], {1, 3}),
        ("lfu", [1, 2, 2, 1, 3], {1, 3}),
        ("lru", [1, 2, 1, 3], {1, 3}),
        ("predicted", [1, 2, 3], {1, 3}),
    ],
)
def test_policies_evict_by_their_rule(policy, order, left):
    host = fake_tier(policy)
    host.predict(0, torch.tensor([[1, 3]]), torch.tensor([[0.9, 0.4]]))
    for expert in order:
        put(host, expert)
    assert set(host.held[0]) == left and host.counts["evictions"] == 1


def test_predicted_scores_fade():
    host = fake_tier("predicted")
    host.predict(0, torch.tensor([[1], [1]]), torch.tensor([[0.2], [0.8]]))
    host.predict(0, torch.tensor([[2]]), torch.tensor([[0.6]]))
    assert np.allclose(host.score[0, :3], [0.0, 0.2, 0.3])


def test_slots_in_use_or_kept_are_not_evicted():
    host = fake_tier("lru")
    put(host, 1)
    put(host, 2)
    host.find(0, 1).users = 1
    assert host.take(0, 3, None, keep={2}) is None
    host.find(0, 1).users = 0
    assert host.take(0, 3, None, keep={2}) is not None and set(host.held[0]) == {2, 3}
    with pytest.raises(ValueError, match="needed: one of lru"):
        fake_tier("fifo")


@pytest.mark.parametrize(
    "depth, layer_ms, fetch_ms, worth",
    [
        (1, 4.0, 8.1, False),
        (2, 4.0, 8.1, False),
        (3, 4.0, 8.1, True),
        (2, 4.0, 8.0, True),
        (1, None, 8.0, True),
        (1, 4.0, None, True),
    ],
)
def test_a_guess_has_to_arrive_in_time(depth, layer_ms, fetch_ms, worth):
    assert tier.in_time(depth, layer_ms, fetch_ms) is worth


def test_the_rule_keeps_guesses_back_while_reads_take_longer(model, folder):
    """Reads of 30 ms against layers of about one: nothing is guessed, once that is known."""
    slow = lambda *args: (time.sleep(0.03), os.preadv(*args))[1]  # noqa: E731
    setting = {"host_slots": 8, "ahead": 1, "threshold": 0.0}
    offloaded(model, folder, slots=6, ssd=setting)
    run(model, text(1, 2), 24)
    store = model.dualdeadline.store
    store.reader.file.read, store.reader.ms, store.layer_ms = slow, 30.0, 1.0
    before = dict(store.counts)
    guess = torch.tensor([[7]]), torch.tensor([[1.0]])
    store.tier.held[1].pop(7, None)
    store.ahead(1, *guess, 0.5, set())
    assert store.counts["ahead_too_late"] == before.get("ahead_too_late", 0) + 1
    assert store.counts["ahead"] == before.get("ahead", 0)
    store.layer_ms = 31.0
    if store.tier.find(1, 7) is None and store.tier.free[1]:
        store.ahead(1, *guess, 0.5, set())
        assert store.counts["ahead"] == before.get("ahead", 0) + 1


@pytest.mark.parametrize("size", (0, 1, 4096, 5000))
def test_a_storage_begins_where_its_tensor_does(size):
    """torch looks there to tell whether a tensor is pinned."""
    found = pages.aligned(size)
    assert found.shape == (size,) and not found.any()
    assert size == 0 or found.data_ptr() == found.untyped_storage().data_ptr() and found.data_ptr() % 4096 == 0
    found.fill_(7)
    assert (found == 7).all()


# --- interruptions at each step of reader, host slots and pool

STEPS = [
    (Reader, ("submit", "help", "hurry", "cancel", "settle")),
    (fetching.Fetching, ("begin", "_pump", "_start", "_from_tier", "_release", "give_up", "ahead", "_guess", "settle")),
    (tier.HostTier, ("use", "find", "take", "predict", "drop", "_remove", "_cancel", "forget")),
    (tier.Staging, ("take", "give", "reset")),
    (pool.Pool, ("lookup", "place", "withdraw")),
    (CallerLanes, ("copy", "compute", "cancel", "settle")),
]


class Interrupts:
    """Raises KeyboardInterrupt at the n-th call of one method, before or after it did its work."""

    def __init__(self, owner, name, n, after):
        self.method, self.n, self.after, self.calls = getattr(owner, name), n, after, 0

    def __get__(self, found, owner):
        return functools.partial(self, found)

    def __call__(self, *args, **options):
        self.calls += 1
        mine = self.calls == self.n
        if mine and not self.after:
            raise KeyboardInterrupt
        out = self.method(*args, **options)
        if mine:
            raise KeyboardInterrupt
        return out


@pytest.mark.parametrize(
    ("shared", "ssd"),
    [("layer", {}), ("shared", {"host_slots": 2, "ahead": 1}), ("shared", {"host_slots": 2, "exclusive": True})],
    ids=str,
)
def test_after_an_interruption_at_any_step_the_bits_are_the_same(model, folder, monkeypatch, shared, ssd):
    ids = text(1, 4)
    wanted = run(model, ids, 2)
    offloaded(model, folder, 3, ssd, pool=shared)
    hit = 0
    for owner, names in STEPS:
        for name in names:
            with monkeypatch.context() as patched:
                counted = Interrupts(owner, name, 0, False)
                patched.setattr(owner, name, counted)
                same(run(model, ids, 2), wanted)
            for n, after in itertools.product({1, (counted.calls + 1) // 2} - {0}, (False, True)):
                with monkeypatch.context() as patched:
                    patched.setattr(owner, name, Interrupts(owner, name, n, after))
                    with contextlib.suppress(KeyboardInterrupt):
                        run(model, ids, 2)
                        hit -= 1
                    hit += 1
                same(run(model, ids, 2), wanted)
    assert hit > 30
    model.dualdeadline.remove()
    same(run(model, ids, 2), wanted)
