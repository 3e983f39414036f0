"""Figures depend on their data only; text and verdicts say what the rows say."""

import json

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import pyplot as plt

import made_up_records
from dualdeadline import record, report
from dualdeadline.report import (
    figures,
    latex,
    look,
    numbers,
    paper,
    published,
    readme,
    runtime,
    tables,
    text,
    verdicts,
)

SHARE = st.floats(-1, 1, allow_nan=False)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A smoke workspace in a temporary folder with made-up records of every stage."""
    with made_up_records.workspace(tmp_path_factory.mktemp("data"), made_up_records.write) as made:
        yield made


@pytest.fixture
def about(workspace):
    return tables.Subject(workspace)


def draw(workspace, name="04_recall"):
    rows = report.rows_of(workspace, "04_evaluation", "recall", horizon=1, **tables.Subject(workspace).test)
    report.style()
    fig, ax = plt.subplots()
    report.curves(rows, "config.budget", ax)
    ax.set_title(report.title(rows, "Recall"))
    png = report.save(fig, name, workspace, rows)
    plt.close(fig)
    return png


def test_saved_figures_are_the_same_bytes_twice(workspace):
    first = [path.read_bytes() for path in (draw(workspace), draw(workspace).with_suffix(".pdf"))]
    second = [path.read_bytes() for path in (draw(workspace), draw(workspace).with_suffix(".pdf"))]
    assert first == second
    assert b"CreationDate" not in first[1] and b"Matplotlib" not in first[0] + first[1]


def test_figure_knows_when_its_records_have_changed(workspace):
    png = draw(workspace)
    assert not paper.stale(png, workspace)
    csv = workspace.records / "04_evaluation.csv"
    before = csv.read_text()
    try:
        csv.write_text(before.replace("0.55,", "0.56,"))
        assert csv.read_text() != before and paper.stale(png, workspace)
    finally:
        csv.write_text(before)


def test_figure_says_kind_model_and_count(workspace):
    rows = report.rows_of(workspace, "04_evaluation", "recall", horizon=1, **tables.Subject(workspace).test)
    assert report.title(rows, "Recall") == "Recall\n(replayed; pilot-olmoe; n = 24)"
    behind = paper.behind(draw(workspace))
    assert (behind["stage"], behind["machine"], behind["metric"]) == (
        ["04_evaluation"],
        ["made-up"],
        ["recall"],
    )
    assert report.provenance_line(rows) == (
        "notebooks/04_evaluation.py via data_manifests/records/04_evaluation.csv; machine made-up"
    )


def test_figure_without_records_or_stage_is_refused(workspace):
    fig = plt.figure()
    with pytest.raises(ValueError, match="write the records first"):
        report.save(fig, "91_nothing", workspace)
    with pytest.raises(ValueError, match="stage number and subject"):
        report.save(fig, "recall", workspace)
    plt.close(fig)


def test_figure_not_saved_by_report_is_named(workspace, tmp_path):
    fig = plt.figure(figsize=(1, 1))
    fig.savefig(tmp_path / "bare.png")
    plt.close(fig)
    with pytest.raises(ValueError, match="bare.png names no records"):
        paper.behind(tmp_path / "bare.png")


def test_curves_refuse_two_points_in_one_place(workspace):
    rows = report.rows_of(workspace, "04_evaluation", "recall")
    with pytest.raises(ValueError, match="fix the other config keys"):
        report.curves(rows, "config.budget")


def test_every_registered_predictor_has_a_look_of_its_own():
    from dualdeadline.predictors import REGISTRY

    shown = [(report.colour(name), report.line(name)["linestyle"]) for name in REGISTRY]
    assert len(set(shown)) == len(shown)
    assert set(REGISTRY) <= set(look.LOOKS)


@given(st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=12))
def test_unknown_names_keep_one_colour(name):
    assert report.colour(name) == report.colour(name) and report.colour(name).startswith("#")


@pytest.mark.parametrize("name", ["ResidualGate", "residual-gate", "residual_gate", "Residual Gate"])
def test_one_look_however_a_name_is_spelt(name):
    assert report.label(name) == "ResidualGate (ours)"


def test_difference_label_names_both():
    assert report.label("residual_gate-gate_ahead") == "ResidualGate (ours) - gate-ahead"


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ((0.76349, 0.758, 0.7691), "0.763 [0.758, 0.769]"),
        ((0.5,), "0.500"),
        ((float("nan"),), "–"),
        ((0.5, float("nan"), float("nan")), "0.500"),
    ],
)
def test_value_with_interval(ends, said):
    assert report.value(*ends) == said


@given(SHARE, SHARE, SHARE)
def test_verdict_follows_the_interval(one, two, bound):
    low, high = sorted((one, two))
    assert (report.verdict(low, high, "greater", bound) == "supported") == (low > bound)
    assert (report.verdict(low, high, "less", bound) == "supported") == (high < bound)
    assert report.verdict(None, high) == report.verdict(low, float("nan")) == report.OPEN


def test_verdict_refuses_nonsense():
    with pytest.raises(ValueError, match="'greater' or 'less'"):
        report.verdict(0, 1, "more")
    with pytest.raises(ValueError, match="low <= high"):
        report.verdict(1, 0)


def test_hypothesis_needs_every_comparison(workspace):
    lines, rows = verdicts.comparisons(workspace, "H2", made_up_records.MODEL)
    assert len(lines) == len(rows) == 12
    # made-up difference is 0.02 / horizon, half width 0.008: horizon 3 touches zero
    assert verdicts.count_supported(lines) == "8 of 12" and verdicts.verdict_of(lines) == text.NOT_SUPPORTED
    assert verdicts.verdict_of(lines[lines["low"] > 0]) == text.SUPPORTED


def test_hypothesis_without_all_its_rows_is_open(workspace):
    assert verdicts.words(workspace, made_up_records.MODEL)["H5"] == text.OPEN
    assert verdicts.words(workspace, "olmoe")["H2"] == text.OPEN
    with pytest.raises(KeyError, match="H9"):
        verdicts.comparisons(workspace, "H9", made_up_records.MODEL)


def test_missing_stage_is_named(workspace):
    with pytest.raises(FileNotFoundError, match="notebook 91_missing makes it"):
        report.rows_of(workspace, "91_missing", "block_ms")
    with pytest.raises(ValueError, match="no rows with metric 'nothing'"):
        report.rows_of(workspace, "04_evaluation", "nothing")
    with pytest.raises(ValueError, match="no row has config key 'colour'"):
        report.rows_of(workspace, "04_evaluation", "recall", colour="red")


def test_pivot_refuses_to_hide_rows(workspace):
    with pytest.raises(ValueError, match="fix the other config keys"):
        tables.pivot(report.rows_of(workspace, "04_evaluation", "recall"), "config.budget")


def test_tables_show_what_the_rows_say(about):
    made = published.recall(about)
    row = made.frame[made.frame.iloc[:, 0] == "gate-ahead"].iloc[0]
    expected = 0.02 * made_up_records.PREDICTORS.index("gate_ahead") + 8 / 20 + 0.05
    assert row["8"] == report.value(expected, expected - 0.01, expected + 0.01)
    assert len(made.frame) == len(made_up_records.PREDICTORS)


@pytest.mark.parametrize("name", published.TABLES)
def test_every_published_table_has_source_and_conditions(about, name):
    made = published.TABLES[name](about)
    assert len(made.frame) and len(made.rows) and made.name == name
    typeset = latex.table(made)
    assert typeset.startswith("% notebooks/") and "machine " in typeset and "commit" in typeset
    assert typeset.count("\\\\\n") == len(made.frame) + 1
    assert made.caption.replace("%", "\\%")[:20] in typeset or latex.escape(made.caption) in typeset
    assert made.frame.iloc[0, 0] in published.show(name, about.workspace).to_html()


def test_unknown_table_is_named(workspace):
    with pytest.raises(KeyError, match="known: traces"):
        published.show("nothing", workspace)


def test_numbers_have_names_latex_accepts_and_sources(about):
    every = numbers.every(about)
    names = [latex.macro(number.name) for number in every]
    assert len(set(names)) == len(names) and all(name.isalpha() for name in names)
    assert all(number.source.startswith(("data_manifests/", "notebooks/")) for number in every)


def test_number_without_rows_is_refused():
    with pytest.raises(ValueError, match="provenance"):
        latex.made_by(pd.DataFrame(columns=record.FIELDS))


@given(st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=30))
def test_escaped_text_holds_no_bare_special(words):
    typeset = latex.escape(words)
    for special in "&%#_":
        assert typeset.replace(f"\\{special}", "").count(special) == 0


def test_readme_blocks_are_filled_and_filling_again_changes_nothing(about, tmp_path):
    target = tmp_path / "README.md"
    target.write_text(
        "x\n" + "\n".join(f"<!-- begin:{name} -->\nbefore\n<!-- end:{name} -->" for name in readme.BLOCKS)
    )
    _time_stages(about.workspace)
    assert readme.fill(about, target) and not readme.fill(about, target)
    filled = target.read_text()
    assert "before\n" not in filled and "**not supported**, 8 of 12 comparisons" in filled
    assert "| all of these " in filled and "2.0" in filled


def test_readme_with_a_lost_block_is_refused(about):
    with pytest.raises(ValueError, match="needed, once each"):
        readme.filled("nothing here", about)


def _time_stages(workspace):
    workspace.runs.mkdir(parents=True, exist_ok=True)
    for name, run in {
        "01_corpus": {"duration": 30},
        "02_traces": {"duration": 90},
        "03_predictors": {"exception": True},
        "02_traces@seed=1": {"duration": 70},
    }.items():
        (workspace.runs / f"{name}.ipynb").write_text(json.dumps({"metadata": {"papermill": run}}))
    recorder = record.Recorder(
        "12_paper", made_up_records.MODEL, "run", workspace, {"profile": workspace.profile}
    )
    assert runtime.add(recorder, workspace) == 2  # neither failed runs nor those of a grid
    recorder.write()


def test_figure_fingerprint_ignores_when_and_where_in_git(workspace):
    rows = record.read(workspace, "05_replay")
    behind = figures.source(rows)
    before = figures.fingerprint(workspace, behind)
    csv = workspace.records / "05_replay.csv"
    original = csv.read_text()
    try:
        csv.write_text(
            original.replace(rows["commit"].iloc[0], "0" * 40).replace(rows["time"].iloc[0], "2030-01-01")
        )
        assert csv.read_text() != original and figures.fingerprint(workspace, behind) == before
    finally:
        csv.write_text(original)
