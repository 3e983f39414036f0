"""One tidy row per measurement: the only source of figures, tables and quoted numbers.

Rows live in `records/<stage>.csv`. A row is replaced by the next run with the same stage, model, scope and
machine; `scope` holds the run parameters that make another row of it (a seed, say).
"""

from __future__ import annotations

import datetime
import fcntl
import functools
import json
import os
import platform
import subprocess
from importlib import metadata

import pandas as pd

from dualdeadline import machine, manifest, paths

KINDS = ("measured", "replayed", "simulated")
FIELDS = (
    "stage model revision variant metric unit median low high n config scope kind "
    "machine versions commit dirty manifest time"
).split()
GENERATED = (
    "figures", "paper/generated", "data_manifests/records", "data_manifests/families.csv",
    "data_manifests/machines.yaml", "notebooks/*.ipynb",
)


class Recorder:
    """Collects the rows of one run and writes them in one step.

    Args:
        stage: notebook stage, e.g. `04_evaluation`; names the file.
        model, revision: keys of `models.yaml`.
        workspace: where the records of this profile live.
        scope: run parameters whose rows stand beside each other, e.g. `{"seed": 0}`.
    """

    def __init__(self, stage: str, model: str, revision: str, workspace: paths.Workspace, scope: dict | None = None):
        self.path = workspace.records / f"{stage}.csv"
        self.common = {"stage": stage, "model": model, "revision": revision, "scope": _compact(scope or {})}
        self.rows: list[dict] = []

    def add(self, variant, metric, median, unit, kind, low=None, high=None, n=1, **config) -> None:
        """One row. `low`/`high` are the interval that the protocol names for this metric (None: no interval).

        Raises:
            ValueError: unknown kind, a control character in a name, or a second row with the same variant, metric
                and config.
        """
        if kind not in KINDS:
            raise ValueError(f"kind is {kind!r}; needed: one of {', '.join(KINDS)}")
        if not (str(variant) + metric).isprintable():
            raise ValueError(f"variant {variant!r} or metric {metric!r} has a line break or control character")
        row = self.common | {
            "variant": variant, "metric": metric, "unit": unit, "kind": kind, "n": int(n), "config": _compact(config),
            "median": _number(median), "low": _number(low), "high": _number(high),
        }
        key = (variant, metric, row["config"])
        if any((r["variant"], r["metric"], r["config"]) == key for r in self.rows):
            raise ValueError(f"two rows with variant, metric and config {key}; a config key is missing")
        self.rows.append(row)

    def write(self, made: dict | None = None) -> pd.DataFrame:
        """Replace this run's rows in the stage's file (under a lock, atomically); the new rows.

        Args:
            made: provenance of rows measured elsewhere (see `import_rows`); default: of here and now.
        """
        made = made or provenance(describe=self.path.is_relative_to(paths.MANIFESTS))
        new = pd.DataFrame([row | made for row in self.rows], columns=FIELDS)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = paths.DATA / "locks" / f"{self.path.stem}.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        with open(lock, "w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            old = load(self.path)
            key = ["stage", "model", "scope", "machine"]
            same = old[key].apply(tuple, axis=1).isin(set(new[key].apply(tuple, axis=1))) if len(old) else []
            rows = pd.concat([old[~same], new], ignore_index=True) if len(old) else new
            with manifest.atomic(self.path) as temporary:
                rows.to_csv(temporary, index=False, lineterminator="\n")
        return new


def import_rows(stage, model, revision, workspace, rows, machine_id, description, versions, commit, time,
                dirty="false", scope=None) -> pd.DataFrame:
    """Write rows measured on another machine (a GPU without git, say), with the provenance given for them.

    Args:
        rows: keyword arguments of `Recorder.add`, with the config keys of a row under `config`.
        machine_id, description: the machine's id and `machine.describe()` there; entered in `machines.yaml`.
        versions, commit, time, dirty: as `provenance()` gives them there. scope: as in `Recorder`.
    """
    recorder = Recorder(stage, model, revision, workspace, scope)
    for row in rows:
        recorder.add(**{key: value for key, value in row.items() if key != "config"}, **row.get("config", {}))
    made = {"machine": machine.register(machine_id, description), "versions": versions, "commit": commit,
            "dirty": dirty, "manifest": manifest.fingerprint(), "time": time}
    return recorder.write(made)


def load(path) -> pd.DataFrame:
    """All rows of a records file (empty if there is none).

    Raises:
        ValueError: the columns are not those of a records file.
    """
    if not path.exists():
        return pd.DataFrame(columns=FIELDS)
    rows = pd.read_csv(path, dtype={name: str for name in FIELDS if name not in ("median", "low", "high", "n")},
                       keep_default_na=False, na_values={"median": [""], "low": [""], "high": [""]})
    if list(rows.columns) != FIELDS:
        raise ValueError(f"{path} has columns {list(rows.columns)}; needed: {FIELDS}. Restore it with git checkout")
    return rows


