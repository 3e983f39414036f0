"""Sentences about tiers below host memory, made from their tables."""

from __future__ import annotations

import pandas as pd

from dualdeadline.report import look, text, tiers
from dualdeadline.report.tiers import RECORD, SCATTERED, border, of, settings

GAIN = 0.9  # of demand's time: what a setting is to stay below
SHARE, TIMES, INSTALL = 0.9, 4.0, 1.05  # share of the disk's rate, times the scattered layout, over one copy


def sides(rows: pd.DataFrame) -> str:
    """How the condition told settings apart, in a sentence."""
    found = border(rows)
    early, late = found[found.in_time], found[~found.in_time]
    hits, speed = (tiers.published()["prefetch"][name] for name in ("hit_rate", "tokens_per_s"))
    faster = [int((part.time_ratio < 1).sum()) for part in (early, late)]
    return (
        f"Of {len(early)} settings whose reads had time to arrive {faster[0]} were faster than demand, of {len(late)} "
        f"whose reads came too late {faster[1]}. Published: reads one layer ahead, too late, took the hit rate from "
        f"{hits[0]:g} to {hits[1]:g} and tokens/s from {speed[0]:g} to {speed[1]:g}."
    )


def prefetch_verdict(rows: pd.DataFrame, slots: int = 16) -> str:
    """Whether a setting beats demand by 10 % at so many slots, and what the accounting allows, by pause."""
    found, out = settings(rows, "test").reset_index(), []
    for (machine, pause), part in found[found.slots == slots].groupby(["machine", "pause_ms"]):
        demand, ahead = part[part.lead_ms.isna()].iloc[0], part[part.lead_ms.notna()].iloc[0]
        ratio = text.value(ahead.time_ratio, ahead.low, ahead.high)
        word = "at least 10 % faster" if ahead.high < GAIN else "not 10 % faster"
        out.append(
            f"With {pause:g} ms of other work per layer, {look.label(ahead.setting)}, {ahead.ahead:.0f} ahead, takes "
            f"{ratio} of demand's time ({machine}): **{word}**; nothing that reads the same bytes could take less than "
            f"{demand.bound_ms / demand.ms:.2f} of it ({demand.bound_ms:.1f} of {demand.ms:.1f} ms)"
        )
    return "; ".join(out) + "." if out else "Reads ahead have not been measured."


def missing_links(rows: pd.DataFrame) -> str:
    """Links that could not be made, with the reason."""
    part = of(rows, "links_made")
    return (
        "; ".join(f"{row['config.link']}: {row['config.why']}" for _, row in part.iterrows()) or "all links were made"
    )


def peers(rows: pd.DataFrame) -> str:
    """What another GPU's memory gives, in sentences, or why nothing was measured."""
    part, none = of(rows, "peer_copy_gbps"), of(rows, "peer_ways")
    if not len(part):
        why = "".join(f" Not at hand on {row.machine}: {row['config.why']}." for _, row in none.iterrows())
        return "No copy between two GPUs is recorded; needed: this notebook run on a host with two GPUs." + why
    part = part[(part["config.depth"].astype(int) == part["config.depth"].astype(int).max())]
    part = part[part["config.part"] == "expert"]
    said = ", ".join(f"by {row.variant} {row['median']:.0f} GB/s" for _, row in part.iterrows())
    steps = of(rows, "peer_step_ms")
    over = "; ".join(
        f"{row.variant}, {int(row['config.slots'])} slots {row['median']:.2f} ms" for _, row in steps.iterrows()
    )
    return (
        f"Experts from another GPU's memory, one behind another: {said} (measured, "
        f"{', '.join(sorted(set(part.machine)))})."
        + (f" Raw steps without guesses over each (simulated): {over}." if over else "")
    )


def replayed_answer(found: pd.DataFrame) -> str:
    """How far our rates lie from the published ones, and LFU from LRU, of `tiers.replayed`."""
    if found["here"].isna().all(axis=None):
        return "Neither notebook 04 nor 05 has records of this model."
    gap = (found["here"] - found["published"]).abs()
    hits, recall = (gap[gap.index.str.startswith(name)].max(axis=None) for name in ("hit rate", "recall"))
    lru, lfu = (found.loc[f"hit rate, {name}", "here"] for name in ("LRU", "LFU"))
    return (
        f"Hit rates lie within {hits:.3f} of the published ones where there are any, recall within {recall:.3f}; LFU "
        f"lies within {(lru - lfu).abs().max():.3f} of LRU (published: {tiers.published()['lfu_to_lru_at_most']:g})."
    )


def layouts_answer(rows: pd.DataFrame) -> str:
    """What a record saves per cold expert, what encoding changes, and what an install costs, by machine."""
    frame, out = tiers.layouts(rows)["ms"], []
    installs = tiers.installs(rows)["over one copy"]
    for (machine, expert), ms in frame.groupby(level=["machine", "expert"]):
        ms = ms.droplevel(["machine", "expert"])
        ways = installs.loc[machine, expert]
        out.append(
            f"on {machine} ({expert}) a cold expert takes {ms[RECORD]:.2f} ms as one record, "
            f"{ms['record, encoded']:.2f} ms encoded, {ms[SCATTERED]:.2f} ms as nine tensors and "
            f"{ms['scattered, parallel']:.2f} ms with these in parallel; its install from host memory takes "
            f"{ways.iloc[1]:.2f} times one copy, nine slices "
            f"{ways.iloc[2]:.2f} times"
        )
    said = ". ".join(out)
    return said[:1].upper() + said[1:] + "."


