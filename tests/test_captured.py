"""Captured decode steps (on a CPU: the forward over the buffers) and routers that are driven by recorded routes."""

from collections import Counter

import conftest
import pytest
import torch
from transformers import DynamicCache, StaticCache

from dualdeadline import models
from dualdeadline.engine.captured import CapturedForward, prefer_static
from dualdeadline.engine.driven import Driven

FAMILIES = ("olmoe", "qwen3_moe", "qwen3_next", "gpt_oss", "deepseek_v3", "granitemoe")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def install(tiny_model):
    """`install(family, **arguments)` -> (model, CapturedForward, [(path, reason)]), undone after the test."""
    made = []

    def make(family="olmoe", **arguments):
        model, seen = tiny_model(family)[0], []
        made.append(CapturedForward(model, on_path=lambda *what: seen.append(what), **arguments))
        return model, made[-1], seen

    yield make
    for one in made:
        one.remove()


@pytest.fixture(autouse=True)
def forget_sizes(tiny_model):
    """transformers never makes a static cache smaller than a model's last one."""
    yield
    for family in FAMILIES:
        tiny_model(family)[0].__dict__.pop("_previous_max_cache_length", None)


def prompt(rows, length=7):
    """Ids and mask, every row but the first with more left padding."""
    ids = torch.randint(1, 384, (rows, length), generator=torch.Generator().manual_seed(rows))
    mask = (torch.arange(length) >= torch.arange(rows)[:, None]).long()
    return ids * mask, mask


def generate(model, rows=1, new=8, **arguments):
    ids, mask = prompt(rows)
    arguments = {"do_sample": False, "cache_implementation": "static"} | arguments
    return model.generate(ids.to(model.device), attention_mask=mask.to(model.device), max_new_tokens=new,
                          min_new_tokens=new, pad_token_id=0, **arguments)


def paths(seen):
    return Counter(name for name, _ in seen)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", (1, 3))
def test_the_same_tokens(tiny_model, install, family, rows):
    """20 new tokens take GPT-OSS's window of 16 from filling to full, which is a step of its own kind."""
    want = generate(tiny_model(family)[0], rows, new=20)
    model, _, seen = install(family)
    assert torch.equal(generate(model, rows, new=20), want)
    first = 2 if family == "gpt_oss" else 1
    assert paths(seen) == {"forward": 1, "first": first, "buffers": 19 - first}


def test_sampling_with_a_seed(tiny_model, install):
    torch.manual_seed(3)
    want = generate(tiny_model()[0], 3, do_sample=True, temperature=1.5)
    model, *_ = install()
    torch.manual_seed(3)
    assert torch.equal(generate(model, 3, do_sample=True, temperature=1.5), want)
    assert not torch.equal(generate(model, 3, do_sample=True, temperature=1.5), want)


def test_beams_move_the_cache_and_still_replay(tiny_model, install):
    want = generate(tiny_model()[0], 2, num_beams=2)
    model, _, seen = install()
    assert torch.equal(generate(model, 2, num_beams=2), want)
    assert paths(seen) == {"forward": 1, "first": 1, "buffers": 6}


def test_cache_sizes_one_after_the_other_and_then_without(tiny_model, install):
    plain = tiny_model()[0]
    want = [generate(plain, new=new) for new in (5, 9)]
    model, taken, seen = install()
    del model._previous_max_cache_length
    assert all(torch.equal(generate(model, new=new), tokens) for new, tokens in zip((5, 9), want, strict=True))
    assert paths(seen)["first"] == 2, "the cache's size is part of the kind"
    taken.remove()
    assert torch.equal(generate(model, new=9), want[1]) and len(seen) == 5 + 9


def test_a_cache_moves_into_the_place_of_one_that_is_gone(install):
    model, _, seen = install()
    want = generate(model)
    seen.clear()
    assert torch.equal(generate(model), want) and paths(seen) == {"forward": 1, "buffers": 7}
    kept = generate(model, return_dict_in_generate=True).past_key_values
    before = [layer.keys.clone() for layer in kept.layers]
    seen.clear()
    other = generate(model, rows=1, new=8, return_dict_in_generate=True)
    assert paths(seen)["first"] == 1, "the other cache is still alive"
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(kept.layers, before, strict=True))
    assert torch.equal(other.sequences, want)


