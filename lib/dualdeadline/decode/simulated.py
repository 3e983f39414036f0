"""The same steps simulated, from single fetches, decodes and kernels and the resident step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from dualdeadline import paths, record, steps, streams
from dualdeadline.cost import CostModel, TransferModel
from dualdeadline.decode.cases import Case
from dualdeadline.decode.recorded import Recorded
from dualdeadline.decode.rows import row
from dualdeadline.overlap import Setting, recorded_cost
from dualdeadline.schedule import Compute

EVERY = 8  # recorded steps of which the middle one is simulated


def costs(workspace: paths.Workspace, model: str, resident_ms: float, layers: int) -> dict[str, CostModel]:
    """Cost model of a captured step by wire.

    Fetches run at the rate of a zero-copy fetch (notebook 06) and of a zero-copy decode (08), stages as in 07; the time
    up to each router is what the measured resident step leaves beside its products.
    """
    kernels, overlap, wire = (record.read(workspace, stage, model) for stage in ("06_kernels", "07_overlap", "08_wire"))
    base = recorded_cost(overlap, streams.OLMOE, Setting())
    fetch = kernels[(kernels.metric == "fetch_gbps") & (kernels["config.shape"] == "olmoe")]["median"].max()
    decode = wire[(wire.metric == "decode_gbps") & (wire.variant == "pinned host") & (wire["config.bits"] == 3)][
        "median"
    ].max()
    eight = tuple(range(8))
    products = sum(base.compute_ms(Compute(0, stage, eight)) for stage in ("gate_up", "down_combine"))
    before = (max(0.0, resident_ms / layers - products),)
    graph = replace(base, issue_ms=0.0, sync_ms=0.0, silent_ms=0.0, launches={}, before_ms=before)
    return {
        name: replace(graph, transfer=TransferModel(0.0, 1e-6 / rate))
        for name, rate in (("raw", float(fetch)), ("coded", float(decode)))
    }


def rows(drive: Recorded, cases: Sequence[Case], costs: dict[str, CostModel], resamples: int, seed: int) -> list[dict]:
    """Record rows of simulated steps of the cases without guesses; a coded byte counts as the bytes it becomes."""
    plain = [case for case in cases if not case.predictor and case.slots < drive.E]
    sampled = steps.Steps(
        drive.routes.numpy(),
        drive.prompt.numpy(),
        drive.E,
        range(EVERY // 2, len(drive.routes), EVERY),
        {},
        streams.OLMOE.component_bytes,
    )
    out = []
    for case in plain:
        found = sampled.simulate([steps.Case(case.schedule, case.slots)], costs[case.wire])
        series = found.set_index(["prompt", "row"]).ms
        out.append(row(case, case.name, "simulated_step_ms", "ms", "simulated", series, resamples, seed))
    return out


def errors(rows: pd.DataFrame) -> pd.DataFrame:
    """Measured and simulated steps side by side, and how far the simulated one is off, in percent."""
    keys = ["config.slots", "config.wire", "config.schedule"]
    plain = rows[rows.variant == "no prefetch"].astype({"config.slots": "Int64"}).set_index(keys)
    frame = pd.DataFrame(
        {
            "measured": plain[plain.metric == "step_ms"]["median"],
            "simulated": plain[plain.metric == "simulated_step_ms"]["median"],
        }
    ).dropna()
    frame["off by, %"] = 100 * (frame.simulated / frame.measured - 1)
    return frame.rename_axis(index=["slots", "wire", "schedule"]).sort_index()
