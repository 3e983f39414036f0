"""The published tables: one function each, from records to text. Paper, README and notebooks read these."""

from __future__ import annotations

import pandas as pd

from dualdeadline import paths, record
from dualdeadline.report import confirmation, latex, routing, text, verdicts
from dualdeadline.report.decode import engine_steps
from dualdeadline.report.kernels import kernels
from dualdeadline.report.overlap import blocks, decode_steps, validation
from dualdeadline.report.prediction import domains, generalisation, horizons, misses, prediction, recall
from dualdeadline.report.replay import caches, credit, prefetch, replay
from dualdeadline.report.tables import CORPUS, MODEL, Subject, Table, conditions, pivot
from dualdeadline.report.tiers_tables import cold_decode, reads_ahead, step_parts
from dualdeadline.report.wire import wire_blocks, wire_designs


def traces(about: Subject) -> Table:
    """Prompt sets: size, length and repetition of their traces."""
    rows = about.rows("02_traces", ["tokens", "ended_by_itself", "repeated_4grams"])
    lines = []
    for name, part in rows.groupby("config.corpus", sort=False):
        of = part.set_index("metric")
        repeated = text.value(*of.loc["repeated_4grams", ["median", "low", "high"]])
        tokens, ended = of["median"]["tokens"], of["median"]["ended_by_itself"]
        sizes = (text.count(of["n"]["tokens"]), text.count(tokens))
        lines.append((name, *sizes, text.value(ended, digits=2), repeated))
    frame = pd.DataFrame(lines, columns=["set", "prompts", "tokens", "ended", "repeated 4-grams"])
    caption = (
        "Decode traces: prompts, decoded tokens, share of texts that ended by themselves, share of 4-grams "
        f"that occurred before in the same text (mean, 95 % interval over prompts). {conditions(rows)} prompts."
    )
    return Table("traces", caption, frame, rows)


def training(about: Subject) -> Table:
    """The embedded model on held-out text, by domain."""
    rows = routing.training_records(MODEL)  # trained once, whatever the profile or the model in question
    rows = rows[rows["metric"] == "bits_per_byte"]
    rows = rows.assign(last=rows["variant"] == "macro").sort_values(["config.text", "last", "variant"])
    frame = pd.DataFrame(
        {
            "domain": list(rows["variant"].replace("macro", "macro average, natural")),
            "text": list(rows["config.text"]),
            "bits per byte": [text.value(value) for value in rows["median"]],
            "n": [text.count(size) for size in rows["n"]],
        }
    )
    caption = (
        "Embedded model: bits per byte on held-out documents; n counts tokens, for the macro average domains. "
        f"{conditions(rows)}."
    )
    return Table("training", caption, frame, rows, align="llrr")


def hypotheses(about: Subject) -> Table:
    """The verdict on every hypothesis; open where the stage that answers it has no records."""
    lines, used = [], []
    for name, entry in verdicts.hypotheses().items():
        found, rows = verdicts.comparisons(about.workspace, name, about.model)
        used.append(rows)
        lines.append(
            [
                name,
                entry["name"],
                entry["support"],
                verdicts.count_supported(found),
                verdicts.verdict_of(found),
            ]
        )
    frame = pd.DataFrame(lines, columns=["", "hypothesis", "counts as support", "comparisons", "verdict"])
    caption = f"Verdicts so far, model {about.model}. Criteria were fixed before the results they speak of."
    return Table("hypotheses", caption, frame, pd.concat(used), wide=True, align="llp{0.5\\linewidth}rl")


def sources(about: Subject) -> Table:
    """Every records file behind this paper."""
    stages = sorted(path.stem for path in about.workspace.records.glob("*.csv"))
    rows = pd.concat([record.read(about.workspace, stage) for stage in stages])
    frame = pd.DataFrame(
        [
            [
                stage,
                "/".join(sorted(set(part["kind"]))),
                text.count(len(part)),
                ", ".join(sorted(set(part["machine"]))),
                ", ".join(sorted({commit[:10] for commit in part["commit"]})),
            ]
            for stage, part in rows.groupby("stage")
        ],
        columns=["stage", "kind", "rows", "machine", "commit"],
    )
    caption = (
        "Records behind every number here: data_manifests/records/<stage>.csv, made by notebooks/<stage>.py."
    )
    return Table("sources", caption, frame, rows, wide=True, align="llrp{0.22\\linewidth}p{0.36\\linewidth}")


TABLES = {
    made.__name__: made
    for made in (traces, recall, horizons, generalisation, domains, misses, prediction)
    + (caches, prefetch, replay, credit, kernels, blocks, validation, decode_steps, wire_designs, wire_blocks)
    + (engine_steps, cold_decode, reads_ahead, step_parts)
    + (training, hypotheses, sources)
}
TABLES |= {f"confirmation_{name}": confirmation.TABLES[name] for name in confirmation.PAPER}


def show(name: str, workspace: paths.Workspace, model: str = MODEL, corpus: str = CORPUS):
    """A published table for display: the rows that the paper has, with caption and source."""
    if name not in TABLES:
        raise KeyError(f"table {name!r} is not published; known: {', '.join(TABLES)}")
    made = TABLES[name](Subject(workspace, model, corpus))
    note = f"{made.caption} Source: {latex.made_by(made.rows)}."
    return made.frame.style.hide(axis="index").set_caption(note).set_uuid(name)
