"""Every notebook has the same header and skeleton, keeps the limits, and equals its pair."""

import ast
import re

import nbformat
import pytest
import yaml

from dualdeadline import notebook, paths, study

TEXTS = notebook.sources()
HEADER = """\
# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     formats: ipynb,py:percent
#     notebook_metadata_filter: jupytext,kernelspec,-jupytext.text_representation.jupytext_version
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: python3
#     language: python
#     name: python3
# ---
"""
CELL_LINES, TEXT_LINES, LINE = 30, 450, 140
# cells over 10 lines, as a share of all code cells
LONG_SHARE = 0.05
each = pytest.mark.parametrize("stage", TEXTS)


def cells(stage, kind="code"):
    return [cell for cell in notebook.load(TEXTS[stage]).cells if cell.cell_type == kind]


@each
def test_header_and_limits(stage):
    text = TEXTS[stage].read_text(encoding="utf-8")
    assert text.startswith(HEADER), "the header differs"
    assert len(text.splitlines()) <= TEXT_LINES
    for number, line in enumerate(text.splitlines(), 1):
        assert len(line) <= LINE, f"line {number} has {len(line)} characters"
    for cell in cells(stage):
        assert len(cell.source.splitlines()) <= CELL_LINES, cell.source[:200]


@each
def test_skeleton(stage):
    loaded = notebook.load(TEXTS[stage])
    first = loaded.cells[0]
    assert first.cell_type == "markdown" and re.match(rf"# {stage[:2]} \S", first.source), "the title comes first"
    assert "**Question.**" in first.source
    assert notebook.tags(cells(stage)[0]) == ["parameters"], "the parameters are the first code"
    prose = "\n\n".join(cell.source for cell in loaded.cells if cell.cell_type == "markdown")
    for part in ("**In:**", "**Out:**", "## Limits"):
        assert part in prose, f"{part} is missing"
    assert any("Markdown(" in cell.source for cell in cells(stage)), "the answer is filled in by code"


@each
def test_parameters(stage):
    loaded = notebook.load(TEXTS[stage])
    found = notebook.parameters(loaded, stage)
    assert next(iter(found)) == "profile" and found["profile"] == "pilot"
    (cell,) = [cell for cell in loaded.cells if "parameters" in notebook.tags(cell)]
    for line in cell.source.splitlines():
        assert re.search(r"\S  # \S", line) or not re.match(r"\w", line), f"{line!r} has no comment"


@each
def test_tags_are_from_the_closed_list(stage):
    loaded = notebook.load(TEXTS[stage])
    assert {tag for cell in loaded.cells for tag in notebook.tags(cell)} <= set(notebook.TAGS)
    checked = [cell for cell in loaded.cells if "nbval-check-output" in notebook.tags(cell)]
    assert 2 <= len(checked) <= 4, f"{len(checked)} cells are checked; needed: 2 to 4"
    assert not any("tqdm" in cell.source for cell in checked)


@each
def test_notebooks_know_no_paths(stage):
    for cell in cells(stage):
        assert "sys.path" not in cell.source
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not re.match(r"(\.{0,2}/\w|data/|notebooks/|~/)", node.value), f"{node.value!r} is a path in a cell"


def test_notebooks_call_and_never_define():
    every = [cell for stage in TEXTS for cell in cells(stage)]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    defining = [cell for cell in every if any(isinstance(node, kinds) for node in ast.walk(ast.parse(cell.source)))]
    assert len(defining) <= 0.01 * len(every), [cell.source[:80] for cell in defining]
    long = [cell for cell in every if len(cell.source.splitlines()) > 10]
    assert len(long) <= max(1, LONG_SHARE * len(every)), [cell.source[:80] for cell in long]


def test_claims_are_asserts():
    for stage in TEXTS:
        if stage != "00_map":
            assert "assert " in notebook.code(notebook.load(TEXTS[stage])), f"{stage} asserts nothing"


@each
def test_pair_equals_text(stage):
    pair = TEXTS[stage].with_suffix(".ipynb")
    assert pair.exists(), "run `make study && make notebooks`"
    text, built = notebook.load(TEXTS[stage]), notebook.read(pair)
    assert notebook.inputs(built) == notebook.inputs(text), "text and notebook differ: make study && make notebooks"
    assert built.metadata == text.metadata
    nbformat.validate(built)


@each
def test_pair_is_executed_and_clean(stage):
    raw = TEXTS[stage].with_suffix(".ipynb").read_text(encoding="utf-8")
    assert str(paths.ROOT) not in raw and "papermill" not in nbformat.reads(raw, 4).metadata
    assert len(raw) < 2_000_000, "pictures are too large"
    for number, cell in enumerate(nbformat.reads(raw, 4).cells):
        assert set(cell.metadata) <= {"tags"}
        if cell.cell_type == "code":
            assert cell.execution_count, f"cell {number} was not executed"
            for output in cell.outputs:
                assert output.output_type != "error" and output.get("name") != "stderr"
                assert set(output.get("data", {})) <= set(notebook.KEPT_TYPES)


@each
def test_checked_cells_have_outputs(stage):
    for cell in notebook.read(TEXTS[stage].with_suffix(".ipynb")).cells:
        if "nbval-check-output" in notebook.tags(cell):
            assert cell.outputs, f"nothing to check in: {cell.source[:80]}"
            assert all(set(output.get("data", {"text/plain": ""})) <= {"text/plain"} for output in cell.outputs)


def test_pilot_profile_equals_the_defaults():
    for stage, given in study.profile("pilot").items():
        defaults = notebook.parameters(notebook.load(TEXTS[stage]), stage)
        assert notebook.resolve(stage, defaults, given) == defaults, stage


@pytest.mark.parametrize("name", ["pilot", "smoke", "olmoe", "qwen"])
def test_profiles_are_accepted(name):
    assert {run.stage for run in study.plan(name)} == set(TEXTS)
    assert all(run.parameters["profile"] == name for run in study.plan(name))


def test_profiles_are_plain_mappings():
    assert {path.stem for path in paths.PROFILES.glob("*.yaml")} == {"pilot", "smoke", "olmoe", "qwen"}
    for path in paths.PROFILES.glob("*.yaml"):
        assert isinstance(yaml.safe_load(path.read_text()), dict), path.name
