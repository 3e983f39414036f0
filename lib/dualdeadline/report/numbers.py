"""Numbers that prose may quote: from records, from the protocol, or from the model's description."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from dualdeadline import manifest, record, schedule
from dualdeadline.overlap import Setting
from dualdeadline.report import (
    confirmation_said, decode, decode_large, decode_beside, kernels, latex, overlap, published, routing, runtime, text,
    tiers_tables, verdicts, wire,
)
from dualdeadline.report.replay import COLD
from dualdeadline.report.tables import MODEL, Subject, conditions

BUDGET, SLOTS = 8, 32  # of the headline numbers: as many experts as are routed, and half of the experts


@dataclass(frozen=True)
class Number:
    """`name` becomes a LaTeX command; `source` says what made it and, for records, of which kind it is."""

    name: str
    text: str
    source: str


def every(about: Subject) -> list[Number]:
    """All of them, in a fixed order."""
    return [
        *_protocol(),
        *_model(about),
        *_training(),
        *_recall(about),
        *_cache(about),
        *_kernels(about),
        *_blocks(about),
        *_deadlines(about),
        *_wire(about),
        *_engine(about),
        *_tiers(about),
        *_confirmation(about),
        *_verdicts(about),
        *_run(about),
        _commit(about),
    ]


def by_name(about: Subject) -> dict[str, str]:
    """`{name: text}` of `every`."""
    return {number.name: number.text for number in every(about)}


def frame(about: Subject):
    """All of them for display."""
    said = pd.DataFrame([(n.name, n.text, n.source) for n in every(about)], columns=["number", "text", "made by"])
    return said.style.hide(axis="index").set_uuid("numbers")


def _protocol() -> list[Number]:
    protocol = manifest.read_yaml("protocol.yaml")
    sampling, horizons = protocol["decoding"]["sampling"], protocol["grid"]["horizons"]
    said = {
        "protocol_fixed": protocol["fixed"],
        "protocol_amendments": text.count(len(protocol["amendments"])) if protocol["amendments"] else "none",
        "resamples": text.count(protocol["statistics"]["resamples"]),
        "new_tokens": text.count(protocol["decoding"]["new_tokens"]),
        "min_new_tokens": text.count(protocol["decoding"]["min_new_tokens"]),
        "temperature": str(sampling["temperature"]),
        "top_p": str(sampling["top_p"]),
        "horizon_first": str(min(horizons)),
        "horizon_last": str(max(horizons)),
    }
    return [Number(name, value, "data_manifests/protocol.yaml") for name, value in said.items()]


def _model(about: Subject) -> list[Number]:
    model = manifest.read_yaml("models.yaml")[about.model]
    return [Number(f"model_{key.lower()}", text.count(model[key]), "data_manifests/models.yaml") for key in "LEKHF"]


def _training() -> list[Number]:
    """What training took and reached: always the embedded model's."""
    rows = routing.training_records(MODEL)
    rows = rows[rows["metric"].isin(["bits_per_byte", "tokens_seen", "seconds"])]
    one = rows.set_index(["metric", "variant"])["median"]
    said = {
        "trained_tokens": f"{one['tokens_seen', 'training'] / 1e6:,.0f} million",
        "trained_minutes": text.value(one["seconds", "training"] / 60, digits=1),
        "bits_per_byte": text.value(one["bits_per_byte", "macro"], digits=2),
    }
    return [Number(name, value, latex.made_by(rows)) for name, value in said.items()]


def _said(rows: pd.DataFrame, variant: str) -> str:
    row = rows[rows["variant"] == variant]
    if len(row) != 1:
        raise ValueError(f"{len(row)} rows for {variant}; needed: exactly one")
    return text.value(*row.iloc[0][["median", "low", "high"]])


