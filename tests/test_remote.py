"""Remote experts: the same bits as the resident run, or an error with a name; never a wrong number."""

import _thread
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
import transformers
from conftest import interpreted_python, tiny_config
from test_engine import build, run, same, text

from dualdeadline import engine
from dualdeadline.remote import Client, RemoteError, frames, keys, new_token, read_token
from dualdeadline.remote.held import Held
from dualdeadline.remote.worker import Worker, main


@pytest.fixture(scope="module")
def token(tmp_path_factory):
    return new_token(tmp_path_factory.mktemp("token") / "token")


@pytest.fixture
def workers(token):
    made = []

    def make(held, kind=Worker, **options):
        made.append(kind(held, read_token(token), **options))
        return made[-1]

    yield make
    for worker in made:
        worker.stop()


def address(worker):
    return "{}:{}".format(*worker.address)


def far(model, worker, token, slots=2, **options):
    return engine.offload(model, slots=slots, tier="remote", remote=address(worker), remote_token=token, **options)


@pytest.mark.parametrize("family, dtype", [("olmoe", torch.float32), ("olmoe", torch.bfloat16), ("gpt_oss", torch.float32),
                                           ("deepseek_v3", torch.float32), ("qwen2_moe", torch.float32)], ids=str)
def test_bits_are_those_of_the_resident_run(workers, token, family, dtype):
    model, ids = build(family, dtype), text()
    wanted = run(model, ids)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    worker = workers(Held.of_model(build(family, dtype)))
    for slots in (1, 3, 8):
        far(model, worker, token, slots)
        same(run(model, ids), wanted)
        counts = model.dualdeadline.stats()
        asked = counts["remote"]["round_trips"]
        assert (counts["misses"] == 0) == (slots == 8) and counts["bytes_demand"] == 0
        assert asked > counts["forwards"] if slots < 8 else asked == 1
        model.dualdeadline.remove()
    after = model.state_dict()
    assert set(before) == set(after) and all(torch.equal(after[name], value) for name, value in before.items())
    same(run(model, ids), wanted)


def test_four_experts_per_token_batches_and_padding(workers, token):
    model, ids, mask = build(num_experts_per_tok=4), text(4, 12), torch.ones(4, 12, dtype=torch.long)
    mask[0, :7] = mask[2, :3] = 0
    wanted = run(model, ids, attention_mask=mask)
    far(model, workers(Held.of_model(build(num_experts_per_tok=4))), token, 3)
    same(run(model, ids, attention_mask=mask), wanted)


def test_state_dicts_are_whole_and_shared_slots_are_refused(workers, token):
    model, wanted = build(), build().state_dict()
    worker = workers(Held.of_model(build()))
    far(model, worker, token)
    found = model.state_dict()
    assert set(found) == set(wanted) and all(torch.equal(found[name], value) for name, value in wanted.items())
    model.dualdeadline.remove()
    with pytest.raises(ValueError, match="pool is 'shared'"):
        far(model, worker, token, pool="shared")
    assert not hasattr(model, "dualdeadline") and not model.model.layers[0].mlp.experts.down_proj.is_meta


def test_weights_leave_the_process_and_come_back(workers, token):
    model = build()
    far(model, workers(Held.of_model(build())), token)
    handle = model.dualdeadline
    assert all(layer.module.gate_up_proj.is_meta for layer in handle.layers) and handle.store.taken is None
    held = sum(bank.nbytes for banks in handle.banks.values() for bank in banks)
    assert held == 2 * 3 * (2 * 16 * 32 + 32 * 16) * 4  # slots, layers, bytes of an expert
    wanted = build().state_dict()
    handle.remove()
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())


