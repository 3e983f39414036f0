"""Tables, figures and text about tiers below host memory: layouts, reads ahead, a remote worker, where time goes."""

from __future__ import annotations

import json

import pandas as pd
from matplotlib import pyplot as plt

from dualdeadline import paths, record
from dualdeadline.attribution import PARTS
from dualdeadline.report import look
from dualdeadline.report.figures import curves, title
from dualdeadline.report.replay import COLD

STAGE, SCATTERED, RECORD = "10_tiers", "scattered, serial", "record, raw"
SLOTS, DEPTHS, BUDGET = (16, 32, 48), (1, 2, 3), 8


def published() -> dict:
    """The second study's figures."""
    return json.loads((paths.MANIFESTS / "published_tiers.json").read_text(encoding="utf-8"))


def every(workspace: paths.Workspace, model: str) -> pd.DataFrame:
    """Rows of all machines: a disk is a machine's own, so that none stands for another."""
    rows = record.visible(workspace, STAGE)
    return record.spread(rows[rows.model == model].reset_index(drop=True))


def of(rows: pd.DataFrame, *metrics: str) -> pd.DataFrame:
    """Rows of some metrics, ordered by machine."""
    return rows[rows.metric.isin(metrics)].sort_values("machine", kind="stable")


def replayed(workspace: paths.Workspace, model: str, corpus: str) -> pd.DataFrame:
    """Hit rates and recall as notebooks 04 and 05 recorded them, beside the second study's."""
    said, test = published(), {"corpus": corpus, "split": "test"}
    hits = _fixed(record.read(workspace, "05_replay", model), "hit_rate", {**COLD, **test, "order": "token"})
    found = _fixed(record.read(workspace, "04_evaluation", model), "recall", {**test, "budget": BUDGET})
    lines = [
        (f"hit rate, {look.label(name)}", f"{count} slots", _value(hits, name, "slots", count), theirs.get(str(count)))
        for name in ("lru", "lfu", "belady")
        for theirs in [said["hit_rate"].get(name, {})]
        for count in SLOTS
    ]
    lines += [
        (
            f"recall@8, {look.label(name)}",
            f"depth {depth}",
            _value(found, name, "horizon", depth),
            theirs.get(str(depth)),
        )
        for name in ("transition", "probe", "gate_ahead", "residual_gate")
        for theirs in [said["recall_at_8"].get(name, {})]
        for depth in DEPTHS
    ]
    frame = pd.DataFrame(lines, columns=["what", "at", "here", "published"])
    wide = frame.set_index(["what", "at"]).unstack("at")
    return wide.loc[:, wide.notna().any() | (wide.columns.get_level_values(0) == "here")]


def _fixed(rows: pd.DataFrame, metric: str, fixed: dict) -> pd.DataFrame:
    rows = rows[rows.metric == metric] if len(rows) else rows
    for key, value in fixed.items():
        rows = rows[rows[f"config.{key}"] == value] if len(rows) else rows
    return rows


def _value(rows: pd.DataFrame, variant: str, key: str, wanted: int) -> float:
    part = rows[(rows.variant == variant) & (rows[f"config.{key}"] == wanted)] if len(rows) else rows
    return float(part["median"].iloc[0]) if len(part) else float("nan")


def reads(rows: pd.DataFrame) -> pd.DataFrame:
    """GB/s of direct reads by size (KiB) and reads in flight."""
    part = of(rows, "read_gbps")
    part = part.assign(kib=part["config.size_bytes"].astype(float) / 1024, depth=part["config.depth"].astype(int))
    return part.pivot_table(index=["machine", "kib"], columns="depth", values="median").rename_axis(
        index=["machine", "KiB"]
    )


def _wide(part: pd.DataFrame, metrics: dict[str, str], index: dict[str, str]) -> pd.DataFrame:
    """A column per metric and an index of some columns of the rows, both under their names for readers."""
    frame = part.pivot_table(index=list(index), columns="metric", values="median", sort=False)
    return (
        frame.reindex(columns=list(metrics))
        .rename(columns=metrics)
        .rename_axis(index=list(index.values()), columns="metric")
    )


