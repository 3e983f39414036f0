import contextlib
import copy
import errno
import math
import multiprocessing
import os
import shutil
import time

import numpy as np
import pytest
import torch
from conftest import FAMILIES
from dualdeadline import models, paths, traces
from dualdeadline.traces import __main__ as command
from dualdeadline.traces import collection, sampling, shards, store
from hypothesis import given, settings
from hypothesis import strategies as st

WARM = traces.Sampling(temperature=0.8, top_p=0.95, seed=7)


@pytest.fixture
def collect(tiny_model, tiny_prompts, tmp_path):
    """Collect the tiny prompts on the tiny OLMoE into a folder of this test."""
    def run(name="store", prompts=tiny_prompts, **options):
        return traces.collect(*tiny_model("olmoe"), prompts, tmp_path / name, **{"new_tokens": 10, "sampling": WARM} | options)

    return run


@pytest.fixture
def decoded(monkeypatch):
    """Ids of the prompts that were decoded, in batches; grows as `collect` runs."""
    seen = []
    true = collection.decode

    def watch(model, spec, ids, names, *rest):
        seen.append(list(names))
        return true(model, spec, ids, names, *rest)

    monkeypatch.setattr(collection, "decode", watch)
    return seen


def equal(one: traces.Trace, other: traces.Trace) -> bool:
    return one.prompt_ids == other.prompt_ids and all(
        torch.equal(getattr(one, field), getattr(other, field)) for field in ("routes", "tokens", "prompt"))


@pytest.mark.parametrize("family", FAMILIES)
def test_batch_equals_one_by_one(family, tiny_model, tiny_prompts, tmp_path):
    model, tokenizer = tiny_model(family)
    one, five = (
        traces.collect(model, tokenizer, tiny_prompts[:5], tmp_path / str(size), 6, size, WARM).split() for size in (1, 5))
    assert equal(one, five)
    torch.testing.assert_close(one.router_input, five.router_input, atol=1e-4, rtol=1e-3)
    _check_routing(one)


def _check_routing(trace):
    """What was captured fits together as the family's own rule says; nothing here was computed by the library."""
    routers = trace.routers
    for layer in range(trace.routes.shape[1]):
        logits = trace.router_logits[:, layer].float()
        torch.testing.assert_close(routers.logits(layer, trace.router_input[:, layer]).float(), logits, atol=1e-4, rtol=1e-4)
        weights = routers.probabilities(logits).gather(1, trace.routes[:, layer])
        if routers.norm_topk_prob:
            weights = weights / weights.sum(1, keepdim=True)
        torch.testing.assert_close(weights * routers.scaling, trace.weights[:, layer].float(), atol=1e-5, rtol=1e-4)
    assert bool((trace.weights.diff(dim=-1) <= 0).all())


