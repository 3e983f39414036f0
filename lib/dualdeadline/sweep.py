"""Parameter sweeps on dask.distributed: one shard per point, resumed after a kill, checked when merged.

A point is a mapping of plain JSON values. Its result is a few rows, kept by the caller's process in
`<out>/<key>.json` as soon as it arrives; the key is a hash of function and parameters. Arrays never travel:
points name a path and workers read it (so with a remote scheduler the path must be shared).
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import cached_property
from pathlib import Path

import pandas as pd
import psutil
from tqdm.auto import tqdm

from dualdeadline import manifest

WORKER_BYTES = 1.5 * 2**30  # a worker with torch and a trace; more workers than fit would swap


class SweepError(ValueError):
    """Shards that do not make up the grid."""


class GapError(SweepError):
    """Points without a shard."""


class OverlapError(SweepError):
    """A point more than once, in the grid or in two shards."""


class ForeignError(SweepError):
    """Shards or files that belong to no point of the grid."""


class DamagedError(SweepError):
    """A shard that is truncated or was changed."""


def points(**axes) -> list[dict]:
    """Every combination of values, the last axis fastest: `points(slots=[16, 32], policy=["lru"])`."""
    return [dict(zip(axes, values)) for values in itertools.product(*axes.values())]


def run(function: Callable, grid: list[dict], out: Path, scheduler: str | Cluster | None = None) -> pd.DataFrame:
    """Rows of `function(**point)` for every point of the grid; points with a sound shard are not run again.

    Args:
        function: importable by the workers; returns a DataFrame, a list of dicts or a dict.
        grid: points, see `points`.
        out: folder of the shards, of this sweep alone.
        scheduler: address of a running dask scheduler, `tcp://host:port`; None: worker processes on this
            machine for the length of the call; a `Cluster` serves several calls. A script that calls this needs
            the usual `if __name__ == "__main__"`.

    Raises:
        OverlapError, ForeignError: see `merge`; before anything runs.
        ConnectionError: no scheduler at that address.
        RuntimeError: a point failed; names it, and what was finished is kept.
    """
    out = Path(out)
    wanted = _wanted(function, grid)
    _refuse_foreign(out, wanted)
    missing = {key: point for key, point in wanted.items() if not _sound(out / f"{key}.json", key)}
    if missing:
        with nullcontext(scheduler) if isinstance(scheduler, Cluster) else Cluster(scheduler) as cluster:
            _collect(cluster.client, function, missing, out)
    return merge(out, grid, function)


def merge(out: Path, grid: list[dict], function: Callable) -> pd.DataFrame:
    """Rows of all shards in grid order, each with its point's parameters as columns.

    Raises:
        OverlapError: the grid names a point twice, or a shard holds another point than its name says.
        ForeignError: the folder holds something that is not of this grid.
        GapError: a point has no shard.
        DamagedError: a shard is truncated or was changed.
    """
    wanted = _wanted(function, grid)
    _refuse_foreign(Path(out), wanted)
    gaps = [point for key, point in wanted.items() if not (Path(out) / f"{key}.json").exists()]
    if gaps:
        raise GapError(f"{out} lacks {len(gaps)} of {len(wanted)} points, first {gaps[0]}; run it again")
    parts = []
    for key, point in wanted.items():
        rows = pd.DataFrame(_read(Path(out) / f"{key}.json", key)["rows"])
        clash = sorted(set(rows.columns) & set(point))
        if clash:
            raise SweepError(f"rows and parameters both have {clash}; needed: different names")
        for place, (name, value) in enumerate(point.items()):
            rows.insert(place, name, [value] * len(rows))
        parts.append(rows)
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def key_of(function: Callable, point: dict) -> str:
    """Name of a point's shard: 24 hex digits of the hash of function and parameters."""
    return manifest.sha256(_canonical([f"{function.__module__}.{function.__qualname__}", point]))[:24]


def _wanted(function: Callable, grid: list[dict]) -> dict[str, dict]:
    wanted = {key_of(function, point): dict(point) for point in grid}
    if len(wanted) < len(grid):
        names = [key_of(function, point) for point in grid]
        twice = next(point for point, name in zip(grid, names) if names.count(name) > 1)
        raise OverlapError(f"the grid names {len(grid) - len(wanted)} points again, as {twice}; needed: each once")
    return wanted


