"""Training forward, optimizer, mixture, resume, export, evaluation of the embedded model, at tiny sizes."""

import json
import lzma
import math

import numpy as np
import pytest
import torch
from conftest import interpreted_python
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import OlmoeForCausalLM

from dualdeadline import machine, paths, record
from dualdeadline.pretrain import bench, checkpoint, data, evaluate, model, train
from dualdeadline.pretrain.optim import Optimizer, orthogonal

VOCAB, LENGTH = 64, 32
TINY = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A pack of three domains whose texts use ten of the tokens only, so that there is something to learn."""
    out, rng, domains = tmp_path_factory.mktemp("pack"), np.random.default_rng(0), {}
    for name, size in (("austen", 3000), ("python-source", 9000), ("word-problems", 3000)):
        domains[name] = {}
        for part, tokens in (("train", size), ("heldout", 1500)):
            lengths = rng.integers(3, 90, tokens // 45)
            stream = np.concatenate([np.append(rng.integers(2, 12, n - 1), 0) for n in lengths]).astype("<u2")
            (out / f"{part}-{name}.xz").write_bytes(lzma.compress(stream.tobytes()))
            domains[name][part] = {"file": f"{part}-{name}.xz", "tokens": len(stream)}
        domains[name]["heldout"] |= {"document_tokens": lengths.tolist(),
                                     "document_bytes": (3 * lengths).tolist()}
    (out / "index.json").write_text(json.dumps({"vocab_size": VOCAB, "domains": domains}))
    return out


@pytest.fixture(scope="module")
def pack(folder):
    return data.read(folder)


def arguments(folder, *extra):
    return train.parser().parse_args([
        "--pack", str(folder), "--train", "--model", json.dumps(TINY), "--length", str(LENGTH),
        "--batch", "4", "--device", "cpu", "--no-compile", *extra])


def make_run(folder, pack, *extra):
    return train.Run(arguments(folder, *extra), pack, torch.device("cpu"))


def stock(params, cfg):
    network = OlmoeForCausalLM(cfg)
    network.load_state_dict({name: value.detach() for name, value in params.items()}, strict=False)
    return network


@pytest.fixture(scope="module")
def both():
    cfg = model.config(vocab_size=VOCAB, **TINY)
    params = {name: value.requires_grad_() for name, value in model.initial(cfg).items()}
    return cfg, params, stock(params, cfg)


def test_full_size_is_the_embedded_model():
    shapes = model.shapes(model.config())
    assert sum(math.prod(shape) for shape in shapes.values()) == 14_819_456
    assert 2 * 14_819_456 < 30_000_000


def test_names_are_those_of_transformers(both):
    cfg, params, network = both
    assert {**params, "lm_head.weight": 0}.keys() == network.state_dict().keys()


def test_logits_and_gradients_equal_transformers(both):
    cfg, params, network = both
    tokens = torch.randint(2, VOCAB, (3, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    forward = model.Forward(cfg, LENGTH, "cpu", torch.float32)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    logits = network(inputs).logits
    torch.testing.assert_close(forward.logits(params, inputs), logits, atol=1e-4, rtol=1e-4)
    forward.loss(params, inputs, targets, 0.0, 0.0)[0].backward()
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    for name, param in network.named_parameters():
        torch.testing.assert_close(params[name].grad, param.grad, atol=1e-5, rtol=1e-3, msg=name)
        params[name].grad = None


def test_unrouted_experts_get_no_gradient(both):
    cfg, params, _ = both
    token = torch.tensor([[5]])
    loss, parts = model.Forward(cfg, 1, "cpu", torch.float32).loss(params, token, token, 0.0, 0.0)
    loss.backward()
    grad = params[f"model.layers.0.{model.GATE_UP}"].grad.flatten(1).norm(dim=1)
    for param in params.values():
        param.grad = None
    assert torch.equal(grad > 0, parts["load"][0] > 0) and (grad > 0).sum() == cfg.num_experts_per_tok


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(-3, 3), min_size=8, max_size=8), min_size=1), st.integers(1, 8))
def test_top_takes_the_largest_and_breaks_ties_by_index(rows, top_k):
    scores = torch.tensor(rows, dtype=torch.float32, requires_grad=True)
    best = torch.sort(-scores.detach(), dim=-1, stable=True).indices[:, :top_k]
    index, values, chosen = model.top(scores, top_k)
    assert torch.equal(index, best) and torch.equal(values, scores.gather(1, best))
    assert torch.equal(chosen, torch.zeros_like(scores).scatter_(1, best, 1.0) > 0)
    factors = torch.arange(1.0, top_k + 1)
    (values * factors).sum().backward()
    assert torch.equal(scores.grad, torch.zeros_like(scores).scatter_(1, best, factors.expand(len(rows), -1)))


def test_balance_is_one_for_even_load_and_grows_with_collapse():
    x = torch.eye(8)
    even = model.route(x, torch.eye(8) * 9, 1, torch.float32)
    assert even[2].item() == pytest.approx(1.0, abs=1e-3)
    collapsed = model.route(x.abs() + 1, torch.cat((torch.ones(1, 8), torch.zeros(7, 8))), 1, torch.float32)
    assert collapsed[2].item() > 7


def test_renormalised_weights_are_the_shares_of_the_chosen():
    x, router = torch.randn(20, 16), torch.randn(8, 16)
    weights, index, *_ = model.route(x, router, 3, torch.float32, renormalised=True)
    shares, best = (x @ router.T).softmax(-1).topk(3)
    assert torch.equal(index, best)
    torch.testing.assert_close(weights, shares / shares.sum(-1, keepdim=True))
    torch.testing.assert_close(model.route(x, router, 3, torch.float32)[0], shares)


@pytest.mark.parametrize("experts", [4, 300], ids=["uneven blocks", "more experts than a byte counts"])
def test_sparse_experts_equal_dense_in_the_interpreter(experts):
    pytest.importorskip("triton")
    code = f"""