def test_routes_equal_those_of_one_forward_over_the_whole_text(tiny_model, tiny_store):
    """Decoding with a cache, left padding and hooks against a plain forward without any of them."""
    model, _ = tiny_model("olmoe")
    trace = tiny_store.split()
    for place, name in enumerate(trace.prompt_ids):
        prompt = store.safetensors.load_file(tiny_store.path / "prompts" / f"{name}.safetensors")["prompt_tokens"].long()
        rows = trace.select([place])
        with torch.no_grad():
            output = model(torch.cat([prompt, rows.tokens])[None], output_router_logits=True, output_hidden_states=True)
        logits = torch.stack(output.router_logits, 1)[len(prompt) :]
        torch.testing.assert_close(logits, rows.router_logits, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(output.hidden_states[1][0, len(prompt) :], rows.layer_input[:, 1], atol=1e-4, rtol=1e-4)
        assert torch.equal(logits.topk(2, -1).indices, rows.routes)


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3", "gpt_oss", "granitemoe"])
@pytest.mark.parametrize("sampled", [None, WARM])
def test_capturing_changes_no_token(family, sampled, tiny_model, tiny_prompts):
    assert traces.check_capture(*tiny_model(family), tiny_prompts[:3], 8, sampled) > 8


def test_changed_token_is_noticed(tiny_model, tiny_prompts, monkeypatch):
    def meddle(self, _module, args, _kwargs):
        self._seen["layer_input"].append(args[0])
        args[0].neg_()

    monkeypatch.setattr(traces.capture.Capture, "_on_layer", meddle)
    with pytest.raises(AssertionError, match="capturing changed the tokens of prompt p0"):
        traces.check_capture(*tiny_model("olmoe"), tiny_prompts[:2], 8)


def test_layer_that_did_not_run_is_noticed(tiny_model, tiny_prompts, tmp_path):
    model, tokenizer = copy.deepcopy(tiny_model("olmoe"))
    model.model.config.num_hidden_layers = 2
    with pytest.raises(RuntimeError, match="gave 2 of router_input; needed: one per MoE layer \\(3\\)"):
        traces.collect(model, tokenizer, tiny_prompts, tmp_path, 4)


def test_greedy_takes_the_most_probable_token(tiny_model, tiny_prompts, collect):
    model, tokenizer = tiny_model("olmoe")
    trace = collect(prompts=tiny_prompts[:1], sampling=None).split()
    ids = tokenizer(tiny_prompts[0].text, return_tensors="pt")["input_ids"]
    expected = model.generate(ids, max_new_tokens=10, do_sample=False)[0, ids.shape[1] :]
    assert torch.equal(trace.tokens, expected[: len(trace)])


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3", "mixtral", "granitemoe"])
def test_prompts_prefilled_in_groups_equal_one_group(family, tiny_model, tiny_prompts, tmp_path, monkeypatch):
    from dualdeadline.traces import decode as loop

    found = []
    for rows in (2, 9):
        monkeypatch.setattr(loop, "PREFILL_ROWS", rows)
        found.append(traces.collect(*tiny_model(family), tiny_prompts, tmp_path / str(rows), 6, 9, WARM).split())
    assert equal(*found)
    torch.testing.assert_close(found[0].router_input, found[1].router_input, atol=1e-4, rtol=1e-3)


# sampling


@given(st.integers(0, 2**32), st.integers(0, 500), st.integers(1, 6))
@settings(max_examples=30, deadline=None)
def test_choice_depends_on_seed_prompt_and_step_only(seed, step, rows):
    policy = traces.Sampling(seed=seed)
    logits = torch.randn(rows, 40, generator=torch.Generator().manual_seed(step)) * 2
    keys = np.array([policy.key(f"prompt {row}") for row in range(rows)], dtype=np.uint64)
    together = policy.choose(logits, keys, step)
    alone = [int(policy.choose(logits[row : row + 1], keys[row : row + 1], step)) for row in range(rows)]
    assert together.tolist() == alone


@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_choices_follow_the_distribution(top_p):
    policy = traces.Sampling(temperature=0.5, top_p=top_p, seed=3)
    logits = torch.tensor([1.0, 0.7, 0.2, -0.4, 0.9, -1.0])
    wanted = (logits / 0.5).softmax(-1)
    order = wanted.argsort(descending=True)
    wanted[order[wanted[order].cumsum(0) - wanted[order] >= top_p]] = 0
    wanted /= wanted.sum()
    keys = np.array([policy.key(str(i)) for i in range(4000)], dtype=np.uint64)
    found = torch.bincount(policy.choose(logits.expand(4000, -1), keys, 5), minlength=6) / 4000
    assert (found - wanted).abs().max() < 0.03  # four standard deviations
    assert (found[wanted == 0] == 0).all() and (wanted > 0).sum() == (6 if top_p == 1 else 3)


def test_nucleus_wider_than_the_first_candidates_is_covered():
    policy = traces.Sampling(temperature=1.0, top_p=0.9001)
    values, ids = policy._candidates(torch.zeros(1, 3000))
    assert np.isfinite(values).sum() == 2701 and len(set(ids[0])) == 3000


def test_streams_differ_by_seed_prompt_step_and_token():
    key = np.array([traces.Sampling(seed=0).key("a")], dtype=np.uint64)
    base = sampling.gumbel(key, 0, np.arange(5000)[None])[0]
    others = [sampling.gumbel(key, 1, np.arange(5000)[None])[0],
              sampling.gumbel(np.array([traces.Sampling(seed=0).key("b")], dtype=np.uint64), 0, np.arange(5000)[None])[0],
              sampling.gumbel(np.array([traces.Sampling(seed=1).key("a")], dtype=np.uint64), 0, np.arange(5000)[None])[0],
              np.roll(base, 1)]
    assert base.mean() == pytest.approx(np.euler_gamma, abs=0.08) and base.std() == pytest.approx(math.pi / 6**0.5, abs=0.08)
    assert all(abs(np.corrcoef(base, other)[0, 1]) < 0.06 for other in others)


@pytest.mark.parametrize("wrong", [{"temperature": 0}, {"top_p": 0}, {"top_p": 1.5}])
def test_impossible_sampling_is_refused(wrong):
    with pytest.raises(ValueError, match="needed: temperature > 0 and 0 < top_p <= 1"):
        traces.Sampling(**wrong)


# ends of texts


def test_trace_ends_before_the_end_of_text(tiny_model, tiny_prompts, tmp_path, monkeypatch):
    model, tokenizer = tiny_model("olmoe")
    free = traces.collect(model, tokenizer, tiny_prompts, tmp_path / "free", 8, 4, WARM).split()
    stop = int(free.select([0]).tokens[3])
    monkeypatch.setattr(model.generation_config, "eos_token_id", [stop])
    ended = traces.collect(model, tokenizer, tiny_prompts, tmp_path / "ended", 8, 4, WARM)
    assert stop not in ended.split().tokens
    for row in ended.index.itertuples():
        tokens = free.select([row.id]).tokens.tolist()
        length = tokens.index(stop) if stop in tokens else 8
        assert (row.tokens, row.finish) == (length, "length" if stop not in tokens else "end of text")


def test_prompt_that_ends_at_once_has_a_file_and_no_rows(tiny_model, tiny_prompts, tmp_path, monkeypatch):
    model, tokenizer = tiny_model("olmoe")
    first = {p.id: int(traces.collect(model, tokenizer, [p], tmp_path / p.id, 1).split().tokens) for p in tiny_prompts}
    monkeypatch.setattr(model.generation_config, "eos_token_id", first["p0"])
    found = traces.collect(model, tokenizer, tiny_prompts, tmp_path / "all", 4)
    silent = [name for name, token in first.items() if token == first["p0"]]
    assert found.index.set_index("id").tokens[silent].tolist() == [0] * len(silent)
    assert not set(silent) & set(found.split().prompt_ids) and len(found.prompts) == 9 and found.verify() == []


def test_end_of_text_is_barred_for_the_first_steps(tiny_model, tiny_prompts, tmp_path, monkeypatch):
    model, tokenizer = tiny_model("olmoe")
    free = traces.collect(model, tokenizer, tiny_prompts, tmp_path / "free", 8, 4, WARM).split()
    monkeypatch.setattr(model.generation_config, "eos_token_id", free.tokens.unique().tolist())
    barred = traces.collect(model, tokenizer, tiny_prompts, tmp_path / "barred", 8, 4, WARM, min_new_tokens=3)
    assert (barred.index.tokens >= 3).all() and not torch.isin(barred.split().tokens, free.tokens.unique()).any()
    with pytest.raises(ValueError, match="min_new_tokens is 9"):
        traces.collect(model, tokenizer, tiny_prompts, tmp_path / "wrong", 8, min_new_tokens=9)


# resuming


def test_killed_run_resumes_and_equals_an_uninterrupted_one(collect, decoded, monkeypatch, tmp_path):
    true = collection._write
    written = []

    def write_five(run, prompt, *rest):
        if len(written) == 5:
            raise KeyboardInterrupt
        written.append(prompt.id)
        return true(run, prompt, *rest)

    monkeypatch.setattr(collection, "_write", write_five)
    with pytest.raises(KeyboardInterrupt, match="5 of 9 prompts are kept in .*store; run it again to go on"):
        collect(batch_size=3)
    with pytest.raises(ValueError, match="holds 5 of 9 prompts: its collection was stopped; run notebook 02_traces"):
        traces.TraceStore(tmp_path / "store")
    monkeypatch.setattr(collection, "_write", true)
    decoded.clear()
    resumed = collect(batch_size=3)
    assert sorted(sum(decoded, [])) == sorted({f"p{i}" for i in range(9)} - set(written))
    assert equal(resumed.split(), collect("whole", batch_size=9).split())


def test_full_disk_keeps_what_is_there_and_says_so(collect, decoded, monkeypatch, tmp_path):
    true = collection._save

    def full(tensors, path, facts):
        if path.stem in ("p3", "p4"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return true(tensors, path, facts)

    monkeypatch.setattr(collection, "_save", full)
    with pytest.raises(OSError, match="the disk is full; . of 9 prompts are kept") as raised:
        collect(batch_size=1)
    assert raised.value.errno == errno.ENOSPC
    kept = set(store.read_index(tmp_path / "store" / store.INDEX).id)
    assert f"the disk is full; {len(kept)} of 9" in str(raised.value) and not kept & {"p3", "p4"}
    monkeypatch.setattr(collection, "_save", true)
    decoded.clear()
    assert len(collect(batch_size=1).prompts) == 9
    assert sorted(sum(decoded, [])) == sorted({f"p{i}" for i in range(9)} - kept)


def test_broken_files_are_named_and_only_they_are_collected_again(collect, decoded):
    before = collect()
    trace = before.split()
    files = {name: before.path / "prompts" / f"{name}.safetensors" for name in ("p1", "p2", "p5", "p6")}
    files["p1"].write_bytes(files["p1"].read_bytes()[:-100])
    shutil.copy(files["p6"], files["p2"])
    files["p5"].unlink()
    problems = before.verify()
    assert [line.split("prompts/")[1].split()[0] for line in problems] == [f"p{i}.safetensors" for i in (1, 2, 5)]
    assert "was truncated or altered" in problems[0] and "is missing" in problems[2]
    with pytest.raises(ValueError, match="p1.safetensors was truncated or altered.*run notebook 02_traces again"):
        before.split()
    decoded.clear()
    with pytest.warns(UserWarning) as told:
        after = collect()
    assert sorted(sum(decoded, [])) == ["p1", "p2", "p5"]
    assert sorted(str(warning.message).rsplit("; ", 1)[1] for warning in told) == [
        f"prompt {name} is collected again" for name in ("p1", "p2", "p5")]
    assert equal(after.split(), trace) and after.verify() == []


def test_foreign_file_is_named(collect):
    found = collect()
    (found.path / "prompts" / "guest.safetensors").write_bytes(b"?")
    assert found.verify() == [f"{found.path / 'prompts' / 'guest.safetensors'} is in no row of the index"]


def test_changed_prompt_text_is_collected_again(collect, decoded, tiny_prompts):
    collect()
    decoded.clear()
    with pytest.warns(UserWarning, match="belongs to another prompt text"):
        collect(prompts=[tiny_prompts[0]._replace(text="entirely other words"), *tiny_prompts[1:]])
    assert decoded == [["p0"]]


@pytest.mark.parametrize("other", [{"new_tokens": 9}, {"sampling": None}, {"sampling": traces.Sampling(seed=8)}])
def test_other_settings_in_the_same_folder_are_refused(collect, other, decoded):
    collect()
    with pytest.raises(ValueError, match=f"holds traces of other settings .*{next(iter(other))} was"):
        collect(**other)
    decoded.clear()
    collect(**other, resume=False)
    assert len(sum(decoded, [])) == 9


def test_another_model_in_the_same_folder_is_refused(tiny_model, tiny_prompts, tmp_path):
    model, tokenizer = copy.deepcopy(tiny_model("olmoe"))
    traces.collect(model, tokenizer, tiny_prompts, tmp_path, 2)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj.mul_(1.01)
    with pytest.raises(ValueError, match="model was .*, now .*; delete that folder"):
        traces.collect(model, tokenizer, tiny_prompts, tmp_path, 2)


def test_fewer_prompts_hide_the_others_without_losing_them(collect, decoded, tiny_prompts):
    every = collect()
    few = collect(prompts=tiny_prompts[4:7])
    assert [prompt.id for prompt in few.prompts] == ["p4", "p5", "p6"] and few.split("train").prompt_ids == ["p4"]
    decoded.clear()
    assert equal(collect().split(), every.split()) and decoded == []


def test_moved_prompt_takes_its_new_split(collect, tiny_prompts):
    collect()
    moved = collect(prompts=[tiny_prompts[0]._replace(split="test"), *tiny_prompts[1:]])
    assert moved.split("test").prompt_ids == ["p0", "p7", "p8"]


def test_prompt_longer_than_the_context_is_refused_before_anything_is_written(collect, tiny_prompts, tmp_path):
    with pytest.raises(ValueError, match=r"prompt p1 \(code\) has \d+ tokens; needed: 1 to 246 \(context 256 less 10"):
        collect(prompts=[tiny_prompts[0], tiny_prompts[1]._replace(text="word " * 400)])
    assert not (tmp_path / "store").exists()
    with pytest.raises(ValueError, match="got no prompts"):
        collect(prompts=[])


def test_chat_template_is_used_where_there_is_one(tiny_tokenizer):
    chat = copy.deepcopy(tiny_tokenizer)
    chat.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
    assert chat.decode(models.encode(chat, "how many")) == "<user>how many<answer>"
    assert tiny_tokenizer.decode(models.encode(tiny_tokenizer, "how many")) == "how many"


# reading


def test_splits_and_shapes(tiny_store):
    every, parts = tiny_store.split(), [tiny_store.split(name) for name in ("train", "validation", "test")]
    rows = len(every)
    assert [len(part.prompt_ids) for part in parts] == [5, 2, 2] and sum(map(len, parts)) == rows
    assert every.routes.shape == every.weights.shape == (rows, 3, 2) and every.routes.dtype == torch.long
    assert every.router_input.shape == every.layer_input.shape == (rows, 3, 32) and every.router_logits.shape == (rows, 3, 8)
    assert every.source == [prompt.source for prompt in tiny_store.prompts] and every.num_experts == 8
    assert {key: tiny_store.meta[key] for key in "LEKHF"} == {"L": 3, "E": 8, "K": 2, "H": 32, "F": 16}


def test_tensors_that_were_not_asked_for_are_none(tiny_store):
    few = tiny_store.split("test", tensors=("routes", "weights"))
    assert few.router_input is None and few.router_logits is None and torch.equal(few.routes, tiny_store.split("test").routes)
    assert few.select([0]).layer_input is None


def test_empty_and_unknown_splits_are_refused(tiny_store, collect, tiny_prompts):
    with pytest.raises(ValueError, match="split 'dev' has no traces; needed: one of train, validation, test, all"):
        tiny_store.split("dev")
    with pytest.raises(ValueError, match="split 'test' has no traces"):
        collect(prompts=tiny_prompts[:3]).split("test")


def test_missing_store_names_its_stage(tmp_path):
    with pytest.raises(FileNotFoundError, match="notebook 02_traces makes it"):
        traces.TraceStore(tmp_path / "nothing")


def test_broken_index_is_named(collect):
    found = collect()
    (found.path / "index.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(ValueError, match="index.parquet cannot be read .*delete that file"):
        traces.TraceStore(found.path)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.data())
@settings(max_examples=40, deadline=None)
def test_select_keeps_rows_and_numbers_prompts_anew(lengths, data):
    rows = sum(lengths)
    values = torch.arange(rows * 2).view(rows, 1, 2)
    names = [f"n{i}" for i in range(len(lengths))]
    whole = store.Trace(values, values, values, values, values, torch.arange(rows),
                        torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)), names, names, 4)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows)))
    part = whole.select(mask)
    assert torch.equal(part.tokens, whole.tokens[mask]) and torch.equal(part.routes, values[mask])
    assert [part.prompt_ids[i] for i in part.prompt] == [names[i] for i in whole.prompt[mask]]
    assert part.prompt_starts.tolist() == [int((part.prompt < i).sum()) for i in range(len(part.prompt_ids))]
    chosen = data.draw(st.lists(st.sampled_from(names), unique=True))
    assert whole.select(chosen).prompt_ids == [name for name in names if name in chosen]


