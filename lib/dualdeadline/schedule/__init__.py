"""A schedule as data: operations (`ops.py`), and the named schedules built of them (`build.py`);
`wired.py` puts a decode behind the copies of encoded components.

To add a schedule: name it in `ops.NAMES` and give `build._Builder` a method `_<name>`; once measured it is everywhere.
"""

from dualdeadline.schedule.build import Layer, block, ready, step
from dualdeadline.schedule.ops import COMPONENTS, DECODES, DEMAND, NAMES, PIECES, STAGES, Compute, Copy, Route, Schedule
from dualdeadline.schedule.wired import with_decode

__all__ = ["COMPONENTS", "DECODES", "DEMAND", "NAMES", "PIECES", "STAGES", "Compute", "Copy", "Layer", "Route",
           "Schedule", "block", "ready", "step", "with_decode"]
