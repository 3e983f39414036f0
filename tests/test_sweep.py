"""Sweeps: resumed, refused and merged; clusters that leave nothing behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import sweep_functions
from dualdeadline import sweep

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def scheduler():
    from distributed import LocalCluster

    with LocalCluster(n_workers=1, threads_per_worker=1, processes=False, protocol="tcp://",
                      dashboard_address=":0") as cluster:
        yield cluster.scheduler_address


GRID = sweep.points(value=[1, 2, 3], label=["a", "b"])


@pytest.fixture
def done(tmp_path, scheduler):
    sweep.run(sweep_functions.square, GRID, tmp_path / "shards", scheduler)
    return tmp_path / "shards"


def test_rows_come_in_grid_order_with_their_parameters(done):
    rows = sweep.merge(done, GRID, sweep_functions.square)
    assert list(rows.columns) == ["value", "label", "square", "half", "name"]
    assert rows.square.tolist() == [1, 1, 4, 4, 9, 9] and rows.name.tolist()[-1] == "bbb"
    assert rows.half.tolist() == [0.5, 0.5, 1.0, 1.0, 1.5, 1.5]


def test_a_finished_sweep_starts_no_cluster(done):
    again = sweep.run(sweep_functions.square, GRID, done, scheduler="tcp://127.0.0.1:1")
    assert len(again) == 6


def test_only_missing_and_damaged_points_run_again(done, scheduler, capsys):
    missing, damaged = (done / f"{sweep.key_of(sweep_functions.square, point)}.json" for point in GRID[:2])
    kept = {path: path.stat().st_mtime_ns for path in done.glob("*") if path not in (missing, damaged)}
    missing.unlink()
    damaged.write_text(damaged.read_text()[:-9])
    with pytest.raises(sweep.GapError, match="lacks 1 of 6"):
        sweep.merge(done, GRID, sweep_functions.square)
    rows = sweep.run(sweep_functions.square, GRID, done, scheduler)
    assert rows.square.tolist() == [1, 1, 4, 4, 9, 9] and damaged.name in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


def test_changed_truncated_foreign_and_doubled_shards_have_their_own_errors(done):
    first, second = (done / f"{sweep.key_of(sweep_functions.square, point)}.json" for point in GRID[:2])
    text = first.read_text()
    first.write_text(json.dumps(json.loads(text) | {"rows": [{"square": 2}]}))
    with pytest.raises(sweep.DamagedError, match=first.name):
        sweep.merge(done, GRID, sweep_functions.square)
    first.write_text(second.read_text())
    with pytest.raises(sweep.OverlapError, match="'label': 'b'"):
        sweep.merge(done, GRID, sweep_functions.square)
    first.write_text(text)
    (done / "notes.txt").write_text("mine")
    with pytest.raises(sweep.ForeignError, match="notes.txt"):
        sweep.merge(done, GRID, sweep_functions.square)
    (done / "notes.txt").unlink()
    with pytest.raises(sweep.ForeignError, match="3 files"):
        sweep.merge(done, GRID[:3], sweep_functions.square)
    with pytest.raises(sweep.OverlapError, match="each once"):
        sweep.merge(done, GRID + GRID[:1], sweep_functions.square)


def test_a_failing_point_is_named_and_the_others_are_kept(tmp_path, scheduler):
    grid = sweep.points(value=[1, 2], at=[2])
    with pytest.raises(RuntimeError, match="'value': 2.*ValueError: value is 2"):
        sweep.run(sweep_functions.fails_at, grid, tmp_path / "shards", scheduler)
    assert len(list((tmp_path / "shards").glob("*.json"))) <= 1
    sweep.run(sweep_functions.fails_at, sweep.points(value=[1], at=[2]), tmp_path / "shards", scheduler)


def test_no_scheduler_at_the_address(tmp_path):
    with pytest.raises(ConnectionError, match="needed: tcp://host:port"):
        sweep.run(sweep_functions.square, GRID, tmp_path / "shards", "nonsense")


SCRIPT = """
import sys
from pathlib import Path
from dualdeadline import sweep
import sweep_functions
if __name__ == "__main__":
    folder = Path(sys.argv[1])
    grid = sweep.points(value=[int(value) for value in sys.argv[2:]], folder=[str(folder)])
    print(sweep.run(sweep_functions.slow_square, grid, folder / "shards").square.tolist())
"""


def start(folder, *values):
    (folder / "script.py").write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, folder / "script.py", folder, *map(str, values)], text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(HERE)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # a background job ignores Ctrl-C


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


def test_a_local_cluster_is_quiet_and_ctrl_c_leaves_shards_but_no_processes(tmp_path):
    process = start(tmp_path, 0, 1, 5)
    shards = tmp_path / "shards"
    wait_for(lambda: (tmp_path / "5.started").exists() and len(list(shards.glob("*.json"))) == 2)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0 and "KeyboardInterrupt" in errors
    assert "distributed" not in errors.split("Traceback")[0]  # no log lines, no word of ports
    wait_for(lambda: not any(child.is_running() and child.status() != "zombie" for child in family))
    out, errors = start(tmp_path, 0, 1).communicate(timeout=60)
    assert out.strip() == "[0, 1]", errors
