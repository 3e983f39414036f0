"""The second embedded model: delta rule, training forward, one whole call of training, at tiny sizes."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from test_pretrain_train import folder, pack  # noqa: F401  (fixtures)
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3_5MoeForCausalLM
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as stock

from dualdeadline import paths, record
from dualdeadline.pretrain import architectures, card, checkpoint, delta, evaluate, imports, model, qwen, train
from dualdeadline.pretrain.optim import Optimizer
from dualdeadline.report import routing

VOCAB, LENGTH = 64, 32
TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 8,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def arguments(folder, *extra):
    return [
        *("--pack", str(folder), "--train", "--architecture", "qwen", "--model", json.dumps(TINY), "--length"),
        *(str(LENGTH), "--batch", "4", "--device", "cpu", "--no-compile", *extra),
    ]


def make_run(folder, pack, *extra):
    return train.Run(train.parser().parse_args(arguments(folder, *extra)), pack, torch.device("cpu"))


def parameters(cfg, seed=0):
    """Initial parameters with norms off their start, and routers clear enough that rounding flips no route."""
    draw = torch.Generator().manual_seed(seed)
    params = qwen.initial(cfg, seed)
    for name, value in params.items():
        if value.dim() == 1 and not name.endswith(("A_log", "dt_bias")):
            value += 0.2 * torch.randn(value.shape, generator=draw)
        if name.endswith(model.BLOCK["router"]):
            value *= 20
    return {name: value.requires_grad_() for name, value in params.items()}


def network_of(params, cfg):
    network = Qwen3_5MoeForCausalLM(cfg)
    network.load_state_dict({name: value.detach() for name, value in params.items()}, strict=False)
    return network


@pytest.fixture(scope="module")
def both():
    cfg = qwen.config(vocab_size=VOCAB, **TINY)
    params = parameters(cfg)
    return cfg, params, network_of(params, cfg)


def test_full_size_is_the_second_embedded_model():
    cfg = qwen.config()
    assert (cfg.num_experts, cfg.num_experts_per_tok, cfg.moe_intermediate_size) == (256, 8, 16)
    assert cfg.layer_types == (["linear_attention"] * 3 + ["full_attention"]) * 2 and 64 <= cfg.hidden_size <= 96
    shapes = qwen.shapes(cfg)
    total = sum(math.prod(shape) for shape in shapes.values())
    routed = sum(math.prod(shape) for name, shape in shapes.items() if ".experts." in name)
    assert routed == 8 * 256 * 3 * 16 * 64 and 2 * total == 15_026_656 < 16_000_000
    with torch.device("meta"):
        assert sum(value.numel() for value in Qwen3_5MoeForCausalLM(cfg).parameters()) == total


@pytest.mark.parametrize("length", [64, 150])
@pytest.mark.parametrize("chunk, key_heads", [(64, 2), (16, 4)])
def test_delta_rule_equals_transformers(length, chunk, key_heads):
    def draw(*shape):
        return torch.randn(2, length, *shape)

    given = [draw(key_heads, 8), draw(key_heads, 8), draw(4, 16), -draw(4).exp(), draw(4).sigmoid()]
    found = []
    for kind in ("ours", "chunk", "recurrent"):
        mine = [value.clone().requires_grad_() for value in given]
        if kind == "ours":
            out = delta.gated_delta_rule(*mine, chunk=chunk)
        else:
            q, k = (value.repeat_interleave(4 // key_heads, 2) for value in mine[:2])
            rule = getattr(stock, f"torch_{kind}_gated_delta_rule")
            out = rule(q, k, mine[2], g=mine[3], beta=mine[4], use_qk_l2norm_in_kernel=True)[0]
        (out * torch.linspace(-1, 1, length)[:, None, None]).sum().backward()
        found.append([out.detach(), *(value.grad for value in mine)])
    for reference in found[1:]:
        for ours, theirs in zip(found[0], reference, strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-3)


def test_delta_rule_keeps_its_head_on_one_repeated_token():
    """Equal keys, nothing forgotten, everything overwritten: powers of the system grow past any float."""
    row = torch.randn(1, 1, 1, 16).expand(1, 192, 1, 16)
    value, ones = torch.randn(1, 192, 1, 8), torch.ones(1, 192, 1)
    theirs = stock.torch_recurrent_gated_delta_rule(row, row, value, 0 * ones, ones, use_qk_l2norm_in_kernel=True)[0]
    torch.testing.assert_close(delta.gated_delta_rule(row, row, value, 0 * ones, ones), theirs, atol=1e-5, rtol=1e-4)
    rough = delta.gated_delta_rule(row, row, value, 0 * ones, ones, dtype=torch.bfloat16).float()
    torch.testing.assert_close(rough, theirs, atol=0.03, rtol=0.03)


def test_delta_rule_in_bfloat16_stays_near_float32():
    given = [torch.randn(2, 128, 2, 16) for _ in range(3)] + [-torch.rand(2, 128, 2), torch.rand(2, 128, 2)]
    exact, rough = (delta.gated_delta_rule(*given, dtype=kind).float() for kind in (torch.float32, torch.bfloat16))
    assert ((rough - exact).norm() / exact.norm()).item() < 0.01


@pytest.mark.parametrize("kind, bounds", [(torch.float32, (1e-5, 1e-5)), (torch.bfloat16, (5e-4, 1e-2))])
def test_unit_lower_inverse_and_its_gradient(kind, bounds):
    lower = (torch.rand(6, 64, 64).tril(-1) * 0.3).requires_grad_()
    inverse = delta.unit_lower_inverse(lower, kind)
    factors = torch.linspace(-1, 1, 64)
    (inverse * factors).sum().backward()
    exact = lower.detach().double().requires_grad_()
    reference = torch.linalg.inv(torch.eye(64, dtype=torch.float64) + exact)
    (reference * factors).sum().backward()
    for ours, theirs, bound in zip((inverse, lower.grad.tril(-1)), (reference, exact.grad.tril(-1)), bounds):
        assert ((ours - theirs).norm() / theirs.norm()).item() < bound


def test_a_chunk_that_is_no_power_of_two_is_refused():
    with pytest.raises(ValueError, match="48; needed: a power of two"):
        delta.unit_lower_inverse(torch.zeros(1, 48, 48))


def test_causal_conv_equals_conv1d():
    x, weight = torch.randn(2, 20, 6, requires_grad=True), torch.randn(6, 1, 4, requires_grad=True)
    found = []
    for kind in ("ours", "torch"):
        if kind == "ours":
            out = delta.causal_conv(x, weight)
        else:
            out = torch.nn.functional.conv1d(x.mT, weight, padding=3, groups=6)[..., :20].mT
        found.append([out, *torch.autograd.grad((out * torch.linspace(-1, 1, 6)).sum(), (x, weight))])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_names_are_those_of_transformers(both):
    _, params, network = both
    assert {**params, "lm_head.weight": 0}.keys() == network.state_dict().keys()


@pytest.mark.parametrize("length", [LENGTH, 100])
def test_logits_and_gradients_equal_transformers(both, length):
    cfg, params, network = both
    tokens = torch.randint(2, VOCAB, (3, length + 1), generator=torch.Generator().manual_seed(1))
    forward = qwen.Forward(cfg, length, "cpu", torch.float32)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    logits = network(inputs).logits
    torch.testing.assert_close(forward.logits(params, inputs), logits, atol=2e-4, rtol=2e-4)
    forward.loss(params, inputs, targets, 0.0, 0.0)[0].backward()
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    for name, param in network.named_parameters():
        apart = (params[name].grad - param.grad).norm() / param.grad.norm()
        assert apart.item() < 2e-3, name
        params[name].grad = param.grad = None


@torch.no_grad()
def test_bfloat16_forward_rounds_no_worse_than_transformers():
    """Every expert routed, so that rounding can flip no route."""
    cfg = qwen.config(vocab_size=VOCAB, **TINY | {"num_experts_per_tok": 12})
    params, tokens = parameters(cfg), torch.randint(2, VOCAB, (2, LENGTH))
    kinds = (torch.float32, torch.bfloat16)
    ours = [qwen.Forward(cfg, LENGTH, "cpu", kind).logits(params, tokens).float() for kind in kinds]
    theirs = [network_of(params, cfg).to(kind)(tokens).logits.float() for kind in kinds]
    errors = [((rough - exact).norm() / exact.norm()).item() for exact, rough in (ours, theirs)]
    assert 0 < errors[0] < errors[1]


def test_dropout_changes_the_loss_only_when_asked(both):
    cfg, params, _ = both
    tokens = torch.randint(2, VOCAB, (2, LENGTH))
    losses = [
        qwen.Forward(cfg, LENGTH, "cpu", torch.float32, dropout=rate).loss(params, tokens, tokens)[0].item()
        for rate in (0.0, 0.0, 0.5)
    ]
    assert losses[0] == losses[1] != losses[2]


def test_each_part_of_a_layer_traces_into_one_graph(both):
    cfg, params, _ = both
    forward = qwen.Forward(cfg, LENGTH, "cpu", torch.float32)
    x = torch.randn(2, LENGTH, 32)
    for layer, part in ((0, 0), (3, 0), (3, 1)):
        work, keys = forward.parts()[part]
        traced = torch.compile(work, fullgraph=True, dynamic=False, backend="eager")
        p = {key: value for key, value in forward.layer_params(params, layer).items() if key in keys}
        found = []
        for kind in (work, traced):
            out = kind(x, p, forward.cos, forward.sin, forward.sizes, torch.float32)
            sums = sum(given.square().sum() for given in out if given.is_floating_point())
            found.append([*out, *torch.autograd.grad(sums, list(p.values()))])
        for plain, compiled in zip(*found, strict=True):
            torch.testing.assert_close(plain, compiled, atol=1e-4, rtol=1e-3)


def test_sparse_block_equals_dense_in_the_interpreter():
    pytest.importorskip("triton")
    code = f"""
