"""Every supported family through the four checks, the committed table of them, and families that are not supported."""

import copy

import pandas as pd
import pytest
import torch
import transformers
from conftest import FAMILIES
from dualdeadline import families, models, paths, tiny, traces
from dualdeadline.engine import offload

ALL = pytest.mark.parametrize("name", families.ROWS)


@ALL
def test_all_four_checks_pass(name, tmp_path):
    row = families.check(name, tmp_path)
    assert tuple(row) == families.FIELDS
    assert {key: row[key] for key in families.CHECKS if row[key].startswith(families.FAILED)} == {}
    assert row["transformers"] == transformers.__version__ and row["family"] in models.FAMILIES
    missed, _, uses, _ = row["offload"].split()
    assert 0 < int(missed) < int(uses) and int(row["exact"].split()[0].replace(",", "")) > 10_000
    assert int(row["traces"].split()[0]) >= 30  # six prompts of at least five steps


def test_every_adapter_entry_has_a_row():
    """The families of the rows are those that `describe` accepts, no more and no fewer."""
    assert {families.ROWS[name][0] for name in families.ROWS} == set(tiny.TINY) >= set(FAMILIES)
    found = set(families.read()["family"])
    assert found == set(models.FAMILIES)


@ALL
def test_committed_rows_cover_both_versions(name):
    rows = families.read()
    own = rows[rows["name"] == name]
    assert own["transformers"].str.rsplit(".", n=1).str[0].tolist() == ["5.17", "5.24"]
    assert not own[list(families.CHECKS)].apply(lambda column: column.str.startswith(families.FAILED)).any().any()


def test_a_check_that_fails_is_a_row_that_says_so(tmp_path, monkeypatch):
    """Each check on a library that does it wrong."""
    from dualdeadline.engine import hosted

    take = traces.capture.Capture.rows
    monkeypatch.setattr(traces.capture.Capture, "rows", lambda self: (found := take(self)) | {"weights": found["weights"] + 1})
    finish = hosted.KERNELS["torch"].finish
    monkeypatch.setattr(hosted.KERNELS["torch"], "finish", lambda self: finish(self) * 1.0001)
    row = families.check("OLMoE", tmp_path)
    assert row["traces"].startswith("failed: AssertionError") and row["predictors"].startswith("failed: KeyError")
    assert row["exact"].startswith("failed: ")
    assert families._verdict(pd.Series(row)) == "fails: traces, predictors, offload, exact"


def test_rows_replace_those_of_the_same_version(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "MANIFESTS", tmp_path)
    assert families.read().empty and "No results yet" in families.table()
    row = dict.fromkeys(families.FIELDS, "x") | {"name": "Mixtral", "family": "mixtral", "transformers": "5.24.0"}
    families.write([row, row | {"name": "OLMoE", "family": "olmoe", "transformers": "5.9.0", "exact": "failed: bits"}])
    families.write([row | {"traces": "60 steps"}])
    rows = families.read()
    assert rows["name"].tolist() == ["OLMoE", "Mixtral"] and rows["traces"].tolist() == ["x", "60 steps"]
    lines = [[cell.strip() for cell in line.split("|")[1:5]] for line in families.table().splitlines() if "`" in line[:40]]
    assert lines[0][2:] == ["transformers 5.9.0", "transformers 5.24.0"]
    assert lines[1][2:] == ["fails: exact", "not run"] and lines[2][2:] == ["not run", "all four pass"]
    (tmp_path / families.FILE).write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"has columns \['a', 'b'\]; needed: \['name'"):
        families.read()


def test_unknown_row_is_refused(tmp_path):
    with pytest.raises(ValueError, match="family is 'GPT-2'; needed: one of OLMoE, "):
        families.check("GPT-2", tmp_path)


# families without an entry


@pytest.fixture(scope="module")
def stranger():
    """A GLM-4-MoE, which has no entry: a sigmoid router whose K weights are renormalised as the config says."""
    config = transformers.Glm4MoeConfig(**tiny.SMALL | tiny.NARROW, n_routed_experts=8, first_k_dense_replace=1,
                                        n_group=1, topk_group=1, head_dim=8, n_shared_experts=1)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for value in model.parameters():
            if value.dim() > 1:
                value.normal_(std=0.3)
    return model


def test_family_without_an_entry_is_told_what_to_add(stranger):
    with pytest.raises(ValueError) as told:
        models.describe(stranger)
    said = str(told.value)
    assert "'glm4_moe'" in said and "Glm4MoeForCausalLM" in said and "2 MoE layers" in said
    assert 'FAMILIES["glm4_moe"] = ("softmax" or "sigmoid", ' in said and "lib/dualdeadline/models.py" in said
    with pytest.raises(ValueError, match="glm4_moe"):
        offload(stranger, 3, backend="cpu")


def test_one_entry_is_enough(stranger, tiny_tokenizer, tiny_prompts, tmp_path, monkeypatch):
    """With the line that the error names, traces, predictors, offload and exactness hold as for any other family."""
    model = copy.deepcopy(stranger)
    monkeypatch.setitem(models.FAMILIES, "glm4_moe", ("sigmoid", "config"))
    found = {}
    rows = [families._outcome(made, model, tmp_path, found)
            for made in (families._traces, families._predictors, families._offload, families._exact)]
    assert not [row for row in rows if row.startswith(families.FAILED)], rows


def test_wrong_entry_is_noticed(stranger, tmp_path, monkeypatch):
    monkeypatch.setitem(models.FAMILIES, "glm4_moe", ("softmax", "config"))
    assert families._outcome(families._traces, copy.deepcopy(stranger), tmp_path, {}).startswith("failed: AssertionError")


def test_structure_that_is_missing_is_named():
    model = tiny.model("olmoe")
    block = model.model.layers[1].mlp
    block.gating = block.gate
    del block.gate
    with pytest.raises(ValueError, match=r"model.layers.1.mlp has experts but no router; needed: a child named gate or router"
                                         r".*it has .*gating"):
        models.describe(model)
    model = tiny.model("olmoe")
    for layer in model.model.layers:
        layer.mlp.experts = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(8))
    with pytest.raises(ValueError, match=r"model.layers.0.mlp.experts is a ModuleList without a stacked down_proj \[E,H,F\]"):
        models.describe(model)
    model = tiny.model("olmoe")
    for layer in model.model.layers:
        layer.mlp.gate.weight = None
    with pytest.raises(ValueError, match="OlmoeTopKRouter has no weight"):
        models.describe(model)
