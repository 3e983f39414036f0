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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import psutil
from tqdm.auto import tqdm

from dualdeadline import manifest

WORKER_BYTES = 1.5 * 2**30  # a worker with torch imported and a trace loaded; more workers than fit would swap


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
    """Every combination of the axes' values, the last axis fastest: `points(slots=[16, 32], policy=["lru"])`."""
    return [dict(zip(axes, values)) for values in itertools.product(*axes.values())]


def run(function: Callable, grid: list[dict], out: Path, scheduler: str | None = None) -> pd.DataFrame:
    """Rows of `function(**point)` for every point of the grid; points that have a sound shard are not run again.

    Args:
        function: importable by the workers; returns a DataFrame, a list of dicts or a dict.
        grid: points, see `points`.
        out: folder of the shards, of this sweep alone.
        scheduler: address of a running dask scheduler, `tcp://host:port`; None: worker processes on this machine
            for the length of the call. A script that calls this needs the usual `if __name__ == "__main__"`.

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
        with _client(scheduler, len(missing)) as client:
            _collect(client, function, missing, out)
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
        raise GapError(f"{out} lacks {len(gaps)} of {len(wanted)} points, first {gaps[0]}; run the sweep again")
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
        raise OverlapError(f"the grid holds {len(grid) - len(wanted)} points again, for one {twice}; needed: each once")
    return wanted


def _refuse_foreign(out: Path, wanted: dict[str, dict]) -> None:
    names = sorted(path.name for path in out.glob("*")) if out.exists() else []
    foreign = [name for name in names if not name.startswith(".") and name.removesuffix(".json") not in wanted]
    if foreign:
        raise ForeignError(f"{out} holds {len(foreign)} files of no point of this grid, first {foreign[0]}; "
                           "needed: a folder of its own for each sweep. Move them away")


def _collect(client, function: Callable, missing: dict[str, dict], out: Path) -> None:
    """Run the missing points and keep each result when it arrives."""
    from distributed import as_completed

    futures = {client.submit(_call, function, point, key=key, pure=False): key for key, point in missing.items()}
    try:
        for future in tqdm(as_completed(futures, loop=client.loop), total=len(futures), desc="sweep", unit="point"):
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
    frame = result if isinstance(result, pd.DataFrame) else pd.DataFrame([result] if isinstance(result, dict) else result)
    return [{name: getattr(value, "tolist", lambda value=value: value)() for name, value in row.items()}
            for row in frame.to_dict("records")]


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
        raise DamagedError(f"{path} is truncated or was changed; needed: the shard as written. A run makes it again")
    if shard["key"] != key:
        raise OverlapError(f"{path} holds the point {shard['parameters']} again; needed: the point of its name")
    return shard


def _canonical(value) -> str:
    return json.dumps(value, sort_keys=True)


@contextmanager
def _client(scheduler: str | None, jobs: int) -> Iterator:
    """A client of the scheduler, or of a local cluster that ends with the block; quiet, without dashboard."""
    from distributed import Client, LocalCluster

    if scheduler:
        try:
            client = Client(scheduler, timeout="10s", set_as_default=False)
        except (OSError, TimeoutError, ValueError) as error:
            raise ConnectionError(f"no dask scheduler at {scheduler!r} ({error}); needed: tcp://host:port") from error
        with client:
            yield client
        return
    cores, memory = len(os.sched_getaffinity(0)), psutil.virtual_memory().available
    workers = max(1, min(cores, jobs, int(memory // WORKER_BYTES)))
    with tempfile.TemporaryDirectory(prefix="dualdeadline-") as scratch, LocalCluster(
        n_workers=workers, threads_per_worker=1, memory_limit=memory // workers, dashboard_address=":0",
        scheduler_kwargs={"dashboard": False}, local_directory=scratch, silence_logs=logging.CRITICAL,
    ) as cluster, Client(cluster, set_as_default=False) as client:
        yield client