def test_few_graphs_are_kept(install):
    model, taken, seen = install(keep=2)
    for _ in range(2):
        for rows in (1, 2, 3):
            generate(model, rows, new=4)
    assert len(taken._steps) == 2 and paths(seen)["first"] == 6
    generate(model, 3, new=4)
    assert paths(seen)["first"] == 6, "the last one is kept"
    taken.clear()
    generate(model, 3, new=4)
    assert paths(seen)["first"] == 7


def decode(model, steps=6, rows=2, **arguments):
    """Decode steps by hand after a prefill: outputs and the cache."""
    cache = StaticCache(config=model.config, max_cache_len=32)
    ids, _ = prompt(rows)
    call = {"past_key_values": cache, "position_ids": torch.arange(7)[None].expand(rows, 7)}
    outputs = []
    with torch.no_grad():
        model(ids, attention_mask=torch.ones_like(ids), **call)
        for step in range(steps):
            outputs.append(model(ids[:, step:step + 1], past_key_values=cache,
                                 position_ids=torch.full((rows, 1), 7 + step), **arguments))
    return outputs, cache


@pytest.mark.parametrize("family", ("olmoe", "qwen3_next"))
def test_outputs_and_counters(tiny_model, install, family):
    want, cache = decode(tiny_model(family)[0])
    model, _, seen = install(family)
    outputs, own = decode(model)
    assert paths(seen) == {"forward": 1, "first": 1, "buffers": 5}
    for output, wanted in zip(outputs, want, strict=True):  # an early output is not overwritten by a later step
        assert type(output) is type(wanted) and list(output) == list(wanted)
        assert torch.equal(output.logits, wanted.logits) and output.past_key_values is own
    assert int(own.get_seq_length()) == int(cache.get_seq_length()) == 13


def test_host_counters_of_a_sliding_window(tiny_model, install):
    runs = []
    for model in (tiny_model("gpt_oss")[0], install("gpt_oss")[0]):
        cache = generate(model, new=20, return_dict_in_generate=True).past_key_values
        runs.append([(layer.get_seq_length(), layer.keys) for layer in cache.layers])
    for (length, keys), (wanted, wanted_keys) in zip(runs[1], runs[0], strict=True):
        assert length == wanted and torch.equal(keys, wanted_keys)
    assert runs[1][0][0] == 7 + 19


def test_a_sliding_window_needs_masks_and_positions(install):
    model, _, seen = install("gpt_oss")
    decode(model)
    assert paths(seen) == {"forward": 7} and seen[-1][1] == "a sliding window, but no position_ids or no attention mask"
    decode(model, attention_mask=None)
    assert paths(seen) == {"forward": 14} and seen[-1][1] == "a sliding window, but attention_mask is None"


def static(model, rows=1):
    cache = StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        model(prompt(rows)[0], past_key_values=cache)
    return cache


@pytest.mark.parametrize("rows, arguments, reason", [
    (1, {"labels": torch.ones(1, 1, dtype=torch.long)}, "loss"),
    (1, {"return_dict": False}, "tuple"),
    (1, {"output_router_logits": True}, "output_router_logits"),
    (1, {"output_hidden_states": True}, "output_hidden_states"),
    (1, {"output_attentions": True}, "output_attentions"),
    (1, {"attention_mask": torch.ones(1, 8, dtype=torch.long)}, "mask"),
    (1, {"unknown": object()}, "unknown is a object"),
    (9, {}, "1 to 8 rows"),
])
def test_anything_else_goes_to_the_original(install, rows, arguments, reason):
    model, _, seen = install()
    cache = static(model, rows)
    seen.clear()
    with torch.no_grad():
        output = model(torch.ones(rows, 1, dtype=torch.long), past_key_values=cache, **arguments)
    assert output is not None and paths(seen) == {"forward": 1} and reason in seen[0][1]


def test_no_graph_with_gradients_or_another_cache(install):
    model, _, seen = install()
    one = torch.ones(1, 1, dtype=torch.long)
    assert model(one, past_key_values=static(model)).logits.requires_grad and "gradients" in seen[-1][1]
    with torch.no_grad():
        model(one, past_key_values=DynamicCache(config=model.config))
        assert "DynamicCache" in seen[-1][1]
        model(one)
        assert "NoneType" in seen[-1][1]
        model(one, past_key_values=StaticCache(config=model.config, max_cache_len=8))
        assert "empty" in seen[-1][1]
    assert paths(seen)["buffers"] == 0