def _refuse_foreign(out: Path, wanted: dict[str, dict]) -> None:
    names = sorted(path.name for path in out.glob("*")) if out.exists() else []
    known = {f"{key}.json" for key in wanted}
    foreign = [name for name in names if not name.startswith(".") and name not in known]
    if foreign:
        raise ForeignError(f"{out} holds {len(foreign)} files of no point of this grid, first {foreign[0]}; "
                           "needed: a folder of its own for each sweep. Move them away")


def _collect(client, function: Callable, missing: dict[str, dict], out: Path) -> None:
    """Run the missing points and keep each result when it arrives."""
    from distributed import as_completed

    futures = {client.submit(_call, function, point, key=key): key for key, point in missing.items()}
    try:
        done = as_completed(futures, loop=client.loop)
        for future in tqdm(done, total=len(futures), desc=function.__name__, unit="point", disable=None):
            key = futures[future]
            error = future.exception()
            if error is not None:
                raise RuntimeError(f"point {missing[key]} failed: {type(error).__name__}: {error}") from error
            rows = future.result()
            shard = {"key": key, "parameters": missing[key], "rows": rows}
            shard["sha256"] = manifest.sha256(_canonical(shard))
            manifest.write_text(out / f"{key}.json", json.dumps(shard))
    finally:
        client.cancel(list(futures), force=True)


def _call(function: Callable, point: dict) -> list[dict]:
    """The point's rows as plain JSON values (runs on a worker)."""
    result = function(**point)
    if not isinstance(result, pd.DataFrame):
        result = pd.DataFrame([result] if isinstance(result, dict) else result)
    return [{name: getattr(value, "tolist", lambda value=value: value)() for name, value in row.items()}
            for row in result.to_dict("records")]


def _sound(path: Path, key: str) -> bool:
    """Whether a shard exists and is whole; a damaged one is named, and will be made again."""
    if not path.exists():
        return False
    try:
        _read(path, key)
    except SweepError as error:
        tqdm.write(f"{error}")
        return False
    return True


def _read(path: Path, key: str) -> dict:
    try:
        shard = json.loads(path.read_text(encoding="utf-8"))
        whole = shard.pop("sha256") == manifest.sha256(_canonical(shard))
    except (ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise DamagedError(f"{path} is truncated or was changed; needed: the shard as written. Run it again")
    if shard["key"] != key:
        raise OverlapError(f"{path} holds {shard['parameters']} again; needed: the point of its name")
    return shard


def _canonical(value) -> str:
    return json.dumps(value, sort_keys=True)


class Cluster:
    """Where sweeps run: a given scheduler, or worker processes on this machine that start when first needed.

    A context manager: what it started ends with the block, also after Ctrl-C. Quiet, without dashboard.
    """

    def __init__(self, scheduler: str | None = None):
        self.scheduler, self.open = scheduler or None, ExitStack()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_) -> None:
        self.open.close()

    @cached_property
    def client(self):
        """A client of the scheduler. Raises ConnectionError if there is none at the address."""
        from distributed import Client

        if self.scheduler is None:
            return self.open.enter_context(Client(self._start(), set_as_default=False))
        try:
            return self.open.enter_context(Client(self.scheduler, timeout="10s", set_as_default=False))
        except (OSError, TimeoutError, ValueError) as error:
            message = f"no dask scheduler at {self.scheduler!r} ({error}); needed: tcp://host:port"
            raise ConnectionError(message) from None

    def _start(self):
        from distributed import LocalCluster

        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        memory = psutil.virtual_memory().available
        workers = max(1, min(cores, int(memory // WORKER_BYTES)))
        scratch = self.open.enter_context(tempfile.TemporaryDirectory(prefix="dualdeadline-"))
        return self.open.enter_context(LocalCluster(
            n_workers=workers, threads_per_worker=1, memory_limit=memory // workers, local_directory=scratch,
            dashboard_address=":0", scheduler_kwargs={"dashboard": False}, silence_logs=logging.CRITICAL,
        ))