def layouts(rows: pd.DataFrame) -> pd.DataFrame:
    """Milliseconds and GB/s per cold expert by layout, and what kept the page cache out."""
    columns = {"expert_ms": "ms", "expert_gbps": "GB/s of weights", "expert_disk_gbps": "GB/s read"}
    part = of(rows, *columns)
    index = {"machine": "machine", "config.expert": "expert", "variant": "layout"}
    kept = part.drop_duplicates(["machine", "variant"]).rename(columns=index).set_index(list(index.values()))
    cache = kept["config.cache"].str.split(";").str[:2].str.join(";")
    return _wide(part, columns, index).assign(cache=cache)


def installs(rows: pd.DataFrame) -> pd.DataFrame:
    """Milliseconds to install an expert that lies in host memory, over one contiguous copy of as many bytes."""
    columns = {"install_ms": "ms", "install_ratio": "over one copy"}
    index = {"machine": "machine", "config.expert": "expert", "variant": "way"}
    return _wide(of(rows, *columns), columns, index)


def cold(rows: pd.DataFrame) -> pd.DataFrame:
    """Cold decode by layout and slots: tokens/s of the tier alone; bytes at the rate of a disk that always has reads in
    flight, and a plain loop of the same reads, over its time; and times scattered tensors, serial and parallel."""
    columns = {
        "cold_tokens_per_s": "tokens/s",
        "cold_misses": "misses",
        "cold_disk_gbps": "disk, GB/s",
        "cold_disk_share": "share of the disk",
        "cold_loop_share": "share of a plain loop",
        "cold_times_serial": "times scattered",
        "cold_times_parallel": "times parallel",
    }
    part = of(rows, *columns)
    part = part.assign(slots=part["config.slots"].astype(int))
    index = {"machine": "machine", "slots": "slots", "variant": "layout"}
    return _wide(part, columns, index).sort_index(level=[0, 1])


def draw_cold(rows: pd.DataFrame):
    """Tokens/s by slots, a panel per machine and a line per layout; the figure."""
    part = of(rows, "cold_tokens_per_s")
    part = part.assign(**{"config.slots": part["config.slots"].astype(int), "low": float("nan")})
    machines = sorted(set(part.machine))
    fig, axes = plt.subplots(1, len(machines), figsize=(3.6 * len(machines) + 0.8, 3.0), squeeze=False)
    for name, ax in zip(machines, axes[0], strict=True):
        here = part[part.machine == name]
        curves(here, "config.slots", ax)
        ax.set(xlabel="slots per layer (of 64)", ylabel="tokens/s, the tier alone", ylim=(0, None))
        ax.set_title(title(here, f"Cold decode, {name}, {', '.join(sorted(set(here['config.expert'])))}"), fontsize=8)
    axes[0, 0].legend()
    return fig


def settings(rows: pd.DataFrame, *splits: str) -> pd.DataFrame:
    """Reads ahead by setting: ms per token, ratio to demand with interval, and what the accounting says of it."""
    keys = ["machine", "config.pause_ms", "config.slots", "variant", "config.ahead", "config.rule"]
    rows = rows[rows["config.split"].isin(splits)]
    part = of(rows, "tier_ms").set_index(keys)
    frame = pd.DataFrame({"ms": part["median"]})
    for name in ("time_ratio", "hit_rate", "lead_ms", "read_ms", "useful", "wasted", "late", "bound_ms"):
        found = of(rows, f"tier_{name}").set_index(keys)
        frame[name] = found["median"]
        if name == "time_ratio":
            frame[["low", "high"]] = found[["low", "high"]]
    frame.loc[frame.time_ratio.isna(), ["time_ratio", "lead_ms"]] = [1.0, float("nan")]
    return frame.rename_axis(index=["machine", "pause_ms", "slots", "setting", "ahead", "rule"]).sort_index(
        level=[0, 1, 2]
    )


def border(rows: pd.DataFrame) -> pd.DataFrame:
    """Settings that read ahead: over = d x layer time over fetch time, in_time whether that reaches 1."""
    splits = sorted(set(of(rows, "tier_ms")["config.split"]))
    frame = pd.concat([settings(rows, split).assign(split=split) for split in splits])
    frame = frame[frame.lead_ms.notna()].reset_index()
    return frame.assign(over=frame.lead_ms / frame.read_ms, in_time=frame.lead_ms >= frame.read_ms)