import torch; torch.set_num_threads(1)
from dualdeadline.pretrain import qwen, sparse
sparse.ROWS, sparse.REPEAT = 16, 2
cfg = qwen.config(vocab_size=64, **{TINY!r})
params = {{name: value.requires_grad_() for name, value in qwen.initial(cfg).items()}}
tokens = torch.randint(2, 64, (2, 17), generator=torch.Generator().manual_seed(1))
found = []
for experts in ("dense", "sparse"):
    forward = qwen.Forward(cfg, 16, "cpu", torch.float32, experts)
    loss, parts = forward.loss(params, tokens[:, :-1], tokens[:, 1:])
    found.append([loss, parts["load"], *torch.autograd.grad(loss, list(params.values()))])
for dense, fast in zip(*found):
    torch.testing.assert_close(dense, fast, atol=1e-5, rtol=1e-3)
"""
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_optimizer_orthogonalises_matrices_only(both):
    _, params, _ = both
    chosen = set(Optimizer(params, "muon", 1e-3).muon)
    assert all(params[name].dim() in (2, 3) for name in chosen)
    left = {name.split(".", 3)[-1] for name in params if name not in chosen and params[name].dim() > 1}
    expected = {"mlp.gate.weight", "mlp.shared_expert_gate.weight", "linear_attn.conv1d.weight", "weight"}
    assert left == expected | {"linear_attn.in_proj_a.weight", "linear_attn.in_proj_b.weight"}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_training_lowers_the_loss_and_moves_every_parameter(folder, pack, kind):
    run = make_run(folder, pack, "--optimizer", kind)
    start = {name: value.detach().clone() for name, value in run.params.items()}
    first = run.advance(1.0)["nats"].item()
    for _ in range(15):
        parts = run.advance(1.0)
    assert parts["nats"].item() < first - 0.1
    assert all(not torch.equal(value, start[name]) for name, value in run.params.items())


def test_resumed_run_equals_uninterrupted(folder, pack, tmp_path):
    whole, first = (make_run(folder, pack) for _ in range(2))
    for run, steps in ((whole, 3), (first, 1)):
        for _ in range(steps):
            run.advance(1.0)
    first.save(tmp_path / "state.safetensors")
    second = make_run(folder, pack, "--seed", "7")
    second.resume(tmp_path / "state.safetensors")
    for _ in range(2):
        second.advance(1.0)
    assert all(torch.equal(value, second.params[name]) for name, value in whole.params.items())


def test_export_is_one_file_that_transformers_loads(folder, pack, tmp_path):
    run = make_run(folder, pack)
    run.advance(1.0)
    files = checkpoint.export(run.params, run.cfg, tmp_path / "model")
    assert {path.name for path in files} == {"config.json", "generation_config.json", "model.safetensors"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    assert isinstance(loaded, Qwen3_5MoeForCausalLM)
    rounded = {name: value.detach().bfloat16().float() for name, value in run.params.items()}
    tokens = torch.randint(2, VOCAB, (2, LENGTH))
    torch.testing.assert_close(loaded(tokens).logits, run.forward.logits(rounded, tokens), atol=1e-4, rtol=1e-4)
    assert len(checkpoint.assemble(tmp_path / "model", tmp_path / "pilot", paths.PILOT / "olmoe")) == 64
    assert {path.name for path in (tmp_path / "pilot").iterdir()} == {path.name for path in files} | {
        "tokenizer.json",
        "tokenizer_config.json",
    }
    again = make_run(folder, pack, "--init-from", str(tmp_path / "pilot"))
    assert all(torch.equal(again.params[name], rounded[name]) for name in rounded)
    assert len(loaded.generate(tokens[:, :5], max_new_tokens=4, do_sample=False)[0]) == 9


def test_unknown_architecture_is_refused():
    from transformers import MixtralConfig

    with pytest.raises(ValueError, match="'mixtral'; needed: one of olmoe"):
        architectures.of(MixtralConfig())


def test_auto_falls_back_from_what_does_not_compile(folder, pack, monkeypatch, tmp_path, capsys):
    def broken(*given, **named):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", broken)
    args = train.parser().parse_args(arguments(folder, "--experts", "auto", "--compile"))
    run, _ = train.ready(args, pack, torch.device("cpu"), tmp_path)
    assert (args.experts, args.compile) == ("dense", False) and "no compiler" in capsys.readouterr().out
    assert math.isfinite(run.advance(1.0)["nats"].item())
    args = train.parser().parse_args(arguments(folder, "--experts", "dense", "--compile"))
    with pytest.raises(RuntimeError, match="no compiler"):
        train.ready(args, pack, torch.device("cpu"), tmp_path)


def test_one_call_trains_evaluates_writes_a_card_and_goes_on(folder, tmp_path, monkeypatch):
    common = (
        "--out",
        str(tmp_path / "out"),
        "--state",
        str(tmp_path / "state"),
        "--report",
        "0.5",
        "--experts",
        "auto",
    )
    for extra in (("--calls-left", "2"), ("--resume",)):
        monkeypatch.setattr(train, "BORN", train.time.monotonic())
        train.main(arguments(folder, *common, "--minutes", "0.08", "--reserve", "1", "--save-every", "0.5", *extra))
    out = tmp_path / "out"
    metrics, found = (json.loads((out / f"{name}.json").read_text()) for name in ("metrics", "records"))
    assert metrics["last"]["calls_left"] == 0 and found["model"] == "pilot-qwen"
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert log[-1] == metrics["last"] and log[-1]["tokens"] > log[0]["tokens"] > 0
    value = {(row["metric"], row["config"].get("layer")): row["median"] for row in found["rows"]}
    assert all(0 < value["shared_gate", layer] < 1 for layer in range(4))
    assert 0 < value["gate_ahead_recall_at_3", 3] <= 1
    text = (out / "model" / "README.md").read_text()
    macro = next(row for row in found["rows"] if row["variant"] == "macro")
    assert f"{macro['median']:.3f} bits per byte" in text and "qwen3_5_moe_text" in text
    assert text == card.text(AutoConfig.from_pretrained(out / "model"), metrics, found["rows"])
    assert len([path for path in out.rglob("*") if path.is_file()]) <= 8, "no more files come back"


def test_a_run_without_bench_is_imported_and_placed(folder, pack, tmp_path, monkeypatch):
    run = make_run(folder, pack)
    run.advance(1.0)
    args = train.parser().parse_args(arguments(folder, "--eval-tokens", "500"))
    checkpoint.export(run.params, run.cfg, tmp_path / "model")
    parts = {
        "nats": torch.ones(()),
        "norm": torch.ones(()),
        "z": torch.ones(4),
        "balance": torch.ones(4),
        "load": torch.full((4, 12), 0.25),
    }
    train.check(run, parts, 1.0, 1.0)
    train.write_json(tmp_path / "metrics.json", train.summary(run, args, pack, [], 1.0, 0))
    evaluate.main(tmp_path / "model", pack, tmp_path / "records.json", args)
    monkeypatch.setattr(paths, "PILOT", tmp_path / "pilot")
    monkeypatch.setattr(paths, "RECORDS", tmp_path / "kept")
    monkeypatch.setattr(paths, "MANIFESTS", tmp_path)
    monkeypatch.setattr(imports.models, "revision", lambda key: key)
    imports.main([str(tmp_path), "--commit", "c0", "--machine", "gpu-box", "--place"])
    rows = record.load(tmp_path / "kept" / "90_pilot_model.csv")
    assert set(rows.model) == {"pilot-qwen"} and {"macro", "training"} <= set(rows.variant)
    assert (tmp_path / "pilot" / "qwen" / "model.safetensors").exists()
    shown = routing.embedded(["pilot-qwen"])["pilot-qwen"]
    loads = rows[(rows.variant == "routing") & (rows.metric == "load_min")]["median"]
    assert shown["load of a layer's least used expert"] == pytest.approx(loads.min()) and len(loads) == 4
    assert shown["bits per byte, macro"] == pytest.approx(rows[rows.variant == "macro"]["median"].item())
    assert 0 < shown["shared expert's gate"] < 1
