"""The committed paper, README and figures say what the committed records say."""

import dataclasses
import re
import shutil

import pytest

import made_up_records
from dualdeadline import machine, notebook, paths
from dualdeadline.report import check, latex, paper, readme, short, stages
from dualdeadline.report.tables import Subject

PILOT = paths.Workspace("pilot")
TEX = (paths.PAPER / "main.tex").read_text(encoding="utf-8")


def test_tables_and_numbers_are_made_again_equal(tmp_path, monkeypatch):
    monkeypatch.setattr(paths.Workspace, "generated", property(lambda self: tmp_path / "paper" / "generated"))
    # where figures lie is written relative to the paper
    monkeypatch.setattr(paths, "FIGURES", tmp_path / "figures")
    shutil.copytree(paths.ROOT / "figures", tmp_path / "figures")
    for made in paper.write(Subject(PILOT)):
        committed = paths.PAPER / "generated" / made.name
        assert made.read_text() == committed.read_text(), f"{committed} is stale: make study ONLY=12"


def test_readme_is_made_again_equal():
    text = readme.README.read_text(encoding="utf-8")
    assert readme.filled(text, Subject(PILOT)) == text, (
        "README.md is stale: python -m dualdeadline.report readme"
    )


def test_paper_has_no_problems():
    assert check.problems(PILOT) == []


def test_every_committed_figure_shows_its_records():
    fresh = check.fresh(PILOT)
    assert fresh and all(fresh.values()), (
        f"run the notebooks of {[name for name in fresh if not fresh[name]]} again"
    )
    assert all((paths.FIGURES / f"{name}.pdf").exists() for name in fresh)


def test_figures_in_readme_exist():
    shown = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", readme.README.read_text(encoding="utf-8"))
    assert shown and all((paths.ROOT / name).exists() for name in shown)


def test_readme_answers_on_its_first_screen():
    screen = readme.README.read_text(encoding="utf-8").split("\n## ")[0]
    assert all(
        word in screen
        for word in ("**Question.**", "begin:answer", "**Data.**", "minutes", "figures/", "begin:headline")
    )


def test_the_first_sentence_of_readme_follows_from_its_table():
    made = short.changes(Subject(PILOT))
    assert short.pays(made)
    rows = made.rows.assign(high=made.rows.high.where(made.rows.metric != "deadline_difference_ms", 0.01))
    assert not short.pays(dataclasses.replace(made, rows=rows))


def test_every_generated_table_is_shown():
    tables = {name for name in check.defined((paths.PAPER / "generated" / "tables.tex").read_text())}
    assert tables and tables <= check.commands(TEX)


@pytest.mark.parametrize(
    ("prose", "found"),
    [
        ("a gain of 12 percent", ["12"]),
        ("recall \\RecallOurs{} at H2", []),
        ("as in \\citep{x2024} and $x^2$", []),
        ("GSM8K and OLMoE-1B-7B-0924", []),
        ("% 13 of 14\nnothing", []),
        ("it hits 0.93\\,of all", ["0.93\\,of"]),
        ("\\study[0.5\\linewidth]{04_recall}{Recall at 8.}{recall}", ["8.}{recall}"]),
    ],
)
def test_typed_results_are_found(prose, found):
    assert check.typed_numbers(rf"\begin{{document}}{prose}\end{{document}}") == found


def test_checks_find_what_is_wrong(tmp_path, monkeypatch):
    generated = tmp_path / "generated"
    generated.mkdir()
    (tmp_path / "main.tex").write_text(
        r"\begin{document}\Known{} \NoSuchNumber{} 99 \study{04_nothing}{None.}{no}\end{document}"
    )
    (generated / "numbers.tex").write_text(latex.define("known", "x", "somewhere"))
    (generated / "tables.tex").write_text("\\newcommand{\\Sourceless}{1}\n")
    monkeypatch.setattr(paths, "PAPER", tmp_path)
    monkeypatch.setattr(paths.Workspace, "generated", property(lambda self: generated))
    assert check.problems(PILOT) == [
        "main.tex: '99' is typed, not a command",
        "main.tex uses \\NoSuchNumber, which no generated file defines",
        "tables.tex: a definition without its source",
        "figure 04_nothing is missing: run notebook 04",
    ]


def test_citations_and_references_agree():
    cited = {key for keys in re.findall(r"\\cite[a-z]*\{([^}]+)\}", TEX) for key in keys.split(",")}
    entries = set(re.findall(r"@\w+\{(\w+),", (paths.PAPER / "refs.bib").read_text(encoding="utf-8")))
    assert cited == entries


def test_map_lists_the_notebooks_that_exist():
    assert sorted(stages.STAGES) == sorted(notebook.sources())


@pytest.mark.skipif(
    shutil.which("latexmk") is None, reason="no LaTeX here; the paper workflow builds the PDF"
)
def test_pdf_builds_from_made_up_records(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "DATA", tmp_path)
    monkeypatch.setattr(machine, "machine_id", lambda: "made-up")
    monkeypatch.setattr(machine, "register", lambda: "made-up")
    workspace = paths.Workspace("smoke")
    monkeypatch.setattr(paths, "ON_GPU", ())  # no committed measurement stands among the made-up ones
    made_up_records.write(workspace)
    made_up_records.draw(workspace)
    paper.write(Subject(workspace))
    assert check.problems(workspace) == []
    pdf = paper.build(workspace)
    assert pdf.read_bytes().startswith(b"%PDF") and pdf.is_relative_to(tmp_path)
    log = pdf.with_suffix(".log").read_text(errors="replace")
    assert "undefined" not in log.lower()
