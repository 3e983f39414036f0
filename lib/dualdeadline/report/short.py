"""The result on one screen: what each means changes in a decode step, and the tokens/s that come of it."""

from __future__ import annotations

import pandas as pd

from dualdeadline.report import decode, overlap, wire
from dualdeadline.report.tables import Subject, Table, conditions

GRAPH, HOST = "one CUDA graph", "launched by the host"
GUESSES = {
    "residual_gate": "learned (ResidualGate)",
    "gate_ahead": "next layer's router, untrained",
    "oracle": "perfect",
    "random": "random",
}


def pays(made: Table) -> bool:
    """Whether what README says of `changes` follows: in a graph deadlines, bytes and guesses gain, bytes most."""
    rows = made.rows
    guesses = rows[rows.variant.isin([f"{name}-no prefetch" for name in ("residual_gate", "gate_ahead")])]
    deadline, coded = (rows[rows.metric == name] for name in ("deadline_difference_ms", "wire_time_ratio"))
    gains = (deadline.high < 0).all() and (coded.high < 1).all() and (guesses.high < 1).all()
    return bool(gains and coded["median"].max() < guesses["median"].min())


def changes(about: Subject) -> Table:
    """What each means does to a measured decode step, by slots."""
    engine = about.rows(decode.STAGE, ["deadline_difference_ms", "wire_time_ratio", "prefetch_time_ratio"])
    hosted = about.rows("07_overlap", ["step_difference_ms"])
    coded = wire.step_ratios(about.rows(wire.STAGE, ["step_time_ratio"]), "measured")
    two = hosted[(hosted["kind"] == "measured") & (hosted["variant"] == "staged_pipelined-demand_pipelined")]
    serial, piped = (
        "second deadline, over all bytes before the first product, ms",
        "second deadline, over pipelined experts, ms",
    )
    ratio = "encoded over raw"
    lines = [
        (serial, GRAPH, decode.chosen(engine, "deadline_difference_ms", wire="raw")),
        (piped, HOST, two),
        (ratio, GRAPH, decode.chosen(engine, "wire_time_ratio")),
        (ratio, HOST, coded),
    ]
    for name, words in GUESSES.items():
        fixed = {"variant": f"{name}-no prefetch", "budget": decode.SETTING, "wire": "coded"}
        found = decode.wrong(engine) if name == "random" else decode.chosen(engine, "prefetch_time_ratio", **fixed)
        lines.append((f"with over without guesses: {words}", GRAPH, found))
    cells = [{"a decode step changes by": what, "steps": how} | overlap.slot_values(rows) for what, how, rows in lines]
    frame = pd.DataFrame(cells).fillna("–")
    frame.columns = [f"{name} slots" if isinstance(name, int) else name for name in frame.columns]
    used = pd.concat([part for *_, part in lines])
    caption = (
        "Below zero, or below one, is faster; mean and 95 % interval over prompts, by slots per layer. "
        "Guesses are for gate and up of the next layer, encoded; the live control stops random ones. "
        f"{conditions(used)}."
    )
    return Table("short_changes", caption, frame, used)


def speeds(about: Subject) -> Table:
    """Tokens/s of the fastest variant by slots per layer, most slots first."""
    rows = about.rows(decode.STAGE, ["tokens_per_s"])
    used = pd.concat([decode.steps(rows, "tokens_per_s", warm) for warm in (False, True)])
    every, *counts = sorted(set(used.slots), reverse=True)
    kinds = [
        ("slots empty at each prompt", "no prefetch", False),
        ("the same, with guesses", "residual_gate", False),
        ("slots stay warm", "no prefetch", True),
        ("the same, with guesses", "residual_gate", True),
    ]
    lines = []
    for name, predictor, warm in kinds:
        found = (decode.best(rows, count, predictor, warm) for count in counts)
        whole = f"{decode.best(rows, every):.0f}" if not lines else "–"  # nothing is fetched: one figure for all
        lines.append([name, whole, *(f"{value:.0f}" for value in found)])
    frame = pd.DataFrame(lines, columns=["tokens/s", f"all {every}", *(f"{count} slots" for count in counts)])
    guessed = used[(used.variant == "residual_gate") & (used["config.budget"] == decode.SETTING)]
    least = " or ".join(map(str, sorted(set(guessed["config.threshold"]))))
    caption = (
        "Batch 1, slots per layer; without guesses the fastest variant, with them two gate/ups of the next layer from "
        f"probability {least}, encoded. {conditions(used)}."
    )
    return Table("short_speeds", caption, frame, used)
