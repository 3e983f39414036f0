"""The study's stages, hypotheses, models and machines as tables for display."""

from __future__ import annotations

import pandas as pd

from dualdeadline import machine, manifest, paths, record
from dualdeadline.report import runtime, verdicts

# stage -> question, what it reads, what it writes; a test compares the keys with the notebooks that exist
STAGES = {
    "00_map": ("How does the study hang together, and how far is it?", "manifests, records", "nothing"),
    "01_corpus": (
        "Which prompts, and is any shared between splits?",
        "pinned packages",
        "prompt ids and hashes",
    ),
    "02_traces": ("What does the router choose while decoding?", "prompts, model", "traces"),
    "03_predictors": ("Which predictors, fitted how?", "traces", "fitted predictors, scores"),
    "04_evaluation": ("How much of the coming routes is predicted?", "scores, traces", "records, figures"),
    "05_replay": ("What do caches keep, what would stalls be?", "scores, traces", "records, figures"),
    "06_kernels": ("How fast are experts, fetch and predictor?", "a GPU, or its records", "records, figures"),
    "07_overlap": ("What is left to gain once every copy is pipelined?", "a GPU, or its records; scores",
                   "records, figures"),
    "08_wire": ("How few bytes can an expert be, and what does that change?", "a GPU, or its records; weights",
                "records, figures"),
    "09_decode": ("What does a whole decode step cost with experts in host memory?",
                  "a GPU, or its records; routes, scores", "certificate, records, figures"),
    "10_tiers": ("What changes when experts lie on an SSD or in another process?",
                 "this machine's disk, records of others; routes, scores", "records, figures"),
    "11_confirmation": ("Do the findings hold on a second architecture, fixed beforehand?",
                        "second model, prompts, protocol; records of others",
                        "own traces and predictors, records, figures"),
    "12_paper": (
        "Does all that is said follow from records?",
        "records, figures",
        "tables, numbers, README, PDF",
    ),
    "90_pilot_model": ("How was the embedded model made?", "records of its training", "figures"),
}


def overview(workspace: paths.Workspace):
    """Every stage with its question, input, output and, where the runner has timed it, minutes."""
    frame = pd.DataFrame.from_dict(STAGES, orient="index", columns=["question", "reads", "writes"])
    rows = record.read(workspace, runtime.STAGE)
    rows = (
        rows[(rows["metric"] == "run_minutes") & (rows["scope.profile"] == workspace.profile)]
        if len(rows)
        else rows
    )
    frame["minutes"] = frame.index.map(dict(zip(rows["variant"], rows["median"], strict=True)))
    frame["minutes"] = frame["minutes"].astype(float)
    return (
        frame.rename_axis("notebook")
        .reset_index()
        .style.hide(axis="index")
        .format({"minutes": "{:.1f}"}, na_rep="–")
        .set_uuid("stages")
    )


def hypotheses(workspace: paths.Workspace, model: str):
    """Every hypothesis with its claim, criterion and verdict."""
    lines = []
    for name, entry in verdicts.hypotheses().items():
        word = verdicts.verdict_of(verdicts.comparisons(workspace, name, model)[0])
        lines.append((name, entry["claim"], entry["support"], entry["stage"], word))
    frame = pd.DataFrame(lines, columns=["", "claim", "counts as support", "stage", "verdict"])
    return frame.style.hide(axis="index").set_uuid("hypotheses")


def models():
    """Models that records may name, with their sizes."""
    entries = manifest.read_yaml("models.yaml")
    frame = pd.DataFrame(
        [
            (name, entry["title"], *(entry[key] for key in "LEKHF"), entry["licence"])
            for name, entry in entries.items()
        ],
        columns=["model", "title", *"LEKHF", "licence"],
    )
    return frame.style.hide(axis="index").set_uuid("models")


def machines(workspace: paths.Workspace):
    """Machines that records name, and the stages each has rows for."""
    files = sorted(workspace.records.glob("*.csv"))
    rows = pd.concat([record.load(path) for path in files] or [pd.DataFrame(columns=record.FIELDS)])
    lines = [
        (
            name,
            entry["cpu"],
            entry["cores"],
            entry["memory_gib"],
            entry["gpu"],
            ", ".join(sorted(set(rows[rows["machine"] == name]["stage"]))),
        )
        for name, entry in machine.known().items()
    ]
    frame = pd.DataFrame(lines, columns=["machine", "CPU", "cores", "GiB", "GPU", "stages"])
    return frame.style.hide(axis="index").set_uuid("machines")
