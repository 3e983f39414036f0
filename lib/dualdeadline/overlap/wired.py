"""Encoded against raw experts: blocks and decode steps, interleaved in the same measurement; record rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import pandas as pd

from dualdeadline import steps, streams
from dualdeadline.cost import TransferModel
from dualdeadline.overlap.blocks import Setting, measure, simulated_blocks
from dualdeadline.overlap.rows import block_rows, cost_rows, measured, simulated_rows
from dualdeadline.overlap.study import recorded_cost, recorded_step_cost
from dualdeadline.schedule import COMPONENTS, Copy
from dualdeadline.streams import probes

WIRES = ("raw", "coded")


def settings(ready: Sequence[int], top_k: int = 8) -> list[Setting]:
    """One token in a graph, raw and coded."""
    return [Setting(1, top_k, ready=tuple(ready), wire=wire) for wire in WIRES]


def run(
    work: streams.Work,
    ready: Sequence[int],
    bits: int,
    samples: int,
    budget_s: float,
    transfers: pd.DataFrame,
    seed: int = 0,
) -> list[dict]:
    """Rows of one shape's blocks with raw and with encoded experts, their difference, sizes and cost model."""
    pair = settings(ready)
    work.tokens(1, pair[0].top_k, "fused", seed)
    work.pack([(layer, expert) for layer in range(work.layers) for expert in work.experts(layer)], bits)
    shape = work.shape.name
    cost = probes.decoding(work, probes.calibrate(work, transfers, graphs=True))
    found = measure(work, pair, samples, budget_s, seed)
    out = size_rows(work) + cost_rows(shape, pair[1], cost)
    for setting, times in zip(pair, found):
        out += block_rows(shape, setting, times)
    for (number, name), times in found[1].items():
        if not name.startswith("floor:") and name != "resident":
            config = pair[1].config(shape) | {"ready": number}
            out.append(
                measured(f"{name}, coded-raw", "wire_difference_ms", "ms", times - found[0][number, name], config)
            )
    return out


def run_shapes(
    shapes: Iterable[streams.Shape],
    layers: int,
    ready: Sequence[int],
    bits: int,
    samples: int,
    budget_s: float,
    transfers: pd.DataFrame,
    seed: int = 0,
) -> Iterator[tuple[str, list[dict]]]:
    """`run` for each shape on the GPU, as (name, rows)."""
    for shape in shapes:
        work = streams.Work(shape, layers, device="cuda", seed=seed)
        yield f"blocks, {shape.name}", run(work, ready, bits, samples, budget_s, transfers, seed)


def size_rows(work: streams.Work) -> list[dict]:
    """Bytes that an encoded component of random weights puts on the link."""
    raw = work.shape.component_bytes
    return [
        dict(
            variant=part,
            metric="record_bytes",
            unit="bytes",
            kind="measured",
            n=len(work.packed.place),
            median=work.encoded.component_bytes[part],
            config={"shape": work.shape.name, "raw_bytes": raw[part]},
        )
        for part in COMPONENTS
    ]


def recorded_sizes(rows: pd.DataFrame, shape: str) -> dict[str, int]:
    """Bytes of the encoded components that were measured for a shape.

    Raises:
        ValueError: there are none.
    """
    part = rows[(rows.metric == "record_bytes") & (rows["config.shape"] == shape)]
    found = {str(name): int(size) for name, size in zip(part.variant, part["median"])}
    if set(found) != set(COMPONENTS):
        raise ValueError(
            f"record sizes of {shape} are known for {sorted(found)}; needed: a run on a GPU for both parts"
        )
    return found


def resimulate(
    rows: pd.DataFrame, shapes: Sequence[streams.Shape], ready: Sequence[int], layers: int, seed: int = 0
) -> list[dict]:
    """Simulated rows of the blocks whose cost model is recorded; the raw ones use the same model."""
    out = []
    raw, coded = settings(ready)
    for shape in shapes:
        cost = recorded_cost(rows, shape, coded)
        routes = streams.draw_routes(shape, layers, 1, raw.top_k, seed)
        for setting, sizes in ((raw, None), (coded, recorded_sizes(rows, shape.name))):
            out += simulated_rows(shape.name, setting, simulated_blocks(shape, routes, setting, cost, sizes))
    return out