def test_selecting_what_is_not_there_is_refused(tiny_store):
    trace = tiny_store.split()
    with pytest.raises(ValueError, match=r"prompts \['zz'\] are not in this trace of 9 prompts"):
        trace.select(["zz"])
    with pytest.raises(ValueError, match="mask has shape"):
        trace.select(torch.ones(3, dtype=torch.bool))


# statistics


def made_up(tokens, routes, lengths, experts=4):
    routes = torch.tensor(routes)
    prompt = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    names = [f"n{i}" for i in range(len(lengths))]
    return store.Trace(routes, None, None, None, None, torch.tensor(tokens), prompt, names, names, experts)


def test_repetition_counts_grams_within_a_prompt():
    loop, plain, short = [1, 2] * 4, [1, 2, 3, 4, 5], [1, 2]
    trace = made_up(loop + plain + short, [[[0, 1]]] * 15, [8, 5, 2])
    found = traces.repetition(trace)
    assert found.repeated[:2].tolist() == [pytest.approx(3 / 5), 0] and math.isnan(found.repeated[2])
    assert found.tokens.tolist() == [8, 5, 2]


def test_load_and_reuse():
    trace = made_up([0] * 4, [[[0, 1]], [[1, 2]], [[1, 2]], [[3, 0]]], [3, 1])
    assert traces.expert_load(trace).tolist() == [[0.25, 0.375, 0.25, 0.125]]
    assert traces.reuse(trace).tolist() == [pytest.approx(0.75)]  # one of two, then two of two; not across prompts
    assert traces.chance_reuse(trace).tolist() == [pytest.approx(2 * (0.0625 + 0.140625 + 0.0625 + 0.015625))]


