"""Made-up record rows of every published stage, in a workspace of a temporary folder."""

from __future__ import annotations

import contextlib
import itertools

import pytest
from matplotlib import pyplot as plt

from dualdeadline import attribution, machine, paths, record, report, schedule, steps
from dualdeadline.decode import rows as decode_rows
from dualdeadline.decode.cases import all_cases, map_cases
from dualdeadline.overlap import Setting
from dualdeadline.remote.client import PARTS
from dualdeadline.report import check
from dualdeadline.tiers.ssd import LAYOUTS

MODEL = "pilot-olmoe"
PREDICTORS = (
    "random popularity previous_layer previous_token transition probe gate_ahead shared_mlp low_rank "
    "residual_gate oracle shuffled"
).split()


@contextlib.contextmanager
def workspace(folder, *stages):
    """A smoke workspace under `folder` with made-up records of some stages (functions of this file), and none other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "DATA", folder)
        patch.setattr(machine, "machine_id", lambda: "made-up")
        patch.setattr(machine, "register", lambda: "made-up")
        patch.setattr(paths, "ON_GPU", ())  # no committed measurement stands among the made-up ones
        made = paths.Workspace("smoke")
        for stage in stages:
            stage(made)
        yield made


def write(workspace) -> None:
    """Records of stages 02, 04 to 10 and 12 whose values follow from their keys by plain arithmetic."""
    traces(workspace)
    evaluation(workspace)
    replay(workspace)
    kernels(workspace)
    overlap(workspace)
    wire(workspace)
    decode(workspace)
    tiers(workspace)
    confirmation(workspace)
    runs(workspace)


def draw(workspace) -> None:
    """A figure for every one that the paper shows."""
    report.style()
    for name in check.shown_figures((paths.PAPER / "main.tex").read_text(encoding="utf-8")):
        fig, ax = plt.subplots(figsize=(2, 1))
        report.save(fig, name, workspace)
        plt.close(fig)


def _recorder(stage, workspace, **scope):
    return record.Recorder(stage, MODEL, "made-up", workspace, scope)


def traces(workspace) -> None:
    rows = _recorder("02_traces", workspace, seed=0)
    for place, corpus in enumerate(("pilot", "replication", "ood"), 1):
        keys = {"n": 120, "corpus": corpus}
        rows.add("decode", "tokens", 9000 + place, "tokens", "measured", **keys)
        rows.add("decode", "ended_by_itself", 0.1, "share", "measured", **keys)
        rows.add("decode", "repeated_4grams", 0.05 * place, "share", "measured", 0.01, 0.2, **keys)
    rows.write()


def evaluation(workspace) -> None:
    rows = _recorder("04_evaluation", workspace, seed=0)
    for place, name in enumerate(PREDICTORS):
        for horizon in (0, 1, 2, 3):
            for budget in (2, 4, 8, 12, 16):
                middle = min(1.0, 0.02 * place + budget / 20 + 0.1 / (horizon + 1))
                keys = {"horizon": horizon, "budget": budget, "corpus": "pilot", "split": "test"}
                rows.add(
                    name, "recall", middle, "share", "replayed", middle - 0.01, middle + 0.01, n=24, **keys
                )
        for slots in (8, 16, 32, 48):
            keys = {"horizon": 1, "budget": 4, "slots": slots, "corpus": "pilot", "split": "test"}
            rows.add(name, "miss_recall", 0.3 + place / 50, "share", "replayed", 0.2, 0.6, n=24, **keys)
    for trained in ("gsm_symbolic", "human_eval", "all"):
        for tested in ("gsm_symbolic", "human_eval"):
            rows.add(
                f"shared_mlp from {trained}",
                "recall",
                0.7,
                "share",
                "replayed",
                0.6,
                0.8,
                n=12,
                horizon=1,
                budget=8,
                corpus="pilot",
                split=f"test: {tested}",
            )
    for corpus in ("replication", "ood"):
        for name in ("gate_ahead", "shared_mlp", "residual_gate"):
            rows.add(
                name,
                "recall",
                0.8,
                "share",
                "replayed",
                0.7,
                0.9,
                n=60,
                horizon=1,
                budget=8,
                corpus=corpus,
                split="all",
            )
    for against in ("gate_ahead", "shared_mlp"):
        for horizon in (1, 2, 3):
            for corpus in ("pilot", "replication"):
                keys = {"horizon": horizon, "budget": 4, "slots": 32, "corpus": corpus}
                rows.add(
                    f"residual_gate-{against}",
                    "miss_recall_difference",
                    0.02 / horizon,
                    "share",
                    "replayed",
                    0.02 / horizon - 0.008,
                    0.02 / horizon + 0.008,
                    n=24,
                    **keys,
                )
    rows.write()


def replay(workspace) -> None:
    rows = _recorder("05_replay", workspace)
    test = {"corpus": "pilot", "split": "test"}
    for policy, scope, start, slots in itertools.product(
        ("lru", "lfu", "belady"), ("layer", "shared"), ("cold", "warm"), (8, 16, 32, 48)
    ):
        keys = {"order": "token", "scope": scope, "start": start, "slots": slots, **test}
        rate = slots / 60
        rows.add(policy, "hit_rate", rate, "share", "replayed", rate - 0.01, rate + 0.01, n=24, **keys)
    for name, slots in itertools.product(("none", "belady", "gate_ahead"), (16, 32, 48)):
        budget, least = (4, 0.5) if name == "gate_ahead" else (0, 0.0)
        keys = {
            "policy": "belady" if name == "belady" else "lru",
            "budget": budget,
            "threshold": least,
            **test,
        }
        rows.add(
            name,
            "prefetch_hit_rate",
            slots / 50,
            "share",
            "replayed",
            0.1,
            0.99,
            n=24,
            horizon=1,
            slots=slots,
            charged=True,
            **keys,
        )
    for name, budget in itertools.product(("random", "gate_ahead", "residual_gate", "oracle"), (0, 2, 4, 8)):
        keys = {"budget": budget, "timings": "p50", "horizon": 1, **test}
        for schedule in ("monolithic", "staged"):
            rows.add(name, "stall_ms", 2 - budget / 10, "ms", "replayed", n=24, schedule=schedule, **keys)
        for metric in ("stall_difference_ms", "stall_link_once_difference_ms"):
            rows.add(name, metric, -0.1, "ms", "replayed", -0.12, -0.08, n=24, **keys)
    rows.write()


def kernels(workspace) -> None:
    rows = _recorder("06_kernels", workspace)
    for place, name in enumerate(("fused", "eager", "batched_mm"), 1):
        for shape in ("olmoe", "qwen"):
            keys = {"n": 50, "shape": shape, "tokens": 1, "top_k": 8}
            rows.add(name, "resident_ms", 0.03 * place, "ms", "measured", 0.029 * place, 0.031 * place, **keys)
            rows.add(name, "resident_gbps", 3000 / place, "GB/s", "measured", 2900 / place, 3100 / place, **keys)
    rows.add("copy", "memory_gbps", 4000, "GB/s", "measured", 3900, 4100, n=50)
    rows.add("zero_copy", "fetch_gbps", 51, "GB/s", "measured", 50, 52, n=50, shape="olmoe", programs=8)
    rows.add("one launch", "predictor_ms", 0.006, "ms", "measured", 0.005, 0.007, n=50, shape="olmoe", predictor="probe")
    rows.write()


def overlap(workspace) -> None:
    rows, guessed = (_recorder("07_overlap", workspace, part=part) for part in ("blocks", "simulated blocks"))
    setting = Setting().config("olmoe")
    for place, name in enumerate(schedule.NAMES, 1):
        for ready in (0, 2, 4, 6, 8):
            keys, ms = setting | {"ready": ready}, 2.0 - 0.15 * ready + 0.01 * place
            rows.add(name, "block_ms", ms, "ms", "measured", ms - 0.01, ms + 0.01, n=200, **keys)
            rows.add(name, "floor_ms", ms - 0.02, "ms", "measured", ms - 0.03, ms - 0.01, n=200, **keys)
            if name != "demand_pipelined":
                other = f"{name}-demand_pipelined"
                rows.add(other, "block_difference_ms", 0.01, "ms", "measured", -0.01, 0.02, n=200, **keys)
            guessed.add(name, "block_ms", ms * 1.01, "ms", "simulated", **keys)
        for slots in (16, 32, 48):
            case = steps.Case(name, slots).config()
            rows.add(name, "step_ms", 10.0, "ms", "measured", n=3, **case)
            guessed.add(name, "simulated_step_ms", 10.5, "ms", "simulated", 10.0, 11.0, n=12, **case)
        for slots in (16, 32, 48) if name != "demand_pipelined" else ():
            config = {"n": 24, "slots": slots}
            rows.add(f"{name}-demand_pipelined", "step_difference_ms", 0.1 * place, "ms", "measured", 0.05, 0.6, **config)
    config = {"n": 12, "slots": 16, "budget": 2, "horizon": 1, "piece": "expert", "threshold": 0.0}
    rows.add("gate_ahead", "prefetch_difference_ms", 0.1, "ms", "measured", 0.05, 0.2, **config)
    for size in (4, 8, 16):
        keys = {"n": 50, "submission": "graph", "size_mib": size}
        rows.add("behind", "copy_ms", size / 50, "ms", "measured", **keys)
        rows.add("behind", "copy_gbps", 50.0, "GB/s", "measured", **keys)
    rows.add("attention and router, graph", "window_ms", 0.14, "ms", "measured", n=50, layer=0)
    rows.write()
    guessed.write()


def wire(workspace) -> None:
    rows, guessed = (_recorder("08_wire", workspace, part=part) for part in ("blocks, olmoe", "simulated"))
    for weights in ("normal", "pilot-olmoe"):
        rows.add("3-bit runs, 4-bit escapes", "bits_per_weight", 11.1, "bits", "measured", n=99, weights=weights, bound=False)
        rows.add("entropy", "bits_per_weight", 10.5, "bits", "measured", n=99, weights=weights, bound=True)
    keys = {"n": 50, "bits": 3, "records": 1, "warps": 4, "programs": 0, "raw_bytes": 1 << 22}
    rows.add("device", "decode_gbps", 900, "GB/s", "measured", 890, 910, **keys)
    for part, size in (("gate_up", 5_800_000), ("down", 2_900_000)):
        rows.add(part, "record_bytes", size, "bytes", "measured", shape="olmoe", raw_bytes=2 * size)
    for way, name, ready in itertools.product(("raw", "coded"), schedule.NAMES, (0, 4, 8)):
        keys = Setting(wire=way).config("olmoe") | {"ready": ready}
        ms = (2.0 if way == "raw" else 1.4) - 0.1 * ready
        rows.add(name, "block_ms", ms, "ms", "measured", ms - 0.01, ms + 0.01, n=200, **keys)
        rows.add(name, "floor_ms", ms - 0.02, "ms", "measured", ms - 0.03, ms - 0.01, n=200, **keys)
        if name != "demand_pipelined":
            other = f"{name}-demand_pipelined"
            rows.add(other, "block_difference_ms", 0.01, "ms", "measured", -0.01, 0.02, n=200, **keys)
        guessed.add(name, "block_ms", ms * 1.01, "ms", "simulated", **keys)
    for slots in (16, 32, 48):
        guessed.add("encoded-raw", "simulated_step_time_ratio", 0.8, "ratio", "simulated", 0.75, 0.85, n=12, slots=slots)
        rows.add("encoded-raw", "step_time_ratio", 0.9, "ratio", "measured", 0.85, 0.95, n=12, slots=slots)
    rows.write()
    guessed.write()


def decode(workspace) -> None:
    rows = _recorder("09_decode", workspace, part="steps")
    guesses = [(name, 2, 0, 0.7) for name in ("residual_gate", "gate_ahead", "random", "oracle")]
    cases = all_cases((16, 32, 48), 64, guesses, guesses[:1])
    wide = [case for case in map_cases((32,), 64, (2, 4), guesses[:1]) if case not in cases]
    for case in cases + wide:
        ms = 1.5 + (64 - case.slots) / (10 if case.warm else 8) + (0.1 if case.predictor else 0.0)
        keys = {"n": 8, **case.config()}
        rows.add(case.name, "step_ms", ms, "ms", "measured", ms - 0.1, ms + 0.1, **keys)
        rows.add(case.name, "tokens_per_s", 1e3 / ms, "tokens/s", "measured", 900 / ms, 1100 / ms, **keys)
        if case.slots < 64:
            rows.add(case.name, "hit_rate", case.slots / 64, "share", "measured", 0.1, 0.9, **keys)
            rows.add(case.name, "link_bytes", 5e6 * (64 - case.slots), "bytes", "measured", 4e6, 6e6, **keys)
        for name, metric, unit, _ in decode_rows.pairs(case):
            rows.add(name, metric, 0.9, unit, "measured", 0.8, 1.0, **keys)
    for name in ("eager", "batched_mm", "grouped_mm", "accelerate cpu_offload"):
        rows.add(name, "baseline_step_ms", 50.0, "ms", "measured", 45.0, 55.0, n=24, way="launched by the host", resident=True)
    rows.add("all variants", "equal_logit_steps", 300, "steps", "measured", n=300, why="", compiled=True)
    for name, size in (("raw, gate_up", 8e6), ("raw, down", 4e6), ("coded, gate_up", 5.5e6), ("coded, down", 2.75e6)):
        rows.add(name, "component_bytes", size, "bytes", "measured")
    for wire, gbps in (("raw", 40.0), ("coded", 50.0)):  # beside 0.002 ms of each launch
        for count in (0, 1, 4):
            keys = {"n": 7, "wire": wire, "component": "gate_up", "count": count, "bytes": count * 8e6}
            rows.add("fetch", "single_ms", 0.002 + count * 8.0 / gbps, "ms", "measured", **keys)
    rows.add("copy", "link_gbps", 51.0, "GB/s", "measured", 50.0, 52.0, n=5, lanes=0)
    rows.add("oracle", "joules_per_token", 1.5, "J/token", "measured", n=960, source="nvml", **cases[-1].config())
    rows.write()
    guessed = _recorder("09_decode", workspace, part="simulated")
    for case in cases:
        if not (case.predictor or case.warm) and case.slots < 64:
            guessed.add("no prefetch", "simulated_step_ms", 5.0, "ms", "simulated", 4.9, 5.1, n=8, **case.config())
    guessed.write()


def tiers(workspace) -> None:
    rows, keys = _recorder("10_tiers", workspace, part="all"), {"n": 4, "expert": "8x8", "cache": "O_DIRECT, past the page cache"}
    for size, depth in itertools.product((4096, 65536), (1, 8)):
        rows.add("direct reads", "read_gbps", depth / 10, "GB/s", "measured", n=9, size_bytes=size, depth=depth)
    for place, name in enumerate(LAYOUTS, 1):
        rows.add(name, "expert_ms", 4.0 / place, "ms", "measured", 3.0 / place, 5.0 / place, **keys)
        for metric in ("expert_gbps", "expert_disk_gbps"):
            rows.add(name, metric, 0.2 * place, "GB/s", "measured", **keys)
        for slots in (16, 32, 48):
            for metric, value in cold_values(place, slots).items():
                rows.add(name, f"cold_{metric}", value, "1", "measured", slots=slots, **keys)
    for name, ratio in (("one contiguous copy", 1.0), ("record, a copy per component", 1.04), ("9 slices", 2.5)):
        rows.add(name, "install_ms", 0.1 * ratio, "ms", "measured", n=50, expert="8x8")
        rows.add(name, "install_ratio", ratio, "ratio", "measured", n=50, expert="8x8")
    for split, pause, slots in (("validation", 0.1, 16), ("test", 0.1, 16), ("test", 3.0, 16), ("test", 3.0, 32)):
        config = {"n": 6, "split": split, "pause_ms": pause, "slots": slots}
        for ahead, name in enumerate(("demand", "residual_gate", "next_token")):
            here = config | {"ahead": ahead, "rule": ahead == 0}
            for metric, value in ahead_values(pause, slots, ahead).items():
                rows.add(name, f"tier_{metric}", value, "1", "measured", **here)
            if ahead:
                ratio = ahead_values(pause, slots, ahead)["ms"] / ahead_values(pause, slots, 0)["ms"]
                rows.add(name, "tier_time_ratio", ratio, "ratio", "measured", ratio - 0.05, ratio + 0.05, **here)
    for part, count in itertools.product((*PARTS, "round trip", "not accounted for"), (1, 8)):
        ms = {"round trip": 2.0 * count, "compute": 1.5 * count, "wire": 0.5 * count}.get(part, 0.0)
        rows.add(part, "remote_ms", ms, "ms", "measured", n=3, shape="olmoe", link="loopback", rows=count, pairs=8 * count)
    rows.add("ping", "ping_ms", 0.25, "ms", "measured", n=3, shape="", link="loopback", rows=0, pairs=0)
    rows.add("round trip", "links_made", 0, "links", "measured", shape="", link="far", rows=0, pairs=0, why="no netem")
    for name, step in (("host memory", 20.0), ("SSD", 40.0)):
        for part in attribution.PARTS:
            ms = {"expert compute": step / 2, "demand wait": step / 2}.get(part, 0.0)
            rows.add(name, "part_ms", ms, "ms", "measured", n=5, part=part, slots=16)
        rows.add(name, "part_ms", step, "ms", "measured", n=5, part="step", slots=16)
        rows.add(name, "engine_ms", step, "ms", "measured", n=5, slots=16)
        for metric in ("tokens_per_s", "hit_rate", "reads", "ssd_bytes"):
            rows.add(name, f"engine_{metric}", step, "1", "measured", n=5, slots=16)
        rows.add(name, "counters_read", 0, "counters", "measured", slots=16, source="none: nothing to read")
    rows.write()


def cold_values(place: int, slots: int) -> dict[str, float]:
    """Of the layout at a place: its misses are read so many times as fast as the first one's."""
    misses = (64 - slots) / 2
    speed = 0.4 * place
    return {
        "ms": misses / speed,
        "tokens_per_s": 1e3 * speed / misses,
        "misses": misses,
        "disk_gbps": 1.7,
        "disk_share": speed / 1.7,
        "loop_share": speed / 1.6,
        "times_serial": float(place),
        "times_parallel": place / 2,
    }


