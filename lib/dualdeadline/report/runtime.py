"""How long the stages took: read from executed notebooks, recorded, shown in README."""

from __future__ import annotations

import json

import pandas as pd

from dualdeadline import machine, paths, record
from dualdeadline.report import text
from dualdeadline.report.tables import Table, rows_of

STAGE = "12_paper"


def durations(workspace: paths.Workspace) -> dict[str, float]:
    """Seconds that each executed stage of this profile took, by stage name; only runs that ended well."""
    found = {}
    for path in sorted(workspace.runs.glob("[0-9][0-9]_*.ipynb")):
        if "@" in path.stem:  # one combination of a grid
            continue
        run = json.loads(path.read_text(encoding="utf-8"))["metadata"].get("papermill", {})
        if run.get("duration") and not run.get("exception"):
            found[path.stem] = float(run["duration"])
    return found


def add(recorder: record.Recorder, workspace: paths.Workspace) -> int:
    """Add one `run_minutes` row per executed stage; how many."""
    found = durations(workspace)
    for stage, seconds in found.items():
        recorder.add(stage, "run_minutes", seconds / 60, "min", "measured")
    return len(found)


def minutes(workspace: paths.Workspace) -> Table:
    """Minutes per stage and in total, with the machine they were taken on."""
    rows = rows_of(workspace, STAGE, "run_minutes", None).sort_values("variant")
    rows = rows[rows["scope.profile"] == workspace.profile]
    lines = [
        [name, text.value(value, digits=1)]
        for name, value in zip(rows["variant"], rows["median"], strict=True)
    ]
    lines.append(["all of these", text.value(rows["median"].sum(), digits=1)])
    where = f"{workspace.profile} profile on {hardware(rows)}"
    caption = f"Measured run time of the {where}, installation not included."
    return Table("minutes", caption, pd.DataFrame(lines, columns=["stage", "minutes"]), rows)


def hardware(rows: pd.DataFrame) -> str:
    """Cores, processor and memory of the machine behind some rows; its id where it is not described."""
    name = rows["machine"].iloc[0]
    entry = machine.known().get(name)
    return f"{entry['cores']} cores of {entry['cpu']}, {entry['memory_gib']} GiB" if entry else name