@pytest.mark.parametrize("name", ("output_router_logits", "output_hidden_states"))
def test_outputs_that_the_config_asks_for(install, name):
    model, _, seen = install()
    cache = static(model)
    try:
        setattr(model.config, name, True)
        with torch.no_grad():
            output = model(torch.ones(1, 1, dtype=torch.long), past_key_values=cache)
    finally:
        setattr(model.config, name, False)
    assert seen[-1] == ("forward", f"{name} is asked for")
    assert len(output[name.removeprefix("output_")]) >= model.config.num_hidden_layers


def test_another_experts_implementation_is_another_kind(install):
    model, _, seen = install()
    generate(model)
    model.set_experts_implementation("eager")
    generate(model)
    model.set_experts_implementation("grouped_mm")
    generate(model)
    assert paths(seen) == {"forward": 3, "first": 2, "buffers": 19}


def test_remove_restores_exactly(tiny_model):
    model = tiny_model()[0]
    code, settings, held = type(model).forward, model.generation_config.to_dict(), set(vars(model))
    taken = CapturedForward(model)
    assert "forward" in vars(model) and type(model).forward is code
    assert model.generation_config.disable_compile is True and not taken.inside
    later = CapturedForward(model)
    with pytest.raises(RuntimeError, match="remove the later one first"):
        taken.remove()
    later.remove()
    taken.remove()
    taken.remove()
    assert set(vars(model)) == held and model.forward.__func__ is code
    assert model.generation_config.to_dict() == settings


def test_inside_is_told_to_what_runs(install):
    model, taken, _ = install()
    seen = []
    hook = models.describe(model).layers[0].experts.register_forward_pre_hook(lambda *_: seen.append(taken.inside))
    generate(model, new=4)
    hook.remove()
    assert seen == [False, True, True, True] and taken.inside is False


def test_prefer_static(tiny_model, install):
    model, taken, seen = install()
    settings = model.generation_config.to_dict()
    static_ = prefer_static(model, context=48)
    ids, mask = prompt(1)
    cache = model.generate(ids, attention_mask=mask, max_new_tokens=8, min_new_tokens=8, pad_token_id=0,
                           return_dict_in_generate=True).past_key_values
    assert isinstance(cache, StaticCache) and cache.layers[0].keys.shape[2] == 48 and paths(seen)["buffers"] == 6
    static_.remove()
    assert model.generation_config.to_dict() == settings
    model.generation_config.cache_implementation = "dynamic"
    static_ = prefer_static(model, context=48)
    assert model.generation_config.cache_implementation == "dynamic" and model.generation_config.max_cache_len is None
    static_.remove()
    model.generation_config.cache_implementation = None


def compiling_with(monkeypatch, backend):
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda forward, options, **rest: real(forward, backend=backend, **rest))
    torch._dynamo.reset()


def test_compiled_once_for_all_caches(tiny_model, install, monkeypatch):
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    compiling_with(monkeypatch, counter)
    plain = tiny_model()[0]
    plain.set_experts_implementation("batched_mm")
    want = generate(plain)
    model, _, seen = install(compile=True)
    assert torch.equal(generate(model), want) and ("compile", "compiled whole") in seen
    kept = generate(model, return_dict_in_generate=True)  # holds the cache, so that the next one is another
    assert torch.equal(generate(model), want) and kept and paths(seen)["first"] == 2
    assert counter.frame_count == 1
    model.set_experts_implementation("grouped_mm")


def test_a_failed_compilation_is_told_and_done_without(tiny_model, install, monkeypatch):
    def refuse(forward, **rest):
        def call(**arguments):
            raise torch._dynamo.exc.Unsupported("no such instruction")
        return call

    monkeypatch.setattr(torch, "compile", refuse)
    want = generate(tiny_model()[0])
    model, _, seen = install(compile=True)
    with pytest.warns(UserWarning, match="run uncompiled.*no such instruction") as caught:
        assert torch.equal(generate(model), want) and torch.equal(generate(model, 2), generate(model, 2))
    assert len([one for one in caught if "uncompiled" in str(one.message)]) == 1
    told = [reason for name, reason in seen if name == "compile"]
    assert [reason.partition(":")[0] for reason in told] == ["not compiled whole", "not compiled in parts"]
    assert paths(seen)["buffers"] > 6


