"""Predictor kernels in Triton's interpreter, and compiled for a GPU that need not be there."""

import json
import os
from pathlib import Path

import pytest
import torch
from conftest import interpreted_python
from dualdeadline import fidelity, predictors
from dualdeadline.kernels import predictor as kernels
from dualdeadline.kernels import predictor_kernels as device
from dualdeadline.kernels import tl, triton
from factory import synthetic_trace

needs_triton = pytest.mark.skipif(tl is None, reason="triton is not installed")
SMALL = dict(layers=3, experts=12, routed=3, hidden=48)
WIDE = dict(layers=3, experts=60, routed=4, hidden=80)  # neither a power of two

HEAD = """
import torch
from dataclasses import replace
from dualdeadline import predictors
from dualdeadline.kernels import predictor as kernels
from factory import synthetic_trace
torch.set_num_threads(1)
SMALL, WIDE = %r, %r
TILES = kernels.Tiles(rows=64)


def fit(name, sizes, horizon=1, change=None, **options):
    extra = {"epochs": 1, "width": 40} if name == "shared_mlp" else {}
    trace = synthetic_trace(prompts=4, tokens=12, **sizes)
    if change:
        change(trace.routers)
    return predictors.build(name, horizon=horizon, **(extra | options)).fit(trace)


def walk(predictor, sizes, rows=2, dtype=torch.bfloat16, tokens=3, give=False, seed=1):
    # (layer, state, router logits, ids) of `rows` sequences stepping side by side
    test = synthetic_trace(prompts=rows, tokens=tokens, seed=seed, **sizes)
    last = torch.full((rows, predictor.K), -1)
    for offset in range(tokens):
        for layer in range(predictor.L):
            at = test.prompt_starts + offset
            state = (test.router_input if predictor.horizon else test.layer_input)[at, layer].to(dtype)
            state[:, predictor.routers.norm[layer] == 0] = 0  # as behind such a norm
            logits = predictor.routers.logits(layer, state.float()) if give else None
            routes = test.routes[at, layer].contiguous()
            yield layer, state, logits, routes if predictor.horizon else last
            last = routes


def compare(predictor, sizes, k=4, tiles=TILES, launches=1, reset=False, **more):
    steps = list(walk(predictor, sizes, **more))
    fused = kernels.Fused(predictor, "cpu", tokens=len(steps[0][1]), k=k, tiles=tiles, launches=launches)
    found = []
    for _ in range(2 if reset else 1):
        online, plain = predictor.online(), predictor.online()
        for layer, state, logits, ids in steps:
            want, whole = fused.reference(online, layer, state, ids), plain(layer, state, ids)
            got = fused.step(layer, state, logits, ids)
            assert (got is None) == (want is None) == (whole is None)
            assert (fused._count == 0).all()
            if got is None:
                continue
            assert got[0].dtype == torch.int32 and torch.equal(got[0], want[0]), (layer, got, want)
            torch.testing.assert_close(got[1], want[1], atol=3e-6, rtol=1e-5)
            torch.testing.assert_close(got[1], whole.gather(-1, got[0].long()), atol=3e-6, rtol=1e-5)
            assert torch.equal(got[0].sort(-1).values.long(), whole.topk(k, -1).indices.sort(-1).values)
            found.append([value.clone() for value in got])
        fused.reset()
    assert found
    return found
""" % (SMALL, WIDE)