import torch; torch.set_num_threads(1); torch.manual_seed(0)
from dualdeadline.pretrain import model, sparse
sparse.ROWS, sparse.REPEAT, E = 16, 2, {experts}  # several blocks and programs per expert, ragged tails
x, router = torch.randn(75 if E < 9 else 20, 16), torch.randn(E, 16)
gate_up, down = torch.randn(E, 32, 16) * 0.2, torch.randn(E, 16, 16) * 0.2
found = []
for work in (model.dense_experts, sparse.Experts.apply):
    given = [value.clone().requires_grad_() for value in (x, router, gate_up, down)]
    weights, index, *_ = model.route(given[0], given[1], 2, torch.float32)
    out = work(given[0], weights, index, *given[2:])
    (out * torch.linspace(-1, 1, 16)).sum().backward()
    found.append([out.detach()] + [value.grad for value in given])
for dense, fast in zip(*found):
    torch.testing.assert_close(dense, fast, atol=1e-5, rtol=1e-4)
if E < 9:
    sparse.agreement(router, gate_up, down, 2, torch.float32, rows=40)
    try:
        sparse.gathered = lambda slots, place: slots[place.long()].sum(1) * 1.1
        sparse.agreement(router, gate_up, down, 2, torch.float32, rows=40)
        raise SystemExit("a wrong sum was not seen")
    except ArithmeticError as error:
        assert "needed: at most 0.02" in str(error)