class Faulty(Worker):
    """Spoils the answers named in `faults` (request number of the whole worker -> what happens)."""

    def __init__(self, *args, faults=None, **options):
        self.faults, self.seen, self.hit = dict(faults or {}), 0, []
        super().__init__(*args, **options)

    def _answer(self, meta, tensors):
        found = super()._answer(meta, tensors)
        if meta["op"] != "experts":
            return found
        self.seen += 1
        kind = self.faults.get(self.seen)
        if kind is None:
            return found
        self.hit.append(kind)
        said, parts, *times = found
        return (*getattr(self, kind)(said, dict(parts)), *times)

    def dies(self, said, parts):
        for connection in list(self.connections):
            connection.shutdown(socket.SHUT_RDWR)
        return said, parts

    def shape(self, said, parts):
        return said, {"weighted": parts["weighted"][:-1]}

    def dtype(self, said, parts):
        return said, {"weighted": parts["weighted"].double().float().half()}

    def others(self, said, parts):
        return {"experts": [expert + 1 for expert in said["experts"]]}, parts

    def nothing(self, said, parts):
        return said, {}


class Tampering:
    """A relay between client and worker that changes bytes of the answers it is told to."""

    def __init__(self, target, change):
        self.target, self.change, self.answers = target, change, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            there = socket.create_connection(self.target)
            threading.Thread(target=self._pump, args=(near, there, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(there, near, True), daemon=True).start()

    def _pump(self, source, sink, back):
        try:
            while True:
                head, rest = frames.receive(source)
                frame = head + bytes(rest)
                if back and frames.HEADER.unpack(head)[1]:
                    self.answers += 1
                    frame = self.change(self.answers, frame)
                sink.sendall(frame)
        except OSError:
            for end in (source, sink):
                end.close()


@pytest.mark.parametrize("kind", ["dies", "shape", "dtype", "others", "nothing"])
def test_one_bad_answer_is_asked_for_again(workers, token, kind):
    model, ids = build(), text()
    wanted = run(model, ids)
    worker = workers(Held.of_model(build()), Faulty, faults={2: kind, 9: kind})
    far(model, worker, token)
    same(run(model, ids), wanted)
    assert worker.hit == [kind, kind] and model.dualdeadline.stats()["remote"]["retries"] == 2


@pytest.mark.parametrize("kind", ["shape", "others"])
def test_a_worker_that_keeps_answering_garbage_stops_the_run(workers, token, kind):
    model, ids = build(), text()
    wanted = run(model, ids)
    worker = workers(Held.of_model(build()), Faulty, faults=dict.fromkeys(range(5, 9), kind))
    far(model, worker, token)
    model.dualdeadline.store.client.pause_s = 0.001
    with pytest.raises(RemoteError, match="no usable answer to experts"):
        run(model, ids)
    worker.faults.clear()
    same(run(model, ids), wanted)


def flipped(place):
    def change(number, frame):
        if number % 4:
            return frame
        spoilt = bytearray(frame)
        spoilt[place if place >= 0 else len(frame) + place] ^= 1
        return bytes(spoilt)

    return change


@pytest.mark.parametrize("change", [flipped(-1), flipped(9), flipped(60), lambda n, frame: frame * 2 if n % 4 == 0 else frame,
                                    lambda n, frame: frame if n % 4 else b"HTTP/1.1 200 OK" + bytes(60)],
                         ids=["tensor byte", "number", "map byte", "answer twice", "another protocol"])
def test_changed_bytes_never_reach_the_output(workers, token, change):
    model, ids = build(), text()
    wanted = run(model, ids)
    relay = Tampering(workers(Held.of_model(build())).address, change)
    engine.offload(model, slots=2, tier="remote", remote="127.0.0.1:{}".format(relay.address[1]), remote_token=token)
    model.dualdeadline.store.client.pause_s = 0.001
    same(run(model, ids), wanted)
    assert model.dualdeadline.stats()["remote"]["retries"] > 3


def test_a_slow_worker_is_asked_again_and_a_late_answer_is_not_taken(workers, token, monkeypatch):
    held = Held.synthetic([(32, 16, 4)], torch.float32)
    client = Client(address(workers(held)), token, timeout_s=0.2, pause_s=0.01)
    x, ids, weights = torch.randn(2, 32), torch.tensor([[0, 1], [1, 2]]), torch.rand(2, 2)
    compute, calls = held.compute, []

    def late(*args):
        calls.append(len(calls))
        if len(calls) == 1:
            threading.Event().wait(0.5)
            return compute(*args) + 1
        return compute(*args)

    monkeypatch.setattr(held, "compute", late)
    found = client.experts(0, x, ids, weights, [0, 1, 2])
    assert torch.equal(torch.cat(list(found.values())), compute(0, x, ids, weights, [0, 1, 2]))
    assert client.counts["retries"] >= 1 and len(calls) >= 2


def test_an_interrupted_wait_gives_its_request_up_and_leaves_no_answer_to_the_next(workers, token):
    """Ctrl-C while a worker that does not answer is waited for: at once, not after the timeout; then the same bits."""
    model, ids = build(), text()
    wanted = run(model, ids)
    held, gate, asked = Held.of_model(build()), threading.Event(), []
    compute = held.compute

    def stuck(*args):
        asked.append(len(asked))
        if len(asked) == 5:
            threading.Timer(0.2, _thread.interrupt_main).start()
            gate.wait(30)
        return compute(*args)

    held.compute = stuck
    far(model, workers(held), token)
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(model, ids)
    assert time.monotonic() - begun < 10 and model.dualdeadline.store.client.timeout_s == 60
    gate.set()
    same(run(model, ids), wanted)
    assert model.dualdeadline.stats()["remote"].get("retries", 0) == 0 and not model.dualdeadline.store.client.given_up
    model.dualdeadline.remove()


@pytest.mark.parametrize("step", ["send", "receive", "unpack"])
def test_a_request_that_is_interrupted_anywhere_drops_its_connection(workers, token, monkeypatch, step):
    held = Held.synthetic([(32, 16, 4)], torch.float32)
    client = Client(address(workers(held)), token)
    real = getattr(frames, step)

    def interrupted(*args):
        if threading.current_thread() is not threading.main_thread():  # the worker
            return real(*args)
        if step == "send":
            real(args[0], args[1][:1])  # half of a frame is away
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(frames, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.ping()
    assert client.connection is None and not client.asking
    assert client.ping() > 0 and client.counts["retries"] == 0


def test_a_worker_that_dies_and_never_comes_back_is_named(workers, token):
    model = build()
    worker = workers(Held.of_model(build()))
    far(model, worker, token)
    client = model.dualdeadline.store.client
    client.patience_s = 0.1
    worker.stop()
    with pytest.raises(RemoteError, match=f"{address(worker)}.*experts of layer 0.*needed: a worker that runs"):
        run(model, text())
    with pytest.raises(RemoteError, match="weights of layer 0"):
        model.dualdeadline.remove()
    again = workers(Held.of_model(build()), port=worker.address[1])
    wanted = build().state_dict()
    assert again.address == worker.address
    model.dualdeadline.remove()
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())


def test_another_checkpoint_is_refused_at_first_and_after_a_restart(workers, token):
    model, ids = build(), text()
    wanted = run(model, ids, 2)
    torch.manual_seed(1)
    other = Held.of_model(transformers.AutoModelForCausalLM.from_config(tiny_config("olmoe")).eval())
    worker = workers(other)
    with pytest.raises(RemoteError, match="holds other experts than model.layers.0"):
        far(model, worker, token)
    assert not hasattr(model, "dualdeadline")
    same(run(model, ids, 2), wanted)
    first = workers(Held.of_model(build()))
    far(model, first, token)
    first.stop()
    for connection in list(first.connections):
        connection.close()
    second = workers(other, port=first.address[1])
    assert second.address == first.address
    with pytest.raises(RemoteError, match="other experts"):
        run(model, ids, 2)


def test_other_arithmetic_is_refused(workers, token, monkeypatch):
    from dualdeadline.remote import worker

    monkeypatch.setattr(worker, "arithmetic", lambda device: {"torch": "1.0", "device": "cpu, ANOTHER"})
    model = build()
    with pytest.raises(RemoteError, match="ANOTHER.*other bits"):
        far(model, workers(Held.of_model(build())), token)
    assert not hasattr(model, "dualdeadline") and not model.model.layers[0].mlp.experts.down_proj.is_meta


def test_a_wrong_token_gets_nothing(workers, token, tmp_path):
    worker = workers(Held.synthetic([(32, 16, 4)], torch.float32))
    with pytest.raises(PermissionError, match="refuses our token"):
        Client(address(worker), new_token(tmp_path / "other"), patience_s=0.1)
    with socket.create_connection(worker.address) as stranger:
        head, rest = frames.receive(stranger)
        frames.send(stranger, frames.pack(1, {"op": "weights", "component": "down", "layer": 0, "expert": 0}, {}, b""))
        with pytest.raises((ConnectionError, OSError)):
            while True:
                meta = frames.unpack(*frames.receive(stranger), b"", None)[1]
                assert set(meta) <= {"refused", "tensors"}
    assert Client(address(worker), token).ping() > 0


def test_a_worker_that_does_not_know_the_token_is_not_believed(token):
    """Somebody else listens on the port and says whatever a worker would say."""
    listener = socket.create_server(("127.0.0.1", 0))

    def accepting():
        connection, _ = listener.accept()
        frames.send(connection, frames.pack(0, {"version": keys.VERSION, "nonce": bytes(32)}, {}, b""))
        keys._take(connection, "nonce", 32)
        frames.send(connection, frames.pack(0, {"proof": bytes(32)}, {}, b""))

    threading.Thread(target=accepting, daemon=True).start()
    with pytest.raises(PermissionError, match="does not know the token"):
        Client("127.0.0.1:{}".format(listener.getsockname()[1]), token, patience_s=0.1)
    listener.close()


def test_frames_beyond_their_limits_are_refused(workers, token):
    worker = workers(Held.synthetic([(32, 16, 4)], torch.float32))
    with socket.create_connection(worker.address) as stranger:
        frames.receive(stranger)
        stranger.sendall(frames.HEADER.pack(frames.MAGIC, 0, 10, keys.SMALL + 1, bytes(16)))
        stranger.settimeout(5)
        assert stranger.recv(1) == b""  # hung up, and nothing of that size was waited for
    with pytest.raises(ValueError, match="in parts"):
        frames.pack(1, {"text": "x" * (frames.META_LIMIT + 1)}, {}, b"")
    with pytest.raises(frames.BadFrame, match="at most"):
        ends = socket.socketpair()
        ends[0].sendall(frames.HEADER.pack(frames.MAGIC, 0, 10, frames.BODY_LIMIT + 1, bytes(16)))
        frames.receive(ends[1])


def test_frames_carry_any_tensor_and_nothing_else():
    key = bytes(range(32))
    tensors = {"a": torch.randn(3, 5).bfloat16(), "empty": torch.empty(0, 4), "t": torch.arange(6).view(2, 3).t(),
               "nan": torch.tensor([float("nan"), float("inf"), -0.0])}
    data = b"".join(bytes(part) for part in frames.pack(7, {"x": 1}, tensors, key))
    head, rest = data[: frames.HEADER.size], bytearray(data[frames.HEADER.size :])
    number, meta, found = frames.unpack(head, rest, key, 7)
    assert number == 7 and meta == {"x": 1} and set(found) == set(tensors)
    for name, value in tensors.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape
        assert bytes(found[name].contiguous().view(torch.uint8).flatten().tolist()) == bytes(
            value.contiguous().view(torch.uint8).flatten().tolist())
    with pytest.raises(frames.BadFrame, match="checksum"):
        frames.unpack(head, rest, bytes(32), 7)
    with pytest.raises(ValueError, match="complex"):
        frames.pack(1, {}, {"c": torch.zeros(2, dtype=torch.complex64)}, key)


@pytest.mark.parametrize("places, words", [({"a": ["float32", [20, 2], 0]}, "inside"), ({"a": ["float32", [-1], 0]}, "sizes"),
                                           ({"a": ["object", [1], 0]}, "KeyError"), ({"a": ["uint8", [4], -4]}, "inside"),
                                           ({"a": 3}, "cannot be read"), ({"a": ["uint8", [2**62, 2**62], 0]}, "inside")])
def test_maps_that_lie_about_their_bytes_are_refused(monkeypatch, places, words):
    """Signed with the right key: a worker with a bug, say."""
    packb = frames.msgpack.packb
    monkeypatch.setattr(frames.msgpack, "packb", lambda value, **options: packb(value | {"tensors": places}, **options))
    data = b"".join(bytes(part) for part in frames.pack(1, {}, {"a": torch.zeros(2)[:1]}, b"k" * 32))
    with pytest.raises(frames.BadFrame, match=words):
        frames.unpack(data[: frames.HEADER.size], bytearray(data[frames.HEADER.size :]), b"k" * 32, 1)


def test_outputs_that_exceed_a_frame_come_in_parts(workers, token, monkeypatch):
    held = Held.synthetic([(32, 16, 4)], torch.float32)
    client = Client(address(workers(held)), token)
    x, ids, weights = torch.randn(6, 32), torch.stack([torch.randperm(4)[:2] for _ in range(6)]), torch.rand(6, 2)
    monkeypatch.setattr(frames, "BODY_LIMIT", 3 * 6 * 32 * 4)
    before = client.counts["round_trips"]
    found = client.experts(0, x, ids, weights, [0, 1, 2, 3])
    monkeypatch.undo()
    counts = torch.bincount(ids.flatten(), minlength=4).tolist()
    assert [len(found[expert]) for expert in range(4)] == counts
    assert torch.equal(torch.cat(list(found.values())), held.compute(0, x, ids, weights, [0, 1, 2, 3]))
    assert client.counts["round_trips"] > before


def test_parts_of_frames():
    from dualdeadline.remote.client import _parts

    size = frames.BODY_LIMIT // 4
    assert _parts([1, 2, 2, 3, 1], size) == [slice(0, 2), slice(2, 3), slice(3, 5)]
    assert _parts([], 1) == [] and _parts([9], size) == [slice(0, 1)]


@pytest.mark.parametrize("change, words", [
    (dict(number=3), "layer is 3"), (dict(number="0"), "layer is '0'"), (dict(hidden=torch.zeros(2, 31)), "hidden"),
    (dict(hidden=torch.zeros(2, 32).half()), "float16"), (dict(weights=torch.zeros(2, 3)), "weights"),
    (dict(ids=torch.zeros(2, 2)), "ids"), (dict(chosen=[4]), "experts"), (dict(chosen=[1, 1]), "different"),
])
def test_wrong_requests_are_refused_with_the_reason(workers, token, change, words):
    held = Held.synthetic([(32, 16, 4)], torch.float32)
    client = Client(address(workers(held)), token)
    good = dict(number=0, hidden=torch.zeros(2, 32), ids=torch.zeros(2, 2, dtype=torch.long), weights=torch.zeros(2, 2),
                chosen=[0])
    given = good | change
    said = {"op": "experts", "layer": given["number"], "experts": given["chosen"], "threads": 1}
    tensors = {name: given[name] for name in ("hidden", "ids", "weights")}
    with pytest.raises(RuntimeError, match=words):
        client.ask(said, tensors)
    with pytest.raises(RuntimeError, match="needed: experts, weights"):
        client.ask({"op": "exec"})
    with pytest.raises(RuntimeError, match="threads is 99999"):
        client.experts(*good.values(), threads=99999)
    with pytest.raises(RuntimeError, match="IndexError"):
        client.weights("down", 0, 99, (32, 16), torch.float32)
    assert client.experts(*good.values())[0].shape == (4, 32)  # the connection still serves


def test_a_round_trip_is_the_sum_of_its_parts(workers, token):
    import time

    held = Held.synthetic([(256, 128, 8)], torch.float32)
    client = Client(address(workers(held)), token)
    x, ids, weights = torch.randn(32, 256), torch.stack([torch.randperm(8)[:4] for _ in range(32)]), torch.rand(32, 4)
    shares = []
    for _ in range(10):
        begun = time.perf_counter()
        client.experts(0, x, ids, weights, list(range(8)))
        shares.append(sum(client.last_ms.values()) / (1e3 * (time.perf_counter() - begun)))
        assert min(client.last_ms.values()) >= 0 and client.last_ms["compute"] > 0
    assert 0.9 < sorted(shares)[5] <= 1


@pytest.mark.parametrize("options, words", [
    ({"wire": "coded"}, "wire"), ({"kernels": "fused"}, "kernels"), ({"predictor": "gate_ahead"}, "predictor"),
    ({"schedule": "staged_barrier"}, "schedule"), ({"backend": "graph"}, "graph"), ({"remote": None}, "all three"),
    ({"tier": "pinned"}, "without both"), ({"remote": "nowhere"}, "host:port"), ({"remote": "127.0.0.1:0"}, "host:port"),
    ({"remote_token": "/nonexistent"}, "no token file"),
])
def test_wrong_choices_are_named(token, options, words):
    model = build()
    given = dict(slots=2, tier="remote", remote="127.0.0.1:9", remote_token=token) | options
    with pytest.raises((ValueError, OSError), match=words):
        engine.offload(model, **given)
    assert not hasattr(model, "dualdeadline") and not model.model.layers[0].mlp.experts.down_proj.is_meta


def test_token_files_are_private(tmp_path, token):
    assert os.stat(token).st_mode & 0o777 == 0o600 and len(read_token(token)) == 64
    with pytest.raises(FileExistsError):
        new_token(token)
    open_one = tmp_path / "open"
    open_one.write_text("x" * 64)
    open_one.chmod(0o644)
    with pytest.raises(ValueError, match="644; needed: 600"):
        read_token(open_one)
    open_one.chmod(0o600)
    open_one.write_text("short")
    with pytest.raises(ValueError, match="holds 5 bytes"):
        read_token(open_one)


def test_a_folder_that_is_no_store_is_named(token, tmp_path, tiny_checkpoint, capsys):
    given = ["--model", str(tiny_checkpoint("olmoe")), "--store", str(tmp_path), "--token-file", str(token)]
    assert main(given) == 2 and str(tmp_path) in capsys.readouterr().err


def test_only_loopback_without_a_flag(token, capsys):
    held = Held.synthetic([(32, 16, 4)], torch.float32)
    with pytest.raises(ValueError, match="0.0.0.0; needed: a loopback address"):
        Worker(held, read_token(token), bind="0.0.0.0")
    given = ["--synthetic", "32,16,4", "--token-file", str(token), "--bind", "0.0.0.0"]
    assert main(given) == 2 and "--expose" in capsys.readouterr().err
    worker = Worker(held, read_token(token), bind="0.0.0.0", expose=True)
    assert worker.address[1] > 0
    worker.stop()


@pytest.mark.parametrize("wire, dtype", [("raw", torch.float32), ("coded", torch.bfloat16)], ids=str)
def test_experts_from_a_folder_of_records(workers, token, tmp_path, wire, dtype):
    from dualdeadline.engine.surgery import find
    from dualdeadline.store import layout, sources

    model, ids = build(dtype=dtype), text()
    wanted = run(model, ids)
    layout.convert(sources.ModelExperts(find(model)[1]), tmp_path / "records", wire)

    def skeleton(**changes):
        with torch.device("meta"):
            config = tiny_config("olmoe", **changes)
            return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()

    far(model, workers(Held.of_store(skeleton(), tmp_path / "records")), token)
    same(run(model, ids), wanted)
    model.dualdeadline.remove()
    same(run(model, ids), wanted)
    with pytest.raises(ValueError, match="records of this model"):
        Held.of_store(skeleton(num_experts=4), tmp_path / "records")
    path = layout.Layout(tmp_path / "records").path
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="record layer .* is altered"):
        Held.of_store(skeleton(), tmp_path / "records")


