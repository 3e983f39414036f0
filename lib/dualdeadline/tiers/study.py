"""The runs of notebook 10 as parts (name, record rows), each recorded when it is done; `guesses` is in ahead.py."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn

from dualdeadline import attribution, energy, paths, record
from dualdeadline.cost import TransferModel
from dualdeadline.decode import simulated
from dualdeadline.decode import study as decode
from dualdeadline.decode.cases import Case, guess
from dualdeadline.decode.recorded import Recorded
from dualdeadline.engine import offload
from dualdeadline.engine.next_token import NextToken
from dualdeadline.remote import peer
from dualdeadline.remote import study as remote_study
from dualdeadline.report.decode import resident_ms
from dualdeadline.store.options import SsdOptions
from dualdeadline.streams import OLMOE, Shape
from dualdeadline.tiers import plain, ssd, ssd_engine, ssd_files, ssd_replay
from dualdeadline.tiers.ssd_rows import rows
from dualdeadline.traces import TraceStore

Parts = Iterator[tuple[str, list[dict]]]
NEAR = {"namespaces, 1 Gbit/s": (0.0, 1000.0), "namespaces, 0.5 ms each way": (0.5, 0.0)}
COLD = {"mean_ms": "ms", "tokens_per_s": "tokens/s", "misses": "experts", "bytes": "bytes", "disk_gbps": "GB/s"}
COLD |= {
    "loop_ms": "ms",
    "disk_share": "share",
    "loop_share": "share",
    "times_serial": "ratio",
    "times_parallel": "ratio",
}


def device() -> str:
    """Where slots lie: the GPU if torch sees one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def files(folder: Path, expert: Sequence[int], mib: int, seed: int) -> ssd_files.Files:
    """Files of random experts: of OLMoE's size where slots are on a GPU, else (H, F)."""
    H, F = expert
    shape = OLMOE if device() == "cuda" else Shape(f"{H}x{F}", H, F, OLMOE.E)
    return ssd_files.prepare(folder, shape, mib << 20, seed)


def disk(
    made: ssd_files.Files, sizes_kib: Sequence[int], depths: Sequence[int], mib: int, repeats: int, seed: int
) -> Parts:
    """Reads by size and depth, layouts of an expert, and installs."""
    sizes = [size << 10 for size in sizes_kib] + [made.raw.largest]
    found = plain.sweep(made.raw.path, sizes, depths, mib << 20, seed)
    yield "reads", rows(found.assign(what="direct reads"), "read", "what", {"gbps": "GB/s"})
    about = dict(expert=made.shape.name, experts=made.count)
    found = ssd.layouts(made, device(), repeats=repeats, seed=seed).assign(**about)
    yield "layouts", rows(found, "expert", "layout", {"gbps": "GB/s", "disk_gbps": "GB/s"})
    shapes = dict.fromkeys((made.shape, OLMOE))
    found = pd.concat([ssd.install(shape, device(), seed=seed).assign(expert=shape.name) for shape in shapes])
    yield "installs", rows(found, "install", "variant", {"ratio": "ratio"})


def cold(made: ssd_files.Files, drive: Recorded, slots: Sequence[int], warm: int, tokens: int, seed: int) -> Parts:
    """Decode steps that find the disk cold, by layout, under recorded routes."""
    found = ssd_replay.decode(made, drive.routes[: warm + tokens], drive.E, slots, device(), warm, seed=seed)
    yield "cold", rows(found.assign(expert=made.shape.name), "cold", "layout", COLD)


def counted(found: list[dict], metric: str, unit: str) -> list[dict]:
    """Record rows, where one without a value becomes 0 of `metric`: its config says why there is none."""
    none = {"metric": metric, "unit": unit, "median": 0, "low": None, "high": None, "n": 1}
    return [row | none if pd.isna(row["median"]) else row for row in found]


def stepper(net: nn.Module, ids: Tensor):
    """A decode step: one token of `ids` [N] after another, each behind nothing."""
    turn = itertools.cycle(ids.tolist())

    @torch.inference_mode()
    def step() -> Tensor:
        return net(torch.tensor([[next(turn)]], device=net.device)).logits

    return step


def hosted(net: nn.Module, ids: Tensor, folder: Path, slots: int, steps: int) -> Parts:
    """Steps that the host drives, in parts, and their joules: experts in host memory and on an SSD.

    Args:
        ids: int [N], tokens of some text. folder: of the records, made if they are not there.
    """
    options = dict(slots=slots, kernels="torch", wire="raw", backend="cpu" if net.device.type == "cpu" else "streams")
    tiers = {"host memory": {}, "SSD": dict(tier="ssd", ssd_path=folder)}
    tiers["SSD, half in host memory, guesses"] = tiers["SSD"] | {"ssd": SsdOptions(host_slots=32, ahead=1)}
    for name, how in tiers.items():
        offload(net, predictor=None, **options, **how)
        try:
            found = attribution.host(net, stepper(net, ids), steps, name)
            joules = energy.per_token(stepper(net, ids), 1, energy.STEP_S, energy.STEP_S)
        finally:
            net.dualdeadline.remove()
        about = {"slots": slots, "way": "launched by the host"}
        yield f"attribution, {name}", attribution.records(found, about)
        yield f"energy, {name}", counted(energy.records(joules, name, about), "counters_read", "counters")


