"""Tables and text about the wire format: designs, speeds, encoded against raw blocks and steps."""

from __future__ import annotations

import pandas as pd

from dualdeadline import paths, record, schedule, streams
from dualdeadline.overlap import wired
from dualdeadline.report import look, overlap, text
from dualdeadline.report.kernels import one
from dualdeadline.report.tables import Subject, Table, conditions, pivot

STAGE = "08_wire"
BITS = 3  # width of the first code that blocks and steps use


def bits_per_weight(rows: pd.DataFrame, weights: str, bits: int = BITS) -> float:
    """Bits per weight of the format in use for some weights."""
    return one(rows, "bits_per_weight", f"{bits}-bit runs, 4-bit escapes", weights=weights)


def of(rows: pd.DataFrame, metric: str, shape: str = "olmoe") -> pd.DataFrame:
    """Measured rows of blocks of one shape by (wire, ready, variant)."""
    part = rows[(rows.metric == metric) & (rows.kind == "measured") & (rows["config.shape"] == shape)]
    return part.set_index(["config.wire", "config.ready", "variant"])[["median", "low", "high"]]


def one_record_gbps(rows: pd.DataFrame) -> float:
    """Rate of the decode as blocks use it: one gate/up record by one launch, a program per block."""
    here = {"bits": BITS, "records": 1, "warps": 4, "programs": 0}
    part = rows[(rows.metric == "decode_gbps") & (rows.variant == "device")]
    for key, value in here.items():
        part = part[part[f"config.{key}"] == value]
    return float(part["median"].max())


def step_ratios(rows: pd.DataFrame, kind: str) -> pd.DataFrame:
    """Rows of encoded over raw decode steps, measured (launched by the host) or simulated (one graph)."""
    return rows[rows.metric.str.endswith("step_time_ratio") & (rows.variant == "encoded-raw") & (rows.kind == kind)]


def ratios(rows: pd.DataFrame, kind: str) -> str:
    """`step_ratios` by slots."""
    part = step_ratios(rows, kind)
    return overlap.by_slots(part) if len(part) else "none yet"


def fits(workspace: paths.Workspace, model: str) -> pd.DataFrame:
    """`overlap.wired.fits` of OLMoE's sizes from the records of 07 (copies, windows) and 08 (record sizes)."""
    rows, link = (record.read(workspace, stage, model) for stage in (STAGE, "07_overlap"))
    copies = link[(link.metric == "copy_ms") & (link.variant == "behind") & (link["config.submission"] == "graph")]
    layer = link[(link.metric == "window_ms") & link.variant.str.endswith("graph")]
    sizes = wired.recorded_sizes(rows, "olmoe")
    return wired.fits(sizes, streams.OLMOE.component_bytes, copies, layer)


def designs(rows: pd.DataFrame) -> pd.DataFrame:
    """Bits per weight by design (rows) and weights (columns), the fewest first; computed bounds are marked."""
    part = rows[rows.metric == "bits_per_weight"]
    part = part.assign(design=part.variant + part["config.bound"].eq(True).map({True: " (bound)", False: ""}))
    wide = part.pivot(index="design", columns="config.weights", values="median")
    return wide.sort_values(wide.columns[0]).rename_axis(None, axis=1)


def decode_rates(rows: pd.DataFrame) -> pd.DataFrame:
    """Decode on the GPU, GB/s of output, the best launch of each: from device memory and from pinned host memory."""
    part = rows[rows.metric == "decode_gbps"]
    part = part.assign(records=part["config.records"].map({1.0: "one record", 16.0: "16 records"}).fillna("16 records"))
    part = part.assign(way=part.variant + ", " + part.records, mib=(part["config.raw_bytes"] / 2**20).astype(int))
    wide = part.pivot_table(index=["way", "mib"], columns="config.bits", values="median", aggfunc="max")
    wide.columns = [f"{int(bits)} bits" for bits in wide.columns]
    return wide.rename_axis(index=["from", "MiB each"])


def lines(rows: pd.DataFrame, schedules, shape: str = "olmoe") -> pd.DataFrame:
    """Measured block rows of some schedules; those of encoded experts as variants `<schedule>_coded`."""
    part = rows[(rows.metric == "block_ms") & (rows.kind == "measured") & (rows["config.shape"] == shape)]
    part = part[part.variant.isin(schedules)]
    return part.assign(variant=part.variant + part["config.wire"].map({"raw": "", "coded": "_coded"}))