def test_two_processes_of_which_one_is_killed_in_the_middle_of_a_token(tiny_checkpoint, token):
    """Started from the command line on a checkpoint; the other one answers what the first did not."""
    folder = tiny_checkpoint("olmoe")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.set_experts_implementation("eager")
    wanted, seen = run(model, text()), []
    command = [sys.executable, "-m", "dualdeadline.remote.worker", "--model", str(folder), "--token-file", str(token),
               "--until-stdin-ends"]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    processes = [subprocess.Popen(command, **pipes) for _ in range(2)]
    try:
        lines = [process.stdout.readline() for process in processes]
        assert all(line.startswith("listening on 127.0.0.1:") for line in lines), lines
        first, second = (line.split()[-1] for line in lines)
        assert read_token(token).decode() not in open(f"/proc/{processes[0].pid}/cmdline").read()
        engine.offload(model, slots=2, tier="remote", remote=first, remote_token=token)
        client = model.dualdeadline.store.client

        def kill(module, args):
            seen.append(1)
            if len(seen) == 3:
                processes[0].kill()
                processes[0].wait()
                host, port = second.split(":")
                client.dial = lambda: socket.create_connection((host, int(port)))

        hook = model.dualdeadline.layers[1].module.register_forward_pre_hook(kill)
        same(run(model, text()), wanted)
        hook.remove()
        assert client.counts["retries"] >= 1 and len(seen) > 3
        model.dualdeadline.remove()
        same(run(model, text()), wanted)
    finally:
        for process in processes:
            process.kill()
            process.wait()


