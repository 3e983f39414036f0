"""Speed variants and a learning-rate probe, time-boxed, each result written as soon as it is there."""

from __future__ import annotations

import argparse
import json
import time
import traceback
from pathlib import Path

import torch

from dualdeadline.pretrain import data, model
from dualdeadline.pretrain.train import BORN, Run, loop, synchronize, validate, write_json


def run(args, pack: data.Pack, out: Path) -> dict:
    """Try `--variants`, then `--recipes` at the fastest one, within `--bench-seconds`; bench.json."""
    device, report = torch.device(args.device), {"variants": [], "recipes": []}
    forwards: dict[str, model.Forward] = {}

    def left() -> float:
        return args.bench_seconds - (time.monotonic() - BORN)

    for text in args.variants.split(","):
        # a variant must leave time for the probes
        if left() > args.bench_seconds / 3:
            row = attempt(text, lambda text=text: speed(args, pack, device, text, forwards))
            report["variants"].append(row)
            keep(report, out, row)
    good = [row for row in report["variants"] if "tokens_per_s" in row]
    if not good:
        raise RuntimeError(f"no variant ran: {[row['error'] for row in report['variants']]}")
    best = max(good, key=lambda row: row["tokens_per_s"])
    report["best"] = best["name"]
    for text in args.recipes.split(","):
        if left() > args.probe_seconds + 5:
            row = attempt(text, lambda text=text: probe(args, pack, device, text, best["name"], forwards))
            report["recipes"].append(row)
            keep(report, out, row)
    return report


def attempt(name: str, work) -> dict:
    """`work()` under a name, or the error it died of: one broken variant must not cost the call."""
    try:
        return {"name": name} | work()
    except Exception as error:
        trace = traceback.format_exc()
        print(trace[-1500:])
        return {"name": name, "error": f"{type(error).__name__}: {error}"[:500]}


def keep(report: dict, out: Path, row: dict) -> None:
    """Print a row and write the report as it stands."""
    print(f"{time.monotonic() - BORN:6.1f} s  {json.dumps(row)}")
    write_json(out / "bench.json", report)


def variant(args, text: str, **changes) -> argparse.Namespace:
    """Command line with `experts:batchxlength` put in."""
    experts, _, size = text.partition(":")
    batch, length = (int(part) for part in size.split("x"))
    changes |= {"experts": experts, "batch": batch, "length": length}
    return argparse.Namespace(**(vars(args) | changes))


def speed(args, pack, device, text: str, forwards: dict) -> dict:
    """Warm-up seconds, tokens/s over full steps (8 s), peak memory; sparse also its distance from dense."""
    mine = variant(args, text)
    key = f"{mine.experts}x{mine.batch}x{mine.length}"
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trial = Run(mine, pack, device)
    row = {"agreement": trial.agreement()} if mine.experts == "sparse" else {}
    row["warm_s"] = round(trial.warm(), 1)
    for _ in range(3):
        trial.advance(0.1)
    synchronize(device)
    begin, first = time.monotonic(), trial.tokens
    while time.monotonic() - begin < min(8.0, args.probe_seconds):
        for _ in range(5):
            parts = trial.advance(0.1)
        parts["nats"].item()
    synchronize(device)
    forwards[key] = trial.forward
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0
    return row | {"tokens_per_s": round((trial.tokens - first) / (time.monotonic() - begin)),
                  "peak_gib": round(memory, 2), "nats": parts["nats"].item()}


def probe(args, pack, device, text: str, best: str, forwards: dict) -> dict:
    """Train `optimizer:rate[:option=value ...]` for --probe-seconds with its own decay, then validate."""
    kind, value, *options = text.split(":")
    changes = {"lr" if kind == "adamw" else "muon_lr": float(value)}
    changes |= {key: float(number) for key, _, number in (option.partition("=") for option in options)}
    mine = variant(args, best, optimizer=kind, warmup=2.0, **changes)
    forward = None if mine.dropout else forwards[f"{mine.experts}x{mine.batch}x{mine.length}"]
    trial = Run(mine, pack, device, forward)
    trial.warm()
    loop(trial, args.probe_seconds, args.probe_seconds)
    found = validate(trial, pack)
    last = trial.curve[-1]
    return {"macro": round(found["macro"], 4), "steps": trial.step, "tokens": trial.tokens,
            **{key: last[key] for key in ("nats", "least", "most", "balance")},
            "bits_per_byte": {name: round(number, 4) for name, number in found.items()}}