def test_what_does_not_compile_whole_is_compiled_in_parts(tiny_model, install, monkeypatch):
    compiling_with(monkeypatch, "eager")
    plain = tiny_model()[0]
    router = models.describe(plain).layers[0].router
    hook = router.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    plain.set_experts_implementation("batched_mm")
    want = generate(plain, new=4)
    model, _, seen = install(compile=True)
    assert torch.equal(generate(model, new=4), want)
    assert [reason for name, reason in seen if name == "compile"][1:] == ["compiled in parts"]
    hook.remove()
    model.set_experts_implementation("grouped_mm")


def test_a_failed_capture_falls_back(tiny_model, install, monkeypatch):
    class Refused:
        def __init__(self, *args, **kwargs):
            pass

        def __enter__(self):
            raise RuntimeError("operation not permitted when stream is capturing")

        def __exit__(self, *error):
            return False

    for name, value in {"CUDAGraph": object, "graph": Refused, "graph_pool_handle": int, "synchronize": int}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    want = generate(tiny_model("gpt_oss")[0], 2)
    model, taken, seen = install("gpt_oss", capture=True)
    with pytest.warns(UserWarning, match="no CUDA graph of this step") as caught:
        assert torch.equal(generate(model, 2), want)
    assert len([one for one in caught if "CUDA graph" in str(one.message)]) == 1 and not taken._steps
    assert paths(seen) == {"forward": 7, "first": 1} and "not permitted" in seen[-1][1]


@gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_on_a_gpu(tiny_checkpoint, family):
    """Tokens equal those of the same forward without graphs, in every step but the first of a kind replayed."""
    model, _ = models.load(str(tiny_checkpoint(family)), device="cuda", experts="batched_mm")
    model.generation_config.disable_compile = True
    want, seen = [generate(model, rows, new=20) for rows in (1, 3, 1)], []
    taken = CapturedForward(model, on_path=lambda *what: seen.append(what))
    got = [generate(model, rows, new=20) for rows in (1, 3, 1)]
    taken.remove()
    assert all(torch.equal(tokens, wanted) for tokens, wanted in zip(got, want, strict=True)), Counter(seen)
    assert paths(seen)["graph"] >= 3 * 19 - 6 and paths(seen)["forward"] == 3, Counter(seen)


# Routes from elsewhere