def _recall(about: Subject) -> list[Number]:
    rows = about.rows("04_evaluation", "recall", horizon=1, budget=BUDGET, **about.test)
    source = latex.made_by(rows)
    shown = {f"recall_{name}": _said(rows, name) for name in ("gate_ahead", "shared_mlp", "residual_gate")}
    shown |= {"recall_budget": str(BUDGET), "recall_conditions": conditions(rows).lower()}
    return [Number(name, value, source) for name, value in shown.items()]


def _cache(about: Subject) -> list[Number]:
    rows = about.rows("05_replay", "hit_rate", slots=SLOTS, **COLD, **about.test)
    source = latex.made_by(rows)
    shown = {f"hit_{name}": _said(rows, name) for name in ("lru", "belady")}
    shown |= {"cache_slots": str(SLOTS), "hit_conditions": conditions(rows).lower()}
    return [Number(name, value, source) for name, value in shown.items()]


def _kernels(about: Subject) -> list[Number]:
    """One token of a resident block, the fetch and a predictor's step, at OLMoE's sizes."""
    rows = about.rows("06_kernels", ["resident_ms", "resident_gbps", "memory_gbps", "fetch_gbps", "predictor_ms"])
    here = {"shape": "olmoe", "tokens": 1}
    step = rows[(rows["metric"] == "predictor_ms") & (rows["variant"] == "one launch")]
    step = step[step["config.shape"] == "olmoe"]["median"]
    said = {
        "kernel_ms": f"{kernels.one(rows, 'resident_ms', 'fused', **here):.4f}",
        "kernel_gbps": text.count(round(kernels.one(rows, "resident_gbps", "fused", **here))),
        "memory_gbps": text.count(round(kernels.one(rows, "memory_gbps", "copy"))),
        "fetch_gbps": text.value(rows[rows["metric"] == "fetch_gbps"]["median"].max(), digits=1),
        "predictor_ms": f"{step.max():.4f}",
    }
    return [Number(name, value, latex.made_by(rows)) for name, value in said.items()]


def _blocks(about: Subject) -> list[Number]:
    """Eight missing experts of OLMoE's size by schedule, their floor, and the simulator's error in CUDA graphs."""
    rows = about.rows("07_overlap", ["block_ms", "floor_ms", "block_difference_ms"])
    here = overlap.of_setting(rows[(rows["kind"] == "measured") & (rows["config.ready"] == 0)], "olmoe", Setting())
    gap = here[here["metric"] == "block_difference_ms"].set_index("variant")[["median", "low", "high"]]
    ms = here[here["metric"] == "block_ms"].set_index("variant")["median"]
    least = here[here["metric"] == "floor_ms"]["median"].min()
    found = overlap.errors(rows)
    graph = found[found["config.submission"] == "graph"]["error"].abs()
    said = {f"block_{name}": f"{ms[name]:.3f}" for name in schedule.NAMES if name in ms} | {
        "block_floor": f"{least:.3f}",
        "staged_gain_ms": text.value(*gap.loc["staged_pipelined-demand_pipelined"]),
        "priority_gain_ms": text.value(*gap.loc["component_priority-demand_pipelined"]),
        "simulator_median": f"{graph.median():.1%}",
        "simulator_worst": f"{graph.max():.1%}",
        "simulator_configurations": text.count(len(graph)),
        "simulator_median_all": f"{found['error'].abs().median():.1%}",
        "step_error_worst": f"{_step_error(about):.0f}",
        "simulator_worst_all": f"{found['error'].abs().max():.1%}",
    }
    return [Number(name, value, latex.made_by(rows)) for name, value in said.items()]


