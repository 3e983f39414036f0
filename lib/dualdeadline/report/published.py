"""The published tables: one function each, from records to text. Paper, README and notebooks read these."""

from __future__ import annotations

import pandas as pd

from dualdeadline import paths, record
from dualdeadline.report import latex, look, text, verdicts
from dualdeadline.report.tables import MODEL, Table, pivot, rows_of

TEST = {"corpus": "pilot", "split": "test"}
COLD = {"scope": "layer", "start": "cold", **TEST}
SHOWN_SLOTS = (8, 16, 32, 48)
FINALISTS = ("oracle", "residual_gate", "gate_ahead", "shared_mlp", "transition", "popularity")


def traces(workspace: paths.Workspace) -> Table:
    """Prompt sets: tokens and repetition."""
    rows = rows_of(workspace, "02_traces", ["tokens", "repeated_4grams"])
    caption = f"Decode traces by prompt set. {conditions(rows)} prompts."
    return Table("traces", caption, pivot(rows, "metric", index="config.corpus", head="prompts"), rows)


def recall(workspace: paths.Workspace) -> Table:
    """Recall by budget, every predictor."""
    rows = rows_of(workspace, "04_evaluation", "recall", horizon=1, **TEST)
    caption = (
        "Recall of the routed experts one layer ahead, by whole-expert budget: mean and 95 % interval over "
        f"prompts. {conditions(rows)}, test split of pilot."
    )
    return Table("recall", caption, pivot(rows, "config.budget", head="predictor \\ budget"), rows, wide=True)


def horizons(workspace: paths.Workspace) -> Table:
    """Recall by horizon, the finalists."""
    rows = rows_of(workspace, "04_evaluation", "recall", budget=8, **TEST)
    rows = rows[rows["variant"].isin(FINALISTS)]
    caption = (
        "Recall at budget 8 by horizon (layers between the state that is read and the layer predicted; "
        f"0 reads the same layer's start state). {conditions(rows)}, test split of pilot."
    )
    return Table(
        "horizons", caption, pivot(rows, "config.horizon", head="predictor \\ horizon"), rows, wide=True
    )


def headline(workspace: paths.Workspace) -> Table:
    """What README shows: raw recall beside recall on what the cache misses."""
    every = rows_of(workspace, "04_evaluation", "recall", horizon=1, budget=8, **TEST)
    hard = rows_of(workspace, "04_evaluation", "miss_recall", horizon=1, budget=4, slots=32, **TEST)
    rows = pd.concat([every, hard])
    frame = pivot(rows, "metric", head="predictor").rename(
        columns={"recall": "recall, budget 8", "miss_recall": "recall on misses, budget 4, 32 slots"}
    )
    caption = (
        "Recall one layer ahead: of all routed experts, and of those absent from a prompt-cold per-layer LRU "
        f"cache. Mean and 95 % interval over prompts. {conditions(rows)}, test split of pilot."
    )
    return Table(
        "headline", caption, frame[[frame.columns[0], *sorted(frame.columns[1:], key=len)]], rows, wide=True
    )


def generalisation(workspace: paths.Workspace) -> Table:
    """The same predictors on prompt sets that nothing was chosen on."""
    rows = rows_of(workspace, "04_evaluation", "recall", horizon=1, budget=8, split=("test", "all"))
    rows = rows[rows["variant"].isin(rows.loc[rows["config.corpus"] != TEST["corpus"], "variant"])]
    caption = (
        "Recall at budget 8, one layer ahead, by prompt set: test split of pilot, all of replication "
        f"(disjoint by template) and of ood (families no training saw). {conditions(rows)}."
    )
    return Table(
        "generalisation", caption, pivot(rows, "config.corpus", head="predictor \\ prompts"), rows, wide=True
    )


def domains(workspace: paths.Workspace) -> Table:
    """Fitted on one kind of prompt, tested on each."""
    rows = rows_of(workspace, "04_evaluation", "recall", horizon=1, budget=8)
    rows = rows[rows["variant"].str.contains(" from ")]
    rows = rows.assign(tested=rows["config.corpus"] + " " + rows["config.split"])
    caption = f"Recall at budget 8, one layer ahead, by source of fitted and tested prompts. {conditions(rows)}."
    return Table("domains", caption, pivot(rows, "tested", head="predictor \\ tested on"), rows, wide=True)


def misses(workspace: paths.Workspace) -> Table:
    """Recall on what the cache misses, by slots."""
    rows = rows_of(workspace, "04_evaluation", "miss_recall", horizon=1, budget=4, **TEST, slots=SHOWN_SLOTS)
    caption = (
        "Recall of what a prompt-cold per-layer LRU cache misses, by slots per layer: share of the absent "
        f"routed experts among the 4 most probable absent ones, one layer ahead. "
        f"{conditions(rows)}, test split."
    )
    return Table("misses", caption, pivot(rows, "config.slots", head="predictor \\ slots"), rows, wide=True)


