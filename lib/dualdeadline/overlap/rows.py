"""What the overlap study writes: record rows (keyword arguments of `Recorder.add`) of copies, blocks, costs, steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from dualdeadline import models, record, steps
from dualdeadline.cost import CostModel
from dualdeadline.overlap.blocks import Setting
from dualdeadline.timeline import Timeline


def add(recorder: record.Recorder, found: list[dict]) -> None:
    """Add rows to a recorder."""
    for row in found:
        recorder.add(**{key: value for key, value in row.items() if key != "config"}, **row["config"])


def record_parts(stage: str, model: str, workspace, parts: Iterable[tuple[str, list[dict]]]) -> None:
    """Write each (name, rows) as a scope of its own as soon as it is there: a killed measurement keeps the others."""
    for part, found in parts:
        recorder = record.Recorder(stage, model, models.revision(model), workspace, {"part": part})
        add(recorder, found)
        recorder.write()


def measured(variant: str, metric: str, unit: str, times, config: dict, **more) -> dict:
    """A row of measured values: median with 20 and 80 %."""
    low, median, high = np.percentile(times, (20, 50, 80))
    return dict(
        variant=variant,
        metric=metric,
        median=median,
        low=low,
        high=high,
        n=np.size(times),
        unit=unit,
        kind="measured",
        config=config | more,
    )


def copy_rows(transfers: dict[bool, pd.DataFrame]) -> list[dict]:
    """Rates of `probes.copies`, in graphs (True) and issued by the host (False), and milliseconds beside them."""
    out = []
    for graphs, found in transfers.items():
        for row in found.itertuples():
            config = {"submission": "graph" if graphs else "streams", "size_mib": row.size_bytes / 2**20}
            for name, ms in (("alone", row.alone_ms), ("behind", row.behind_ms)):
                common = dict(variant=name, kind="measured", n=row.n, config=config)
                out.append(common | dict(metric="copy_ms", median=ms, unit="ms"))
                out.append(common | dict(metric="copy_gbps", median=row.size_bytes / ms / 1e6, unit="GB/s"))
    return out


def install_rows(found: pd.DataFrame) -> list[dict]:
    """Rows of `probes.installs`."""
    return [_probed(row, row.path, "install_ms", writes=row.writes) for row in found.itertuples()]


def window_rows(found: pd.DataFrame) -> list[dict]:
    """Rows of `windows.windows`."""
    names = {"before": "attention and router", "after": "experts"}
    return [_probed(row, f"{names[row.part]}, {row.mode}", "window_ms", layer=row.layer) for row in found.itertuples()]


def _probed(row, variant: str, metric: str, **config) -> dict:
    """A row from one of a probe's, which has ms, low, high and n."""
    spread = {"median": row.ms, "low": row.low, "high": row.high, "n": row.n}
    return dict(variant=variant, metric=metric, unit="ms", kind="measured", config=config, **spread)


def span_rows(lines: dict[str, Timeline]) -> list[dict]:
    """Timelines by schedule, one row per operation; the median is its length."""
    out = []
    for name, line in lines.items():
        for number, span in enumerate(line.frame().itertuples()):
            config = {"number": number, "lane": span.lane, "what": span.what, "start_ms": round(span.start_ms, 6)}
            config |= {"bytes": span.bytes, "speculative": bool(span.speculative)}
            length = span.end_ms - span.start_ms
            out.append(dict(variant=name, metric="span_ms", median=length, unit="ms", kind=line.kind, config=config))
    return out


def simulated_rows(shape: str, setting: Setting, guessed: dict[tuple[int, str], float]) -> list[dict]:
    """Record rows of simulated blocks."""
    return [
        dict(
            variant=name,
            metric="block_ms",
            median=ms,
            unit="ms",
            kind="simulated",
            config=setting.config(shape) | {"ready": ready},
        )
        for (ready, name), ms in guessed.items()
    ]


