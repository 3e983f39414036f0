"""Whether a stage is up to date: what it was made from, and whether its outputs lie as it left them."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dualdeadline import manifest, notebook, paths

MANIFESTS = ("data_manifests/models.yaml", "data_manifests/protocol.yaml")
SHOWN = ("records/*", "data_manifests/machines.yaml", *MANIFESTS)
FITTED = ("traces/**/*", "scores/**/*")
PILOT = "lib/dualdeadline/pilot/**/*"


@dataclass(frozen=True)
class Stage:
    """What a stage reads and makes, as globs.

    `traces/`, `scores/`, `records/`, `figures/` and `generated/` lie in the workspace, all else below ROOT.
    """

    reads: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()
    shows: int = 0  # above 0: shows the results of the stages with a smaller number, and runs after them
    beside: str = ""  # an earlier stage, if the two share nothing, use one core each and may run at the same time


STAGES = {
    "00_map": Stage(reads=SHOWN, shows=2),
    "01_corpus": Stage(reads=MANIFESTS[:1], makes=("data_manifests/corpora/*", "records/01_corpus.csv")),
    "02_traces": Stage(reads=("data_manifests/corpora/*", MANIFESTS[0], PILOT),
                       makes=("traces/**/*", "records/02_traces.csv")),
    "03_predictors": Stage(reads=("traces/**/*", *MANIFESTS), makes=("scores/**/*", "records/03_predictors.csv")),
    "04_evaluation": Stage(reads=(*FITTED, *MANIFESTS), makes=("records/04_evaluation.csv",)),
    "05_replay": Stage(reads=(*FITTED, *MANIFESTS, "data_manifests/published_olmoe.json"),
                       makes=("records/05_replay.csv",)),
    "06_kernels": Stage(reads=("data_manifests/records/06_*", *FITTED, MANIFESTS[0]),
                        makes=("records/06_kernels.csv",)),
    "07_overlap": Stage(reads=("data_manifests/records/07_*", *FITTED, *MANIFESTS),
                        makes=("records/07_overlap.csv",), beside="06_kernels"),
    "08_wire": Stage(reads=("data_manifests/records/0[78]_*", *FITTED, PILOT, *MANIFESTS),
                     makes=("records/08_wire.csv",)),
    "09_decode": Stage(reads=("data_manifests/records/0[79]_*", "records/07_*", *FITTED, PILOT, *MANIFESTS),
                       makes=("records/09_decode.csv",), beside="08_wire"),
    "10_tiers": Stage(reads=("records/0[459]_*", "data_manifests/records/09_*", "data_manifests/records/10_*", *FITTED,
                             PILOT, *MANIFESTS, "data_manifests/published_tiers.json"),
                      makes=("records/10_tiers.csv",)),
    "11_confirmation": Stage(reads=("data_manifests/corpora/*", "data_manifests/records/0[6789]_*",
                                    "data_manifests/records/11_*", "traces/**/*", PILOT, *MANIFESTS,
                                    "data_manifests/published_olmoe.json"),
                             makes=("records/11_confirmation.csv",)),
    "12_paper": Stage(reads=(*SHOWN, "figures/*", "paper/*.tex", "paper/*.bib"), makes=("generated/*",),
                      shows=1),
    "90_pilot_model": Stage(reads=("records/0[245]_*", "data_manifests/records/90_*", PILOT), beside="08_wire"),
}
# a stage that is not in the table reads whatever an earlier one may have made
UNKNOWN = Stage(reads=("data_manifests/corpora/*", *MANIFESTS, PILOT, *FITTED))


class Stamp:
    """The stamp of one run: `runs/<name>.json`, written last.

    Args:
        stage, name: stage and the name of its run (with the grid's values).
        text: the notebook's text file.
        parameters: all parameters of the run.
        workspace: where the profile reads and writes.
    """

    def __init__(self, stage: str, name: str, text: Path, parameters: dict, workspace: paths.Workspace):
        self.path = workspace.runs / f"{name}.json"
        self.own = workspace.records / f"{stage}.csv"
        self.stage, self.text, self.workspace = STAGES.get(stage, UNKNOWN), text, workspace
        # where a sweep is computed does not change its result
        self.parameters = {key: value for key, value in parameters.items() if key != "scheduler"}

    def key(self) -> dict[str, str]:
        """Hash of each thing that the result depends on."""
        return {
            "text": manifest.file_sha256(self.text),
            "parameters": manifest.sha256(json.dumps(self.parameters, sort_keys=True)),
            "code": code_hash(self.text),
            "environment": manifest.file_sha256(paths.LIB / "requirements.lock"),
            "inputs": manifest.sha256(json.dumps(self._inputs(), sort_keys=True)),
        }

    def stale(self) -> str | None:
        """Why the stage has to run, or None if it is up to date."""
        try:
            stamp = json.loads(self.path.read_text(encoding="utf-8"))
            old, outputs = stamp["key"], stamp["outputs"]
        except (OSError, ValueError, KeyError, TypeError):
            return "not run yet"
        changed = [name for name, value in self.key().items() if old.get(name) != value]
        if changed:
            return f"changed: {', '.join(changed)}"
        now = self._state(self.stage.makes)
        # tables that other runs add rows to, and files that git may rewrite, need only be there
        lost = [name for name, state in outputs.items()
                if name not in now or (isinstance(state, list) and now[name] != state)]
        return f"outputs missing or altered: {', '.join(sorted(lost)[:3])}" if lost else None

    def clear(self) -> None:
        self.path.unlink(missing_ok=True)

    def write(self, key: dict[str, str]) -> None:
        """Stamp a finished run with the key it started from."""
        stamp = {"key": key, "outputs": self._state(self.stage.makes)}
        manifest.write_text(self.path, json.dumps(stamp, indent=1, sort_keys=True) + "\n")

    def _inputs(self) -> dict[str, object]:
        state = self._state(self.stage.reads)
        state.pop(str(self.own), None)  # what a stage writes is no reason to run it again
        return state

    def _state(self, globs: tuple[str, ...]) -> dict[str, object]:
        """Path -> size and time of data files, or content hash of files that git may rewrite."""
        state = {}
        for glob in globs:
            top, _, rest = glob.partition("/")
            known = top in ("traces", "scores", "records", "figures", "generated")
            folder, pattern = (getattr(self.workspace, top), rest) if known else (paths.ROOT, glob)
            bulky = top in ("traces", "scores")
            for path in sorted(folder.glob(pattern)):
                if path.is_file() and not path.name.startswith(".") and "__pycache__" not in path.parts:
                    status = path.stat()
                    seen = [status.st_size, status.st_mtime_ns] if bulky else manifest.file_sha256(path)
                    state[str(path)] = seen
        return state


def code_hash(text: Path) -> str:
    """Hash over the sources of the project's modules that a notebook imports, directly or not."""
    found = closure(_imports(notebook.code(notebook.load(text)), ""))
    lines = [f"{path.relative_to(paths.LIB)}:{manifest.file_sha256(path)}" for path in sorted(found)]
    return manifest.sha256("\n".join(lines))


def closure(names: set[str]) -> set[Path]:
    """Source files behind dotted names and all that those import in turn."""
    found: set[Path] = set()
    queue = list(names)
    while queue:
        for path in _files(queue.pop()):
            if path not in found:
                found.add(path)
                queue.extend(_module_imports(path))
    return found


@cache
def _module_imports(path: Path) -> frozenset[str]:
    package = path.relative_to(paths.LIB).parent.parts
    return frozenset(_imports(path.read_text(encoding="utf-8"), ".".join(package)))


def _imports(source: str, package: str) -> set[str]:
    """Dotted names of this project that a source imports anywhere, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] == "dualdeadline"}


def _files(name: str) -> list[Path]:
    """Source files that importing a dotted name reads: the packages on the way and the module itself."""
    found, parts = [], name.split(".")
    for depth in range(1, len(parts) + 1):
        base = paths.LIB.joinpath(*parts[:depth])
        found += [path for path in (base / "__init__.py", base.with_suffix(".py")) if path.is_file()]
    return found