CASES = {
    "mlp": """
for horizon, sizes, dtype, rows in ((1, SMALL, torch.bfloat16, 2), (0, WIDE, torch.float32, 1)):
    predictor = fit("shared_mlp", sizes, horizon)
    predictor.table["norm_weight"] += 0.3 * torch.randn(predictor.H)
    predictor.table["norm_bias"] += 0.3 * torch.randn(predictor.H)
    predictor.table["out_bias"] += torch.randn(predictor.E)
    one = compare(predictor, sizes, rows=rows, dtype=dtype, tokens=2)
    two = compare(predictor, sizes, rows=rows, dtype=dtype, tokens=2, launches=2)
    assert all(torch.equal(*pair) for both in zip(one, two) for pair in zip(*both))
""",
    "residual gate": """
predictor = fit("residual_gate", SMALL)
one = compare(predictor, SMALL, rows=1)
two = compare(predictor, SMALL, rows=1, launches=2)
assert all(torch.equal(*pair) for both in zip(one, two) for pair in zip(*both))
""",
    "other shapes": """
compare(fit("residual_gate", WIDE, rank=9), WIDE, rows=1, dtype=torch.float32, k=16,
        tiles=replace(TILES, select="rounds"))
compare(fit("residual_gate", SMALL, 2), SMALL, rows=3, tokens=2)
""",
    "horizon 0 and sequences anew": """
compare(fit("residual_gate", SMALL, 0), SMALL, reset=True, rows=1, tokens=2)
""",
    "router logits given, bias and correction": """
def change(routers):
    draw = torch.Generator().manual_seed(3)
    routers.bias = 0.5 * torch.randn(3, 12, generator=draw)
    routers.kind, routers.correction = "sigmoid", 0.3 * torch.randn(3, 12, generator=draw)
    routers.norm[1, 5] = 0
predictor = fit("residual_gate", SMALL, change=change)
given = compare(predictor, SMALL, rows=1, give=True)
own = compare(predictor, SMALL, rows=1)
assert all(torch.equal(a[0], b[0]) for a, b in zip(given, own))
""",
    "fewer features": """
for features in ((), ("state",), ("previous_state", "running")):
    compare(fit("residual_gate", SMALL, features=features, rank=5), SMALL, rows=1, tokens=2)
compare(fit("gate_ahead", SMALL), SMALL, rows=1, tokens=1)
""",
    "broken states": """
for name in ("shared_mlp", "residual_gate"):
    predictor = fit(name, SMALL)
    fused = kernels.Fused(predictor, "cpu", tokens=3, k=12, tiles=TILES)
    state = torch.randn(3, 48)
    state[0], state[1, 3], state[1, 7], state[2] = torch.nan, torch.inf, -torch.inf, 1e30
    online = predictor.online()
    for _ in range(2):
        for layer in range(2):
            want = fused.reference(online, layer, state, torch.full((3, 3), -1))
            ids, probabilities = fused.step(layer, state, torch.full((3, 12), torch.nan) if layer else None)
            assert torch.isfinite(probabilities).all() and ((probabilities >= 0) & (probabilities <= 1)).all()
            assert torch.equal(ids.sort(-1).values, torch.arange(12).int().expand(3, 12))
    if name == "shared_mlp":
        torch.testing.assert_close(probabilities, want[1], atol=1e-5, rtol=1e-4)
""",
    "equal logits": """
for select in ("pairs", "rounds"):
    predictor = fit("shared_mlp", SMALL)
    predictor.table["out"].zero_()
    predictor.table["out_bias"] = torch.tensor([0., -0., 1., 1., -2., 0., 1., -0., 3., 0., 0., -2.])
    ids, probabilities = kernels.Fused(predictor, "cpu", k=12, tiles=replace(TILES, select=select)).step(
        0, torch.randn(1, 48))
    assert ids[0].tolist() == [8, 2, 3, 6, 0, 1, 5, 7, 9, 10, 4, 11], ids
    assert (probabilities[0, 1:4] == probabilities[0, 1]).all()
""",
    "lower precision": """
for name in ("shared_mlp", "residual_gate"):
    predictor = fit(name, SMALL)
    for dtype in (torch.bfloat16, torch.float16):
        fused = kernels.Fused(predictor, "cpu", k=5, weights=dtype, tiles=TILES)
        online = kernels.stored(predictor, dtype).online()
        for layer, state, logits, ids in walk(predictor, SMALL, rows=1, tokens=1):
            want, got = fused.reference(online, layer, state, ids), fused.step(layer, state)
            if got is not None:
                assert torch.equal(want[0], got[0])
                torch.testing.assert_close(want[1], got[1], atol=1e-5, rtol=1e-4)
""",
}