def block_rows(shape: str, setting: Setting, found: dict) -> list[dict]:
    """Record rows (keyword arguments of `Recorder.add`, with `config`) of one measured setting."""
    common, out = setting.config(shape), []
    for (ready, name), times in found.items():
        metric = "floor_ms" if name.startswith("floor:") else "block_ms"
        config = common | {"ready": max(ready, 0)}
        out.append(measured(name.removeprefix("floor:"), metric, "ms", times, config))
        base = found.get((ready, "demand_pipelined"))
        if metric == "block_ms" and base is not None and name != "demand_pipelined":
            out.append(measured(f"{name}-demand_pipelined", "block_difference_ms", "ms", times - base, config))
    return out


def cost_rows(shape: str, setting: Setting, cost: CostModel) -> list[dict]:
    """Record rows of a calibrated cost model: one per part, ms, or ms per byte or expert for a slope."""
    return [
        dict(variant=name, metric="cost", median=value, unit="ms", kind="measured", config=setting.config(shape))
        for name, value in cost.parts().items()
    ]


def step_cost_rows(cost: CostModel) -> list[dict]:
    """The cost model of whole steps, with each layer's time up to its router."""
    parts = cost.parts() | {f"before {layer}": ms for layer, ms in enumerate(cost.before_ms)}
    return [
        dict(variant=name, metric="step_cost", median=value, unit="ms", kind="measured", config={})
        for name, value in parts.items()
    ]


def step_rows(found: pd.DataFrame, cases: Sequence[steps.Case], kind: str, resamples: int, seed: int) -> list[dict]:
    """Mean step times, and differences from no prefetch and from demand_pipelined with two-level intervals."""
    by_case, out = found.set_index(["prompt", "row"]).groupby("case"), []
    for number, part in by_case:
        case = cases[number]
        mean, low, high, n = steps.two_level(part.ms, resamples, seed)
        out.append(_step(case, "step_ms", mean, low, high, n, kind, mib=round(part.bytes.mean() / 2**20, 3)))
    ahead = steps.differences(found, cases, resamples, seed)
    for row in ahead.itertuples():
        out.append(_step(cases[row.case], "prefetch_difference_ms", row.mean, row.low, row.high, row.n, kind))
    for row in steps.between(found, cases, "demand_pipelined", resamples, seed).itertuples():
        made = _step(cases[row.case], "step_difference_ms", row.mean, row.low, row.high, row.n, kind)
        out.append(
            made | {"variant": f"{made['variant']}-demand_pipelined", "config": {"slots": cases[row.case].slots}}
        )
    return out


def _step(case: steps.Case, metric: str, mean, low, high, n, kind, **more) -> dict:
    """A row of one case. Simulated steps have metrics of their own: a verdict must never find them in the place of
    measured ones."""
    metric = metric if kind == "measured" else f"simulated_{metric}"
    said = dict(variant=case.predictor or case.schedule, metric=metric, unit="ms", kind=kind)
    return said | dict(median=mean, low=low, high=high, n=n, config=case.config() | more)


def agreement_rows(rows: pd.DataFrame, simulated: list[dict], resamples: int, seed: int) -> list[dict]:
    """How often the cost model gives the sign of a prefetch's measured effect.

    Args:
        rows: records with the measured effects. simulated: rows of a `Recorder` with the simulated ones.
    """
    measured = rows[(rows.metric == "prefetch_difference_ms") & (rows.kind == "measured")]
    measured = measured.rename(columns={"median": "mean"}).assign(case=measured.variant + measured["config"])
    guessed = pd.DataFrame([row for row in simulated if row["metric"] == "simulated_prefetch_difference_ms"])
    guessed = guessed.rename(columns={"median": "mean"}).assign(case=guessed.variant + guessed["config"])
    found = steps.sign_agreement(measured[["case", "mean", "low", "high"]], guessed[["case", "mean"]], resamples, seed)
    return [dict(variant="cost_model", metric="sign_agreement", unit="share", kind="simulated", config={}, **found)]
