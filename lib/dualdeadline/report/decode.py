"""Tables and text about the engine's decode steps: speed by slots, what prefetch changes, distance from the floor."""

from __future__ import annotations

import pandas as pd

from dualdeadline import paths, record
from dualdeadline.report import text
from dualdeadline.report.tables import Subject, Table, conditions

STAGE = "09_decode"
WORDS = {"demand_serial": "one deadline", "staged_barrier": "two deadlines"}


def steps(rows: pd.DataFrame, metric: str = "step_ms") -> pd.DataFrame:
    """Measured rows of whole steps with a readable name of the variant."""
    part = rows[(rows.metric == metric) & (rows.kind == "measured")]
    if part.empty:
        return part
    names = [
        f"{wire}, {WORDS[name]}"
        + ("" if variant.startswith(("no prefetch", "two", "encoded")) else f", {variant} {budget}")
        for wire, name, variant, budget in zip(
            part["config.wire"], part["config.schedule"], part.variant, part["config.budget"]
        )
    ]
    return part.assign(name=names, slots=part["config.slots"].astype(int))


def resident_ms(rows: pd.DataFrame) -> float:
    """Step time with every expert in a slot."""
    part = steps(rows)
    return float(part[part.slots == part.slots.max()]["median"].iloc[0])


def speeds(rows: pd.DataFrame, metric: str = "tokens_per_s") -> pd.DataFrame:
    """Tokens/s (or another metric) by variant and slots, the resident run in a column of its own."""
    wide = steps(rows, metric).pivot_table(index="name", columns="slots", values="median", sort=False)
    return wide.sort_index(axis=1).rename_axis(index="variant")


def plain(rows: pd.DataFrame) -> pd.DataFrame:
    """Tokens/s without guesses and with experts outside, by wire: the two ends of what was measured."""
    part = steps(rows, "tokens_per_s")
    ends = part.name.isin(["raw, one deadline", "coded, two deadlines"]) & (part.slots < part.slots.max())
    return part[ends].assign(variant=part.name)


def link_gbps(workspace: paths.Workspace, model: str) -> float:
    """Rate of large copies behind one another, measured by notebook 07."""
    rows = record.read(workspace, "07_overlap", model)
    part = rows[(rows.metric == "copy_gbps") & (rows.variant == "behind") & (rows["config.submission"] == "graph")]
    return float(part.loc[part["config.size_mib"].idxmax(), "median"])


def floors(rows: pd.DataFrame, gbps: float) -> pd.DataFrame:
    """Step without prediction beside resident step plus the link time of its bytes, and their ratio."""
    part = steps(rows)[steps(rows).variant == "no prefetch"].set_index(["name", "slots"])["median"]
    moved = steps(rows, "link_bytes").set_index(["name", "slots"])["median"]
    hit = steps(rows, "hit_rate").set_index(["name", "slots"])["median"]
    frame = pd.DataFrame({"hit rate": hit, "MB per token": moved / 1e6, "step, ms": part}).dropna()
    frame["resident + link, ms"] = resident_ms(rows) + frame["MB per token"] / gbps
    frame["ratio"] = frame["step, ms"] / frame["resident + link, ms"]
    return frame.sort_values(["slots", "name"], ascending=[False, True])


def prefetches(rows: pd.DataFrame) -> pd.DataFrame:
    """What each prefetch changed against the same without, with interval, and what it fetched per token."""
    part = steps(rows, "prefetch_difference_ms")
    part = part.assign(variant=part.variant.str.removesuffix("-no prefetch"))
    key = ["variant", "slots", "config.budget"]
    frame = part.set_index(key)[["median", "low", "high"]]
    frame["share of the step"] = (
        steps(rows, "prefetch_time_ratio").assign(variant=part.variant.to_numpy()).set_index(key)["median"] - 1
    )
    for name in ("ahead", "useful", "wasted"):
        found = steps(rows, f"{name}_per_token")
        frame[name] = found[found.variant.isin(part.variant)].set_index(key)["median"]
    return frame.rename_axis(index=["guesses", "slots", "budget"]).rename(columns={"median": "ms"})


def baselines(rows: pd.DataFrame) -> pd.DataFrame:
    """Steps of what could be installed instead, on the same model."""
    part = rows[rows.metric == "baseline_step_ms"]
    frame = part.assign(tokens_per_s=1e3 / part["median"])[["variant", "config.way", "median", "tokens_per_s"]]
    return frame.rename(columns={"config.way": "how", "median": "step, ms", "tokens_per_s": "tokens/s"}).set_index(
        "variant"
    )


def best(rows: pd.DataFrame, slots: int, predictor: str = "no prefetch") -> float:
    """Tokens/s of the fastest variant with so many slots and that guessing."""
    part = steps(rows, "tokens_per_s")
    return float(part[(part.slots == slots) & (part.variant == predictor)]["median"].max())


def hit_rate(rows: pd.DataFrame, slots: int) -> float:
    """Share of accesses that hit with so many slots, without prediction."""
    part = steps(rows, "hit_rate")
    return float(part[(part.slots == slots) & (part.variant == "no prefetch")]["median"].iloc[0])


def by_slots(rows: pd.DataFrame, metric: str, **config) -> str:
    """A difference or ratio by slots, each with its interval."""
    part = steps(rows, metric)
    for name, value in config.items():
        part = part[part[name if name == "variant" else f"config.{name}"] == value]
    return "; ".join(
        f"{row.slots} slots {text.value(row.median, row.low, row.high)}"
        for row in part.sort_values("slots").itertuples(index=False)
    )


def answer(rows: pd.DataFrame, gbps: float) -> str:
    """The stage's result in Markdown."""
    if not len(steps(rows)):
        return "No decode step of the engine has been measured yet; needed: this notebook run on a GPU."
    counts = sorted(set(steps(rows).slots))
    speed = ", ".join(f"{best(rows, count):.0f} at {count}" for count in counts[:-1])
    ahead = ", ".join(f"{best(rows, count, 'residual_gate'):.0f} at {count}" for count in counts[:-1])
    ratio = floors(rows, gbps)["ratio"]
    return (
        f"Tokens/s without prediction: {speed} of {counts[-1]} slots, {best(rows, counts[-1]):.0f} with everything "
        f"resident; with the predictor's guesses {ahead}. Without prediction a step takes {ratio.min():.2f} to "
        f"{ratio.max():.2f} times the resident step plus the link time of its bytes ({gbps:.1f} GB/s). Two deadlines "
        f"change an encoded step by {by_slots(rows, 'deadline_difference_ms', wire='coded')} ms. Encoded over raw: "
        f"{by_slots(rows, 'wire_time_ratio')}. Sizes are OLMoE's, weights random, routes the embedded model's."
    )


def engine_steps(about: Subject) -> Table:
    """Measured decode steps of the engine by slots."""
    rows = about.rows(STAGE, ["tokens_per_s"])
    part = speeds(rows).map(lambda value: "" if pd.isna(value) else f"{value:.0f}")
    part.columns = [str(column) for column in part.columns]
    caption = (
        "Tokens/s of the engine by slots per layer: stock transformers code of OLMoE's sizes, random weights, driven "
        f"by the embedded model's recorded routes, caches empty at each prompt (mean over prompts). {conditions(rows)}."
    )
    return Table("engine_steps", caption, part.rename_axis("variant").reset_index(), rows, wide=True)