class Give(torch.nn.Module):
    """Returns what it was made with: a module that costs nothing but its call."""

    def __init__(self, *output):
        super().__init__()
        self.output = output

    def forward(self, *_):
        return self.output


def capture_cost_ms(layers, batch, hidden, experts, routed, repeats=200):
    """Median ms that hooks and `take` add to one step, on modules of these shapes that do nothing themselves.

    The difference of two whole decode steps, each a hundred times as long, drowns in their scatter.
    """
    state, read = torch.randn(batch, 1, hidden), torch.randn(batch, hidden)
    weights, index = torch.rand(batch, experts).topk(routed)
    found = [models.MoELayer(str(i), Give(), Give(torch.rand(batch, experts), weights, index), Give(), None)
             for i in range(layers)]
    spec = models.MoESpec("olmoe", layers, experts, routed, hidden, 32, "softmax", False, 1.0, tuple(found))
    capture, medians = traces.capture.Capture(spec, repeats), []
    for opened in (False, True):
        taken = []
        with capture if opened else contextlib.nullcontext():
            for _ in range(repeats):
                start = time.thread_time()
                for layer in found:
                    layer.decoder(state), layer.router(read), layer.experts(read, index, weights)
                if opened:
                    capture.take()
                taken.append(time.thread_time() - start)
        medians.append(float(np.median(taken)) * 1e3)
    return medians[1] - medians[0]


