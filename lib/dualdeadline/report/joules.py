"""Energy tables: which counters a machine has, joules per token, and joules per megabyte that crossed the link."""

from __future__ import annotations

import pandas as pd

from dualdeadline.report import decode

KEYS = ["slots", "config.wire", "config.schedule", "config.budget", "config.threshold", "variant"]


def counters(rows: pd.DataFrame) -> pd.DataFrame:
    """What was read for the joules of notebook 10's steps, by machine and configuration."""
    part = rows[rows.metric.isin(["joules_per_token", "net_joules_per_token", "counters_read"])]
    wide = part.pivot_table(
        index=["machine", "variant", "config.source"], columns="metric", values="median", sort=False, dropna=False
    )
    wide = wide[wide.index.isin(part.set_index(["machine", "variant", "config.source"]).index)]
    return wide.rename_axis(index=["machine", "case", "read from"], columns=None)


def per_megabyte(rows: pd.DataFrame) -> pd.DataFrame:
    """Joules per token of notebook 09's steps over the MB (1e6 bytes) that crossed for them, useful and wasted.

    Useful is what the router asked for, fetched for it or ahead of it; wasted what was fetched ahead and evicted
    unused. All joules over each of both, so that the two do not add up; and what a MB adds to the resident step.
    """
    joules = decode._measured(rows, "joules_per_token")
    if joules.empty:
        return pd.DataFrame()
    table = joules.set_index(KEYS)["median"]
    resident = float(table[table.index.get_level_values("slots") == joules.slots.max()].iloc[0])
    found = {
        name: decode.steps(rows, name)
        for name in ("link_bytes", "ahead_per_token", "useful_per_token", "wasted_per_token")
    }
    lines = []
    for key, value in table.items():
        if key[0] == joules.slots.max():
            continue
        one = {name: part.set_index(KEYS)["median"].get(key) for name, part in found.items()}
        size = decode.stored(rows, key[1])["gate_up"]  # guesses of this study are of gate and up
        useful = (one["link_bytes"] - (one["ahead_per_token"] - one["useful_per_token"]) * size) / 1e6
        wasted = one["wasted_per_token"] * size / 1e6
        line = {"J per token": value, "useful MB": useful, "wasted MB": wasted, "J per useful MB": value / useful}
        line["J per wasted MB"] = value / wasted if wasted else float("nan")
        line["J per MB over resident"] = (value - resident) / (one["link_bytes"] / 1e6)
        lines.append(dict(zip(("slots", "wire", "schedule", "budget", "from", "guesses"), key)) | line)
    return pd.DataFrame(lines).set_index(["guesses", "slots", "wire", "schedule"]).drop(columns=["budget", "from"])


def ratio(rows: pd.DataFrame) -> str:
    """The chosen way's joules per token over one deadline without guesses, with interval, or that there is none."""
    part = rows[rows.metric == "energy_ratio"]
    if part.empty:
        return "no ratio of joules is recorded"
    row = part.iloc[0]
    where = f"{float(row['config.slots']):.0f} slots ({row.machine}, {row['config.source']})"
    return f"{row['median']:.3f} [{row.low:.3f}, {row.high:.3f}] at {where}"
