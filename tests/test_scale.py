"""The largest shapes meant: 512 experts, top-10, 94 layers, H 7168, ids beyond 255, widths that are no power of two."""

import numpy as np
import pytest
import torch
import transformers
from cache_reference import plain_hits
from dualdeadline import cache, metrics, models, planning, predictors, tiny, traces, wire
from dualdeadline.cache import slots as rules
from dualdeadline.corpus import Prompt
from dualdeadline.cost import CostModel, TransferModel
from dualdeadline.engine import offload, surgery
from dualdeadline.models import Routers
from dualdeadline.traces import Trace
from safetensors.torch import load_file

L, E, K, H = 94, 512, 10, 7168
NARROW = dict(num_hidden_layers=L, num_experts=E, num_experts_per_tok=K, hidden_size=12, head_dim=4, mlp_only_layers=[],
              moe_intermediate_size=6, num_attention_heads=2, num_key_value_heads=1)
WIDE = dict(hidden_size=H, moe_intermediate_size=1408, num_experts=E, num_experts_per_tok=K, num_hidden_layers=L,
            num_attention_heads=64, num_key_value_heads=4, head_dim=128, vocab_size=1000, norm_topk_prob=True)
LINES = {name: TransferModel(0.002, 3e-7) for name in ("gate_up", "down", "combine", "down_combine")}
COST = CostModel(TransferModel(0.01, 2e-8), LINES, {}, before_ms=(0.05,), committed=1)


@pytest.fixture(scope="module")
def narrow():
    """A Qwen3-MoE of 94 layers with 512 experts each, H 12 and F 6: 10 million expert weights."""
    torch.set_num_threads(1)
    model = tiny.model("qwen3_moe", **NARROW)
    model.set_experts_implementation("eager")
    return model


@pytest.fixture(scope="module")
def store(narrow, tmp_path_factory):
    prompts = [Prompt(f"p{i}", "words", "train", f"g{i}", text) for i, text in enumerate(("how many", "a few"))]
    return traces.collect(narrow, tiny.tokenizer(), prompts, tmp_path_factory.mktemp("scale") / "store", 4, 2, min_new_tokens=4)


def test_traces_keep_every_id(narrow, store):
    trace, spec = store.split(), models.describe(narrow)
    assert (spec.L, spec.E, spec.K, spec.H, spec.F) == (L, E, K, 12, 6)
    assert trace.routes.shape == (8, L, K) and trace.router_logits.shape == (8, L, E)
    assert trace.routes.min() >= 0 and 500 < trace.routes.max() < E
    assert (trace.routes > 255).float().mean() == pytest.approx(0.5, abs=0.1)
    assert all(len(set(row.tolist())) == K for row in trace.routes.flatten(0, 1))
    wanted = trace.router_logits.topk(K, -1).indices
    assert torch.equal(wanted.sort(-1).values, trace.routes.sort(-1).values)
    (file, *_) = sorted((store.path / "prompts").iterdir())
    assert load_file(file)["routes"].dtype == torch.int16 and store.verify() == []
    assert traces.expert_load(trace).shape == (L, E)


def test_predictors_have_these_shapes(store):
    trace = store.split()
    for name, options in (("gate_ahead", {}), ("residual_gate", {"ridges": (0.03,)})):
        guide = predictors.build(name, **options).fit(trace)
        scores, step = guide.score(trace), guide.online()
        assert scores.shape == (8, L - 1, E) and bool(((scores >= 0) & (scores <= 1)).all())
        assert metrics.recall(scores, trace.routes[:, 1:], 16).shape == (8, L - 1)
        first = trace.prompt_starts[0]
        for layer in range(L):
            found = step(layer, trace.router_input[first, layer][None], trace.routes[first, layer][None])
        assert found is None
        found = guide.online()(93 - 1, trace.router_input[first, 92][None], trace.routes[first, 92][None])
        assert found.shape == (1, E)


