import json
import shutil
from collections import Counter

import pandas as pd
import pytest
from dualdeadline import corpus, manifest, paths
from dualdeadline.corpus import build, sources
from hypothesis import given
from hypothesis import strategies as st

PACKAGED = ["pilot", "replication", "ood"]


@pytest.fixture
def manifests(tmp_path, monkeypatch):
    """A copy of the committed manifests that a test may change; value: the corpora folder."""
    shutil.copytree(paths.MANIFESTS, tmp_path / "manifests")
    monkeypatch.setattr(paths, "MANIFESTS", tmp_path / "manifests")
    monkeypatch.setattr(paths, "CORPORA", tmp_path / "manifests" / "corpora")
    return paths.CORPORA


def change(path, place, **values):
    rows = manifest.read_jsonl(path)
    rows[place] |= values
    manifest.write_jsonl(path, rows)


def test_purposes_share_no_template_and_cover_all():
    from reasoning_gym.arithmetic.gsm_symbolic.gsm_symbolic import tasks_ok

    parts = [corpus.templates(purpose) for purpose in ("pretrain", "pilot", "replication")]
    assert sorted(sum(parts, [])) == sorted(tasks_ok)
    assert [len(part) for part in parts] == [34, 25, 26]
    with pytest.raises(ValueError, match="purpose is 'test'; needed: one of pretrain, pilot, replication"):
        corpus.templates("test")


@pytest.mark.parametrize("name", PACKAGED)
def test_committed_manifest_is_what_the_installed_packages_give(name):
    made, committed = build.rows(name), corpus.rows(name)
    assert made == committed


@pytest.mark.parametrize(("name", "sizes"), [
    ("pilot", {"gsm_symbolic": 80, "humaneval": 40}), ("replication", {"gsm_symbolic": 200, "humaneval": 100}),
    ("ood", {"docstring": 60}),
])
def test_sizes_and_shares(name, sizes):
    prompts = corpus.load(name)
    assert Counter(prompt.source for prompt in prompts) == sizes
    for source, size in sizes.items():
        splits = Counter(prompt.split for prompt in prompts if prompt.source == source)
        for split, share in zip(corpus.SPLITS, (0.6, 0.2, 0.2), strict=True):
            assert abs(splits[split] - share * size) <= 2  # modules hold one or two prompts; the others are exact
    for row, prompt in zip(corpus.rows(name), prompts, strict=True):
        assert prompt.id == manifest.sha256(f"{row['source']}/{row['key']}")[:16]
        assert manifest.sha256(prompt.text) == row["sha256"]


def test_texts_are_not_committed():
    for name in PACKAGED:
        assert {tuple(row) for row in corpus.rows(name)} == {
            ("id", "source", "key", "split", "group", "sha256", "package", "version")}


def test_generator_seeds_lie_further_apart_than_the_sets_are_large():
    seeds = {name: [int(row["key"].split("/")[1]) for row in corpus.rows(name) if row["source"] == "gsm_symbolic"]
             for name in ("pilot", "replication")}
    assert max(seeds["pilot"]) < 500_000 <= min(seeds["replication"]) and max(seeds["replication"]) < 10**6
    assert min(seeds["replication"]) - max(seeds["pilot"]) > sum(map(len, seeds.values()))


def test_changed_text_names_prompt_package_and_versions(manifests):
    change(manifests / "pilot.jsonl", 3, sha256="0" * 64, version="0.0.1")
    row = corpus.rows("pilot")[3]
    with pytest.raises(ValueError, match=f"prompt {row['id']} .*its text differs in reasoning-gym .*needed: reasoning-gym 0.0.1"):
        corpus.load("pilot")


def test_vanished_prompt_is_named(manifests):
    change(manifests / "ood.jsonl", 0, key="networkx.no_such_module:nothing")
    with pytest.raises(ValueError, match="no_such_module:nothing.*it is not there in"):
        corpus.load("ood")


@pytest.mark.parametrize(("values", "message"), [
    ({"split": "test"}, "group, in two splits"), ({"group": "template 14"}, "training text uses too"),
])
def test_shared_groups_are_refused(manifests, values, message):
    assert 14 in corpus.templates("pretrain")
    change(manifests / "pilot.jsonl", 0, **values)
    with pytest.raises(ValueError, match=message):
        corpus.load("pilot")


def test_prompt_of_another_corpus_is_refused(manifests):
    stolen = corpus.rows("replication")[0]
    change(manifests / "pilot.jsonl", 0, id=stolen["id"], sha256=stolen["sha256"])
    with pytest.raises(ValueError, match="pilot and replication: .* there twice"):
        corpus.load("pilot")


