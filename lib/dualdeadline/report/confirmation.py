"""Tables, numbers and text about the confirmation: targets, recall, the published figures beside ours."""

from __future__ import annotations

import functools

import pandas as pd

from dualdeadline import record
from dualdeadline.confirmation import deviations
from dualdeadline.confirmation.rows import STAGE
from dualdeadline.report import latex, look, text, verdicts
from dualdeadline.report.confirmation_beside import beside
from dualdeadline.report.confirmation_sources import (
    block_excess,
    best_decode,
    best_rows,
    CONTROLS,
    decode_rows,
    checked_share,
    corpora,
    costs,
    decode_kind,
    kernel_rows,
    kind_of,
    rows_of,
)
from dualdeadline.report.tables import Subject, Table, conditions, pivot

__all__ = ["checked_share", "costs", "decode_kind", "kind_of"]
SECOND = "pilot-qwen"  # the model of the published tables


def second(about: Subject) -> Subject:
    """The subject of the confirmation: the model in question where it was run, else the second embedded one."""
    rows = record.visible(about.workspace, STAGE)
    model = about.model if about.model in set(rows["model"]) else SECOND
    return Subject(about.workspace, model, corpora(model, rows)[0])


def on_second(made):
    """A table function about the first model's study that shows the confirmation's model instead."""

    @functools.wraps(made)
    def shown(about: Subject) -> Table:
        return made(second(about))

    return shown


def fixed() -> pd.DataFrame:
    """The targets as the protocol has them."""
    found = deviations.entries()["targets"]
    lines = [(name, entry["name"], entry["claim"], entry["support"]) for name, entry in found.items()]
    return pd.DataFrame(lines, columns=["", "target", "claim", "counts as support"]).set_index("")


def compared(name: str, about: Subject) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Lines and rows of one target, as `verdicts.comparisons`; open where nothing is recorded yet."""
    entry = deviations.entries()["targets"][name]
    test = entry["test"]
    if test["metric"] == "block_excess_ms":
        return block_excess(name, test, about)
    if entry["stage"] != STAGE:
        return best_decode(name, test, about)
    config = {}
    if test["metric"] == "kernel_difference":
        part = kernel_rows(record.read(about.workspace, STAGE, about.model))
        config = {"where": sorted(set(part["config.where"]))} if len(part) else {}
    fixed = deviations.entries()["parameters"].get(about.model)  # another model is judged by the prompts it was run on
    prompts = fixed["corpora"] if fixed else corpora(about.model, record.visible(about.workspace, STAGE))
    config |= deviations.config_of(test, prompts)
    return verdicts.compared(about.workspace, name, STAGE, test | {"config": config}, about.model)


def fixed_value(name: str, key: str):
    """The first value that a target's test fixes for a config key."""
    return deviations.entries()["targets"][name]["test"]["config"][key][0]


def verdict(name: str, about: Subject) -> str:
    """The word for one target."""
    return verdicts.verdict_of(compared(name, about)[0])


@on_second
def targets(about: Subject) -> Table:
    """Every target with its result and verdict, whichever way it fell."""
    lines, used = [], []
    for name, entry in deviations.entries()["targets"].items():
        found, rows = compared(name, about)
        used += [rows] if len(rows) else []
        one = text.value(*found.loc[0, ["median", "low", "high"]], digits=4 if name == "C4" else 3)
        result = one if len(found) == 1 else verdicts.count_supported(found)
        lines.append((name, entry["claim"], entry["support"], result, verdicts.verdict_of(found)))
    frame = pd.DataFrame(lines, columns=["", "claim", "counts as support", "result", "verdict"])
    rows = pd.concat(used)
    caption = (
        f"Confirmation on {about.model}: targets fixed before any result of it (those of C5, of no model's routes, had "
        "been seen), single values with 95 % interval, else how many comparisons support."
        f"{_kept(rows)} {conditions(rows)}."
    )
    return Table("confirmation_targets", caption, frame, rows, wide=True, align="lp{0.3\\linewidth}p{0.3\\linewidth}rl")


