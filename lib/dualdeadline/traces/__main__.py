"""Collect the trace stores of a profile without its notebook, in one process or, under torchrun, in several.

    python -m dualdeadline.traces --profile qwen --device auto       one process, the model spread over all GPUs
    torchrun --nproc-per-node 4 -m dualdeadline.traces --profile olmoe    one model and every fourth batch per GPU

The notebook 02_traces then finds its stores complete.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch

from dualdeadline import corpus, models, paths, study, traces
from dualdeadline.traces import shards


def device_for(asked: str | None, processes: int) -> str | None:
    """Where this process puts its model: as asked, else a GPU of its own where there are several processes.

    Raises:
        ValueError: `auto` with several processes, or fewer GPUs than processes on this host.
    """
    if asked == "auto" and processes > 1:
        raise ValueError(
            f"device is 'auto' with {processes} processes; needed: one process, whose model takes all GPUs, "
            "or one GPU per process"
        )
    if asked or processes == 1 or not torch.cuda.is_available():
        return asked
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= count:
        raise ValueError(f"LOCAL_RANK is {local} and this host has {count} GPUs; needed: at most one process per GPU")
    return f"cuda:{local}"


def stores(given: dict) -> list[tuple[str, str, traces.Sampling | None]]:
    """Store, corpus and sampling of each set that the notebook's parameters name."""
    sampling = traces.Sampling(given["temperature"], given["top_p"], given["sampling_seed"])
    return [(name, name, sampling) for name in given["corpora"]] + [
        (f"{name}_greedy", name, None) for name in given["greedy"]
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dualdeadline.traces", description=__doc__.split("\n")[0])
    parser.add_argument("--profile", default="pilot")
    parser.add_argument("--model", help="key or folder instead of the profile's")
    parser.add_argument("--device", help="cpu, cuda, cuda:N, or auto: spread over all GPUs by accelerate")
    asked = parser.parse_args(arguments)
    try:
        rank, processes = shards.place()
        device = device_for(asked.device, processes)
        (run,) = study.plan(asked.profile, only="02")
        given = run.parameters | ({"model": asked.model} if asked.model else {})
        model, tokenizer = models.load(given["model"], device)
        for name, source, sampling in stores(given):
            found = shards.collect_part(
                model,
                tokenizer,
                corpus.load(source, given["prompts"]),
                paths.Workspace(asked.profile).traces / name,
                given["new_tokens"],
                given["batch_size"],
                sampling,
                given["min_new_tokens"],
                rank,
                processes,
            )
            told = f"{len(found.prompts)} prompts, whole" if found else "its part is done, another process joins them"
            print(f"{name}, process {rank} of {processes}: {told}", flush=True)
    except (ValueError, OSError, study.StudyError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        print(f"{error or 'interrupted'}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