"""
    done = interpreted_python("-c", code)
    assert done.returncode == 0, done.stderr[-2000:]


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(10, 10**6), min_size=1), st.floats(10, 1e9))
def test_mixture_sums_to_one_and_keeps_the_cap(sizes, planned):
    shares = data.mixture(sizes, planned, {"w": 0.06}, epochs=12)
    assert sum(shares.values()) == pytest.approx(1.0)
    seen = [shares[name] * planned / size for name, size in sizes.items()]
    # above the cap only where every domain is at it
    assert max(seen) <= 12 * (1 + 1e-9) or min(seen) >= 12 * (1 - 1e-9)


def test_rate_warms_up_holds_and_ends_at_zero():
    def at(seconds):
        return train.rate(seconds, seconds, 100, warmup=10, decay=0.3)

    found = [at(0), at(5), at(10), at(69), at(85), at(100), at(101)]
    assert found == pytest.approx([0, 0.5, 1, 1, 0.5, 0, 0])


def test_windows_are_drawn_by_share_and_shifted_by_one(pack):
    sampler = data.Sampler(pack.train, {"austen": 0.25, "python-source": 0.75}, LENGTH, "cpu", 0)
    inputs, targets = sampler.draw(64)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    flat, first = sampler.tokens.long(), len(pack.train["austen"])
    places = [int(((flat.unfold(0, LENGTH, 1) == row).all(1)).nonzero()[0]) for row in inputs]
    assert sum(place < first for place in places) == 16


def test_pack_errors_are_named(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="index.json"):
        data.read(tmp_path)
    index = json.loads((folder / "index.json").read_text())
    index["domains"]["austen"]["train"]["tokens"] += 1
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="train-austen"):
        data.read(tmp_path)


@pytest.mark.parametrize("shape", [(5, 8, 32), (5, 32, 8)])
def test_muon_update_is_near_orthogonal(shape):
    torch.manual_seed(0)
    singular = torch.linalg.svdvals(orthogonal(torch.randn(shape)).float())
    assert singular.min() > 0.5 and singular.max() < 1.4


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_training_lowers_the_loss_and_moves_every_parameter(folder, pack, kind):
    run = make_run(folder, pack, "--optimizer", kind)
    start = {name: value.detach().clone() for name, value in run.params.items()}
    first = run.advance(1.0)["nats"].item()
    for _ in range(25):
        last = run.advance(1.0)["nats"].item()
    assert last < first - 0.1
    assert all(not torch.equal(value, start[name]) for name, value in run.params.items())


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_resumed_run_equals_uninterrupted(folder, pack, tmp_path, kind):
    whole, first = (make_run(folder, pack, "--optimizer", kind) for _ in range(2))
    for _ in range(4):
        whole.advance(1.0)
    for _ in range(2):
        first.advance(1.0)
    first.save(tmp_path / "state.safetensors")
    second = make_run(folder, pack, "--optimizer", kind, "--seed", "7")
    second.resume(tmp_path / "state.safetensors")
    for _ in range(2):
        second.advance(1.0)
    assert (second.step, second.tokens) == (4, whole.tokens)
    assert all(torch.equal(value, second.params[name]) for name, value in whole.params.items())


def test_missing_state_and_foreign_optimizer_are_refused(folder, pack, tmp_path):
    run = make_run(folder, pack, "--optimizer", "adamw")
    with pytest.raises(FileNotFoundError, match="--init-from"):
        run.resume(tmp_path / "state.safetensors")
    run.save(tmp_path / "state.safetensors")
    with pytest.raises(ValueError, match="adamw"):
        make_run(folder, pack, "--optimizer", "muon").resume(tmp_path / "state.safetensors")
    with pytest.raises(ValueError, match="sgd"):
        Optimizer(run.params, "sgd", 1e-3)


def test_nan_stops_the_run_and_keeps_the_last_state(folder, pack, tmp_path):
    run, state = make_run(folder, pack), tmp_path / "state.safetensors"
    run.save(state)
    before = state.read_bytes()
    with torch.no_grad():
        run.params[model.FINAL_NORM][0] = math.nan
    with pytest.raises(FloatingPointError, match="not finite"):
        run.save(state)
    with pytest.raises(FloatingPointError, match="step 1"):
        train.loop(run, budget=5, total=5, every=1)
    assert state.read_bytes() == before and list(tmp_path.iterdir()) == [state]


def test_export_assembles_and_gives_the_same_logits(folder, pack, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "LARGEST", 30_000)
    run = make_run(folder, pack)
    run.advance(1.0)
    files = checkpoint.export(run.params, run.cfg, tmp_path / "shards")
    assert all(path.stat().st_size < 45_000 for path in files) and len(files) > 4, "shards of the size asked for"
    digest = checkpoint.assemble(tmp_path / "shards", tmp_path / "whole")
    assert len(digest) == 64
    loaded = OlmoeForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32).eval()
    rounded = {name: value.detach().bfloat16().float() for name, value in run.params.items()}
    tokens = torch.randint(2, VOCAB, (2, LENGTH))
    mine = run.forward.logits(rounded, tokens)
    torch.testing.assert_close(loaded(tokens).logits, mine, atol=1e-4, rtol=1e-4)
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["OlmoeForCausalLM"], "bfloat16")
    assert (config["eos_token_id"], config["pad_token_id"], config["bos_token_id"]) == (0, 1, 0)
    again = make_run(folder, pack, "--init-from", str(tmp_path / "whole"))
    assert all(torch.equal(again.params[name], rounded[name]) for name in rounded)


def test_a_missing_shard_is_refused(folder, pack, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "LARGEST", 30_000)
    run = make_run(folder, pack)
    files = checkpoint.export(run.params, run.cfg, tmp_path / "shards")
    next(path for path in files if path.suffix == ".safetensors").unlink()
    with pytest.raises(ValueError, match="all shards"):
        checkpoint.assemble(tmp_path / "shards", tmp_path / "whole")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(2, 60), min_size=1, max_size=5))
def test_windows_score_every_token_once_with_context(lengths):
    tokens = np.arange(sum(lengths), dtype=np.uint16)
    stream = data.Stream(tokens, np.array(lengths), 3 * np.array(lengths))
    found, size = evaluate.windows(stream, limit=10**9, window=16, stride=4)
    scored = [int(token) for text, done in found for token in text[done + 1 :]]
    closing = np.cumsum(lengths) - 1
    assert sorted(scored) == [token for token in tokens.tolist() if token not in closing]
    assert size == 3 * sum(lengths)
    assert all(done in (0, 12) and len(text) <= 17 for text, done in found)


def test_bits_and_loads_equal_direct_computation(both, pack):
    cfg, params, network = both
    network = network.eval()
    rows = evaluate.measure(network, pack, limit=10**9)
    value = {(row["variant"], row["metric"], row["config"].get("layer")): row["median"] for row in rows}
    bits, load = {"austen": 0.0, "python-source": 0.0}, torch.zeros(2, 8)
    forward = model.Forward(cfg, 512, "cpu", torch.float32)
    for name in bits:
        at = 0
        for length in pack.heldout[name].lengths:
            text = torch.tensor([0, *pack.heldout[name].tokens[at : at + length - 1].tolist()])[None]
            parts, at = forward.loss(params, text[:, :-1], text[:, 1:])[1], at + length
            load += parts["load"] * (length - 1)
            bits[name] += parts["nats"].item() * (length - 1) / math.log(2)
    per_byte = {name: bits[name] / pack.heldout[name].sizes.sum() for name in bits}
    for name, expected in (per_byte | {"macro": sum(per_byte.values()) / 2}).items():
        assert value[name, "bits_per_byte", None] == pytest.approx(expected, rel=1e-4)
    share = load / load.sum(1, keepdim=True) * 8
    for layer in range(2):
        assert value["routing", "load_max", layer] == pytest.approx(share[layer].max().item(), rel=1e-3)
        assert value["routing", "dead_experts", layer] == 0
    assert 0 < value["routing", "gate_ahead_recall_at_2", 1] <= 1
    assert ("routing", "gate_ahead_recall_at_2", 0) not in value


def test_one_call_trains_exports_and_its_rows_import(folder, tmp_path, monkeypatch):
    common = ["--pack", str(folder), "--model", json.dumps(TINY), "--length", str(LENGTH), "--batch", "4",
              "--device", "cpu", "--no-compile", "--out", str(tmp_path / "out"),
              "--state", str(tmp_path / "state"), "--report", "0.5"]
    monkeypatch.setattr(train, "BORN", train.time.monotonic())
    train.main([*common, "--train", "--minutes", "0.05", "--reserve", "1", "--calls-left", "2"])
    monkeypatch.setattr(train, "BORN", train.time.monotonic())
    train.main([*common, "--train", "--minutes", "0.05", "--reserve", "1", "--resume"])
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["last"]["calls_left"] == 0 and metrics["curve"][-1]["rate"] < 0.2
    assert (tmp_path / "state" / "state.safetensors").exists()
    monkeypatch.setattr(paths, "MANIFESTS", tmp_path)
    monkeypatch.setattr(paths, "DATA", tmp_path / "data")
    space = paths.Workspace("smoke")
    found = tmp_path / "out" / "records.json"
    rows = evaluate.import_rows(found, space, "r1", "gpu-box", tokens=(5, "token"))
    assert set(rows.machine) == {"gpu-box"} and "macro" in set(rows.variant)
    assert machine.known()["gpu-box"]["cores"] >= 1
    assert len(record.load(space.records / "90_pilot_model.csv")) == len(rows)
    with pytest.raises(ValueError, match="another machine id"):
        machine.register("gpu-box", {"cores": -1})


def test_a_call_too_short_for_its_reserve_says_so(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "BORN", train.time.monotonic())
    with pytest.raises(ValueError, match="more --minutes"):
        train.train(arguments(folder, "--minutes", "0.1", "--reserve", "60", "--state", str(tmp_path)),
                    data.read(folder), tmp_path)
    with pytest.raises(SystemExit):
        train.main(["--pack", str(folder)])


def test_bench_survives_a_broken_variant(folder, pack, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "BORN", train.time.monotonic())
    args = arguments(folder, "--variants", "nonsense:4x32,dense:4x32", "--recipes",
                     "muon:1e-2,adamw:3e-3:dropout=0.1", "--probe-seconds", "0.5", "--bench-seconds", "30")
    report = bench.run(args, pack, tmp_path)
    assert "nonsense" in report["variants"][0]["error"] and report["best"] == "dense:4x32"
    assert all(row["macro"] > 0 for row in report["recipes"]) and len(report["recipes"]) == 2
    assert json.loads((tmp_path / "bench.json").read_text())["best"] == "dense:4x32"