def cases(slots: Sequence[int], schedules: Sequence[str]) -> list[steps.Case]:
    """Decode steps without prefetch, raw and coded."""
    return [steps.Case(name, size, coded=coded) for name in schedules for size in slots for coded in (False, True)]


def pack_for(recorded: steps.Steps, work: streams.Work, chosen: Sequence[steps.Case], bits: int) -> None:
    """Encode the experts that some step copies."""
    raw = [case for case in chosen if not case.coded]
    plans = [recorded.schedule(case, row) for case in raw for row in recorded.rows.tolist()]
    work.pack({(op.layer, op.expert) for plan in plans for op in plan.ops if isinstance(op, Copy)}, bits)
    recorded.coded_bytes = {part: work.encoded.component_bytes[part] for part in COMPONENTS}


def simulate_steps(
    recorded: steps.Steps, chosen: Sequence[steps.Case], rows: pd.DataFrame, link: pd.DataFrame, shape: streams.Shape
) -> pd.DataFrame:
    """Steps as one CUDA graph would run them: no host, decode and kernels as in the blocks, attention as in 07.

    Args:
        rows, link: records of 08 and of 07.

    Returns:
        As `steps.Steps.simulate`.
    """
    cost = recorded_cost(rows, shape, settings([0])[1])
    recorded.coded_bytes = recorded_sizes(rows, shape.name)
    return recorded.simulate(chosen, replace(cost, before_ms=recorded_step_cost(link, shape).before_ms))


def step_rows(found: pd.DataFrame, chosen: Sequence[steps.Case], kind: str, resamples: int, seed: int) -> list[dict]:
    """Mean step times, and the ratio of encoded to raw with an interval over prompts and their samples.

    Simulated steps have metrics of their own, which no verdict finds.
    """
    wide, places = steps.wide(found), {case: number for number, case in enumerate(chosen)}
    prefix = "" if kind == "measured" else f"{kind}_"

    def row(variant: str, metric: str, unit: str, values: pd.Series, **config) -> dict:
        mean, low, high, n = steps.two_level(values, resamples, seed)
        said = dict(variant=variant, metric=prefix + metric, unit=unit, kind=kind, config=config)
        return said | dict(median=mean, low=low, high=high, n=n)

    out = []
    for case, number in places.items():
        out.append(row(case.schedule, "step_ms", "ms", wide[number], slots=case.slots, wire=WIRES[case.coded]))
        if case.coded:
            raw = places[steps.Case(case.schedule, case.slots)]
            name = "encoded-raw" if case.schedule == chosen[0].schedule else f"encoded-raw, {case.schedule}"
            out.append(row(name, "step_time_ratio", "ratio", wide[number] / wide[raw], slots=case.slots))
    return out


def fits(
    record_bytes: Mapping[str, int], raw_bytes: Mapping[str, int], link: pd.DataFrame, windows: pd.DataFrame
) -> pd.DataFrame:
    """Whether a component crosses the link within the time that one layer computes.

    Args:
        link: rows `copy_ms` of copies behind one another in a graph. windows: rows `window_ms`, in graphs.

    Returns:
        DataFrame(piece, wire, copy_ms, window_ms, share): share of the piece that one window hides, at most 1.
    """
    line = TransferModel.fit(link["config.size_mib"] * 2**20, link["median"])
    layer = windows.groupby("variant")["median"].median().sum()
    rows = []
    for wire, sizes in zip(WIRES, (raw_bytes, record_bytes)):
        for piece in (*COMPONENTS, "expert"):
            bytes = sum(sizes[part] for part in COMPONENTS) if piece == "expert" else sizes[piece]
            ms = line.ms(bytes)
            rows.append((piece, wire, ms, layer, min(1.0, layer / ms)))
    return pd.DataFrame(rows, columns=["piece", "wire", "copy_ms", "window_ms", "share"])