def routes_for(spec, count=5, seed=0):
    """Random routes [T,L,K] without repetition."""
    order = torch.rand(count, spec.L, spec.E, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    return order[..., :spec.K]


class Watched:
    """What the experts modules are given, by layer, in order."""

    def __init__(self, spec):
        self.ids, self.weights = ([[] for _ in spec.layers] for _ in range(2))
        self._handles = [layer.experts.register_forward_pre_hook(self._hook(at))
                         for at, layer in enumerate(spec.layers)]

    def _hook(self, at):
        def hook(module, args):
            self.ids[at].append(args[1].clone())
            self.weights[at].append(args[2].clone())
        return hook

    def remove(self):
        for handle in self._handles:
            handle.remove()


@pytest.fixture
def drive(tiny_model):
    """`drive(family, **arguments)` -> (model, spec, routes, Driven, Watched), undone after the test."""
    made = []

    def make(family="olmoe", **arguments):
        model = tiny_model(family)[0]
        spec = models.describe(model)
        routes = arguments.pop("routes", routes_for(spec))
        made.extend([Driven(spec, routes, **arguments), Watched(spec)])
        return model, spec, routes, *made[-2:]

    yield make
    for one in made:
        one.remove()


@pytest.mark.parametrize("family", conftest.FAMILIES)
@pytest.mark.parametrize("taken", (False, True))
def test_the_experts_see_the_wished_ids(drive, family, taken):
    """9 new tokens over 5 recorded ones: a prefill of 7 from step 0 on, then 8 steps that begin at 0 and wrap."""
    model, spec, routes, driven, watched = drive(family)
    forward = CapturedForward(model) if taken else None
    generate(model, 2, new=9)
    for layer in range(spec.L):
        assert torch.equal(watched.ids[layer][0], routes[torch.arange(7) % 5, layer].repeat(2, 1))
        for step, seen in enumerate(watched.ids[layer][1:]):
            assert torch.equal(seen, routes[step % 5, layer].expand(2, -1))
        assert len(watched.ids[layer]) == 9
    assert driven.place.tolist() == [8 % 5]
    driven.rewind(4)
    generate(model, 1, new=2)
    assert torch.equal(watched.ids[0][-1], routes[4, :1]) and driven.place.tolist() == [0]
    if taken:
        forward.remove()


@pytest.mark.parametrize("family", ("olmoe", "gpt_oss", "granitemoe"))
def test_own_weights_by_default_or_the_given_ones(drive, tiny_model, family):
    model, spec, routes, driven, watched = drive(family)
    router, hidden = spec.layers[0].router, torch.randn(3, spec.H)
    driven.remove()
    with torch.no_grad():
        plain = router(hidden)
        driven = Driven(spec, routes)
        mine = router(hidden)
    driven.remove()
    for before, after in zip(plain, mine, strict=True):
        same = torch.equal(before, after)
        assert same == before.is_floating_point()
    weights = torch.rand(5, spec.L, spec.K)
    driven = Driven(spec, routes, weights)
    generate(model, 1, new=4)
    driven.remove()
    for layer in range(spec.L):
        for step, seen in enumerate(watched.weights[layer][1:]):
            assert torch.equal(seen, weights[step, layer].expand(1, -1))


def test_remove_lets_the_routers_choose_again(tiny_model):
    model = tiny_model()[0]
    spec, want = models.describe(model), generate(tiny_model()[0], new=12)
    driven = Driven(spec, routes_for(spec))
    assert not torch.equal(generate(model, new=12), want)
    driven.remove()
    assert torch.equal(generate(model, new=12), want) and driven.place.tolist() == [11 % 5]


def test_guesses_of_the_current_step(drive, tiny_model):
    spec = models.describe(tiny_model()[0])
    scores = torch.rand(5, spec.L, spec.E).round(decimals=1)  # with ties
    model, spec, _, driven, _ = drive(scores=scores)
    ids, found = driven.guess(1, 3)
    driven.rewind(3)
    for layer in range(spec.L):
        for top in (1, 3, spec.E):
            ids, found = driven.guess(layer, top)
            assert ids.shape == found.shape == (1, top) and ids.dtype == torch.int32
            want = sorted(range(spec.E), key=lambda e: (-float(scores[3, layer, e]), e))[:top]
            assert ids[0].tolist() == want and torch.equal(found[0], scores[3, layer, want])
    generate(model, new=2)
    assert driven.guess(0, 1)[1].item() == scores[4, 0].max()
    for wrong in ((spec.L, 1), (-1, 1), (0, 0), (0, spec.E + 1)):
        with pytest.raises(ValueError, match="needed: layer 0 to"):
            driven.guess(*wrong)


def test_wrong_routes(tiny_model):
    spec = models.describe(tiny_model()[0])
    good = routes_for(spec)
    with pytest.raises(ValueError, match="needed: scores"):
        driven = Driven(spec, good)
        driven.remove()
        driven.guess(0, 1)
    high, low, twice = good.clone(), good.clone(), good.clone()
    high[2, 1, 0], low[0, 0, 0], twice[3, 2, 1] = spec.E, -1, twice[3, 2, 0]
    ones = torch.ones(5, spec.L, spec.K)
    scores = torch.ones(5, spec.L, spec.E)
    scores[1, 1, 1] = float("nan")
    for arguments, text in (((high,), "ids 0 to 8"), ((low,), "ids -1 to"), ((twice,), "token 3, layer 2"),
                            ((good[:, :1],), "routes are torch.int64"), ((good[:0],), "needed: integers"),
                            ((good.float(),), "routes are torch.float32"), ((good, ones[1:]), "weights are"),
                            ((good, None, ones), "scores are"), ((good, None, scores), r"NaN at \[1, 1, 1\]")):
        with pytest.raises(ValueError, match=text):
            Driven(spec, *arguments)
