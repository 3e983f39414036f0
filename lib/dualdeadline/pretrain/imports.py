"""Bring a training run made on a GPU machine into the records: evaluation, progress, and the bench before it.

    python -m dualdeadline.pretrain.imports FOLDER --commit C [--dirty]

FOLDER holds what the calls returned: `records.json`, `metrics.json` and, where speeds were compared, `bench.json`; with
`--place` also the weights in `model/`, which go to pilot/NAME with the first model's tokenizer and the card.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dualdeadline import models, paths, record
from dualdeadline.pretrain import checkpoint, evaluate

POINTS = 80  # of the loss curve; more would show nothing else


def training_rows(metrics: dict) -> list[dict]:
    """Rows of one run: totals, the held-out history by domain and the training loss over tokens."""
    last, rows = metrics["last"], []
    totals = {
        "tokens_seen": (last["tokens"], "token"), "steps": (last["step"], "1"), "seconds": (last["seconds"], "s"),
        "tokens_per_s": (last["tokens_per_s"], "token/s"), "peak_memory": (metrics["peak_bytes"] / 2**30, "GiB"),
    }
    rows += [evaluate.row("training", name, value, unit, 1) for name, (value, unit) in totals.items()]
    for metric, by_domain in (("epochs", metrics["epochs"]), ("share", metrics["shares"])):
        rows += [evaluate.row("training", metric, value, "1", 1, domain=name) for name, value in by_domain.items()]
    for point in metrics["history"]:
        rows += [evaluate.row("progress", "heldout_bits_per_byte", point[name], "bit/byte", 1, domain=name,
                              tokens=point["tokens"]) for name in ("macro", *metrics["shares"])]
    curve = metrics["curve"][:: max(1, len(metrics["curve"]) // POINTS)]
    seen = {point["tokens"]: point for point in curve}  # the last point may stand twice
    for tokens, point in seen.items():
        rows.append(evaluate.row("progress", "training_loss", point["nats"], "nat/token", 1, tokens=tokens))
        rows.append(evaluate.row("progress", "rate", point["rate"], "1", 1, tokens=tokens))
    return rows


def bench_rows(bench: dict) -> list[dict]:
    """Rows of the speed variants and of the optimizer probes (equal time) that chose the recipe."""
    rows = []
    for line in bench["variants"]:
        rows.append(evaluate.row(line["name"], "bench_tokens_per_s", line["tokens_per_s"], "token/s", 1))
        rows.append(evaluate.row(line["name"], "bench_peak_memory", line["peak_gib"], "GiB", 1))
    rows += [evaluate.row(line["name"], "probe_bits_per_byte", line["macro"], "bit/byte", 1, tokens=line["tokens"])
             for line in bench["recipes"]]
    return rows


def main(argv: list[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--commit", required=True, help="what the GPU machine ran")
    parser.add_argument("--dirty", action="store_true", help="its tree differed from the commit")
    parser.add_argument("--place", action="store_true", help="put the weights into the package first")
    parser.add_argument("--machine", default="nvidia-h200", help="id for machines.yaml")
    args = parser.parse_args(argv)
    found, metrics, *bench = (json.loads(path.read_text()) for name in ("records", "metrics", "bench")
                              if (path := args.folder / f"{name}.json").exists() or name != "bench")
    rows = found["rows"] + training_rows(metrics) + (bench_rows(bench[0]) if bench else [])
    if args.place:
        checkpoint.assemble(args.folder / "model", paths.PILOT / found["model"].removeprefix("pilot-"),
                            paths.PILOT / "olmoe")
    written = record.import_rows(
        found["stage"], found["model"], models.revision(found["model"]), paths.Workspace("pilot"), rows, args.machine,
        found["machine"], found["versions"], args.commit, found["time"], str(args.dirty).lower())
    print(f"{len(written)} rows in {found['stage']}.csv")


if __name__ == "__main__":
    main()