def cold_answer(rows: pd.DataFrame) -> str:
    """How the record layout does against plain reads and the scattered layout, a sentence per machine."""
    frame, out = tiers.cold(rows), []
    for machine, part in frame.groupby(level="machine"):
        mine = part.xs(RECORD, level="layout")
        names = ("share of a plain loop", "share of the disk", "times scattered", "times parallel")
        ends = [f"{mine[name].min():.2f} to {mine[name].max():.2f}" for name in names]
        aims = (SHARE, SHARE, TIMES, TIMES)
        enough = [f"{int((mine[name] >= aim).sum())} of {len(mine)}" for name, aim in zip(names, aims)]
        out.append(
            f"On {machine} a plain loop of the same reads, layer by layer, would take {ends[0]} of the time of one "
            f"record per expert ({enough[0]} slot counts at {SHARE:g} or more), and a disk that never waits for a "
            f"router {ends[1]} ({enough[1]}); scattered tensors read one by one take {ends[2]} times as long "
            f"({enough[2]} at {TIMES:g} or more), by as many threads {ends[3]} times ({enough[3]})"
        )
    theirs = tiers.published()["tokens_per_s"]
    said = ", ".join(
        f"{name} {low:g}" + (f" to {high:g}" if high > low else "") for name, (low, high) in theirs.items()
    )
    return ". ".join(out) + f". Published, in tokens/s of whole steps: {said}."


def targets(rows: pd.DataFrame) -> pd.DataFrame:
    """What was aimed at and what came out, by machine: the record layout on the cold disk at the fewest slots, the
    install of a record, and reads ahead at 16 slots."""
    lines, found = [], tiers.cold(rows).xs(RECORD, level="layout").reset_index("slots")
    for machine, part in found.groupby(level="machine"):
        least = part[part.slots == part.slots.min()].iloc[0]
        where = f"record, {least.slots:.0f} slots, cold"
        for what, name, aim in (
            ("share of a plain loop of the same reads", "share of a plain loop", SHARE),
            ("share of a disk that always has reads in flight", "share of the disk", SHARE),
            ("times scattered, one by one", "times scattered", TIMES),
            ("times scattered, as many threads", "times parallel", TIMES),
        ):
            lines.append((machine, f"{where}: {what}", f"at least {aim:g}", least[name]))
    for (machine, expert, way), value in tiers.installs(rows)["over one copy"].items():
        if way.startswith("record"):
            lines.append((machine, f"install, over one contiguous copy ({expert})", f"at most {INSTALL:g}", value))
    found = settings(rows, "test").reset_index()
    for _, row in found[(found.slots == found.slots.min()) & found.lead_ms.notna()].iterrows():
        said = f"reads ahead, {row.slots:.0f} slots, {row.pause_ms:g} ms of other work per layer: over demand"
        lines.append((row.machine, f"{said}, upper end", f"at most {GAIN:g}", row.high))
    frame = pd.DataFrame(lines, columns=["machine", "target", "needed", "measured"])
    bound, least = frame.needed.str.split().str[-1].astype(float), frame.needed.str.startswith("at least")
    met = (frame.measured >= bound).where(least, frame.measured <= bound)
    return frame.assign(met=met.map({True: "yes", False: "no"})).set_index(["machine", "target"])


def remote_answer(rows: pd.DataFrame) -> str:
    """Of what a round trip over loopback is made."""
    frame, out = tiers.remote(rows), []
    for (machine, link, count), row in frame.iterrows():
        if link == "loopback":
            share = row["compute"] / row["round trip"]
            out.append(f"{count} rows {row['round trip']:.1f} ms, {share:.0%} of it products ({machine})")
    ping = tiers.published()["ping_ms"]
    return (
        f"Over loopback a request takes {'; '.join(out)}. The second study's stands in the table, over a ping of "
        f"{ping[0]:g} to {ping[1]:g} ms: another machine and smaller experts, so that forms compare, not milliseconds."
    )


def parts_answer(rows: pd.DataFrame) -> str:
    """The largest part of each configuration's step."""
    frame = tiers.parts(rows)
    share = frame[list(tiers.PARTS)].div(frame.step, axis=0)
    said = [
        f"{case} ({machine}) {share.loc[machine, case].max():.0%} {share.loc[machine, case].idxmax()}"
        for machine, case in frame.index
    ]
    return f"Largest part of a step: {'; '.join(said)}."


def answer(rows: pd.DataFrame) -> str:
    """The stage's result in Markdown."""
    met = targets(rows).met
    missed = [f"{target} ({machine})" for (machine, target), word in met.items() if word == "no"]
    return (
        f"{int((met == 'yes').sum())} of {len(met)} targets are met"
        + (f"; not met: {'; '.join(missed)}" if missed else "")
        + "."
    )