PEER_TINY = """
import torch
from dualdeadline.kernels import fetch
from dualdeadline.remote import peer
from dualdeadline.streams import Shape
found = peer.copies(Shape("tiny", 16, 8, 4), (1, 3), 3, "cpu", "cpu", 4096)
assert found.groupby("way").size().to_dict() == {peer.ENGINE: 6, peer.KERNEL: 6}, found
real = fetch.fetch
fetch.fetch = lambda away, slots, wanted, places, count: real(away, slots, wanted.flip(0), places, count)
try:
    peer.copies(Shape("tiny", 16, 8, 4), (3,), 3, "cpu", "cpu", 4096)
except AssertionError as error:
    assert "arrived changed" in str(error)
else:
    raise SystemExit("wrong rows were taken")
"""


def test_peer_copies_between_two_devices_that_are_both_cpus():
    from dualdeadline.remote import peer
    from dualdeadline.streams import Shape

    if torch.cuda.device_count() < 2:
        with pytest.raises(RuntimeError, match="GPUs are visible.*needed: two"):
            peer.copies()
    found = peer.copies(Shape("tiny", 64, 32, 8), (1, 4), 20, "cpu", "cpu", 2**20)
    assert list(found.part) == ["down"] * 2 + ["gate_up"] * 2 + ["expert"] * 2 and (found.ms > 0).all()
    assert set(found.way) == {peer.ENGINE} and found.size_bytes.tolist() == [4096] * 2 + [8192] * 2 + [12288] * 2
    rows = peer.records(found)
    assert len(rows) == 12 and rows[3]["median"] == pytest.approx(4 * 4096 / found.ms[1] / 1e6)
    done = interpreted_python("-c", PEER_TINY)
    assert done.returncode == 0, done.stderr[-2000:]