def test_predictors_on_the_widest_states():
    """H 7168 with 512 experts: few layers and tokens, so that memory holds them."""
    draw = torch.Generator().manual_seed(0)
    states = torch.randn(8, 3, H, generator=draw)
    weight = torch.randn(3, E, H, generator=draw) * H**-0.5
    routers = Routers(weight=weight, bias=None, norm=torch.ones(3, H), correction=None, eps=1e-6, kind="softmax",
                      norm_topk_prob=True, scaling=1.0)
    logits = torch.einsum("tlh,leh->tle", states, weight)
    routes = logits.topk(K, -1).indices
    trace = Trace(routes, torch.ones(8, 3, K), states, logits, states, torch.zeros(8, dtype=torch.long),
                  torch.arange(8) // 2, [f"p{i}" for i in range(4)], ["words"] * 4, E, routers)
    gate = predictors.build("gate_ahead").fit(trace)
    assert torch.equal(gate.score(trace)[:, 0].topk(K, -1).indices.sort(-1).values,
                       (states[:, 0] @ weight[1].T).topk(K, -1).indices.sort(-1).values)
    guide = predictors.build("residual_gate", features=("previous", "running")).fit(trace)
    assert guide.score(trace).shape == (8, 2, E) and guide.affordable_rank(2 * H, 6) >= 1


@pytest.mark.parametrize("slots", [10, 300])
def test_slot_tables(slots):
    tables, draw = rules.SlotTables(L, E, (slots, 2 * slots)), torch.Generator().manual_seed(slots)
    for step in range(40):
        ids = torch.randperm(E, generator=draw)[:K][None]
        found = rules.lookup(tables, L - 1, ids)
        assert [set(tables.expert_of[L - 1, part].tolist()) >= set(ids[0].tolist()) for part in (0, 1)] == [True, True]
        assert found is not None
    tables.check()
    counts = tables.counts()
    assert counts["hits_gate_up"] + counts["misses_gate_up"] == 40 * K
    assert counts["hits_down"] >= counts["hits_gate_up"] and max(tables.present(L - 1, 0)) > 255
    assert not tables.present(0, 0)


@pytest.mark.parametrize("policy", cache.POLICIES)
@pytest.mark.parametrize("order", cache.ORDERS)
def test_replayed_caches(policy, order):
    draw = np.random.default_rng(3)
    popular = draw.permutation(E)[:40]
    routes = np.stack([[draw.choice(popular if draw.random() < 0.8 else E, K, replace=False) for _ in range(2)]
                       for _ in range(60)])
    for slots in (7, 30, 300):
        found = cache.hits(routes, slots, policy, order, experts=E)
        for layer in (0, 1):
            assert np.array_equal(found[:, layer], plain_hits(routes[:, layer], slots, policy, order)), (slots, layer)


def test_one_cache_for_all_layers(store):
    """70 layers of 512 experts are 35,840 experts in one pool, more than 16 bits with a sign hold."""
    routes = store.split("all", tensors=("routes", "weights")).routes[:4, :70, :3]
    routes = routes[[0, 1, 0, 3]]  # the third token uses what the first did
    found = cache.hits(routes, 450, "lru", "rank", scope="pool", experts=E).reshape(-1)
    flat = (routes + E * torch.arange(70)[None, :, None]).flatten().tolist()
    assert max(flat) > 2**15
    held: dict[int, None] = {}  # the least recently used first
    for place, expert in enumerate(flat):
        assert found[place] == (expert in held)
        held.pop(expert, None)
        held[expert] = None
        if len(held) > 450:
            del held[next(iter(held))]
    assert 0 < found.sum() < len(flat)


@pytest.mark.parametrize("slots", [3, 200])
def test_offloaded_experts_are_exact(narrow, slots):
    ids = torch.tensor([[5, 300, 17, 9]])
    with torch.no_grad():
        wanted = narrow(ids).logits
        offload(narrow, slots=slots, backend="cpu")
        found = narrow(ids).logits
        counts = narrow.dualdeadline.stats()
        narrow.dualdeadline.remove()
    assert torch.equal(found, wanted) and counts["hits"] + counts["misses"] >= 10 * L


def test_a_plan_counts_every_byte(monkeypatch):
    """Without memory: 94 layers of 512 experts of 61 MB are 2.9 TB."""
    monkeypatch.setattr(planning, "ORDER", ("demand_serial",))  # the others take seconds each to simulate
    config = transformers.Qwen3MoeConfig(**WIDE, dtype=torch.bfloat16)
    expert = 3 * H * 1408 * 2
    found = planning.plan(config, "160GB", cost=COST, context=64, device="cpu")
    spare = found.bytes["limit_bytes"] - found.bytes["total_bytes"]
    assert found.bytes["slots_bytes"] == found.slots * L * expert and 0 <= spare < L * expert
    assert 10 <= found.slots < E and found.tokens_per_s > 0
    with pytest.raises(ValueError, match="are missing"):
        planning.plan(config, "8GB", cost=COST, context=64, device="cpu")


def test_experts_are_found_without_memory():
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3MoeConfig(**WIDE, dtype=torch.bfloat16)).eval()
    spec, layers = surgery.find(model, empty=True)
    assert (spec.L, spec.E, spec.K, spec.H, spec.F) == (L, E, K, H, 1408) and len(layers) == L
    assert layers[93].shapes == {"gate_up": (2816, H), "down": (H, 1408)}
    assert layers[93].bytes("gate_up") == 2 * layers[93].bytes("down") == 2 * H * 1408 * 2


@pytest.mark.parametrize("shape", [(2 * 89, H), (H, 89), (2 * 1407, 33), (1, 1), (513, 7)])
def test_wire_format_of_odd_widths(shape):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).mul(0.02).bfloat16()
    record = wire.encode(tensor)
    assert torch.equal(wire.decode(record).view(torch.int16), tensor.view(torch.int16))
    if tensor.numel() > 2**17:
        assert record.nbytes * 8 / tensor.numel() == pytest.approx(11.2, abs=0.2)