def _wire(about: Subject) -> list[Number]:
    """Bits per weight, the decode's rate, encoded against raw blocks and steps, and what a layer's time hides."""
    kinds = [
        "bits_per_weight",
        "block_ms",
        "block_difference_ms",
        "floor_ms",
        "decode_gbps",
        "step_time_ratio",
        "simulated_step_time_ratio",
    ]
    rows = about.rows(wire.STAGE, kinds)
    ms, floor = (wire.of(rows, metric)["median"] for metric in ("block_ms", "floor_ms"))
    split = wire.of(rows, "block_difference_ms").loc["coded", 0, "component_priority-demand_pipelined"]
    share = wire.fits(about.workspace, about.model).set_index(["piece", "wire"])
    said = {
        "wire_bits": f"{wire.bits_per_weight(rows, 'normal'):.2f}",
        "wire_bits_model": f"{wire.bits_per_weight(rows, about.model):.2f}",
        "wire_entropy": f"{kernels.one(rows, 'bits_per_weight', 'entropy', weights='normal'):.2f}",
        "wire_raw_ms": f"{ms['raw', 0, 'demand_pipelined']:.3f}",
        "wire_coded_ms": f"{ms['coded', 0, 'demand_pipelined']:.3f}",
        "wire_split_ms": f"{ms['coded', 0, 'component_priority']:.3f}",
        "wire_split_gain_ms": text.value(*split),
        "wire_coded_ready_ms": f"{ms['coded', 4, 'demand_pipelined']:.3f}",
        "wire_coded_floor": f"{floor['coded', 0, 'demand_pipelined']:.3f}",
        "wire_decode_gbps": text.count(round(wire.one_record_gbps(rows))),
        "wire_copy_raw_ms": f"{share.copy_ms['gate_up', 'raw']:.3f}",
        "wire_copy_coded_ms": f"{share.copy_ms['gate_up', 'coded']:.3f}",
        "wire_window_ms": f"{share.window_ms['gate_up', 'raw']:.3f}",
        "wire_step_ratios": wire.ratios(rows, "measured"),
        "wire_step_simulated": wire.ratios(rows, "simulated"),
    }
    return [Number(name, value, latex.made_by(rows)) for name, value in said.items()]


def _engine(about: Subject) -> list[Number]:
    """Tokens/s of the engine, its distance from the floor, and what deadlines, wire format and guesses change."""
    kinds = ["step_ms", "tokens_per_s", "hit_rate", "link_bytes", "link_gbps", "deadline_difference_ms",
             "wire_time_ratio", "prefetch_difference_ms", "prefetch_time_ratio", "baseline_step_ms",
             "equal_logit_steps", "simulated_step_ms", "reserved_bytes", "single_ms"]
    rows = about.rows(decode.STAGE, kinds)
    counts, other = sorted(set(decode.steps(rows).slots)), decode_beside.baselines(rows)["tokens/s"]

    def speeds(predictor: str = "no prefetch", warm: bool = False) -> str:
        return ", ".join(f"{decode.best(rows, count, predictor, warm):.0f} at {count}" for count in counts[:-1])

    def hits(warm: bool) -> str:
        return ", ".join(f"{decode.hit_rate(rows, count, warm):.3f}" for count in counts[:-1])

    said = {
        "engine_resident": f"{decode.best(rows, counts[-1]):.0f}",
        "engine_speeds": speeds(),
        "engine_hits": hits(False),
        "engine_warm_speeds": speeds(warm=True),
        "engine_warm_guided": speeds("residual_gate", True),
        "engine_warm_hits": hits(True),
        "engine_link": f"{decode.link_gbps(rows):.1f}",
        "engine_reads": decode.reads(rows),
        "engine_deadlines": decode.by_slots(rows, "deadline_difference_ms", wire="raw"),
        "engine_deadlines_coded": decode.by_slots(rows, "deadline_difference_ms", wire="coded"),
        "engine_wire": decode.by_slots(rows, "wire_time_ratio"),
        "engine_stock": f"{other.iloc[:3].max():.0f}",
        "engine_stock_graph": f"{other[other.index != 'accelerate cpu_offload'].max():.0f}",
        "engine_accelerate": f"{other['accelerate cpu_offload']:.1f}" if "accelerate cpu_offload" in other else "–",
        "engine_equal_steps": text.count(int(rows[rows.metric == "equal_logit_steps"]["median"].sum())),
        "engine_off": f"{decode.errors(rows)['off by, %'].abs().median():.1f}",
    }
    large = record.read(about.workspace, decode.STAGE, decode_large.MODEL)
    said |= {"engine_random": overlap.by_slots(decode.wrong(rows)), "engine_vram": decode_beside.reserved(rows),
             "engine_large": decode_large.answer(large)}
    labels = {"guided": "residual_gate", "free": "gate_ahead", "oracle": "oracle"}
    for name, label in labels.items():
        said[f"engine_{name}"] = decode.by_slots(
            rows, "prefetch_time_ratio", variant=f"{label}-no prefetch", budget=decode.SETTING
        )
    for wire in ("raw", "coded"):
        ratio = decode.ratios(rows, wire)
        said[f"engine_floor_{wire}"] = f"{ratio.min():.2f} to {ratio.max():.2f}"
    return [Number(name, value, latex.made_by(rows)) for name, value in said.items()]


