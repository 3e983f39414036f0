"""The same steps simulated, from single fetches, decodes and kernels and the resident step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from dualdeadline import paths, record, steps, streams
from dualdeadline.cost import CostModel, TransferModel
from dualdeadline.decode.cases import Case
from dualdeadline.decode.recorded import Recorded
from dualdeadline.decode.rows import row
from dualdeadline.overlap import Setting, recorded_cost
from dualdeadline.schedule import Compute

FIRST, EVERY = (
    8,
    8,
)  # steps of a prompt that are all simulated, slots being empty; later ones of which the middle one is


def cost(
    workspace: paths.Workspace,
    model: str,
    resident_ms: float,
    layers: int,
    shape: streams.Shape = streams.OLMOE,
    stages_of: str = "",
) -> dict[str, CostModel]:
    """Cost model of a captured step by wire, from single operations and the resident step.

    Args:
        model: whose single operations are recorded here. stages_of: whose stages notebook 07 recorded (default: that).

    Fetches and decodes are lines through single ones, stages as in notebook 07; the time up to each router is what the
    measured resident step leaves beside its products (a shared expert is among it), and a look-up.

    Raises:
        ValueError: a part is not recorded.
    """
    single = record.read(workspace, "09_decode", model)
    single = single[single.metric == "single_ms"]
    if single.empty:
        raise ValueError(f"no single operation is recorded for {model}; needed: notebook 09 run on a GPU")
    base = recorded_cost(record.read(workspace, "07_overlap", stages_of or model), shape, Setting())
    eight = tuple(range(8))
    products = sum(base.compute_ms(Compute(0, stage, eight)) for stage in ("gate_up", "down_combine"))
    before = max(0.0, resident_ms / layers - products) + float(single[single.variant == "lookup"]["median"].iloc[0])
    graph = replace(base, issue_ms=0.0, sync_ms=0.0, silent_ms=0.0, launches={}, before_ms=(before,))
    decode = single[single.variant == "decode"]
    size = decode["config.component"].map(shape.component_bytes) * decode["config.count"].astype(float)
    line = TransferModel.fit(size, decode["median"])
    stages = {**graph.stages, **dict.fromkeys(("decode_gate_up", "decode_down", "decode_expert"), line)}
    graph = replace(graph, stages=stages)
    return {wire: replace(graph, transfer=_fetch(single, wire)) for wire in ("raw", "coded")}


def _fetch(single: pd.DataFrame, wire: str) -> TransferModel:
    part = single[(single.variant == "fetch") & (single["config.wire"] == wire)]
    return TransferModel.fit(part["config.bytes"].astype(float), part["median"])


def picked(prompt: np.ndarray) -> dict[int, int]:
    """Rows that are simulated, and how many recorded steps each stands for."""
    found = {}
    for number in np.unique(prompt):
        mine = np.flatnonzero(prompt == number).tolist()
        found |= dict.fromkeys(mine[:FIRST], 1)
        for begin in range(FIRST, len(mine), EVERY):
            some = mine[begin : begin + EVERY]
            found[some[len(some) // 2]] = len(some)
    return found


def rows(
    drive: Recorded,
    cases: Sequence[Case],
    costs: dict[str, CostModel],
    coded_bytes: dict[str, int],
    resamples: int,
    seed: int,
    shape: streams.Shape = streams.OLMOE,
) -> list[dict]:
    """Record rows of simulated steps of the cold cases without guesses.

    Args:
        coded_bytes: dict(gate_up, down), of an encoded expert. shape: of the experts.
    """
    weights = picked(drive.prompt.numpy())
    plain = [case for case in cases if not (case.predictor or case.warm) and case.slots < drive.E]
    sampled = steps.Steps(
        drive.routes.numpy(),
        drive.prompt.numpy(),
        drive.E,
        list(weights),
        {},
        shape.component_bytes,
    )
    sampled.coded_bytes = coded_bytes
    out = []
    for case in plain:
        one = steps.Case(case.schedule, case.slots, coded=case.wire == "coded")
        found = sampled.simulate([one], costs[case.wire])
        series = found.loc[found.index.repeat(found.row.map(weights))].set_index(["prompt", "row"]).ms
        out.append(row(case, case.name, "simulated_step_ms", "ms", "simulated", series, resamples, seed))
    return out
