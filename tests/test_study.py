"""The runner: what it refuses, runs, skips, keeps and says. Uses notebooks of a few cells in a temporary folder."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import nbformat
import pytest

from dualdeadline import beside, notebook, paths, stamp, study

HEADER = Path(paths.NOTEBOOKS / "00_map.py").read_text(encoding="utf-8").split("# %%")[0].strip() + "\n"
FIRST = """
# %% tags=["parameters"]
profile = "pilot"  # name
seed = 0  # number
rate = 0.5  # per s
flags = [1, 2]  # numbers

# %%
from dualdeadline import paths

folder = paths.Workspace(profile).traces
folder.mkdir(parents=True, exist_ok=True)
(folder / "a.txt").write_text(f"{seed} {rate}")
"""
SECOND = """
# %% tags=["parameters"]
profile = "pilot"  # name
fail = False  # whether to fail
wait_s = 0  # seconds

# %% [markdown]
# Reads what the first one made.

# %%
import threading
import time

from dualdeadline import paths

print((paths.Workspace(profile).traces / "a.txt").read_text(), paths.DATA)
(paths.DATA / "waiting").touch()
time.sleep(wait_s)

# %%
assert not fail, "told to fail"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two notebooks, two profiles, and a data folder of their own."""
    made = tmp_path / "notebooks"
    (made / "profiles").mkdir(parents=True)
    (made / "01_first.py").write_text(HEADER + FIRST)
    (made / "02_second.py").write_text(HEADER + SECOND)
    (made / "profiles" / "pilot.yaml").write_text("01_first:\n  seed: 0\n")
    (made / "profiles" / "smoke.yaml").write_text("01_first:\n  rate: 2\n")
    monkeypatch.setattr(paths, "DATA", tmp_path / "data")
    monkeypatch.setenv("DUALDEADLINE_DATA", str(tmp_path / "data"))
    # the table names the study's own stages; these two read and make traces
    monkeypatch.setattr(stamp, "STAGES", {"01_first": stamp.Stage(makes=("traces/**/*",)),
                                          "02_second": stamp.Stage(reads=("traces/**/*",))})
    return made


def states(folder, profile="pilot", **options):
    """Run name -> why it is stale."""
    workspace = paths.Workspace(profile)
    return {run.name: stamp.Stamp(run.stage, run.name, run.text, run.parameters, workspace).stale()
            for run in study.plan(profile, folder, **options)}


def test_runs_skips_and_reruns_what_changed(folder, capsys):
    workspace = paths.Workspace("pilot")
    assert study.main(["run"], folder) == 0
    assert (workspace.traces / "a.txt").read_text() == "0 0.5"
    executed = notebook.read(workspace.runs / "02_second.ipynb")
    assert "0 0.5" in executed.cells[2].outputs[0].text
    assert states(folder) == {"01_first": None, "02_second": None}
    capsys.readouterr()
    assert study.main(["run"], folder) == 0
    assert "0 of 2 stages ran" in capsys.readouterr().out

    (workspace.traces / "a.txt").write_text("altered")
    assert "outputs missing or altered" in states(folder)["01_first"]
    assert states(folder)["02_second"] == "changed: inputs"
    (workspace.traces / "a.txt").unlink()
    assert "a.txt" in states(folder)["01_first"]
    text = folder / "02_second.py"
    text.write_text(text.read_text() + "\n# %%\n1 + 1\n")
    assert "text" in states(folder)["02_second"]
    (folder / "profiles" / "pilot.yaml").write_text("01_first: {seed: 4}\n")
    assert states(folder)["01_first"] == "changed: parameters"
    (workspace.runs / "01_first.json").write_text("{ trunc")
    assert states(folder)["01_first"] == "not run yet"


def test_failure_names_notebook_cell_and_error(folder, capsys):
    (folder / "profiles" / "pilot.yaml").write_text("02_second: {fail: true}\n")
    assert study.main(["run"], folder) == 1
    said = capsys.readouterr().err
    assert "02_second.py, cell 4 failed" in said and "assert not fail" in said and "AssertionError: told to fail" in said
    assert (paths.Workspace("pilot").runs / "02_second.ipynb").exists()  # kept for looking at
    assert states(folder) == {"01_first": None, "02_second": "not run yet"}


def test_grid_runs_each_combination(folder, capsys):
    assert study.main(["run", "--grid", "seed=0,3", "--profile", "smoke"], folder) == 0
    workspace = paths.Workspace("smoke")
    assert {path.stem for path in workspace.runs.glob("*.ipynb")} == {"01_first", "01_first@seed=3", "02_second"}
    assert (workspace.traces / "a.txt").read_text() == "3 2.0"
    # the second stage has no seed: it ran again, on the traces of the second combination
    assert "4 of 4 stages ran" in capsys.readouterr().out
    assert "3 2.0" in notebook.read(workspace.runs / "02_second.ipynb").cells[3].outputs[0].text


def hear_ctrl_c():
    """A shell's background job ignores Ctrl-C, and its children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("together", [False, True])