def test_peer_lines_are_those_of_pieces_behind_one_another():
    import pandas as pd

    from dualdeadline.remote import peer

    found = pd.DataFrame([dict(way=way, part="x", size_bytes=mib * 2**20, depth=depth, ms=0.5 + depth * mib * slope)
                          for way, slope in ((peer.ENGINE, 0.005), (peer.KERNEL, 0.01))
                          for mib in (4, 8, 12) for depth in (1, 4, 8)])
    lines = peer.lines(found)
    assert lines[peer.ENGINE].ms(16 * 2**20) == pytest.approx(0.08)  # what a train costs once is not in it
    assert lines[peer.KERNEL].ms(16 * 2**20) == pytest.approx(0.16) and lines[peer.KERNEL].intercept_ms < 1e-9
    with pytest.raises(ValueError, match="needed: two different ones of each size"):
        peer.lines(found[found.depth == 4])


def test_round_trips_over_every_link(monkeypatch):
    """A worker process, loopback, a relay, and namespaces or the reason why there are none."""
    from dualdeadline.remote import study

    found = study.round_trips({"small": (64, 32, 8)}, rows=(1, 4), top_k=4, samples=3, dtype="float32",
                              links={"namespaces": (0.0, 0.0), "slow": (0.4, 0.0)})
    assert list(found.columns) == study.COLUMNS
    measured = found[found.n > 0]
    assert {"loopback", f"loopback, relay, {study.RELAY_MS:g} ms each way"} <= set(measured.link)
    assert set(measured[measured["rows"] == 4].part) == {*study.PARTS, "round trip", study.LEFT}
    assert (measured.ms >= 0).all()
    pings = measured[measured.part == "ping"].set_index("link").ms
    assert pings[f"loopback, relay, {study.RELAY_MS:g} ms each way"] > 2 * study.RELAY_MS
    for row in found[found.n == 0].itertuples():
        assert row.link in ("namespaces", "slow") and row.why and row.ms != row.ms
    if "slow" in set(measured.link):
        assert pings["slow"] > 0.8
    rows = study.records(found)
    assert len(rows) == len(found) and all((row["median"] is None) == ("why" in row["config"]) for row in rows)


