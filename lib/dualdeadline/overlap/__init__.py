"""The overlap study: schedules of one MoE block and of whole decode steps, measured, simulated, recorded.

blocks.py   settings, schedules, floors, timing       rows.py   record rows
study.py    loops over settings, recorded costs       wired.py   encoded against raw experts
`report.overlap` and `report.wire` show the rows
"""

from dualdeadline.overlap import wired
from dualdeadline.overlap.blocks import (
    Setting,
    block,
    check,
    floor,
    ideal,
    measure,
    resident,
    settings,
    simulated_blocks,
)
from dualdeadline.overlap.rows import (
    add,
    agreement_rows,
    copy_rows,
    install_rows,
    record_parts,
    span_rows,
    step_cost_rows,
    step_rows,
    window_rows,
)
from dualdeadline.overlap.study import (
    of_setting,
    recorded_cost,
    recorded_step_cost,
    resimulate,
    run,
    run_shapes,
    simulated_timelines,
    step_cost,
    steps_of,
    timelines,
)

__all__ = [
    "Setting",
    "add",
    "agreement_rows",
    "block",
    "check",
    "copy_rows",
    "floor",
    "ideal",
    "install_rows",
    "measure",
    "of_setting",
    "record_parts",
    "recorded_cost",
    "recorded_step_cost",
    "resident",
    "resimulate",
    "run",
    "run_shapes",
    "settings",
    "simulated_blocks",
    "simulated_timelines",
    "span_rows",
    "step_cost",
    "step_cost_rows",
    "step_rows",
    "steps_of",
    "timelines",
    "window_rows",
    "wired",
]