def test_interrupt_keeps_what_was_done(folder, tmp_path, together):
    assert not together or study.main(["run"], folder) == 0  # the second stage reads what the first has made
    (tmp_path / "data" / "waiting").unlink(missing_ok=True)
    (folder / "profiles" / "pilot.yaml").write_text("02_second: {wait_s: 600}\n")
    lines = ["import sys", "from pathlib import Path", "from dualdeadline import stamp, study"]
    lines += ["stamp.STAGES['02_second'] = stamp.Stage(beside='01_first')"] * together
    lines += [f"sys.exit(study.main(['run'] + ['--force'] * {together}, Path({str(folder)!r})))"]
    script = "\n".join(lines)
    process = subprocess.Popen([sys.executable, "-u", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               start_new_session=True, env=dict(os.environ), preexec_fn=hear_ctrl_c)
    while not (tmp_path / "data" / "waiting").exists():
        assert process.poll() is None, process.stdout.read().decode()
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    rest, _ = process.communicate(timeout=120)
    assert process.returncode == 130, rest.decode()
    assert "Interrupted" in rest.decode()
    assert (tmp_path / "data" / "pilot" / "runs" / "01_first.json").exists()
    assert not (tmp_path / "data" / "pilot" / "runs" / "02_second.json").exists()


def test_stages_that_share_nothing_run_side_by_side(monkeypatch):
    monkeypatch.setitem(stamp.STAGES, "b", stamp.Stage(beside="a"))
    runs = [study.Run(stage, None, {}, {}, label) for label in ("", "x") for stage in ("a", "b", "c")]
    assert [[run.name for run in group] for group in beside.groups(runs)] == [["a", "b"], ["c"], ["a@x", "b@x"], ["c@x"]]
    assert [[run.name for run in group] for group in beside.groups(runs[1:3])] == [["b"], ["c"]]
    monkeypatch.setitem(stamp.STAGES, "c", stamp.Stage(beside="a"))
    assert [[run.name for run in group] for group in beside.groups([runs[0], *runs[2:4], runs[1]])] == [["a", "c", "b"], ["a@x"]]
    meet, ended = threading.Barrier(2, timeout=20), []

    def job(name, fail=False):
        meet.wait()  # passes only if both run at once
        ended.append(name)
        if fail:
            raise ValueError(name)

    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    with pytest.raises(ValueError, match="first"):
        beside.run([lambda: job("first", True), lambda: job("second")])
    assert sorted(ended) == ["first", "second"]
    running, most = [], []

    def counted():
        running.append(None)
        most.append(len(running))
        time.sleep(0.05)
        running.pop()

    beside.run([counted] * 5)
    assert len(most) == 5 and max(most) == 2


@pytest.mark.parametrize("arguments, said", [
    (["--profile", "nope"], "no profile 'nope'; known: pilot, smoke"),
    (["--only", "07"], "no stage '07'; known: 01_first, 02_second"),
    (["--only", "1", "--from", "2"], "leave no stage"),
    (["--grid", "sed=1"], "none of 01_first, 02_second has a parameter 'sed'"),
    (["--grid", "seed=x"], "seed = 'x' is str; needed: int"),
    (["--grid", "seed"], "needed: name=value,value"),
    (["--scheduler", "tcp://127.0.0.1:1"], "has a parameter 'scheduler'"),
])
def test_bad_commands_run_nothing(folder, capsys, arguments, said):
    assert study.main(["run", *arguments], folder) == 1
    assert said in capsys.readouterr().err
    assert not paths.Workspace("pilot").runs.exists()


@pytest.mark.parametrize("section, said", [
    ("01_first: {sed: 1}", "01_first has no parameter 'sed'; it has: profile, seed, rate, flags"),
    ("01_first: {seed: true}", "seed = True is bool; needed: int"),
    ("01_first: {seed: 1.0}", "is float; needed: int"),
    ("01_first: {rate: 1e-3}", "is str; needed: float"),  # YAML 1.1 reads 1e-3 as text
    ("01_first: {flags: [1, a]}", "needed: list of int"),
    ("02_second: {fail: 0}", "is int; needed: bool"),
    ("09_other: {}", "has a section '09_other'"),
    ("- a", "needed: stage -> parameters"),
])
def test_bad_profiles_run_nothing(folder, capsys, section, said):
    (folder / "profiles" / "pilot.yaml").write_text(section + "\n")
    assert study.main(["run"], folder) == 1
    assert said in capsys.readouterr().err


def test_resolve_writes_equal_values_equally():
    assert notebook.resolve("s", {"rate": 0.5}, {"rate": 2}) == {"rate": 2.0}
    assert notebook.resolve("s", {"sizes": (1, 2)}, {"sizes": [3]}) == {"sizes": (3,)}
    assert notebook.resolve("s", {"names": []}, {"names": ["a"]}) == {"names": ["a"]}


def test_rows_of_words_and_numbers_are_checked_field_by_field():
    declared = {"guesses": [["gate_ahead", 2, 0, 0.7]], "chosen": [32, "gate_ahead", 0.5]}
    given = {"guesses": [["oracle", 4, 4, 1], ["random", 1, 0, 0.0]], "chosen": [16, "oracle", 1]}
    found = notebook.resolve("s", declared, given)
    assert found == {"guesses": [["oracle", 4, 4, 1.0], ["random", 1, 0, 0.0]], "chosen": [16, "oracle", 1.0]}
    for name, value in (("guesses", [["oracle", 4, 4]]), ("guesses", [["oracle", "4", 4, 0.5]]), ("chosen", [16, 2, 1])):
        with pytest.raises(ValueError, match=name):
            notebook.resolve("s", declared, {name: value})



@pytest.mark.parametrize("cell, said", [
    ("a = 1 + b", "needed: name = literal"), ("a, b = 1, 2", "needed: name = literal"),
    ("import os", "needed: name = literal"), ("a = None", "needed: a value with a type"),
])
def test_parameters_are_literals(cell, said):
    cells = [nbformat.v4.new_code_cell(cell, metadata={"tags": ["parameters"]}) for _ in range(2)]
    with pytest.raises(ValueError, match=said):
        notebook.parameters(nbformat.v4.new_notebook(cells=cells[:1]), "01_x")
    with pytest.raises(ValueError, match="2 cells are tagged"):
        notebook.parameters(nbformat.v4.new_notebook(cells=cells), "01_x")


def test_building_is_deterministic_and_keeps_outputs_of_unchanged_cells(folder):
    study.build(folder)
    pair = folder / "02_second.ipynb"
    first = pair.read_bytes()
    study.build(folder)
    assert pair.read_bytes() == first
    old = notebook.read(pair)
    for cell in old.cells[2:]:
        cell.outputs = [nbformat.v4.new_output("stream", text="kept")]
    notebook.write(old, pair)
    text = folder / "02_second.py"
    text.write_text(text.read_text().replace("assert not fail", "assert fail is False"))
    study.build(folder)
    new = notebook.read(pair)
    assert new.cells[2].outputs and not new.cells[3].outputs
    assert [cell.id for cell in new.cells[:3]] == [cell.id for cell in old.cells[:3]]


def test_publishing_strips_what_differs_between_runs(folder, capsys):
    assert study.main(["publish"], folder) == 1
    assert "needed: make study" in capsys.readouterr().err
    (folder / "profiles" / "pilot.yaml").write_text("01_first: {seed: 0}\n02_second: {wait_s: 0}\n")
    assert study.main(["run"], folder) == 0 and study.main(["publish"], folder) == 0
    made = (folder / "02_second.ipynb").read_text()
    assert "papermill" not in made and str(paths.DATA) not in made and "0 0.5 data" in made
    assert notebook.inputs(notebook.read(folder / "02_second.ipynb")) == notebook.inputs(
        notebook.load(folder / "02_second.py"))
    (folder / "02_second.py").write_text(HEADER + SECOND.replace("told", "asked"))
    with pytest.raises(ValueError, match="is of another text"):
        study.publish(folder)


def test_published_outputs_are_text_and_small_pictures():
    import base64
    import io

    import numpy as np
    from PIL import Image

    rows, columns = np.mgrid[:400, :700]
    picture = np.stack([rows // 2, columns // 2, rows + columns], axis=-1) + np.random.default_rng(0).integers(0, 3, (400, 700, 3))
    buffer = io.BytesIO()
    Image.fromarray(picture.astype(np.uint8)).save(buffer, "PNG")
    big = base64.b64encode(buffer.getvalue()).decode()
    small = base64.b64decode(notebook._small_png(big, "here"))
    assert len(small) <= notebook.PNG_LIMIT_BYTES < len(buffer.getvalue())
    assert Image.open(io.BytesIO(small)).size == (700, 400)
    widget = nbformat.v4.new_output("display_data", data={"application/vnd.jupyter.widget-view+json": {}})
    assert notebook._clean(widget, "here") is None
    assert notebook._clean(nbformat.v4.new_output("stream", name="stderr", text="10 %"), "here") is None
    assert notebook._neutral(f"at {paths.ROOT}/x 0x7f00deadbeef") == "at ./x 0x..."


def test_code_of_a_stage_is_what_it_imports():
    def closure(name):
        return {str(path.relative_to(paths.PACKAGE)) for path in stamp.closure({name})}

    assert closure("dualdeadline.manifest") == {"__init__.py", "manifest.py", "paths.py"}
    assert closure("dualdeadline.record") >= {"record.py", "machine.py", "manifest.py"}
    assert "study.py" not in closure("dualdeadline.record")
    assert stamp._imports("from . import a\nfrom ..b import c", "dualdeadline.x") == {
        "dualdeadline.x", "dualdeadline.x.a", "dualdeadline.b", "dualdeadline.b.c"}


def test_every_stage_of_the_table_exists():
    found = notebook.sources()
    assert set(stamp.STAGES) <= set(found), "the table names stages without a notebook"


def test_truncated_run_is_named(tmp_path):
    (tmp_path / "x.ipynb").write_text(json.dumps({"cells": []})[:8])
    with pytest.raises(ValueError, match="x.ipynb: not a whole notebook"):
        notebook.read(tmp_path / "x.ipynb")
