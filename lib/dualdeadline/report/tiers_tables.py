"""Published tables and numbers about tiers below host memory, of every machine that measured them."""

from __future__ import annotations

import pandas as pd

from dualdeadline.report import look, text, tiers, tiers_said
from dualdeadline.report.tables import Subject, Table, conditions

AHEAD = ("ms", "time_ratio", "hit_rate", "lead_ms", "read_ms", "useful", "wasted", "late", "bound_ms")


def _rows(about: Subject, *metrics: str) -> pd.DataFrame:
    """Rows of some metrics, of all machines.

    Raises:
        FileNotFoundError, ValueError: as `tables.rows_of`.
    """
    about.rows(tiers.STAGE, list(metrics))
    return tiers.of(tiers.every(about.workspace, about.model), *metrics)


def cold_decode(about: Subject) -> Table:
    """Cold decode steps by layout."""
    shares = ("disk_share", "loop_share", "times_serial", "times_parallel")
    rows = _rows(about, *(f"cold_{name}" for name in ("tokens_per_s", "misses", "disk_gbps", *shares)))
    shown = tiers.cold(rows).reset_index().drop(columns="disk, GB/s")
    names = ("share of the disk", "share of a plain loop", "times scattered", "times parallel")
    for name, places in {"tokens/s": 1, "misses": 0, **dict.fromkeys(names, 2)}.items():
        shown[name] = ["–" if pd.isna(value) else text.value(value, digits=places) for value in shown[name]]
    shown = shown.rename(columns=dict(zip(names, ("of the disk", "of a loop", "scattered", "parallel"))))
    shown["layout"] = shown["layout"].map(look.label)
    caption = (
        "Decode steps whose misses find the disk cold, under recorded routes: tokens per second of the tier alone (no "
        "attention, no products), misses per token; over its time that of the same bytes at the rate of a disk that "
        "always has reads in flight (of the disk), and of a plain loop that reads as many records per layer and waits "
        "for them (of a loop); and how many times as long nine scattered tensors take, read one by one (scattered) and "
        f"by as many threads (parallel). {conditions(rows)} tokens."
    )
    return Table("cold_decode", caption, shown.astype({"slots": str}), rows, wide=True, align="lrlrrrrrr")


def reads_ahead(about: Subject) -> Table:
    """Reads ahead of the router against demand on the cold disk."""
    rows = _rows(about, *(f"tier_{name}" for name in AHEAD))
    rows = rows[rows["config.split"] == "test"]
    found = tiers.settings(rows, "test").reset_index()
    asked = found.lead_ms.notna()
    ahead = found.setting.map(look.label) + ", " + found.ahead.map("{:.0f}".format)
    columns = {
        "machine": found.machine,
        "pause, ms": found.pause_ms.map("{:g}".format),
        "slots": found.slots.map("{:.0f}".format),
        "reads ahead": ahead.where(asked, "none"),
        "ms per token": found.ms.map("{:.1f}".format),
        "over demand": [text.value(*ends) for ends in zip(found.time_ratio, found.low, found.high)],
        "hit rate": found.hit_rate.map("{:.3f}".format),
        "lead / read": (found.lead_ms / found.read_ms).map("{:.1f}".format).where(asked, "–"),
    }
    caption = (
        "Reads ahead, by layers ahead, chosen on validation prompts, measured on test prompts beside demand (mean, 95 "
        "% interval over prompts): host slots over a cold disk, a layer's attention and products a pause of the stated "
        f"length; lead / read: layers ahead x layer time over the time of a read. {conditions(rows)}."
    )
    return Table("reads_ahead", caption, pd.DataFrame(columns), rows, wide=True, align="lrrlrrrr")


SHORT = {
    "demand wait": "demand",
    "late prefetch wait": "late",
    "expert compute": "experts",
    "launch gaps": "gaps",
    "prediction": "guess",
}


def step_parts(about: Subject) -> Table:
    """Where the milliseconds of a step go."""
    rows = _rows(about, "part_ms")
    found = tiers.parts(rows)
    shown = found.loc[:, (found > 0).any()].map(lambda value: "–" if value == 0 else f"{value:.3g}")
    shown["sum"] = found["sum"].map("{:.3f}".format)
    frame = shown.rename_axis(index=["machine", "experts in"]).reset_index().rename(columns=SHORT)
    frame["machine"] = frame["machine"].str.replace("nvidia-h200", "H200").str.replace(r"^local-.*", "CPU", regex=True)
    caption = (
        "Milliseconds of a decode step by part, the step by another clock, and the parts' sum over it: waits for what "
        "was asked for (demand) and for late guesses (late), expert products (experts), launch gaps (gaps). The "
        f"embedded model launched by the host, and captured steps at OLMoE's sizes. {conditions(rows)} steps."
    )
    return Table(
        "step_parts", caption, frame, rows, wide=True, align="lp{0.17\\linewidth}" + "r" * (shown.shape[1]), gap_pt=1.5
    )


def numbers(about: Subject) -> tuple[dict[str, str], pd.DataFrame]:
    """What prose may quote, by name, and the rows behind."""
    rows = _rows(
        about,
        "cold_disk_share",
        "cold_tokens_per_s",
        "cold_misses",
        "cold_disk_gbps",
        "cold_loop_share",
        "cold_times_serial",
        "cold_times_parallel",
        "install_ms",
        "install_ratio",
        "remote_ms",
        "ping_ms",
    )
    cold = tiers.cold(rows).xs(tiers.RECORD, level="layout")
    installs = tiers.installs(rows)["over one copy"]
    installs = installs[installs.index.get_level_values("way").str.startswith("record")]
    remote = tiers.remote(rows).xs("loopback", level="link")
    share = (remote["compute"] / remote["round trip"]).groupby(level="machine").agg(["min", "max"])
    ahead = tiers.settings(_rows(about, *(f"tier_{name}" for name in AHEAD)), "test").reset_index()
    ahead = ahead[ahead.lead_ms.notna()]
    said = {
        "tier_ahead": "; ".join(
            f"{text.value(row.time_ratio, row.low, row.high)} at {row.slots:.0f} slots, pause {row.pause_ms:g} ms"
            for row in ahead.itertuples()
        ),
        "tier_record_share": _by_machine(cold["share of the disk"]),
        "tier_record_loop": _by_machine(cold["share of a plain loop"]),
        "tier_record_times": _by_machine(cold["times scattered"], 1),
        "tier_record_parallel": _by_machine(cold["times parallel"], 1),
        "tier_install": "; ".join(f"{value:.2f} ({key[0]}, {key[1]})" for key, value in installs.items()),
        "tier_remote": ", ".join(f"{ms:.1f} ms for {key[1]}" for key, ms in remote["round trip"].items()),
        "tier_peer": tiers_said.peers(tiers.every(about.workspace, about.model)),
        "tier_remote_compute": "; ".join(f"{low:.0%} to {high:.0%}" for low, high in share.to_numpy()),
    }
    return said, rows


def _by_machine(values: pd.Series, digits: int = 2) -> str:
    """`0.91 to 0.34 at 16 to 48 slots (machine)`: from the fewest slots to the most."""
    out = []
    for machine, part in values.groupby(level="machine"):
        part = part.droplevel("machine").sort_index()
        ends, slots = (part.iloc[0], part.iloc[-1]), (part.index[0], part.index[-1])
        out.append(f"{ends[0]:.{digits}f} at {slots[0]} and {ends[1]:.{digits}f} at {slots[1]} slots ({machine})")
    return "; ".join(out)
