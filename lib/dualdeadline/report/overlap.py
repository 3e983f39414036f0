"""Tables and figures about schedules: blocks against floors, the simulator's error, decode steps, the link."""

from __future__ import annotations

import numpy as np
import pandas as pd

from dualdeadline import schedule
from dualdeadline.overlap import Setting, of_setting
from dualdeadline.report import look, text
from dualdeadline.report.tables import Subject, Table, conditions, pivot

BLOCK_KEYS = [f"config.{key}" for key in (*Setting().config(""), "ready")]
STAGE = "07_overlap"


def installs(rows: pd.DataFrame) -> pd.DataFrame:
    """Milliseconds to install one expert, by path and number of writes."""
    part = rows[rows.metric == "install_ms"]
    return part.pivot(index="variant", columns="config.writes", values="median").rename(
        columns=lambda n: f"{int(n)} writes"
    )


def span_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of the timelines: the measured ones, or the simulated ones where none was measured."""
    part = rows[rows.metric == "span_ms"]
    return part[part.kind == min(part.kind)]  # in the order of the alphabet


def spans(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """By schedule, the timeline of `span_rows` as `lanes.draw` takes it."""
    part = rows.rename(columns=lambda name: name.removeprefix("config."))
    part = part.assign(end_ms=part.start_ms + part["median"], speculative=part.speculative.eq(True))
    return {name: found.sort_values("start_ms") for name, found in part.groupby("variant")}


def against(rows: pd.DataFrame, setting: Setting, shapes) -> pd.DataFrame:
    """Median block, floor of its own copies and the difference of the two, ms; by shape, ready and schedule."""
    rows = rows[(rows.kind == "measured") & rows.variant.isin(schedule.NAMES)]
    return over_own_floor(pd.concat([of_setting(rows, shape, setting) for shape in shapes]), "shape", "ready")


def over_own_floor(rows: pd.DataFrame, *keys: str) -> pd.DataFrame:
    """Median block, floor of its own copies and the difference, ms, by some config keys and schedule."""
    index = [*(f"config.{key}" for key in keys), "variant"]
    wide = rows.pivot_table(index=index, columns="metric", values="median")
    wide = wide[["block_ms", "floor_ms"]].assign(over_ms=wide.block_ms - wide.floor_ms)
    return wide.rename_axis(index=[*keys, "schedule"]).rename(index=look.label, level="schedule")


def over_floor(rows: pd.DataFrame) -> pd.DataFrame:
    """Block rows of one setting less the median floor of `demand_pipelined`, the fewest pieces, at the same ready."""
    floor = rows[(rows.metric == "floor_ms") & (rows.variant == "demand_pipelined")].set_index("config.ready")["median"]
    part = rows[(rows.metric == "block_ms") & rows.variant.isin(schedule.NAMES)]
    least = part["config.ready"].map(floor)
    return part.assign(**{name: part[name] - least for name in ("median", "low", "high")})


def gaps(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of each schedule less demand_pipelined, in blocks."""
    return rows[rows.metric == "block_difference_ms"]


def cuts(rows: pd.DataFrame, setting: Setting, shape: str = "olmoe") -> dict[str, pd.DataFrame]:
    """Gaps along top_k and along tokens, all else as in `setting`, nothing ready; variants by their first name."""
    rows = rows[rows["config.ready"] == 0]
    rows = rows.assign(variant=rows.variant.str.split("-").str[0])
    fixed = setting.config(shape)
    out = {}
    for free in ("top_k", "tokens"):
        part = rows
        for key, value in fixed.items():
            part = part[part[f"config.{key}"] == value] if key != free else part
        out[free] = part
    return out


def errors(rows: pd.DataFrame, keys=BLOCK_KEYS) -> pd.DataFrame:
    """Simulated against measured blocks, one row per configuration, with the relative error (share).

    Args:
        keys: columns that tell configurations apart.
    """
    part = rows[(rows.metric == "block_ms") & (rows.variant != "resident")]
    wide = part.pivot_table(index=["variant", *keys], columns="kind", values="median").dropna().reset_index()
    return wide.assign(error=wide.simulated / wide.measured - 1)


def error_summary(found: pd.DataFrame, by=("kernels", "submission")) -> pd.DataFrame:
    """Median and worst absolute error in percent, and configurations, by some config keys and over all."""
    size = found.assign(error=100 * found.error.abs())
    groups = size.groupby([f"config.{key}" for key in by]).error
    table = groups.agg(median="median", worst="max", configurations="count")
    whole = ("all", *[""] * (len(by) - 1)) if len(by) > 1 else "all"
    table.loc[whole, :] = size.error.median(), size.error.max(), len(size)
    return table.rename_axis(index=list(by)).astype({"configurations": int})


def steps(rows: pd.DataFrame) -> pd.DataFrame:
    """Decode-step differences from demand_pipelined by slots, measured and simulated, as text."""
    part = rows[rows.metric.str.endswith("step_difference_ms")]
    part = part.assign(line=part.variant.str.split("-").str[0].map(look.label) + ", " + part.kind)
    return pivot(part, "config.slots", index="line", head="schedule \\ slots", digits=4).set_index("schedule \\ slots")


def slot_values(rows: pd.DataFrame) -> dict[int, str]:
    """Slots -> `0.785 [0.767, 0.810]`, fewest slots first; of several rows with the same slots the first."""
    rows = rows.astype({"config.slots": int}).sort_values("config.slots", kind="stable").drop_duplicates("config.slots")
    values = zip(rows["config.slots"], rows["median"], rows["low"], rows["high"])
    return {slots: text.value(*found) for slots, *found in values}