@on_second
def recall(about: Subject) -> Table:
    """Recall one layer ahead by budget."""
    rows = rows_of(about, "recall", horizon=1, budget=[1, 2, 4, 8, 16], **about.test)
    caption = (
        f"Recall of the routed experts one layer ahead by budget, {about.model}: mean and 95 % interval over prompts. "
        f"{conditions(rows)}, test split of {about.corpus}. The shared expert is resident and not counted."
    )
    frame = pivot(rows, "config.budget", head="predictor \\ budget")
    return Table("confirmation_recall", caption, frame, rows, wide=True)


@on_second
def misses(about: Subject) -> Table:
    """Every comparison of the repeated H2."""
    lines, rows = compared("C2", about)
    lines = lines[lines["n"] > 0]
    frame = pd.DataFrame(
        {
            "comparison": [look.label(name) for name in lines["variant"]],
            "prompts": [config["corpus"] for config in lines["config"]],
            "horizon": [str(config["horizon"]) for config in lines["config"]],
            "difference": [text.value(*ends) for ends in lines[["median", "low", "high"]].itertuples(index=False)],
            "n": [text.count(size) for size in lines["n"]],
            "verdict": list(lines["verdict"]),
        }
    )
    caption = (
        f"H2 repeated on {about.model}: paired difference in recall of what a prompt-cold LRU cache of "
        f"{fixed_value('C2', 'slots')} routed experts misses, budget {fixed_value('C2', 'budget')}, mean and 95 % "
        f"interval over prompts. {conditions(rows)}."
    )
    return Table("confirmation_misses", caption, frame, rows, wide=True, align="llrrrl")


@on_second
def caches(about: Subject) -> Table:
    """Hit rates by policy and start."""
    rows = rows_of(about, "hit_rate", **about.test)
    names = rows["variant"].map(look.label) + ", " + rows["config.start"]
    caption = (
        f"Hit rate of routed experts by slots per layer, {about.model}, layers that prediction reaches one layer "
        f"ahead; predicted eviction copies nothing ahead. {conditions(rows)}, test split of {about.corpus}."
    )
    frame = pivot(rows.assign(line=names), "config.slots", index="line", head="cache \\ slots")
    return Table("confirmation_caches", caption, frame, rows)


@on_second
def blocks(about: Subject) -> Table:
    """Blocks at three layers, and their change against the published study's baseline."""
    rows = best_rows(about, ["block_ms", "block_change"])
    ms = rows[rows.metric == "block_ms"].assign(line=lambda part: part["variant"].map(look.label) + ", ms")
    change = rows[(rows.metric == "block_change") & rows["variant"].str.endswith("-demand_serial")]
    change = change[~change["variant"].str.startswith("nothing_ahead")]
    change = change.assign(line=change["variant"].str.partition("-")[0].map(look.label) + ", change")
    both = pd.concat([ms, change])
    both = both.assign(place=both["config.place"] + " (" + both["config.layer"].astype(int).astype(str) + ")")
    frame = pivot(both, "place", index="line", head="schedule \\ layer")
    order = list(dict.fromkeys(both["place"]))
    budget = int(rows["config.budget"].iloc[0])
    caption = (
        f"Blocks of eight routed experts of Qwen3.6's size at three layers of {about.model}, the bytes of {budget} "
        f"experts spent ahead by {look.label('residual_gate')}; change against demand serial with the same bytes "
        f"ahead. {conditions(rows)}."
    )
    return Table("confirmation_blocks", caption, frame[[frame.columns[0], *order]], rows, wide=True)


