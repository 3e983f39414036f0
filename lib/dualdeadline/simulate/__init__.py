"""Times without a device: the original study's stall arithmetic, and an event simulator over a schedule."""

from dualdeadline.simulate.events import run
from dualdeadline.simulate.stalls import (
    Coverage,
    coverage,
    mean_coverage,
    published,
    published_stall,
    stall,
    windows,
    windows_for,
)

__all__ = ["Coverage", "coverage", "mean_coverage", "published", "published_stall", "run", "stall", "windows",
           "windows_for"]
