"""Manifests are read, written and hashed as promised; what is committed has the promised form."""

import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualdeadline import machine, manifest, paths, record


def test_atomic_write_replaces_or_leaves_alone(tmp_path):
    path = tmp_path / "deep" / "a.txt"
    manifest.write_text(path, "one\n")
    with pytest.raises(KeyboardInterrupt), manifest.atomic(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "one\n"
    assert [each.name for each in path.parent.iterdir()] == ["a.txt"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~_umask()


def _umask():
    value = os.umask(0)
    os.umask(value)
    return value


def test_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    manifest.write_text(path, "old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        manifest.write_text(path, "new")
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


@given(st.lists(st.dictionaries(st.text(), st.one_of(st.integers(), st.text(), st.booleans()), max_size=4), max_size=5))
def test_jsonl_round_trip(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("rows") / "a.jsonl"
    manifest.write_jsonl(path, rows)
    assert manifest.read_jsonl(path) == rows


def test_truncated_jsonl_names_the_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"id": 1}\n{"id": ')
    with pytest.raises(ValueError, match="a.jsonl, line 2: not JSON"):
        manifest.read_jsonl(tmp_path / "a.jsonl")


def test_missing_manifest_says_how_to_restore_it():
    with pytest.raises(FileNotFoundError, match="restore it with git checkout"):
        manifest.read_yaml("nothing.yaml")


def test_fingerprint_follows_the_manifests(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "MANIFESTS", tmp_path)
    monkeypatch.setattr(paths, "CORPORA", tmp_path / "corpora")
    before = manifest.fingerprint()
    manifest.write_text(tmp_path / "corpora" / "a.jsonl", "{}\n")
    between = manifest.fingerprint()
    manifest.write_text(tmp_path / "protocol.yaml", "a: 1\n")
    assert len({before, between, manifest.fingerprint()}) == 3


def test_missing_input_names_its_stage(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"notebook 02_traces makes it \(make study ONLY=02\)"):
        paths.need(tmp_path / "traces", "02_traces")
    assert paths.need(tmp_path, "02_traces") == tmp_path


def test_smoke_never_writes_where_git_looks():
    workspace = paths.Workspace("smoke")
    for folder in (workspace.records, workspace.figures, workspace.generated, workspace.traces, workspace.scores,
                   workspace.runs):
        assert folder.is_relative_to(paths.DATA)
    assert paths.Workspace("pilot").records == paths.Workspace("olmoe").records == paths.RECORDS


def test_machine_has_one_id(monkeypatch):
    here = machine.describe()
    assert set(here) == {"cpu", "cores", "memory_gib", "gpu", "gpus", "system"} and here["cores"] >= 1
    monkeypatch.setattr(machine, "known", lambda: {"other": here | {"cores": here["cores"] + 1}, "this": here | {"note": ""}})
    machine.machine_id.cache_clear()
    assert machine.machine_id() == "this"
    monkeypatch.setattr(machine, "known", dict)
    machine.machine_id.cache_clear()
    assert machine.machine_id().startswith("local-")
    machine.machine_id.cache_clear()


def test_known_machines_are_described():
    for name, entry in machine.known().items():
        assert set(machine.describe()) <= set(entry), f"{name} lacks fields"


def test_known_models_are_described():
    for name, entry in manifest.read_yaml("models.yaml").items():
        assert {"title", "family", "licence", "dtype", "shared_experts"} | set("LEKHF") <= set(entry), name
        assert ("path" in entry) != ("hub" in entry), f"{name} needs either path or hub"
        assert "hub" not in entry or "revision" in entry, f"{name} has no revision"
        assert 1 <= entry["K"] <= entry["E"]


def test_corpora_hold_ids_and_hashes_only():
    """No prompt text is committed: rows are short and have no text field."""
    for path in sorted(paths.CORPORA.glob("*.jsonl")):
        for row in manifest.read_jsonl(path):
            assert "text" not in row and max(map(len, map(str, row.values()))) <= 200, f"{path.name}: {row}"


def test_git_ignores_by_name_only_what_it_should():
    lines = (paths.ROOT / ".gitignore").read_text().splitlines()
    assert "lib/" not in lines and "/data/" in lines and "/.venv" in lines
    assert record.GENERATED
