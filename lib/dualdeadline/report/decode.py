"""Tables and text about the engine's decode steps: speed by slots, what prefetch changes, distance from the floor."""

from __future__ import annotations

import numpy as np
import pandas as pd

from dualdeadline.cost import TransferModel
from dualdeadline.report import overlap
from dualdeadline.report.tables import Subject, Table, conditions

STAGE = "09_decode"
WORDS = {"demand_serial": "one deadline", "staged_barrier": "two deadlines"}
SETTING = "2-0"  # of the guesses that prose and the tables on top tell: two gate/ups a layer, as fixed before


def _measured(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Measured rows of whole steps with a readable name of the variant."""
    part = rows[(rows.metric == metric) & (rows.kind == "measured")]
    if part.empty:
        return part
    plain = part.variant.str.startswith(("no prefetch", "two", "encoded"))
    names = part["config.wire"] + ", " + part["config.schedule"].map(WORDS)
    guessed = ", " + part.variant + " " + part["config.budget"] + " from " + part["config.threshold"].astype(str)
    names += guessed.where(~plain, "")
    return part.assign(name=names, slots=part["config.slots"].astype(int))


def _break_even(part: pd.DataFrame) -> pd.Series:
    name = "config.break_even"
    return part[name] if name in part else pd.Series(float("nan"), part.index)


def control(rows: pd.DataFrame) -> pd.DataFrame:
    """Steps with guesses over those without, by the precision that the live control asks for."""
    part = _measured(rows, "prefetch_time_ratio")
    part = part[_break_even(part).notna()]
    key = ["variant", "slots", "config.threshold", "config.break_even"]
    part = part.assign(variant=part.variant.str.removesuffix("-no prefetch")) if len(part) else part
    frame = (
        part.set_index(key)[["median", "low", "high"]].sort_index() if len(part) else pd.DataFrame(columns=["median"])
    )
    return frame.rename_axis(index=["guesses", "slots", "from", "break-even"]) if len(part) else frame


def _own_link(part: pd.DataFrame) -> pd.Series:
    lanes = part["config.lanes"].astype(float)
    return lanes == lanes.max()  # fewer programs emulate a slower link


def _is(part: pd.DataFrame, name: str) -> pd.Series:
    return part[f"config.{name}"].astype(str) == "True"


def steps(rows: pd.DataFrame, metric: str = "step_ms", warm: bool = False) -> pd.DataFrame:
    """Measured rows of whole steps, over the machine's own link; slots empty at each prompt, or warm."""
    part = _measured(rows, metric)
    if part.empty:
        return part
    part = part[_break_even(part).isna()]
    return part[_own_link(part) & _is(part, "compiled") & (_is(part, "warm") == warm)]


def resident_ms(rows: pd.DataFrame) -> float:
    """Step time with every expert in a slot."""
    part = steps(rows)
    return float(part[part.slots == part.slots.max()]["median"].iloc[0])


def speeds(rows: pd.DataFrame, metric: str = "tokens_per_s", warm: bool = False) -> pd.DataFrame:
    """Tokens/s (or another metric) by variant and slots, the resident run in a column of its own."""
    wide = steps(rows, metric, warm).pivot_table(index="name", columns="slots", values="median", sort=False)
    return wide.sort_index(axis=1).sort_index().rename_axis(index="variant")


def plain(rows: pd.DataFrame) -> pd.DataFrame:
    """Tokens/s without guesses and with experts outside, by wire: the two ends of what was measured."""
    part = steps(rows, "tokens_per_s")
    ends = part.name.isin(["raw, one deadline", "coded, two deadlines"]) & (part.slots < part.slots.max())
    return part[ends].assign(variant=part.name)


def stored(rows: pd.DataFrame, wire: str) -> dict[str, int]:
    """Bytes of an expert's components as they cross."""
    part = rows[(rows.metric == "component_bytes") & rows.variant.str.startswith(f"{wire}, ")]
    return {name.split(", ")[1]: int(size) for name, size in zip(part.variant, part["median"])}


def link_gbps(rows: pd.DataFrame) -> float:
    """Rate of plain copies behind one another in the same run."""
    return float(rows[(rows.metric == "link_gbps") & (rows.variant == "copy")]["median"].iloc[0])


def fetch_gbps(rows: pd.DataFrame, wire: str) -> float:
    """Rate of a kernel's reads of host memory: the slope of the line through single fetches; NaN if not measured."""
    part = rows[(rows.metric == "single_ms") & (rows.variant == "fetch") & (rows["config.wire"] == wire)]
    if part.empty:
        return float("nan")
    return 1e-6 / TransferModel.fit(part["config.bytes"].astype(float), part["median"]).slope_ms


def floors(rows: pd.DataFrame) -> pd.DataFrame:
    """Steps beside resident step plus the link time of their bytes, and their ratio; oracle's beside the longer.

    *at a fetch's rate*: the ratio where the bytes take what single fetches by a kernel take, instead of copies. Steps
    of a run of their own, without a resident step and a link, are left out.
    """
    rows = rows[rows["scope.part"] != "warm"] if "scope.part" in rows else rows
    gbps, frames = link_gbps(rows), []
    for warm in (False, True):
        part = steps(rows, warm=warm)
        part = part[part.variant.isin(["no prefetch", "oracle"])].set_index(["name", "slots"])["median"]
        moved = steps(rows, "link_bytes", warm).set_index(["name", "slots"])["median"]
        hit = steps(rows, "hit_rate", warm).set_index(["name", "slots"])["median"]
        frame = pd.DataFrame({"hit rate": hit, "MB per token": moved / 1e6, "step, ms": part}).dropna()
        frames.append(frame.assign(caches="warm" if warm else "cold").set_index("caches", append=True))
    frame = pd.concat(frames)
    link = frame["MB per token"] / gbps
    frame["resident + link, ms"] = resident_ms(rows) + link
    frame["ratio"] = frame["step, ms"] / frame["resident + link, ms"]
    coded = frame.index.get_level_values("name").str.startswith("coded")
    rate = pd.Series(coded, frame.index).map({wire == "coded": fetch_gbps(rows, wire) for wire in ("raw", "coded")})
    frame["at a fetch's rate"] = frame["step, ms"] / (resident_ms(rows) + frame["MB per token"] / rate)
    frame["to the longer of both"] = frame["step, ms"] / link.clip(lower=resident_ms(rows))
    return frame.sort_values(["caches", "slots", "name"], ascending=[True, False, True])


def ratios(rows: pd.DataFrame, wire: str, column: str = "ratio") -> pd.Series:
    """Steps without prediction over resident step plus link time, of one wire; or another column of `floors`."""
    frame = floors(rows)[column]
    names = frame.index.get_level_values("name")
    return frame[names.str.startswith(wire) & ~names.str.contains("oracle")]


def reads(rows: pd.DataFrame) -> str:
    """What a kernel's reads of host memory make of a step's distance from its floor: a sentence, or nothing."""
    gbps = [fetch_gbps(rows, wire) for wire in ("raw", "coded")]
    if not np.isfinite(gbps).all():
        return ""
    raw, coded = (ratios(rows, wire, "at a fetch's rate") for wire in ("raw", "coded"))
    return (
        f" A kernel that fetches reads {gbps[0]:.1f} (raw) and {gbps[1]:.1f} GB/s (encoded) beside the fixed cost of a "
        f"launch, copies move {link_gbps(rows):.1f}; at the former rates the ratios are {raw.min():.2f} to "
        f"{raw.max():.2f} and {coded.min():.2f} to {coded.max():.2f}."
    )


def spread(rows: pd.DataFrame, layers: int) -> pd.DataFrame:
    """The map: what two deadlines, encoding and guesses change over slower links and with slower layers.

    GB/s is what raw steps with one deadline reach: their bytes over their time beyond the resident step. The window is
    a resident layer's time; a gate/up that takes many of them can be hidden in part only.
    """
    part = _measured(rows, "step_ms")
    part = part[~_is(part, "warm")].assign(plain=~_is(part, "compiled"), lanes=part["config.lanes"].astype(float))
    resident = part[part.slots == part.slots.max()].groupby("plain")["median"].first()
    moved = _measured(rows, "link_bytes")
    moved = moved.assign(plain=~_is(moved, "compiled"), lanes=moved["config.lanes"].astype(float))[~_is(moved, "warm")]
    moved = moved.groupby(["slots", "lanes", "plain", "name"])["median"].first()
    size = {wire: stored(rows, wire)["gate_up"] for wire in ("raw", "coded")}
    out = []
    for (slots, lanes, plain), here in part[part.slots.isin(_map_slots(part))].groupby(["slots", "lanes", "plain"]):
        ms = here.drop_duplicates("name").set_index("name")["median"]
        bytes_ = moved[slots, lanes, plain, "raw, one deadline"]
        gbps = bytes_ / (ms["raw, one deadline"] - resident[plain]) / 1e6
        line = {
            "slots": slots,
            "layers": "plain" if plain else "compiled",
            "GB/s": gbps,
            "raw": ms["raw, one deadline"],
        }
        for wire in ("raw", "coded"):
            two = ms[f"{wire}, two deadlines"]
            guessed = ms[
                [name for name in ms.index if name.startswith(f"{wire}, two deadlines, residual_gate {SETTING}")]
            ]
            line[f"{wire}: two deadlines"] = two / ms[f"{wire}, one deadline"] - 1
            line[f"{wire}: guesses"] = guessed.iloc[0] / two - 1 if len(guessed) else float("nan")
            line[f"{wire}: gate/up in windows"] = size[wire] / gbps / 1e6 / (resident[plain] / layers)
        line["encoding"] = ms["coded, two deadlines"] / ms["raw, two deadlines"] - 1
        out.append(line)
    key = ["slots", "layers", "GB/s"]
    return pd.DataFrame(out).sort_values(key).set_index(key).rename(columns={"raw": "raw, one deadline, ms"})


def _map_slots(part: pd.DataFrame) -> list[int]:
    most = part["config.slots"].astype(int).max()
    slow = part[~_own_link(part) | ~_is(part, "compiled")]
    return sorted(set(slow["config.slots"].astype(int)) - {most})


def energy(rows: pd.DataFrame) -> pd.DataFrame:
    """Joules per token of some variants, as counted."""
    part = _measured(rows, "joules_per_token")
    columns = {"median": "J per token", "config.source": "read from", "n": "tokens"}
    return part.set_index(["name", "slots"])[list(columns)].rename(columns=columns)


def errors(rows: pd.DataFrame) -> pd.DataFrame:
    """Measured and simulated steps side by side, and how far the simulated one is off, in percent."""
    keys = ["config.slots", "config.wire", "config.schedule"]
    guessed = rows[rows.metric == "simulated_step_ms"].astype({"config.slots": int}).set_index(keys)["median"]
    plain = steps(rows).astype({"config.slots": int})
    plain = plain[plain.variant == "no prefetch"].set_index(keys)["median"]
    frame = pd.DataFrame({"measured": plain, "simulated": guessed}).dropna()
    frame["off by, %"] = 100 * (frame.simulated / frame.measured - 1)
    return frame.rename_axis(index=["slots", "wire", "schedule"]).sort_index()


def prefetches(rows: pd.DataFrame) -> pd.DataFrame:
    """What each prefetch changed against the same without, with interval, and what it fetched per token."""
    part = steps(rows, "prefetch_difference_ms")
    part = part.assign(variant=part.variant.str.removesuffix("-no prefetch"))
    key = ["variant", "slots", "config.budget", "config.threshold"]
    frame = part.set_index(key)[["median", "low", "high"]]
    frame["share of the step"] = (
        steps(rows, "prefetch_time_ratio").assign(variant=part.variant.to_numpy()).set_index(key)["median"] - 1
    )
    for name in ("ahead", "useful", "wasted"):
        found = steps(rows, f"{name}_per_token")
        frame[name] = found[found.variant.isin(part.variant)].set_index(key)["median"]
    frame = frame.rename_axis(index=["guesses", "slots", "budget", "from"]).sort_index()
    return frame.rename(columns={"median": "ms"})


def best(rows: pd.DataFrame, slots: int, predictor: str = "no prefetch", warm: bool = False) -> float:
    """Tokens/s of the fastest variant with so many slots: without guesses, or with a predictor's as of `SETTING`."""
    part = steps(rows, "tokens_per_s", warm)
    part = part[(part.slots == slots) & (part.variant == predictor)]
    return float(part[(predictor == "no prefetch") | (part["config.budget"] == SETTING)]["median"].max())


def hit_rate(rows: pd.DataFrame, slots: int, warm: bool = False) -> float:
    """Share of accesses that hit with so many slots, without prediction."""
    part = steps(rows, "hit_rate", warm)
    return float(part[(part.slots == slots) & (part.variant == "no prefetch")]["median"].iloc[0])


def chosen(rows: pd.DataFrame, metric: str, warm: bool = False, **config) -> pd.DataFrame:
    """Rows of a difference or ratio with these settings, `variant` perhaps among them."""
    part = steps(rows, metric, warm)
    for name, value in config.items():
        part = part[part[name if name == "variant" else f"config.{name}"] == value]
    return part


def wrong(rows: pd.DataFrame) -> pd.DataFrame:
    """What random guesses, which the live control stops, do to a step: in the main run, else in the control's own."""
    own = chosen(rows, "prefetch_time_ratio", variant="random-no prefetch", budget=SETTING)
    part = _measured(rows, "prefetch_time_ratio")
    return own if len(own) else part[(part.variant == "random-no prefetch") & _break_even(part).notna()]


def by_slots(rows: pd.DataFrame, metric: str, warm: bool = False, **config) -> str:
    """A difference or ratio by slots, each with its interval; of several settings the first."""
    return overlap.by_slots(chosen(rows, metric, warm, **config))


def answer(rows: pd.DataFrame) -> str:
    """The stage's result in Markdown."""
    if not len(steps(rows)):
        return "No decode step of the engine has been measured yet; needed: this notebook run on a GPU."
    counts = sorted(set(steps(rows).slots))

    def said(predictor: str, warm: bool) -> str:
        return ", ".join(f"{best(rows, count, predictor, warm):.0f} at {count}" for count in counts[:-1])

    raw, coded = ratios(rows, "raw"), ratios(rows, "coded")
    return (
        f"Tokens/s without prediction, slots empty at each prompt: {said('no prefetch', False)} of {counts[-1]} slots, "
        f"{best(rows, counts[-1]):.0f} with everything resident; with the predictor's guesses "
        f"{said('residual_gate', False)}. With slots that stay warm {said('no prefetch', True)}; with guesses "
        f"{said('residual_gate', True)}. Without prediction a step takes {raw.min():.2f} to {raw.max():.2f} (raw) and "
        f"{coded.min():.2f} to {coded.max():.2f} (encoded) times the resident step plus the link time of its bytes "
        f"({link_gbps(rows):.1f} GB/s).{reads(rows)} Two deadlines change an encoded step by "
        f"{by_slots(rows, 'deadline_difference_ms', wire='coded')} ms. Encoded over raw: "
        f"{by_slots(rows, 'wire_time_ratio')}. Sizes are OLMoE's, weights random, routes the embedded model's."
    )


def engine_steps(about: Subject) -> Table:
    """Measured decode steps of the engine by slots."""
    rows = about.rows(STAGE, ["tokens_per_s"])
    part = speeds(rows).map(lambda value: "" if pd.isna(value) else f"{value:.0f}")
    part.columns = [str(column) for column in part.columns]
    part.index = part.index.str.replace(" from 0.7", "").str.replace("residual_gate", "ResidualGate")
    caption = (
        "Tokens/s of the engine by slots per layer: stock transformers code of OLMoE's sizes, random weights, driven "
        f"by the embedded model's recorded routes, caches empty at each prompt (mean over prompts). With guesses: "
        f"gate/ups and downs ahead per layer, from probability 0.7 where none is given. {conditions(rows)}."
    )
    return Table("engine_steps", caption, part.rename_axis("variant").reset_index(), rows, wide=True)
