"""A record row says everything about its measurement; the committed ones do."""

import json
import re

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualdeadline import machine, manifest, notebook, paths, record


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """A smoke workspace of its own."""
    monkeypatch.setattr(paths, "DATA", tmp_path)
    return paths.Workspace("smoke")


def recorder(workspace, seed=0, **names):
    names = {"stage": "04_evaluation", "model": "pilot-olmoe", "revision": "r"} | names
    return record.Recorder(workspace=workspace, scope={"seed": seed}, **names)


def test_a_row_carries_its_provenance(workspace):
    made = recorder(workspace)
    made.add("gate_ahead", "recall", 0.5, "1", "replayed", 0.4, 0.6, 24, budget=4)
    row = made.write().iloc[0]
    assert list(row.index) == record.FIELDS
    assert re.fullmatch(r"[0-9a-f]{40}|unknown", row["commit"]) and row["dirty"] in ("true", "false")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", row["time"]) and "torch" in row["versions"]
    assert json.loads(row["config"]) == {"budget": 4} and row["machine"] == machine.machine_id()


def test_smoke_describes_no_machine(workspace):
    path = paths.MANIFESTS / "machines.yaml"
    before = path.read_bytes() if path.exists() else None
    made = recorder(workspace)
    made.add("a", "recall", 0.5, "1", "replayed")
    made.write()
    assert (path.read_bytes() if path.exists() else None) == before


def test_next_run_replaces_its_own_rows_only(workspace):
    for seed, value in ((0, 0.1), (1, 0.2), (0, 0.3)):
        made = recorder(workspace, seed)
        made.add("a", "recall", value, "1", "replayed")
        made.write()
    found = record.read(workspace, "04_evaluation", "pilot-olmoe")
    assert dict(zip(found["scope.seed"], found["median"], strict=True)) == {0: 0.3, 1: 0.2}
    assert record.read(workspace, "04_evaluation", "other").empty


def test_bad_rows_are_refused(workspace):
    made = recorder(workspace)
    with pytest.raises(ValueError, match="kind is 'guessed'; needed: one of measured, replayed, simulated"):
        made.add("a", "recall", 0.5, "1", "guessed")
    made.add("a", "recall", 0.5, "1", "replayed", budget=4)
    with pytest.raises(ValueError, match="a config key is missing"):
        made.add("a", "recall", 0.6, "1", "replayed", budget=4)
    with pytest.raises(ValueError, match="control character"):
        made.add("a\r", "recall", 0.6, "1", "replayed", budget=4)


def test_foreign_file_is_refused(workspace):
    workspace.records.mkdir(parents=True)
    (workspace.records / "04_evaluation.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="has columns .*; needed: "):
        record.load(workspace.records / "04_evaluation.csv")


@settings(max_examples=25)
@given(st.floats(allow_nan=False, allow_infinity=False, width=32), st.text(st.characters(codec="ascii", min_codepoint=32), max_size=8))
def test_rows_survive_the_file(tmp_path_factory, value, name):
    frame = pd.DataFrame([dict.fromkeys(record.FIELDS, "x") | {
        "variant": name, "median": record._number(value), "low": None, "high": None, "n": 3}], columns=record.FIELDS)
    path = tmp_path_factory.mktemp("r") / "a.csv"
    frame.to_csv(path, index=False)
    (row,) = record.load(path).to_dict("records")
    assert row["median"] == pytest.approx(value, rel=1e-8) and row["n"] == 3
    assert row["variant"] == name


FILES = sorted(paths.RECORDS.glob("*.csv"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_committed_rows_are_whole(path):
    rows = record.load(path)
    assert len(rows) and set(rows["stage"]) == {path.stem}
    assert path.stem in notebook.sources(), f"no notebook writes {path.name}"
    assert set(rows["kind"]) <= set(record.KINDS)
    assert set(rows["machine"]) <= set(machine.known()), "a machine is not in machines.yaml"
    assert set(rows["model"]) <= set(manifest.read_yaml("models.yaml")), "a model is not in models.yaml"
    assert rows["commit"].str.fullmatch(r"[0-9a-f]{40}").all() and rows["dirty"].isin(["true", "false"]).all()
    assert rows["manifest"].str.fullmatch(r"[0-9a-f]{16}").all()
    assert rows["time"].str.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ").all()
    assert rows["versions"].str.contains("python 3").all() and (rows["unit"] != "").all() and (rows["n"] >= 1).all()
    assert rows["median"].notna().all()
    interval = rows[rows["low"].notna()]
    assert (interval["low"] <= interval["high"]).all()
    for column in ("config", "scope"):
        assert all(isinstance(json.loads(text), dict) for text in rows[column])
    key = ["model", "variant", "metric", "config", "scope", "machine"]
    assert not rows.duplicated(key).any(), rows[rows.duplicated(key)][key]


def test_a_workspace_without_measurements_sees_the_committed_ones(workspace):
    stage = "07_overlap"
    committed = record.load(paths.RECORDS / f"{stage}.csv")
    measured = (committed.kind == "measured").sum()
    assert measured and len(record.read(workspace, stage)) == measured
    made = recorder(workspace, stage=stage)
    made.add("demand_serial", "block_ms", 1.0, "ms", "simulated")
    made.write()
    assert record.read(workspace, stage).kind.value_counts().to_dict() == {"measured": measured, "simulated": 1}
    part = '{"part": "blocks"}'
    made = record.Recorder(stage, "pilot-olmoe", "r", workspace, json.loads(part))
    made.add("demand_serial", "block_ms", 1.0, "ms", "measured")
    made.write()
    others = ((committed.kind == "measured") & (committed.scope != part)).sum()
    assert 0 < others < measured and len(record.read(workspace, stage)) == others + 2


def test_another_models_measurements_hide_nothing(workspace):
    stage, part = "07_overlap", {"part": "blocks"}
    before = len(record.read(workspace, stage, "pilot-olmoe"))
    made = record.Recorder(stage, "olmoe", "r", workspace, part)
    made.add("demand_serial", "block_ms", 1.0, "ms", "measured")
    made.write()
    assert before and len(record.read(workspace, stage, "pilot-olmoe")) == before
    assert len(record.read(workspace, stage, "olmoe")) == 1


def test_a_part_measured_here_leaves_the_other_parts(workspace, monkeypatch):
    """A GPU stage may be measured in parts: one machine's steps do not hide another's blocks."""
    monkeypatch.setattr(paths, "RECORDS", workspace.records)
    description = machine.known()["nvidia-h200"]
    there = dict(machine_id="nvidia-h200", description=description, versions="", commit="", time="")
    row = dict(variant="a", median=1.0, unit="ms", kind="measured")
    for part in ("blocks", "steps"):
        found = [row | {"metric": part}]
        record.import_rows("07_overlap", "pilot-olmoe", "r", workspace, found, scope={"part": part}, **there)
    own = record.Recorder("07_overlap", "pilot-olmoe", "r", workspace, {"part": "steps"})
    own.add("a", "steps", 2.0, "ms", "measured")
    own.write()
    assert dict(record.read(workspace, "07_overlap")[["metric", "median"]].values) == {"blocks": 1.0, "steps": 2.0}