def fitted(workspace: paths.Workspace, corpus: str) -> dict[str, object]:
    """What guesses a whole token ahead for host slots in `exact`; nothing where there are no traces."""
    folder = workspace.traces / corpus
    if not folder.exists():
        return {}
    return {NextToken.name: NextToken.fit(TraceStore(folder).split("train", tensors=("routes",)))}


def exact(net: nn.Module, ids: Tensor, folder: Path, slots: int, new_tokens: int, guessing: Mapping) -> Parts:
    """Whole decode steps of the engine over an SSD, with every logit compared with the resident run's.

    Args:
        ids: int [1,N]. folder: as in `hosted`. guessing: what guesses for the host slots, by name.

    Raises:
        AssertionError: a bit differs.
    """
    settings = {"SSD": {}}
    for name, predictor in guessing.items():
        settings[f"SSD, half in host memory, {name}"] = dict(host_slots=32, ahead=1, predictor=predictor)
    options = dict(kernels="torch", wire="raw", backend="cpu" if net.device.type == "cpu" else "streams")
    found = ssd_engine.engine(net, ids, folder, settings, slots, new_tokens, predictor=None, **options)
    wrong = found.setting[~found.equal].tolist()
    assert not wrong, f"settings whose bits differ from the resident run: {wrong}"
    units = {"tokens_per_s": "tokens/s", "hit_rate": "share", "reads": "reads", "ssd_bytes": "bytes"}
    units |= {"step_share": "share", "net_share": "share"}
    yield "engine", rows(found.assign(slots=slots), "engine", "setting", units)


def remote(row_counts: Sequence[int], samples: int, seed: int) -> Parts:
    """Round trips to a worker over loopback, a relay that delays, and namespaces."""
    sizes = {"olmoe": remote_study.SIZES["olmoe"]}
    found = remote_study.round_trips(sizes, row_counts, samples=samples, links=NEAR, seed=seed)
    yield "remote", counted(remote_study.records(found), "links_made", "links")


def captured(drive: Recorded, chosen: Sequence, seed: int, compile: bool, steps: int, **sizes) -> Parts:
    """Steps in CUDA graphs, in parts, from a trace: everything resident, and encoded without and with guesses.

    Args:
        chosen: slots, predictor, gate/up and down components ahead, least probability. sizes: as `decode.build`.
    """
    base = Case(chosen[0])
    cases = [Case(drive.E, "raw"), base, guess(base, *chosen[1:])]
    group = decode.build(drive, cases, seed, compile, **sizes)
    found = attribution.variants(group, drive.spans[0].start, steps)
    yield "attribution, graphs", attribution.records(found, {"way": "one CUDA graph", "compiled": compile})


def peers(workspace: paths.Workspace, model: str, drive: Recorded | None, slots: Sequence[int], **options) -> Parts:
    """Another GPU's memory, and steps simulated with it in place of the host link; why not, where it is not at hand.

    Args:
        drive: routes of the simulated steps (None: none). options: samples, resamples, seed.
    """
    reason = peer.why_not()
    if reason:
        yield "peer", peer.none(reason)
        return
    found = peer.copies(samples=options["samples"], seed=options["seed"])
    yield "peer", peer.records(found)
    if drive is not None:
        again = options["resamples"], options["seed"]
        yield "peer steps", peer_steps(workspace, model, drive, peer.lines(found), slots, *again)


def peer_steps(
    workspace: paths.Workspace,
    model: str,
    drive: Recorded,
    lines: Mapping[str, TransferModel],
    slots: Sequence[int],
    resamples: int,
    seed: int,
) -> list[dict]:
    """Record rows of raw steps without guesses, simulated from notebook 09's single operations over each line, and
    over the host's link beside them.

    Raises:
        ValueError: notebook 09 recorded no single operations.
    """
    measured = record.read(workspace, "09_decode", model)
    base = simulated.cost(workspace, model, resident_ms(measured), drive.routes.shape[1])["raw"]
    cases, out = [Case(count, "raw") for count in slots], []
    for name, line in {"host link": base.transfer, **lines}.items():
        costs = {"raw": replace(base, transfer=line)}
        for row in simulated.rows(drive, cases, costs, {}, resamples, seed):
            out.append(row | dict(variant=name, metric="peer_step_ms", config=row["config"] | {"gbps": line.gbps}))
    return out