def test_a_link_that_cannot_be_made_says_why(monkeypatch):
    from dualdeadline.remote import link, study

    monkeypatch.setattr(link.os, "geteuid", lambda: 1000)
    with pytest.raises(link.LinkError, match="no root; needed"), link.Link():
        pass
    monkeypatch.undo()
    monkeypatch.setattr(link.shutil, "which", lambda name: None)
    with pytest.raises(link.LinkError, match="ip is not installed"), link.Link():
        pass


def test_parts_that_miss_their_round_trip_are_refused():
    import pandas as pd

    from dualdeadline.remote import study

    def trip(whole):
        parts = [("s", "l", 1, 8, part, 1.0, 1.0, 1.0, 3, "") for part in study.PARTS]
        both = [("s", "l", 1, 8, name, ms, ms, ms, 3, "") for name, ms in (("round trip", whole), (study.LEFT, whole - 5))]
        return pd.DataFrame([*parts, *both], columns=study.COLUMNS)

    study.check(trip(5.1))
    with pytest.raises(AssertionError, match="0.500 of 5.500 ms"):
        study.check(trip(5.5))


def test_delays_of_a_relay(workers, token):
    from dualdeadline.remote.link import Relay

    worker = workers(Held.synthetic([(32, 16, 4)], torch.float32))
    near = Client(address(worker), token)
    relay = Relay(worker.address, 3.0)
    far_away = Client("{}:{}".format(*relay.address), token)
    assert min(far_away.ping() for _ in range(5)) >= 6.0 > min(near.ping() for _ in range(5))
    x, ids, weights = torch.randn(2, 32), torch.tensor([[0, 1], [1, 2]]), torch.rand(2, 2)
    found = far_away.experts(0, x, ids, weights, [0, 1, 2])
    wanted = near.experts(0, x, ids, weights, [0, 1, 2])
    assert all(torch.equal(found[expert], wanted[expert]) for expert in wanted)
    assert far_away.last_ms["wire"] >= 6.0
    relay.close()
