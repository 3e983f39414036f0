"""Stages that use one core each, two at a time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress

import psutil

from dualdeadline.stamp import STAGES


def groups(runs: list) -> list[list]:
    """Runs in order; a stage that may run beside an earlier one is in one group with it."""
    found: list[list] = []
    led: dict[tuple[str, str], list] = {}
    for run in runs:
        group = led.get((STAGES[run.stage].beside if run.stage in STAGES else "", run.label))
        if group is None:
            group = led[run.stage, run.label] = []
            found.append(group)
        group.append(run)
    return found


def run(jobs: list[Callable[[], None]]) -> None:
    """Run the jobs in two threads (a single one in this thread) and wait for all; the first error is raised.

    Ctrl-C reaches this thread only: the kernels that run for the others are interrupted from here.
    """
    if len(jobs) < 2 or (os.cpu_count() or 1) < 2:
        for job in jobs:
            job()
        return
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(job) for job in jobs]
        try:
            wait(futures)
        except KeyboardInterrupt:
            _stop(futures)
            raise
    for future in futures:
        future.result()


def _stop(futures: list, patience_s: float = 20.0) -> None:
    """Interrupt the kernels of this process until its threads have ended, and kill those that do not stop."""
    for future in futures:
        future.cancel()
    end = time.monotonic() + patience_s
    while wait(futures, 1.0).not_done:
        for kernel in _kernels():
            with suppress(psutil.Error):
                kernel.send_signal(signal.SIGINT if time.monotonic() < end else signal.SIGKILL)


def _kernels() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # one that has just gone
            if any("ipykernel" in word for word in child.cmdline()):
                found.append(child)
    return found