@on_second
def kernel(about: Subject) -> Table:
    """The predictor kernel against its reference."""
    rows = kernel_rows(rows_of(about, ["kernel_difference", "kernel_pairs_share"]))
    wide = rows.pivot(index="variant", columns="metric", values="median")
    sizes = rows[rows.metric == "kernel_difference"].set_index("variant")["n"]
    frame = pd.DataFrame(
        {
            "predictor": [look.label(name) for name in wide.index],
            "pairs": [text.count(sizes[name]) for name in wide.index],
            "of held-out pairs": [f"{share:.1%}" for share in wide["kernel_pairs_share"]],
            "largest difference": [f"{value:.1e}" for value in wide["kernel_difference"]],
        }
    )
    where = ", ".join(sorted(set(rows["config.where"])))
    caption = f"Predictor kernel against its float32 reference ({where}), {about.model}. {conditions(rows)}."
    return Table("confirmation_kernel", caption, frame, rows)


@on_second
def listed(about: Subject) -> Table:
    """Every deviation of the run from the protocol."""
    rows = rows_of(about, ["deviation", "deviations"])
    lines = rows[rows.metric == "deviation"]
    cells = [
        (row.variant, *(getattr(row, name) for name in ("part", "protocol", "run")))
        for row in lines.rename(columns=lambda name: name.removeprefix("config.")).itertuples()
    ]
    frame = pd.DataFrame(cells or [("none", "–", "–", "–")], columns=["entry", "part", "protocol", "run"])
    caption = f"Deviations of the run of {about.model} from the protocol, computed from both. {conditions(rows)}."
    return Table(
        "confirmation_deviations", caption, frame, rows, wide=True, align="llp{0.3\\linewidth}p{0.3\\linewidth}"
    )


TABLES = {
    "targets": targets,
    "recall": recall,
    "misses": misses,
    "caches": caches,
    "blocks": blocks,
    "kernel": kernel,
    "deviations": listed,
    "beside": on_second(beside),
}
PAPER = ("beside", "targets", "recall", "misses", "blocks", "deviations")  # of these, what the paper shows


def show(name: str, about: Subject):
    """One of `TABLES` for display, with caption and source.

    Raises:
        KeyError: no such table.
    """
    if name not in TABLES:
        raise KeyError(f"table {name!r} is not one of the confirmation's; known: {', '.join(TABLES)}")
    made = TABLES[name](about)
    note = f"{made.caption} Source: {latex.made_by(made.rows)}."
    return made.frame.style.hide(axis="index").set_caption(note).set_uuid(f"confirmation_{name}")


def decode(about: Subject, slots: int) -> str:
    """What notebook 09 measured with half of the experts in slots, or that nothing is measured yet; Markdown."""
    found, rows = best_decode("C6", deviations.entries()["targets"]["C6"]["test"], about, slots)
    if not len(rows):
        return f"Decode of {about.model} with {slots} slots per layer: not measured yet."
    speed = text.value(*found.loc[0, ["median", "low", "high"]], digits=1)
    kept = _kept(rows)
    return f"With {slots} slots per layer the best variant decodes {speed} tokens/s ({conditions(rows)}).{kept}" + (
        _empty(about, slots) if "warm" in kept else ""
    )


def _empty(about: Subject, slots: int) -> str:
    """The same with slots that start empty at each prompt; "" where that is not measured."""
    rows = decode_rows(about, slots)
    rows = rows[~rows["variant"].isin(CONTROLS) & (rows["config.warm"].astype(str) == "False")]
    if rows.empty:
        return ""
    one = rows.loc[rows["median"].idxmax(), ["median", "low", "high"]]
    return f" Where they start empty, {text.value(*one, digits=1)}."


def _kept(rows: pd.DataFrame) -> str:
    """What the slots of measured decode among some rows hold when a prompt begins; "" where there is none."""
    part = rows[rows.metric == "tokens_per_s"]
    if part.empty or "config.warm" not in part or part["config.warm"].isna().iloc[0]:
        return ""
    return (
        " Decode's slots stay warm." if str(part["config.warm"].iloc[0]) == "True" else " Decode's slots start empty."
    )
