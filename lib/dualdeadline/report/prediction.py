"""Tables about prediction: recall by budget, horizon, prompt set and cache, and the comparisons of H2."""

from __future__ import annotations

import pandas as pd

from dualdeadline.report import look, text, verdicts
from dualdeadline.report.tables import SHOWN_SLOTS, Subject, Table, conditions, pivot

FINALISTS = ("oracle", "residual_gate", "gate_ahead", "shared_mlp", "transition", "popularity")


def headline(about: Subject) -> Table:
    """What README shows: raw recall beside recall on what the cache misses."""
    every = about.rows("04_evaluation", "recall", horizon=1, budget=8, **about.test)
    hard = about.rows("04_evaluation", "miss_recall", horizon=1, budget=4, slots=32, **about.test)
    rows = pd.concat([every, hard])
    frame = pivot(rows, "metric", head="predictor").rename(
        columns={"recall": "recall, budget 8", "miss_recall": "recall on misses, budget 4, 32 slots"}
    )
    caption = (
        "Recall one layer ahead: of all routed experts, and of those absent from a prompt-cold per-layer LRU "
        f"cache. Mean and 95 % interval over prompts. {conditions(rows)}, test split of {about.corpus}."
    )
    return Table(
        "headline", caption, frame[[frame.columns[0], *sorted(frame.columns[1:], key=len)]], rows, wide=True
    )


def recall(about: Subject) -> Table:
    """Recall by budget, every predictor."""
    rows = about.rows("04_evaluation", "recall", horizon=1, **about.test)
    caption = (
        "Recall of the routed experts one layer ahead, by whole-expert budget: mean and 95 % interval over "
        f"prompts. {conditions(rows)}, test split of {about.corpus}."
    )
    return Table("recall", caption, pivot(rows, "config.budget", head="predictor \\ budget"), rows, wide=True)


def horizons(about: Subject) -> Table:
    """Recall by horizon, the finalists."""
    rows = about.rows("04_evaluation", "recall", budget=8, **about.test)
    rows = rows[rows["variant"].isin(FINALISTS)]
    caption = (
        "Recall at budget 8 by horizon (layers between the state that is read and the layer predicted; "
        f"0 reads the same layer's start state). {conditions(rows)}, test split of {about.corpus}."
    )
    return Table(
        "horizons", caption, pivot(rows, "config.horizon", head="predictor \\ horizon"), rows, wide=True
    )


def generalisation(about: Subject) -> Table:
    """The same predictors on prompt sets that nothing was chosen on."""
    rows = about.rows("04_evaluation", "recall", horizon=1, budget=8, split=("test", "all"))
    rows = rows[rows["variant"].isin(rows.loc[rows["config.corpus"] != about.corpus, "variant"])]
    caption = (
        f"Recall at budget 8, one layer ahead, by prompt set: test split of {about.corpus}, all of replication "
        f"(disjoint by template) and of ood (families no training saw). {conditions(rows)}."
    )
    return Table(
        "generalisation", caption, pivot(rows, "config.corpus", head="predictor \\ prompts"), rows, wide=True
    )


def domains(about: Subject) -> Table:
    """Fitted on one kind of prompt, tested on each."""
    rows = about.rows("04_evaluation", "recall", horizon=1, budget=8)
    rows = rows[rows["variant"].str.contains(" from ")]
    rows = rows.assign(tested=rows["config.corpus"] + " " + rows["config.split"])
    caption = (
        f"Recall at budget 8, one layer ahead, by source of fitted and tested prompts. {conditions(rows)}."
    )
    return Table("domains", caption, pivot(rows, "tested", head="predictor \\ tested on"), rows, wide=True)


def misses(about: Subject) -> Table:
    """Recall on what the cache misses, by slots."""
    rows = about.rows("04_evaluation", "miss_recall", horizon=1, budget=4, **about.test, slots=SHOWN_SLOTS)
    caption = (
        "Recall of what a prompt-cold per-layer LRU cache misses, by slots per layer: share of the absent "
        f"routed experts among the 4 most probable absent ones, one layer ahead. "
        f"{conditions(rows)}, test split."
    )
    return Table("misses", caption, pivot(rows, "config.slots", head="predictor \\ slots"), rows, wide=True)


def prediction(about: Subject) -> Table:
    """Every comparison of H2, whichever way it fell."""
    lines, rows = verdicts.comparisons(about.workspace, "H2", about.model)
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