@pytest.mark.slow
def test_capture_costs_at_most_five_percent_at_batch_sixteen(tiny_tokenizer):
    """On the embedded model's shape with random weights, in CPU time of the decoding thread."""
    from conftest import tiny_config
    from dualdeadline.corpus import Prompt
    from transformers import AutoModelForCausalLM

    config = tiny_config("olmoe", vocab_size=8192, hidden_size=128, intermediate_size=32, num_hidden_layers=16,
                         num_experts=64, num_experts_per_tok=8, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.set_experts_implementation("grouped_mm")
    prompts = [Prompt(f"p{i}", "words", "train", "g", "how many words " * (3 + i % 4)) for i in range(16)]
    plain = traces.overhead(model, tiny_tokenizer, prompts, steps=12, clock=time.thread_time).plain_ms.median()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        cost = capture_cost_ms(layers=16, batch=16, hidden=128, experts=64, routed=8)
    finally:
        torch.set_num_threads(before)
    print(f"capture {cost:.2f} ms of a step of {plain:.1f} ms: {cost / plain:.1%}")
    assert 0 < cost < 0.05 * plain


def test_small_model_decodes_on_one_thread_and_gives_the_others_back(collect, monkeypatch):
    from dualdeadline.traces import decode as loop

    seen = []
    true = loop._decode
    monkeypatch.setattr(loop, "_decode", lambda *args: (seen.append(torch.get_num_threads()), true(*args))[1])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        collect()
        assert set(seen) == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_summary_records_every_store_and_layer(tiny_store, tmp_path, monkeypatch):
    from dualdeadline import record
    from dualdeadline.traces import summary

    monkeypatch.setattr(paths, "DATA", tmp_path)
    recorder = record.Recorder("02_traces", "tiny", "0", paths.Workspace("smoke"), {"seed": 0})
    trace = summary.add_records(recorder, {"tiny": tiny_store}, 100, 0)["tiny"]
    rows = {(row["variant"], row["metric"], row["config"]): row for row in recorder.rows}
    assert rows["decode", "tokens", '{"corpus": "tiny"}']["median"] == len(trace)
    for layer in range(3):
        keys = f'{{"corpus": "tiny", "layer": {layer}}}'
        reuse = rows["neighbour", "reuse", keys]
        assert reuse["median"] == pytest.approx(float(traces.reuse(trace)[layer]), abs=1e-6)
        assert reuse["low"] <= reuse["median"] <= reuse["high"] and rows["busiest", "load", keys]["median"] >= 1
    assert summary.table({"tiny": tiny_store}).tokens.tolist() == [len(trace)]


def test_routing_shows_exactly_the_routed_experts(tiny_store):
    from dualdeadline.traces import summary

    trace = tiny_store.split()
    name = summary.longest(trace, "code")
    part = trace.select([name])
    assert part.source == ["code"] and len(part) == max(
        length for length, source in zip(trace.lengths.tolist(), trace.source, strict=True) if source == "code")
    grid = summary.routing(trace, name, 1)
    assert grid.shape == (8, len(part)) and (~np.isnan(grid)).sum() == 2 * len(part)
    assert grid[int(part.routes[0, 1, 0]), 0] == pytest.approx(float(part.weights[0, 1, 0]))


# several devices


@pytest.mark.parametrize("family", ["olmoe", "qwen3_5_moe"])
def test_layers_on_several_devices_have_buffers_of_their_own(family, tiny_model, tiny_prompts, tmp_path, monkeypatch):
    """The last layer's tensors count as lying elsewhere; `layer_input` of the layer arrives on the old device."""
    model, tokenizer = tiny_model(family)
    whole = traces.collect(model, tokenizer, tiny_prompts[:3], tmp_path / "one", 6, 3, WARM).split()
    last = models.describe(model).layers[-1]
    moved, made = {}, []

    def elsewhere(*given):
        moved.update((id(value), value) for value in given[-1] if isinstance(value, torch.Tensor))  # an id lives on with it

    hooks = [last.experts.register_forward_pre_hook(lambda module, given: elsewhere(given)),
             last.router.register_forward_hook(lambda module, given, output: elsewhere(output))]
    monkeypatch.setattr(traces.capture, "device_of", lambda tensor: id(tensor) in moved)
    take = traces.capture.Capture.take

    def watch(self):
        take(self)
        moved.clear()
        made.append({field: [buffer.shape[1] for buffer in buffers] for field, buffers in self.buffers.items()})

    monkeypatch.setattr(traces.capture.Capture, "take", watch)
    monkeypatch.setattr(traces.parallel, "workers_for", lambda *_: 1)
    split = traces.collect(model, tokenizer, tiny_prompts[:3], tmp_path / "two", 6, 3, WARM).split()
    for hook in hooks:
        hook.remove()
    assert made[0] == dict.fromkeys(("routes", "weights", "router_input", "router_logits"), [2, 1]) | {"layer_input": [3]}
    assert equal(whole, split)
    for field in ("weights", "router_input", "router_logits", "layer_input"):
        assert torch.equal(getattr(whole, field), getattr(split, field))


# several processes


def files(folder):
    return {path.name: path.read_bytes() for path in [*(folder / "prompts").iterdir(), folder / store.ROUTERS, folder / store.META]}


@pytest.fixture
def part(tiny_model, tiny_prompts, tmp_path, monkeypatch):
    """`part(name, **options)`: this process's share of what the fixture `collect` does, in batches of two."""
    monkeypatch.setattr(paths, "DATA", tmp_path / "data")

    def run(name="parted", prompts=tiny_prompts, **options):
        return shards.collect_part(*tiny_model("olmoe"), prompts, tmp_path / name,
                                   **{"new_tokens": 10, "sampling": WARM, "batch_size": 2} | options)

    return run


def test_two_processes_write_what_one_writes(collect, part, tmp_path):
    """Real processes, told apart by the environment alone, side by side."""
    alone = collect(batch_size=2)
    context = multiprocessing.get_context("fork")
    results = context.Queue()

    def work(rank):
        os.environ.update(RANK=str(rank), WORLD_SIZE="2")
        try:
            torch.set_num_threads(1)
            found = part()
            results.put((rank, None if found is None else len(found.prompts)))
        except BaseException as error:
            results.put((rank, repr(error)))

    workers = [context.Process(target=work, args=(rank,)) for rank in (0, 1)]
    for one in workers:
        one.start()
    told = dict(results.get(timeout=60) for _ in workers)
    for one in workers:
        one.join(60)
    assert 9 in told.values() and set(told.values()) <= {9, None}
    joined = traces.TraceStore(tmp_path / "parted")
    assert joined.verify() == [] and files(joined.path) == files(alone.path)
    columns = sorted(alone.index.columns)
    assert joined.index[columns].equals(alone.index[columns]) and shards.parts(joined.path) == []


def test_parts_are_joined_once_the_last_is_there_and_not_collected_twice(part, decoded, tiny_prompts, tmp_path):
    assert part(rank=1, processes=3) is None and part(rank=2, processes=3) is None
    assert [path.name for path in shards.parts(tmp_path / "parted")] == ["parted.part-1-of-3", "parted.part-2-of-3"]
    first = sum(decoded, [])
    assert part(rank=1, processes=3) is None and sum(decoded, []) == first  # run again: nothing to do
    found = part(rank=0, processes=3)
    assert len(found.prompts) == 9 and sorted(sum(decoded, [])) == sorted(prompt.id for prompt in tiny_prompts)
    assert part(rank=0, processes=2).verify() == [] and len(sum(decoded, [])) == 9  # the store is whole: nothing to do
    assert [prompt.id for prompt in part(rank=1, processes=2, prompts=tiny_prompts[2:7]).prompts] == [f"p{i}" for i in range(2, 7)]


def test_killed_process_goes_on_also_with_another_number(part, decoded, tiny_prompts, tmp_path, monkeypatch):
    true, written = collection._write, []

    def write_three(run, prompt, *rest):
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(prompt.id)
        return true(run, prompt, *rest)

    monkeypatch.setattr(collection, "_write", write_three)
    with pytest.raises(KeyboardInterrupt, match=r"3 of 5 prompts are kept in .*part-0-of-2"):
        part(rank=0, processes=2)
    monkeypatch.setattr(collection, "_write", true)
    decoded.clear()
    assert part(rank=1, processes=2) is None
    assert part(rank=0, processes=2) is not None and not set(sum(decoded, [])) & set(written)


def test_damaged_part_is_not_joined(part, tmp_path):
    part(rank=0, processes=2)
    (first, *_) = sorted((shards.parts(tmp_path / "parted")[0] / "prompts").iterdir())
    first.write_bytes(first.read_bytes()[:-1])
    with pytest.warns(UserWarning, match=f"{first.name} was truncated or altered"):
        assert part(rank=1, processes=2) is None
    with pytest.warns(UserWarning, match=f"prompt {first.stem} is collected again"):
        assert part(rank=0, processes=2).verify() == []


def test_parts_of_other_settings_are_refused(part, tmp_path):
    part(rank=0, processes=2)
    with pytest.raises(ValueError, match=r"part-0-of-2 holds traces of other settings \(new_tokens was 10, now 9"):
        part(rank=1, processes=2, new_tokens=9)


@pytest.mark.parametrize("said", [{"RANK": "0"}, {"WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"},
                                  {"RANK": "-1", "WORLD_SIZE": "2"}, {"RANK": "x", "WORLD_SIZE": "2"}])
def test_environment_that_makes_no_sense_is_refused(said):
    with pytest.raises(ValueError, match="needed: whole numbers, 0 <= rank < size"):
        shards.place(said)
    assert shards.place({}) == (0, 1) and shards.place({"RANK": "1", "WORLD_SIZE": "2"}) == (1, 2)


def test_rank_outside_is_refused(part):
    with pytest.raises(ValueError, match="rank is 2 and processes 2; needed: 0 <= rank < processes"):
        part(rank=2, processes=2)


def test_command_collects_what_the_notebook_would(tiny_checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(paths, "DATA", tmp_path)
    folder = str(tiny_checkpoint("olmoe", max_position_embeddings=2048))
    monkeypatch.setenv("WORLD_SIZE", "2")
    given = ["--profile", "smoke", "--model", folder, "--device", "cpu"]
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        assert command.main(given) == 0
    told = capsys.readouterr().out.splitlines()
    names = ["pilot", "replication", "ood", "pilot_greedy"]
    assert told[:4] == [f"{name}, process 1 of 2: its part is done, another process joins them" for name in names]
    assert told[4:] == [f"{name}, process 0 of 2: 12 prompts, whole" for name in names]
    found = traces.TraceStore(tmp_path / "smoke" / "traces" / "pilot")
    assert found.verify() == [] and found.meta["new_tokens"] == 12 and found.meta["sampling"]["temperature"] == 0.8
    assert command.main([*given[:4], "--device", "auto"]) == 1
    assert "device is 'auto' with 2 processes; needed: one process" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "7")
    assert command.main(given) == 1 and "RANK is '7'" in capsys.readouterr().err


def test_processes_take_one_gpu_each(monkeypatch):
    assert command.device_for(None, 1) is None and command.device_for("cpu", 2) == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert command.device_for(None, 4) == "cuda:1"
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="LOCAL_RANK is 2 and this host has 2 GPUs; needed: at most one process per GPU"):
        command.device_for(None, 4)