def by_slots(rows: pd.DataFrame) -> str:
    """`16 slots 0.785 [0.767, 0.810]; 32 slots ...`."""
    return "; ".join(f"{slots} slots {value}" for slots, value in slot_values(rows).items())


def windows(rows: pd.DataFrame) -> pd.DataFrame:
    """Median over layers of each part of a stock layer, ms."""
    part = rows[rows.metric == "window_ms"]
    return part.groupby("variant")["median"].median().rename("ms").to_frame().rename_axis("part of a layer")


def step_errors(rows: pd.DataFrame) -> pd.DataFrame:
    """Measured step time of each schedule without prefetch, ms, and the simulated one's distance, %, by slots.

    Slots that only one of the two has are left out.
    """
    part = rows[rows.metric.isin(["step_ms", "simulated_step_ms"]) & rows.variant.isin(schedule.NAMES)]
    part = part[part["config.budget"] == 0].rename(columns={"config.slots": "slots"})
    wide = part.pivot(index=["variant", "slots"], columns="kind", values="median").dropna()
    wide = wide.assign(error=100 * (wide.simulated / wide.measured - 1))[["measured", "error"]]
    wide = wide.rename(columns={"measured": "ms", "error": "off by, %"}).unstack("slots").swaplevel(axis=1)
    wide = wide.sort_index(axis=1).rename(index=look.label).rename_axis("schedule").rename_axis([None, None], axis=1)
    return wide.rename(columns=lambda slots: f"{slots:.0f} slots", level=0)


def prefetch(
    rows: pd.DataFrame, budget: int, horizon: int = 1, threshold: float = 0.5, piece: str = "gate_up"
) -> pd.DataFrame:
    """Rows of a prefetch's effect on the decode step, by predictor and slots."""
    fixed = {"budget": budget, "horizon": horizon, "threshold": threshold, "piece": piece}
    rows = rows[rows.metric.str.endswith("prefetch_difference_ms")]
    for key, value in fixed.items():
        rows = rows[rows[f"config.{key}"] == value]
    return rows


def answer(rows: pd.DataFrame, setting: Setting) -> str:
    """The stage's result in Markdown, from its rows."""
    measured = rows[rows.kind == "measured"]
    block = of_setting(measured[(measured.metric == "block_ms") & (measured["config.ready"] == 0)], "olmoe", setting)
    ms = block.set_index("variant")["median"]
    gap = measured[(measured.metric == "block_difference_ms") & (measured["config.ready"] == 0)]
    gap = of_setting(gap, "olmoe", setting)
    gap = gap.set_index("variant").loc["staged_pipelined-demand_pipelined"]
    found = errors(rows).error.abs()
    best = min((name for name in schedule.NAMES if name in ms), key=ms.get)
    return (
        f"Eight missing experts of OLMoE's size: {ms['demand_serial']:.3f} ms copied and then computed, "
        f"{ms['demand_pipelined']:.3f} ms pipelined expert by expert, {ms['staged_pipelined']:.3f} ms with "
        f"two deadlines, {ms[best]:.3f} ms at best "
        f"({look.label(best)}). Two deadlines against the fair baseline: "
        f"{text.value(gap['median'], gap.low, gap.high, digits=4)} ms. The simulator's median error is "
        f"{np.median(found):.1%}, its worst {found.max():.1%} over {len(found)} configurations."
    )


def blocks(about: Subject) -> Table:
    """Schedules of one block beside the floor of their copies."""
    rows = about.rows(STAGE, ["block_ms", "floor_ms"], shape="olmoe")
    rows = rows[(rows.kind == "measured") & rows.variant.isin(schedule.NAMES)]
    rows = of_setting(rows, "olmoe", Setting())
    parts = []
    for metric, word in (("block_ms", ""), ("floor_ms", ", floor")):
        part = rows[rows.metric == metric]
        parts.append(part.assign(line=part.variant.map(look.label) + word))
    caption = (
        "One block of eight OLMoE-sized experts, one token, by number of gate/ups already present: median ms "
        f"(20 to 80 %) of each schedule in a CUDA graph, and of its copies back to back. {conditions(rows)}."
    )
    frame = pivot(pd.concat(parts), "config.ready", index="line", head="schedule \\ ready")
    return Table("blocks", caption, frame, rows, wide=True)


def validation(about: Subject) -> Table:
    """The simulator's error on configurations that did not calibrate it."""
    rows = about.rows(STAGE, "block_ms")
    found = error_summary(errors(rows)).reset_index()
    frame = found.assign(**{name: found[name].map("{:.2f}".format) for name in ("median", "worst")}).astype(str)
    caption = "Simulated against measured blocks: absolute relative error in percent, and configurations."
    return Table("validation", caption, frame, rows[rows.variant != "resident"], align="llrrr")


def decode_steps(about: Subject) -> Table:
    """Decode steps of the schedules against demand_pipelined."""
    rows = about.rows(STAGE, ["step_difference_ms", "simulated_step_difference_ms"])
    caption = (
        "Decode step less that of demand pipelined, ms, by cache slots per layer: mean over prompts, two-level "
        f"95 % interval; OLMoE-sized experts, recorded routes of held-out prompts, no prefetch. {conditions(rows)}."
    )
    return Table("decode_steps", caption, steps(rows).reset_index(), rows, wide=True)