def _tiers(about: Subject) -> list[Number]:
    """Tiers below host memory, by machine."""
    said, rows = tiers_tables.numbers(about)
    return [Number(name, value, latex.made_by(rows)) for name, value in said.items()]


def _confirmation(about: Subject) -> list[Number]:
    """The second architecture."""
    said, rows = confirmation_said.numbers(about)
    return [Number(name, value, latex.made_by(rows)) for name, value in said.items()]


def _deadlines(about: Subject) -> list[Number]:
    """What two deadlines change in measured decode steps, and what the prefetches behind H3 did."""
    rows = about.rows("07_overlap", ["step_difference_ms", "prefetch_difference_ms"])
    rows = rows[rows["kind"] == "measured"]
    gap = rows[rows["variant"] == "staged_pipelined-demand_pipelined"]
    ahead = rows[rows["metric"] == "prefetch_difference_ms"]
    said = {
        "deadline_steps": overlap.by_slots(gap),
        "prefetch_cases": text.count(len(ahead)),
        "prefetch_slower": text.count(int((ahead["low"] > 0).sum())),
        "prefetch_faster": text.count(int((ahead["high"] < 0).sum())),
    }
    return [Number(name, value, latex.made_by(rows)) for name, value in said.items()]


def _step_error(about: Subject) -> float:
    """Largest distance of a simulated decode step from a measured one, percent."""
    errors = overlap.step_errors(about.rows("07_overlap", ["step_ms", "simulated_step_ms"]))
    return float(errors.xs("off by, %", axis=1, level=1).abs().max(axis=None))


def _verdicts(about: Subject) -> list[Number]:
    said, unanswered = [], []
    for name in verdicts.hypotheses():
        lines, rows = verdicts.comparisons(about.workspace, name, about.model)
        source = latex.made_by(rows) if len(rows) else "data_manifests/protocol.yaml (no records yet)"
        unanswered += [name] if verdicts.verdict_of(lines) == text.OPEN else []
        said += [
            Number(f"verdict_{name.lower()}", verdicts.verdict_of(lines), source),
            Number(f"comparisons_{name.lower()}", verdicts.count_supported(lines), source),
        ]
    return [*said, Number("open_hypotheses", ", ".join(unanswered) or "none", "data_manifests/protocol.yaml")]


def _run(about: Subject) -> list[Number]:
    made = runtime.minutes(about.workspace)
    said = {
        "run_minutes": text.value(made.rows["median"].sum(), digits=1),
        "run_machine": runtime.hardware(made.rows),
    }
    return [Number(name, value, latex.made_by(made.rows)) for name, value in said.items()]


def _commit(about: Subject) -> Number:
    """The commits that the published records were made at, in the order of stages."""
    rows = published.sources(about).rows
    commits = list(dict.fromkeys(rows["commit"].str[:10]))
    return Number("records_commit", ", ".join(commits), "data_manifests/records/*.csv")
