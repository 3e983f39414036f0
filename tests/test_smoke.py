"""The whole study in its smallest size, and the published notebooks checked cell by cell on its data.

Slow (minutes). The cells tagged `nbval-check-output` print what is equal in every profile, so their published
(pilot) outputs must come out of a smoke run too: every stage's are compared with those of the run itself, and nbval runs
the short stages once more (`make test MARK=slow`: all).
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import nbformat
import pytest

from dualdeadline import notebook, paths, study

# the runner moves the stages that show the others' results to the end
ORDER = study.ordered(list(notebook.sources()))
TRACKED = ("data_manifests", "figures", "paper", "notebooks", "README.md")


def git_state():
    """Changes of tracked and unignored files, or None outside git."""
    done = subprocess.run(["git", "status", "--porcelain", "--", *TRACKED], cwd=paths.ROOT, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """Environment of a finished smoke run, and what the runner said."""
    environment = os.environ | {"DUALDEADLINE_DATA": str(tmp_path_factory.mktemp("data")), "JUPYTER_PREFER_ENV_PATH": "1"}
    before = git_state()
    done = run_study(environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert git_state() == before, "the smoke run changed committed files"
    return environment, done.stdout


def run_study(environment):
    return subprocess.run([sys.executable, "-m", "dualdeadline.study", "run", "--profile", "smoke"], env=environment,
                          capture_output=True, text=True, timeout=1500)


def test_every_stage_runs_and_leaves_its_copy(smoke):
    environment, said = smoke
    runs = os.path.join(environment["DUALDEADLINE_DATA"], "smoke", "runs")
    assert {f"{stage}.ipynb" for stage in ORDER} <= set(os.listdir(runs))
    assert {f"{stage}.json" for stage in ORDER} <= set(os.listdir(runs))
    assert f"{len(ORDER)} of {len(ORDER)} stages ran" in said


def test_second_run_skips_every_stage(smoke):
    done = run_study(smoke[0])
    assert done.returncode == 0 and f"0 of {len(ORDER)} stages ran" in done.stdout, done.stdout


def printed(path) -> list[str]:
    """What each cell tagged for nbval printed."""
    cells = [cell for cell in nbformat.read(path, 4).cells if "nbval-check-output" in cell.metadata.get("tags", ())]
    return ["".join(out.text for out in cell.outputs if out.get("name") == "stdout") for cell in cells]


@pytest.mark.parametrize("stage", ORDER)
def test_tagged_cells_print_what_is_published(smoke, stage):
    run = os.path.join(smoke[0]["DUALDEADLINE_DATA"], "smoke", "runs", f"{stage}.ipynb")
    found = printed(notebook.sources()[stage].with_suffix(".ipynb"))
    assert found and all(found) and printed(run) == found


@pytest.fixture(scope="module")
def checks(smoke, tmp_path_factory, request):
    """A running nbval check of every stage that is asked for, two at a time: the other tests leave a core to spare."""
    asked = {item.callspec.params["stage"] for item in request.session.items if "come_out_again" in item.name}
    with ThreadPoolExecutor(2) as pool:
        yield {stage: pool.submit(check, stage, smoke[0], tmp_path_factory.mktemp(stage)) for stage in ORDER if stage in asked}


def check(stage, environment, folder):
    """nbval on the published notebook of a stage with the smoke run's parameters and data."""
    import papermill

    (run,) = study.plan("smoke", only=stage)
    copy = folder / f"{stage}.ipynb"
    papermill.execute_notebook(notebook.sources()[stage].with_suffix(".ipynb"), copy, parameters=run.changed,
                               prepare_only=True, progress_bar=False)
    checked = [sys.executable, "-m", "pytest", "--nbval-lax", "--nbval-cell-timeout=900", "-q", "-p", "no:cacheprovider",
               f"--rootdir={folder}", str(copy)]
    return subprocess.run(checked, cwd=folder, env=environment | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
                          timeout=1500)


@pytest.mark.parametrize("stage", ORDER)
def test_published_outputs_come_out_again(checks, stage):
    done = checks[stage].result()
    assert done.returncode == 0, done.stdout[-6000:]