RUN = """
import json, sys, traceback
found = {}
for name, code in json.loads(sys.stdin.read()).items():
    try:
        exec(code, dict(globals()))
        found[name] = None
    except Exception:
        found[name] = traceback.format_exc()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def interpreted():
    """What each case raised, None where nothing; one process for all, since importing takes longest."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = interpreted_python("-c", HEAD + RUN, env={"PYTHONPATH": path}, input=json.dumps(CASES))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@needs_triton
@pytest.mark.parametrize("case", CASES)
def test_kernels_equal_the_predictor(case, interpreted):
    assert interpreted[case] is None, interpreted[case]


@needs_triton
@pytest.mark.parametrize("E", [60, 256])
def test_kernels_compile_without_a_gpu(E):
    """The interpreter takes programs that the compiler refuses."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    common = dict(H=80, E=E, ROUTED=8, TOP=4, ROWS=2, BLOCK_H=128, BLOCK_E=triton.next_power_of_2(E), CHUNK=8,
                  ROUNDS=0 if E < 128 else 9, PHASE=0, EARLY=E > 128)
    mlp = common | dict(WIDTH=40, PROGRAMS=20)
    gate = common | dict(L=3, RANK=10, GATES=E // 2, OWNS=E // 2 * (E < 128), SAME=5, PAST=5, PROGRAMS=E + 11, WORK=14,
                         TOLD=1 if E < 128 else 3, PREDICT=True, STORE=True, REMEMBERS=True, CORRECTED=E > 128,
                         BLOCK_K=8)
    types = {"layer": "i32", "target": "i32", "ran": "i32", "keep": "fp32", "eps": "fp32", "state_ptr": "*bf16",
             "count_ptr": "*i32", "ids_ptr": "*i32", "routed_ptr": "*i64", "rows_ptr": "*bf16"}
    for kernel, constants in ((device.mlp_kernel, mlp), (device.gate_kernel, gate)):
        signature = {name: "constexpr" if name in constants else types.get(name, "*fp32") for name in kernel.arg_names}
        built = compile(ASTSource(kernel, signature, constexprs=constants), target=GPUTarget("cuda", 90, 32))
        assert "atom.global.gpu.acq_rel.add" in built.asm["ptx"] and len(built.asm["cubin"]) > 1000
        assert ("griddepcontrol.wait" in built.asm["ptx"]) == constants["EARLY"]


@pytest.fixture(scope="module")
def train():
    return synthetic_trace(prompts=16, tokens=24, **SMALL)


@pytest.fixture(scope="module")
def fitted(train):
    options = {"shared_mlp": {"epochs": 2, "width": 40}}
    return {name: predictors.build(name, **options.get(name, {})).fit(train)
            for name in ("shared_mlp", "residual_gate", "gate_ahead")}


def changed_sets(first, second, budget):
    """How many (token, layer) pairs of scores [T,G,E] have other experts among their largest."""
    sets = [torch.zeros_like(scores).scatter(-1, scores.topk(budget, -1).indices, 1) for scores in (first, second)]
    return int((sets[0] != sets[1]).any(-1).sum())


@pytest.mark.parametrize("name", ["shared_mlp", "residual_gate", "gate_ahead"])
def test_float32_keeps_every_set_and_bfloat16_most(name, fitted):
    test, predictor = synthetic_trace(prompts=12, tokens=24, seed=1, **SMALL), fitted[name]
    scores = predictor.score(test)
    pairs = scores.shape[0] * scores.shape[1]
    for budget in (2, 4, 8):
        same, half, brain = (changed_sets(scores, kernels.stored(predictor, dtype).score(test), budget)
                             for dtype in (torch.float32, torch.float16, torch.bfloat16))
        assert same == 0 and half < 0.01 * pairs and brain < 0.05 * pairs
    assert not torch.equal(kernels.stored(predictor, torch.bfloat16).score(test), scores)


def test_requests_that_the_kernels_cannot_serve(train, fitted, monkeypatch):
    prepared = kernels.prepare(fitted["residual_gate"], "cpu", torch.bfloat16)
    assert prepared.tables["rows"].dtype == torch.bfloat16 and prepared.tables["factor"].dtype == torch.float32
    assert prepared.nbytes < kernels.prepare(fitted["residual_gate"], "cpu").nbytes
    with pytest.raises(ValueError, match="shared_mlp, residual_gate or gate_ahead"):
        kernels.prepare(predictors.build("popularity").fit(train), "cpu")
    with pytest.raises(ValueError, match="not fitted"):
        kernels.prepare(predictors.build("shared_mlp"), "cpu")
    with pytest.raises(ValueError, match="weights is torch.int8"):
        kernels.prepare(fitted["shared_mlp"], "cpu", torch.int8)
    with pytest.raises(ValueError, match="multiple of 16"):
        kernels.prepare(predictors.build("gate_ahead").fit(synthetic_trace(prompts=4, hidden=40)), "cpu")
    huge = predictors.build("gate_ahead").fit(synthetic_trace(prompts=4))
    huge.routers.weight = huge.routers.weight * 1e6
    with pytest.raises(ValueError, match="does not fit"):
        kernels.prepare(huge, "cpu", torch.float16)
    for bad in ({"rows": 3}, {"warps": 0}, {"select": "best"}):
        with pytest.raises(ValueError, match="needed"):
            kernels.Tiles(**bad)
    with pytest.raises(RuntimeError, match="needed"):
        kernels.Fused(prepared, "cpu")
    monkeypatch.setattr(kernels, "require", lambda tensor: None)
    for bad in ({"tokens": 9}, {"k": 0}, {"k": 13}, {"launches": 3}):
        with pytest.raises(ValueError, match="needed"):
            kernels.Fused(prepared, "cpu", **bad)
    fused = kernels.Fused(prepared, "cpu", tokens=2)
    state, ids = torch.zeros(2, 48), torch.zeros(2, 3, dtype=torch.int64)
    for arguments in ((3, state), (0, state[:1]), (0, state.T.contiguous().T), (0, state, torch.zeros(2, 11)),
                      (0, state, None, ids[:1])):
        with pytest.raises(ValueError, match="needed"):
            fused.step(*arguments)
    ahead = kernels.Fused(predictors.build("residual_gate", horizon=0).fit(train), "cpu", tokens=2)
    with pytest.raises(ValueError, match="ids is None"):
        ahead.step(0, state)


def test_kept_sets_count_what_changed_and_by_how_much_it_is_worse():
    """Two processors add in another order: a set that differs by a tie is not kept, and nothing is worse."""
    plain = torch.tensor([[0.9, 0.5, 0.5 - 1e-7, 0.1], [0.9, 0.6, 0.4, 0.1], [0.2, 0.9, 0.7, 0.1]])
    tied, wrong = plain.clone(), plain.clone()
    tied[0, 1] -= 2e-7
    wrong[1] = torch.tensor([0.9, 0.3, 0.4, 0.1])
    kept, worse = fidelity.chosen(plain, tied, 2)
    assert kept.tolist() == [False, True, True] and 0 < worse < 1e-6
    kept, worse = fidelity.chosen(plain, wrong, 2)
    assert kept.tolist() == [True, False, True] and worse == pytest.approx(0.2)
    assert fidelity.chosen(plain, plain.flip(0).flip(0), 2)[1] == 0
    for bad in (torch.full((1, 4), float("nan")), torch.zeros(0, 4)):
        with pytest.raises(ValueError, match="needed: at least one pair, numbers only"):
            fidelity.chosen(bad, bad, 2)
    swapped = plain.clone()
    swapped[2] = torch.tensor([0.2, 0.7, 0.9, 0.1])  # the same two, in another order
    assert fidelity.chosen(plain, swapped, 2)[0].all() and fidelity.chosen(plain, swapped, 2)[1] == 0