def prediction(workspace: paths.Workspace) -> Table:
    """Every comparison of H2, whichever way it fell."""
    lines, rows = verdicts.comparisons(workspace, "H2", MODEL)
    measured = lines[lines["n"] > 0]
    frame = pd.DataFrame(
        {
            "comparison": [look.label(name) for name in measured["variant"]],
            "prompts": [config["corpus"] for config in measured["config"]],
            "horizon": [str(config["horizon"]) for config in measured["config"]],
            "difference": [
                text.value(*ends) for ends in measured[["median", "low", "high"]].itertuples(index=False)
            ],
            "n": [text.count(size) for size in measured["n"]],
            "verdict": list(measured["verdict"]),
        }
    )
    caption = (
        "Hypothesis H2: paired difference in miss recall at budget 4 and 32 slots, mean and 95 % interval "
        f"over prompts. {conditions(rows)}."
    )
    return Table("prediction", caption, frame, rows, wide=True, align="llrrrl")


def caches(workspace: paths.Workspace) -> Table:
    """Hit rates by policy, scope and start."""
    rows = rows_of(workspace, "05_replay", "hit_rate", slots=SHOWN_SLOTS)
    rows = rows.assign(line=_cache_names(rows))
    caption = (
        "Hit rate by slots per layer (a shared pool has the same total), mean and 95 % interval over "
        f"prompts. {conditions(rows)}."
    )
    return Table(
        "caches", caption, pivot(rows, "config.slots", index="line", head="cache \\ slots"), rows, wide=True
    )


def _cache_names(rows: pd.DataFrame) -> pd.Series:
    start = rows["config.start"]
    return rows["variant"].map(look.label) + ", " + rows["config.scope"] + ", " + start


def replay(workspace: paths.Workspace) -> Table:
    """Stall in the published accounting."""
    rows = rows_of(workspace, "05_replay", "stall_ms", timings="p50")
    rows = rows.assign(line=rows["variant"] + ", " + rows["config.schedule"])
    caption = (
        "Replayed stall per layer and token in ms by whole-expert budget, in the original study's cacheless "
        f"accounting with its published p50 times, predictor cost charged. {conditions(rows)}. Not measured."
    )
    return Table(
        "replay",
        caption,
        pivot(rows, "config.budget", index="line", head="predictor, layout"),
        rows,
        wide=True,
    )


def training(workspace: paths.Workspace) -> Table:
    """The embedded model on held-out text, by domain."""
    rows = rows_of(workspace, "90_pilot_model", "bits_per_byte")
    caption = f"Embedded model: bits per byte on held-out documents, by domain. {conditions(rows)} documents."
    frame = pivot(rows, "metric", index="config.domain", head="domain").set_axis(
        ["domain", "bits per byte"], axis=1
    )
    return Table("training", caption, frame, rows)


def hypotheses(workspace: paths.Workspace) -> Table:
    """The verdict on every hypothesis; open where the stage that answers it has no records."""
    lines, used = [], []
    for name, entry in verdicts.hypotheses().items():
        found, rows = verdicts.comparisons(workspace, name, MODEL)
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
    caption = f"Verdicts so far, model {MODEL}. Criteria were fixed before the results they speak of."
    return Table("hypotheses", caption, frame, pd.concat(used), wide=True, align="llp{0.5\\linewidth}rl")


def sources(workspace: paths.Workspace) -> Table:
    """Every records file behind this paper."""
    stages = sorted(path.stem for path in workspace.records.glob("*.csv"))
    rows = pd.concat([record.read(workspace, stage) for stage in stages])
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
    return Table("sources", caption, frame, rows, wide=True, align="llrll")


def conditions(rows: pd.DataFrame) -> str:
    """`Replayed, pilot-olmoe, n = 24`: kind, model and count of some rows."""
    kinds, models = "/".join(sorted(set(rows["kind"]))), ", ".join(sorted(set(rows["model"])))
    sizes = sorted({int(size) for size in rows["n"]})
    size = text.count(sizes[0]) if len(sizes) == 1 else f"{text.count(sizes[0])} to {text.count(sizes[-1])}"
    return f"{kinds.capitalize()}, {models}, n = {size}"


TABLES = {
    make.__name__: make
    for make in (
        traces,
        recall,
        horizons,
        generalisation,
        domains,
        misses,
        prediction,
        caches,
        replay,
        training,
        hypotheses,
        sources,
    )
}


def show(name: str, workspace: paths.Workspace):
    """A published table for display: the rows that the paper has, with caption and source."""
    if name not in TABLES:
        raise KeyError(f"table {name!r} is not published; known: {', '.join(TABLES)}")
    made = TABLES[name](workspace)
    note = f"{made.caption} Source: {latex.made_by(made.rows)}."
    return made.frame.style.hide(axis="index").set_caption(note).set_uuid(name)