def against_floor(rows: pd.DataFrame, shape: str) -> pd.DataFrame:
    """Median block, floor of its own copies and what lies between, ms, by wire, ready and schedule."""
    part = rows[(rows.kind == "measured") & (rows["config.shape"] == shape) & rows.variant.isin(schedule.NAMES)]
    return overlap.over_own_floor(part.astype({"config.ready": "Int64"}), "wire", "ready")


def errors(rows: pd.DataFrame) -> pd.DataFrame:
    """`overlap.errors` with raw and coded blocks apart."""
    return overlap.errors(rows, [*overlap.BLOCK_KEYS, "config.wire"])


def steps(rows: pd.DataFrame) -> pd.DataFrame:
    """Decode-step times, raw and coded, and their ratio, by slots, as text."""
    part = rows[rows.metric.str.endswith("step_ms") | rows.metric.str.endswith("step_time_ratio")]
    words = [
        f"{look.label(name)}, {way + ', ' if metric.endswith('step_ms') else ''}{kind}"
        for name, way, metric, kind in zip(part.variant, part["config.wire"], part.metric, part.kind)
    ]
    part = part.assign(line=words)
    return pivot(part, "config.slots", index="line", head="step, ms \\ slots", digits=3).set_index("step, ms \\ slots")


def answer(rows: pd.DataFrame, hidden: pd.DataFrame) -> str:
    """The stage's result in Markdown, from its rows and from `fits`."""
    ms, floor = of(rows, "block_ms")["median"], of(rows, "floor_ms")["median"]
    piped, split = ("coded", 0, "demand_pipelined"), ("coded", 0, "component_priority")
    gap = of(rows, "block_difference_ms").loc["coded", 0, "component_priority-demand_pipelined"]
    share = hidden.set_index(["piece", "wire"]).share["gate_up"]
    return (
        f"{bits_per_weight(rows, 'normal'):.2f} bits per weight instead of 16. Eight missing OLMoE-sized experts: "
        f"{ms[piped]:.3f} ms encoded and pipelined (their copies alone {floor[piped]:.3f}) against "
        f"{ms['raw', 0, 'demand_pipelined']:.3f} ms raw, equal bits; with two deadlines for the last expert "
        f"{ms[split]:.3f} ms, a difference of {text.value(*gap, digits=4)} ms sample by sample. "
        f"Attention and router of a captured stock layer hide {share['coded']:.0%} of an encoded gate/up and "
        f"{share['raw']:.0%} of a raw one. Decode step, encoded over raw: measured, launched by the host, "
        f"{ratios(rows, 'measured')}; simulated, as one CUDA graph, {ratios(rows, 'simulated')}."
    )


def wire_blocks(about: Subject) -> Table:
    """Raw and encoded blocks beside the floor of their copies."""
    rows = about.rows(STAGE, ["block_ms", "floor_ms"], shape="olmoe")
    rows = rows[
        (rows.kind == "measured") & rows.variant.isin(["demand_serial", "demand_pipelined", "component_priority"])
    ]
    word = {"block_ms": "", "floor_ms": ", floor"}
    part = rows.assign(line=rows.variant.map(look.label) + ", " + rows["config.wire"] + rows.metric.map(word))
    caption = (
        "One block of eight OLMoE-sized experts, raw and encoded on the link, by gate/ups already present: median ms "
        f"(20 to 80 %), and the same copies back to back. {conditions(rows)}."
    )
    return Table(
        "wire_blocks", caption, pivot(part, "config.ready", index="line", head="schedule \\ ready"), rows, wide=True
    )


def wire_designs(about: Subject) -> Table:
    """Bits per weight by design."""
    rows = about.rows(STAGE, "bits_per_weight")
    frame = designs(rows)
    shown = frame.apply(lambda column: column.map("{:.2f}".format)).rename_axis("design").reset_index()
    caption = f"Bits per weight by design and weights; bounds count exponents only. {conditions(rows)}."
    return Table("wire_designs", caption, shown, rows, wide=True)