def draw_border(rows: pd.DataFrame, axes) -> None:
    """Left: d x layer time against fetch time, with the border between enough and too little. Right: what it gave."""
    found = border(rows)
    for name, part in found.groupby("setting"):
        axes[0].plot(part.read_ms, part.lead_ms, ".", color=look.colour(name), label=look.label(name))
        axes[1].plot(part.over, part.time_ratio, ".", color=look.colour(name))
    most = max(found.read_ms.max(), 1.0)
    axes[0].plot([0, most], [0, most], color=look.BLACK, lw=0.8, label="border: equal")
    axes[0].set(xlabel="time of a read, ms", ylabel="depth x layer time, ms")
    axes[1].axvline(1.0, color=look.BLACK, lw=0.8)
    axes[1].axhline(1.0, color=look.GREY, lw=0.8, linestyle=look.DASHED)
    axes[1].set(xlabel="depth x layer time over time of a read", ylabel="ms per token, over demand", xscale="log")


def engine(rows: pd.DataFrame) -> pd.DataFrame:
    """Whole steps of the engine over an SSD, beside host memory."""
    columns = {
        "engine_ms": "ms per token",
        "engine_tokens_per_s": "tokens/s",
        "engine_hit_rate": "hits in slots",
        "engine_reads": "reads",
        "engine_ssd_bytes": "bytes read",
        "engine_step_share": "plain reads over the step",
        "engine_net_share": "over what host memory does not take",
    }
    return _wide(of(rows, *columns), columns, {"machine": "machine", "variant": "experts in"})


def remote(rows: pd.DataFrame) -> pd.DataFrame:
    """Round trips by link and rows, part by part, beside the ping and the second study's."""
    part = of(rows, "remote_ms", "ping_ms")
    part = part.assign(rows_=part["config.rows"].astype(int), link=part["config.link"])
    wide = part[part.rows_ > 0].pivot_table(
        index=["machine", "link", "rows_"], columns="variant", values="median", sort=False
    )
    ping = part[part.metric == "ping_ms"].set_index(["machine", "link"])["median"]
    wide["ping"] = [ping.get(key[:2], float("nan")) for key in wide.index]
    said = published()["remote_ms"]
    wide["published"] = [said.get(str(key[2]), float("nan")) for key in wide.index]
    first = ["round trip", "ping", "published"]
    return wide[first + [name for name in wide.columns if name not in first]].rename_axis(
        index=["machine", "link", "rows"]
    )


def parts(rows: pd.DataFrame) -> pd.DataFrame:
    """Milliseconds of a step by part, the step, and their sum over the step; a line per configuration."""
    part = of(rows, "part_ms")
    wide = part.pivot_table(index=["machine", "variant"], columns="config.part", values="median", sort=False)
    wide = wide[[name for name in (*PARTS, "step") if name in wide]]
    return wide.assign(sum=wide[list(PARTS)].sum(axis=1) / wide.step).rename_axis(
        index=["machine", "case"], columns=None
    )


def draw_parts(rows: pd.DataFrame, ax) -> None:
    """A stacked bar per configuration: shares of its step, and the milliseconds."""
    frame = parts(rows)
    left = pd.Series(0.0, frame.index)
    places = range(len(frame))[::-1]
    shades = (look.SKY, look.BLUE, look.GREEN, look.VERMILLION, look.ORANGE, look.WINE, look.PURPLE, look.OLIVE)
    for name, shade in zip(PARTS, (*shades, look.SILVER, look.GREY), strict=True):
        share = frame[name] / frame.step
        ax.barh(places, share, left=left, color=shade, label=name)
        left += share
    ax.set_yticks(places, [f"{case}\n{machine}, {ms:.3g} ms" for (machine, case), ms in frame.step.items()], fontsize=6)
    ax.axvline(1.0, color=look.BLACK, lw=0.8)
    ax.set(xlabel="share of the step, measured by another clock")