def ahead_values(pause: float, slots: int, ahead: int) -> dict[str, float]:
    """Of a setting so many layers ahead; each layer takes half a read and the pause, and one ahead halves the disk's share."""
    read, disk = 2.0, (64 - slots) / 2
    found = {"ms": 8 * pause + disk / (1 + (ahead == 1)), "hit_rate": slots / 64, "read_ms": read, "bound_ms": max(8 * pause, disk / 2)}
    return found | {"lead_ms": ahead * (1.0 + pause), "useful": 2.0 * ahead, "wasted": 0.5 * ahead, "late": 0.0}


def confirmation(workspace, gap=0.05) -> None:
    """Stage 11 of the second model; `gap` is every difference of our predictor from a rival."""
    rows = record.Recorder("11_confirmation", "pilot-qwen", "made-up", workspace, {"part": "made up"})
    told = {"corpus": "pilot", "split": "test"}
    for place, name in enumerate(("popularity", "previous_token", "probe", "gate_ahead", "shared_mlp", "residual_gate"), 1):
        for budget in (1, 2, 4, 6, 8, 16):
            middle = place * budget / 100
            ends = middle - 0.01, middle + 0.01
            rows.add(name, "recall", middle, "share", "replayed", *ends, n=16, horizon=1, budget=budget, **told)
        for part in ("monolithic", "staged"):
            rows.add(name, "stall_ms", 0.6, "ms", "replayed", 0.5, 0.7, n=16, budget=4, schedule=part, **told)
        rows.add(name, "stall_difference_ms", -gap, "ms", "replayed", -gap - 0.01, -gap + 0.01, n=16, budget=4, **told)
    for corpus, split in (("pilot", "test"), ("replication", "all")):
        for other, horizon in itertools.product(("popularity", "gate_ahead", "shared_mlp"), (1, 2, 3)):
            keys = {"horizon": horizon, "budget": 4, "corpus": corpus, "split": split}
            ends = gap, gap - 0.01, gap + 0.01
            if horizon == 1:
                rows.add(f"residual_gate-{other}", "recall_difference", ends[0], "share", "replayed", *ends[1:], n=16, **keys)
            if other != "popularity":
                many = {"n": 16, "slots": 128, **keys}
                rows.add(f"residual_gate-{other}", "miss_recall_difference", ends[0], "share", "replayed", *ends[1:], **many)
    for policy, slots, start in itertools.product(("lru", "lfu", "predicted", "belady"), (64, 128, 192), ("cold", "warm")):
        rows.add(policy, "hit_rate", slots / 256, "share", "replayed", 0.1, 0.9, n=16, slots=slots, start=start, **told)
    for name in ("shared_mlp", "gate_ahead", "residual_gate"):
        rows.add(name, "kernel_difference", 1e-6, "1", "measured", 1e-6, 1e-6, n=14, where="interpreter")
        rows.add(name, "kernel_pairs_share", 0.25, "share", "measured", n=56, where="interpreter")
    for number, place in enumerate(("first", "middle", "last"), 1):
        keys = {"place": place, "layer": number, "budget": 4}
        for name in (*schedule.NAMES, "nothing_ahead"):
            rows.add(name, "block_ms", 0.7, "ms", "simulated", 0.6, 0.8, n=16, **keys)
            for base in {"demand_serial", "nothing_ahead"} - {name}:
                rows.add(f"{name}-{base}", "block_change", -0.1 * number, "share", "simulated", -0.4, 0.1, n=16, **keys)
    rows.add("all", "deviations", 1, "1", "measured")
    rows.add("checked_share", "deviation", 1, "1", "measured", part="choice", protocol="1.0", run="0.25")
    rows.write()


def runs(workspace) -> None:
    rows = _recorder("12_paper", workspace, profile=workspace.profile)
    rows.add("02_traces", "run_minutes", 2.5, "min", "measured")
    rows.write()
