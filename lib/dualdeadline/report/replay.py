"""Tables about caches and stalls: hit rates, prefetch, and the published accounting on our routes."""

from __future__ import annotations

from dualdeadline.report import look
from dualdeadline.report.tables import SHOWN_SLOTS, Subject, Table, conditions, pivot

COLD = {"scope": "layer", "start": "cold"}
SHOWN_BUDGETS = [0, 2, 4, 8]  # as many columns of intervals as two text columns hold
STALLING = ("random", "popularity", "gate_ahead", "shared_mlp", "residual_gate", "oracle")


def caches(about: Subject) -> Table:
    """Hit rates by policy, scope and start."""
    rows = about.rows("05_replay", "hit_rate", slots=SHOWN_SLOTS, **about.test)
    names = rows["variant"].map(look.label) + ", " + rows["config.scope"] + ", " + rows["config.start"]
    caption = (
        "Hit rate by slots per layer (a shared pool has the same total), mean and 95 % interval over prompts; "
        f"all experts of a token at once. {conditions(rows)}, test split of {about.corpus}."
    )
    frame = pivot(rows.assign(line=names), "config.slots", index="line", head="cache \\ slots")
    return Table("caches", caption, frame, rows, wide=True)


def prefetch(about: Subject) -> Table:
    """Hit rates with copies ahead, beside LRU and the optimum without any."""
    rows = about.rows("05_replay", "prefetch_hit_rate", horizon=1, charged=True, **about.test)
    ahead = (
        (rows["config.policy"] == "lru") & (rows["config.budget"] == 4) & (rows["config.threshold"] == 0.5)
    )
    rows = rows[ahead | rows["variant"].isin(["none", "belady"])]
    caption = (
        "Hit rate by slots per layer when at most 4 experts of probability 0.5 or more are copied ahead "
        "per token and layer, one layer ahead, each taking a slot from the LRU cache; beside no prefetch and "
        f"Belady's optimum. {conditions(rows)}, test split of {about.corpus}."
    )
    return Table("prefetch", caption, pivot(rows, "config.slots", head="predictor \\ slots"), rows, wide=True)


def replay(about: Subject) -> Table:
    """Stall in the published accounting."""
    rows = about.rows("05_replay", "stall_ms", budget=SHOWN_BUDGETS, timings="p50", **about.test)
    rows = rows[rows["variant"].isin(STALLING)]
    rows = rows.assign(line=rows["variant"].map(look.label) + ", " + rows["config.schedule"])
    caption = (
        "Replayed stall per layer and token in ms by whole-expert budget, in the original study's cacheless "
        f"accounting with its published p50 times, predictor time charged. {conditions(rows)}. Not measured."
    )
    return Table(
        "replay",
        caption,
        pivot(rows, "config.budget", index="line", head="predictor, layout"),
        rows,
        wide=True,
    )


def credit(about: Subject) -> Table:
    """Staged minus monolithic: what is left when link time is charged once, and without prediction."""
    rules = {"stall_difference_ms": "as published", "stall_link_once_difference_ms": "link once"}
    rows = about.rows("05_replay", list(rules), budget=SHOWN_BUDGETS, timings="p50", **about.test)
    rows = rows[rows["variant"].isin(STALLING)]
    rows = rows.assign(line=rows["variant"].map(look.label) + ", " + rows["metric"].map(rules))
    caption = (
        "Staged minus monolithic stall in ms by budget, paired within prompts: as published, and with the "
        f"link's time charged once. Below zero staged wins. {conditions(rows)}. Not measured."
    )
    frame = pivot(rows, "config.budget", index="line", head="predictor, accounting")
    return Table("credit", caption, frame, rows, wide=True)