def visible(workspace: paths.Workspace, stage: str) -> pd.DataFrame:
    """All rows that a workspace shows of a stage: its own, and of a stage that needs a GPU the committed
    measurements of every scope that it has not measured itself."""
    rows = load(workspace.record_file(stage))
    committed = paths.RECORDS / f"{stage}.csv"
    if stage in paths.ON_GPU and workspace.record_file(stage) != committed:
        known = load(committed)
        own = rows[rows.kind == "measured"]
        ours = set(zip(own.model, own.scope))
        missing = [key not in ours for key in zip(known.model, known.scope)]
        known = known[(known.kind == "measured") & pd.Series(missing, known.index, dtype=bool)]
        both = [part for part in (known, rows) if len(part)]  # an empty frame has no types
        return pd.concat(both, ignore_index=True) if both else rows
    return rows


def read(workspace: paths.Workspace, stage: str, model: str | None = None, here: bool = False) -> pd.DataFrame:
    """Rows of a stage with their config spread into columns `config.<key>`, one machine per model and kind.

    Rows of this machine win; a model and kind that this machine never ran shows the reference machine's rows
    (the first of `machines.yaml` that has some). `here=True` takes this machine's rows only. Of a stage that needs
    a GPU the committed measurements count in every workspace, but for scopes that it measured itself.
    """
    order = (machine.machine_id(), *(() if here else machine.known()))
    files = tuple(_state(path) for path in (workspace.record_file(stage), paths.RECORDS / f"{stage}.csv"))
    return _read(workspace, stage, model, order, files).copy()


def _state(path) -> tuple:
    """The path and what changes when its file is written again."""
    if not path.exists():
        return (str(path),)
    status = path.stat()
    return str(path), status.st_ino, status.st_size, status.st_mtime_ns


@functools.lru_cache(64)  # tables and numbers ask for the same rows many times; read again only when a file has changed
def _read(workspace, stage: str, model: str | None, order: tuple[str, ...], files: tuple) -> pd.DataFrame:
    rows = visible(workspace, stage)
    if model is not None:
        rows = rows[rows.model == model]
    rank = rows.machine.map({name: place for place, name in reversed(list(enumerate(order)))})
    rows = rows[rank.notna()].assign(_rank=rank)
    # a GPU stage may have been measured in parts, on several machines
    one = ["model", "kind", "scope"] if stage in paths.ON_GPU else ["model", "kind"]
    return spread(rows[rows._rank == rows.groupby(one)._rank.transform("min")].drop(columns="_rank"))


def spread(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of a records file with config and scope spread into columns `config.<key>` and `scope.<key>`."""
    for column in ("config", "scope"):
        found = pd.DataFrame([json.loads(text) for text in rows[column]], index=rows.index)
        rows = rows.join(found.add_prefix(f"{column}."))
    return rows.reset_index(drop=True)


def provenance(describe: bool = True) -> dict:
    """Machine, versions, commit, dirty flag, manifest hash and UTC time of a row written now.

    `describe` enters this machine in `machines.yaml`; rows that are not committed leave that file alone.
    """
    commit, dirty = _git()
    return {
        "machine": machine.register() if describe else machine.machine_id(),
        "versions": _versions(), "commit": commit, "dirty": str(dirty).lower(),
        "manifest": manifest.fingerprint(),
        "time": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


@functools.cache
def _versions() -> str:
    names = ("torch", "transformers", "triton", "numpy")
    found = [f"{name} {metadata.version(name)}" for name in names if _installed(name)]
    return "; ".join([f"python {platform.python_version()}", *found])


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _git() -> tuple[str, bool]:
    """Commit and whether anything but generated files differs from it; ('unknown', True) outside git.

    A tree that travels without its git folder names the commit it was made from in DUALDEADLINE_COMMIT.
    """
    if os.environ.get("DUALDEADLINE_COMMIT"):
        return os.environ["DUALDEADLINE_COMMIT"], False
    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=paths.ROOT, capture_output=True, text=True, check=True).stdout

    try:
        exclude = [f":(exclude){path}" for path in GENERATED]
        return git("rev-parse", "HEAD").strip(), bool(git("status", "--porcelain", "--", ".", *exclude).strip())
    except (OSError, subprocess.CalledProcessError):
        return "unknown", True


def _compact(mapping: dict) -> str:
    return json.dumps(mapping, sort_keys=True, default=str)


def _number(value) -> float | None:
    return None if value is None else float(f"{float(value):.9g}")
