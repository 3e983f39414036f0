"""Run the study: python -m dualdeadline.study [run | list | build | publish].

Each stage is a notebook `NN_name.py`. `run` gives it its profile's parameters, executes it with papermill in
a fresh kernel, keeps the executed copy under `data/<profile>/runs`, and leaves a stamp. A stage whose text,
parameters, code, environment and inputs equal its stamp, and whose outputs lie as it left them, is skipped.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from dualdeadline import beside, notebook, paths
from dualdeadline.stamp import STAGES, Stamp


class StudyError(Exception):
    """A message for the person at the terminal: what was got, what is needed."""


@dataclass(frozen=True)
class Run:
    """One stage with its parameters; `label` tells the runs of a grid apart."""

    stage: str
    text: Path
    parameters: dict
    changed: dict = field(default_factory=dict)  # from the defaults: papermill injects only these
    label: str = ""

    @property
    def name(self) -> str:
        return f"{self.stage}@{self.label}" if self.label else self.stage


def profile(name: str, folder: Path = paths.NOTEBOOKS) -> dict[str, dict]:
    """Stage -> parameters of a profile.

    Raises:
        StudyError: there is no such profile, or the file is no mapping of stages to parameters.
    """
    known = sorted(path.stem for path in (folder / "profiles").glob("*.yaml"))
    if name not in known:
        raise StudyError(f"no profile {name!r}; known: {', '.join(known)}")
    path = folder / "profiles" / f"{name}.yaml"
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise StudyError(f"{path} is no YAML: {error}") from None
    if not isinstance(found, dict) or not all(isinstance(value, dict | None) for value in found.values()):
        raise StudyError(f"{path}: got a {type(found).__name__}; needed: stage -> parameters")
    return {stage: values or {} for stage, values in found.items()}


def grid(text: str) -> list[dict]:
    """`"seed=0,1 horizon=1,2"` -> every combination as a mapping; `""` -> one empty mapping."""
    axes = {}
    for part in text.split():
        name, equals, values = part.partition("=")
        if not (name and equals and values) or name in axes:
            raise StudyError(f"GRID has {part!r}; needed: name=value,value, each name once")
        axes[name] = [yaml.safe_load(value) for value in values.split(",")]
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def select(stages: list[str], only: str = "", first: str = "") -> list[str]:
    """The stages to run, in run order: `only` is a list of numbers or names, `first` where to begin."""
    def find(wanted: str) -> str:
        matches = [stage for stage in stages if stage == wanted or stage.split("_")[0] == wanted.zfill(2)]
        if not matches:
            raise StudyError(f"no stage {wanted!r}; known: {', '.join(sorted(stages))}")
        return matches[0]

    chosen = {find(part.strip()) for part in only.split(",") if part.strip()} or set(stages)
    start = stages.index(find(first)) if first else 0
    found = [stage for stage in stages[start:] if stage in chosen]
    if not found:
        raise StudyError(f"ONLY={only} and FROM={first} leave no stage; the order is {', '.join(stages)}")
    return found


def ordered(stages: list[str]) -> list[str]:
    """Reading order, except that a stage which shows the results of others comes after them."""
    return sorted(stages, key=_shows)


def plan(
    name: str, folder: Path = paths.NOTEBOOKS, only="", first="", combinations="", scheduler=""
) -> list[Run]:
    """Every run that the command asks for, with checked parameters, before the first one starts.

    Raises:
        StudyError: unknown profile, stage or parameter, a value of the wrong type, an axis that no stage has.
    """
    texts = notebook.sources(folder)
    given = profile(name, folder)
    for stage in given:
        if stage not in texts:
            raise StudyError(f"profile {name} has a section {stage!r}; stages are: {', '.join(texts)}")
    chosen = select(ordered(list(texts)), only, first)
    declared = {stage: notebook.parameters(notebook.load(texts[stage]), stage) for stage in chosen}
    runs = []
    for combination in grid(combinations):
        for axis in list(combination) + (["scheduler"] if scheduler else []):
            if not any(axis in names for names in declared.values()):
                raise StudyError(f"none of {', '.join(chosen)} has a parameter {axis!r}")
        shared = {"profile": name} | combination | ({"scheduler": scheduler} if scheduler else {})
        for stage in chosen:
            own = {key: value for key, value in shared.items() if key in declared[stage]}
            values = given.get(stage, {})
            runs.append(_run(stage, texts[stage], declared[stage], values, own, set(combination)))
    # a stage without the axis comes again in every combination: its stamp says whether its inputs changed
    return sorted(runs, key=lambda run: _shows(run.stage))


def _shows(stage: str) -> int:
    return STAGES[stage].shows if stage in STAGES else 0


def _run(stage: str, text: Path, declared: dict, given: dict, own: dict, axes: set) -> Run:
    base = notebook.resolve(stage, declared, given)
    values = notebook.resolve(stage, declared, given | own)
    differs = {key: value for key, value in values.items() if value != declared[key]}
    label = ",".join(f"{key}={values[key]}" for key in sorted(axes & set(own)) if values[key] != base[key])
    return Run(stage, text, values, differs, label.replace("/", "-"))


def execute(run: Run, workspace: paths.Workspace, bar) -> None:
    """Run one notebook in a fresh kernel; the executed copy is kept whether or not it succeeds.

    Raises:
        StudyError: a cell failed or the kernel died; the message names notebook, cell and error.
    """
    import papermill
    from nbclient.exceptions import DeadKernelError

    target = workspace.runs / f"{run.name}.ipynb"
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        papermill.execute_notebook(
            notebook.load(run.text), target, parameters=run.changed, kernel_name="python3",
            cwd=run.text.parent,
            progress_bar=False, extra_arguments=["--log-level=ERROR"],
            on_cell_start=lambda cell, cell_index: bar.set_postfix_str(
                f"{run.name} cell {cell_index + 1}", refresh=sys.stderr.isatty()),
            on_cell_executed=lambda cell, cell_index, execute_reply: bar.update(),
        )
    except papermill.PapermillExecutionError as error:
        if error.ename == "KeyboardInterrupt":
            raise KeyboardInterrupt from None
        raise StudyError(_failure(run, target, error)) from None
    except DeadKernelError:
        raise StudyError(f"{run.text.name}: its kernel died, most often for lack of memory "
                         f"(4 GB are enough for the pilot). The run so far: {target}") from None


def _failure(run: Run, target: Path, error) -> str:
    place = error.cell_index + (0 if run.changed else 1)  # from 1; the injected cell is not in the text
    source = "\n".join("    " + line for line in error.source.strip().splitlines()[:12])
    return (f"{run.text.name}, cell {place} failed:\n{source}\n{error.ename}: {error.evalue}\n"
            f"Whole traceback in {target}.\n"
            "What was collected is kept; the same command goes on from this stage.")


def environment() -> None:
    """What every kernel inherits: this environment's kernel, fixed hashing, quiet libraries."""
    os.environ |= {"PYTHONHASHSEED": "0", "JUPYTER_PREFER_ENV_PATH": "1", "TOKENIZERS_PARALLELISM": "false",
                   "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    # another kernel called python3, or a backend that draws nothing, would come from these
    # and without compiled files every kernel would compile its imports anew
    for name in ("JUPYTER_PATH", "MPLBACKEND", "PYTHONDONTWRITEBYTECODE"):
        os.environ.pop(name, None)


def run_all(runs: list[Run], workspace: paths.Workspace, force: bool = False) -> int:
    """Run what is not up to date, one progress bar over the code cells of all stages; how many stages ran."""
    from tqdm.auto import tqdm

    environment()
    cells = [sum(cell.cell_type == "code" for cell in notebook.load(run.text).cells) + bool(run.changed)
             for run in runs]
    done, counts = 0, {run.name: count for run, count in zip(runs, cells, strict=True)}
    quiet = {} if sys.stderr.isatty() else {"mininterval": 30, "maxinterval": 60}
    with tqdm(total=sum(cells), unit="cell", desc=f"study {workspace.profile}", **quiet) as bar:
        for group in beside.groups(runs):
            todo = []
            for run in group:
                stamp = Stamp(run.stage, run.name, run.text, run.parameters, workspace)
                if not force and (reason := stamp.stale()) is None:
                    bar.write(f"{run.name}: unchanged", file=sys.stdout)
                    bar.update(counts[run.name])
                else:
                    bar.write(f"{run.name}: running ({'forced' if force else reason})", file=sys.stdout)
                    todo.append((run, stamp))
            beside.run([functools.partial(_stamped, run, stamp, workspace, bar) for run, stamp in todo])
            done += len(todo)
    return done


def _stamped(run: Run, stamp: Stamp, workspace: paths.Workspace, bar) -> None:
    start, before = time.monotonic(), stamp.key()
    stamp.clear()
    execute(run, workspace, bar)
    stamp.write(before)
    bar.write(f"{run.name}: done in {time.monotonic() - start:.0f} s", file=sys.stdout)


def build(folder: Path = paths.NOTEBOOKS) -> None:
    """Text to notebook; outputs of cells that did not change stay."""
    for stage, text in notebook.sources(folder).items():
        target = text.with_suffix(".ipynb")
        built = notebook.load(text)
        notebook.parameters(built, stage)
        old = notebook.read(target) if target.exists() else None
        notebook.write(notebook.keep_outputs(built, old) if old else built, target)
        print(target.name)


def publish(folder: Path = paths.NOTEBOOKS) -> None:
    """Put the executed pilot runs beside their texts, cleaned of what differs from run to run."""
    runs = paths.Workspace("pilot").runs
    executed = {stage: runs / f"{stage}.ipynb" for stage in notebook.sources(folder)}
    found = {stage: path for stage, path in executed.items() if path.exists()}
    if not found:
        raise StudyError(f"no executed runs in {runs}; needed: make study")
    for stage, path in found.items():
        text = folder / f"{stage}.py"
        cleaned = notebook.with_outputs(notebook.load(text), notebook.read(path), stage)
        notebook.write(cleaned, text.with_suffix(".ipynb"))
        print(text.with_suffix(".ipynb").name)


def show(runs: list[Run], workspace: paths.Workspace) -> None:
    """One line per stage: whether it would run, and why."""
    for run in runs:
        reason = Stamp(run.stage, run.name, run.text, run.parameters, workspace).stale()
        print(f"{run.name:24} {'unchanged' if reason is None else 'to run: ' + reason}")


def parser() -> argparse.ArgumentParser:
    """The command line: run, list, build, publish."""
    root = argparse.ArgumentParser(prog="python -m dualdeadline.study", description=__doc__.split("\n")[0])
    commands = root.add_subparsers(dest="command", required=True)
    for name, text in (("run", "run what is not up to date"), ("list", "what would run")):
        command = commands.add_parser(name, help=text)
        command.add_argument("--profile", default="pilot")
        command.add_argument("--only", default="", help="stages by number or name, such as 03,04")
        command.add_argument("--from", dest="first", default="", help="first stage to run")
        command.add_argument("--grid", default="", help="every combination, such as 'seed=0,1,2'")
        command.add_argument("--scheduler", default="", help="address of a dask scheduler for the sweeps")
        command.add_argument("--force", action="store_true", help="run stages that are up to date too")
    commands.add_parser("build", help="make the .ipynb of every text file")
    commands.add_parser("publish", help="put the executed pilot runs beside their text files")
    return root


def main(arguments: list[str] | None = None, folder: Path = paths.NOTEBOOKS) -> int:
    """Exit status: 0 done, 1 failed, 130 interrupted."""
    given = parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        if given.command in ("build", "publish"):
            {"build": build, "publish": publish}[given.command](folder)
            return 0
        runs = plan(given.profile, folder, given.only, given.first, given.grid, given.scheduler)
        workspace = paths.Workspace(given.profile)
        if given.command == "list":
            show(runs, workspace)
        else:
            ran = run_all(runs, workspace, given.force)
            print(f"{ran} of {len(runs)} stages ran; executed copies in {workspace.runs}")
    except (StudyError, ValueError, OSError) as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted. What was collected is kept; the same command resumes.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