def test_unknown_corpus_and_missing_manifest_say_what_is_needed(manifests):
    with pytest.raises(ValueError, match="corpus is 'nonsense'; needed: one of pilot, replication, ood, gsm8k-humaneval"):
        corpus.load("nonsense")
    (manifests / "ood.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match="ood.jsonl is missing: it is committed"):
        corpus.load("ood")


@given(st.integers(6, 130))
def test_limit_keeps_the_shares(limit):
    every = corpus.rows("pilot")
    kept = corpus.shrink(every, limit)
    assert len(kept) == min(limit, len(every)) and [row for row in every if row in kept] == kept
    sizes, parts = (Counter((row["source"], row["split"]) for row in rows) for rows in (every, kept))
    for stratum, size in sizes.items():
        assert abs(parts[stratum] - size * len(kept) / len(every)) < 2


def test_limit_that_empties_a_split_is_refused():
    with pytest.raises(ValueError, match="2 prompts leave the split .* empty; needed: at least 6"):
        corpus.shrink(corpus.rows("pilot"), 2)
    with pytest.raises(ValueError, match="limit is -1"):
        corpus.shrink(corpus.rows("pilot"), -1)


def test_prose_keeps_plain_opening_paragraphs():
    opening = "Compute something of a graph that is described here in plain words, at some length, so that it is kept."
    second = "A second paragraph tells more about it, and ends the prose of this text before a table of parameters."
    docstring = f"{opening}\n\n{second}\n\nParameters\n----------\nx : int\n\nPlain words after the table."
    assert sources.prose(docstring) == f"{opening}\n\n{second}"
    assert sources.prose(f"{opening}\n\n>>> f(1)\n\n{second}") == ""  # the opening alone is too short


@pytest.fixture
def local_hub(tmp_path, manifests):
    """Data sets in the hub's own format in local folders, and a hub.yaml that names them."""
    problems = pd.DataFrame({"question": [f"How many are {i} apples?" for i in range(40)], "answer": ["#### 1"] * 40})
    tasks = [{"task_id": f"HumanEval/{i}", "prompt": f"def f{i}():\n", "test": ""} for i in range(20)]
    (tmp_path / "gsm8k" / "main").mkdir(parents=True)
    problems.to_parquet(tmp_path / "gsm8k" / "main" / "test-00000-of-00001.parquet")
    (tmp_path / "humaneval").mkdir()
    (tmp_path / "humaneval" / "test.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    for folder, config, file in (("gsm8k", "main", "main/test-*"), ("humaneval", "openai_humaneval", "test.jsonl")):
        card = f"---\nconfigs:\n- config_name: {config}\n  data_files:\n  - split: test\n    path: {file}\n---\n"
        (tmp_path / folder / "README.md").write_text(card)
    recipe = manifest.read_yaml("corpora/hub.yaml")
    recipe["datasets"]["gsm8k"]["hub"] = str(tmp_path / "gsm8k")
    recipe["datasets"]["openai_humaneval"]["hub"] = str(tmp_path / "humaneval")
    recipe["corpora"] = {"gsm8k-humaneval": {"gsm8k": [0, 20], "openai_humaneval": [0, 10]},
                         "gsm8k-humaneval-replication": {"gsm8k": [20, 40], "openai_humaneval": [10, 20]}}
    (manifests / "hub.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    return tmp_path


def test_hub_corpora_are_pinned_at_the_first_fetch(local_hub, manifests):
    first, second = corpus.load("gsm8k-humaneval"), corpus.load("gsm8k-humaneval-replication")
    assert Counter(prompt.source for prompt in first) == {"gsm8k": 20, "openai_humaneval": 10}
    assert not {prompt.id for prompt in first} & {prompt.id for prompt in second}
    assert {row["version"][:6] for row in corpus.rows("gsm8k-humaneval")} == {"local-"}
    assert all(prompt.text.startswith(("How many are", "def f")) for prompt in first)
    assert corpus.load("gsm8k-humaneval") == first  # now from the manifest


def test_changed_hub_text_is_refused(local_hub, manifests):
    corpus.load("gsm8k-humaneval")
    change(manifests / "gsm8k-humaneval.jsonl", 0, sha256="0" * 64)
    with pytest.raises(ValueError, match="its text differs in .*gsm8k local-"):
        corpus.load("gsm8k-humaneval")


def test_frame_has_a_line_per_prompt(tiny_tokenizer):
    prompts = corpus.load("pilot", 6)
    table = corpus.frame({"pilot": prompts}, tiny_tokenizer)
    assert table.id.tolist() == [prompt.id for prompt in prompts] and set(table.corpus) == {"pilot"}
    assert table.tokens.tolist() == [len(tiny_tokenizer(prompt.text)["input_ids"]) for prompt in prompts]
