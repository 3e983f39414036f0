"""Tasks and the lanes made of them: one outcome, whoever waits, and no interruption that others could hang on."""

import gc
import linecache
import sys
import threading
import weakref
from concurrent.futures import CancelledError

import pytest

from dualdeadline import task
from dualdeadline.engine.lanes import CallerLanes
from dualdeadline.task import Task


def test_a_task_runs_once_or_never():
    ran = []
    one, other = Task(lambda: ran.append(1)), Task(lambda: ran.append(2))
    assert not one.begun and not one.done
    one.run()
    one.run()
    assert ran == [1] and one.done and one.begun and not one.cancel() and not one.claim()
    one.result()
    assert other.cancel() and not other.cancel() and other.cancelled and other.done
    other.run()
    assert ran == [1]
    with pytest.raises(CancelledError):
        other.result()
    failed = Task(lambda: 1 / 0)
    failed.run()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            failed.result()
    with pytest.raises(TimeoutError, match="no outcome after 0.01 s"):
        Task().result(0.01)


def test_many_threads_wait_for_one_outcome_and_one_of_them_claims_it(monkeypatch):
    monkeypatch.setattr(task, "LOST_S", 60.0)
    one, claimed, seen = Task(), [], []

    def wait():
        claimed.append(one.claim())
        one.result()
        seen.append(one.done)

    threads = [threading.Thread(target=wait) for _ in range(8)]
    for thread in threads:
        thread.start()
    one.finish()
    for thread in threads:
        thread.join(20)
    assert sum(claimed) == 1 and seen == [True] * 8


def test_a_waiter_that_keeps_the_gate_does_not_hold_up_the_others():
    one = Task(lambda: None)
    one.run()
    one.done = False  # as another waiter sees it just before
    assert one._gate.acquire(timeout=1)  # interrupted before it opened the gate again
    threading.Timer(0.05, setattr, [one, "done", True]).start()
    assert one.wait(20)


class At:
    """Raises KeyboardInterrupt at the n-th line that runs in some files; not where a signal never is: leaving a `with`."""

    def __init__(self, files, n):
        self.files, self.n, self.count = files, n, 0

    def __call__(self, frame, event, arg):
        return self.line if frame.f_code.co_filename.endswith(self.files) else None

    def line(self, frame, event, arg):
        if event == "line":
            self.count += 1
            here = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            if self.count >= self.n and not here.startswith("with "):
                sys.settrace(None)
                raise KeyboardInterrupt
        return self.line


def interrupted(work, files, n):
    """Whether work was interrupted at its n-th line."""
    sys.settrace(At(files, n))
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def test_lanes_outlive_an_interruption_at_each_of_their_lines():
    lanes, done = CallerLanes(), []

    def layer():
        marks = [lanes.copy(lambda: None, ())]
        marks.append(lanes.copy(lambda: None, marks))
        lanes.compute(lambda: done.append(1), marks)
        lanes.cancel(lanes.copy(lambda: None, ()))
        lanes.settle()

    layer()
    n = 1
    while interrupted(layer, ("engine/lanes.py", "dualdeadline/task.py"), n):
        before = len(done)
        after = threading.Thread(target=layer, daemon=True)
        after.start()
        after.join(20)
        assert not after.is_alive() and len(done) == before + 1, f"line {n}"
        n += 1
    assert n > 40
    lanes.close()
    with pytest.raises(RuntimeError, match="needed: open ones"):
        lanes.copy(lambda: None, ())
    lanes.settle()
    assert not lanes.thread.is_alive()


def test_lanes_that_are_dropped_end_their_thread():
    lanes = CallerLanes()
    thread, gone = lanes.thread, weakref.ref(lanes)
    lanes.copy(lambda: None, ())
    del lanes
    gc.collect()
    thread.join(20)
    assert gone() is None and not thread.is_alive()


def test_closing_cancels_what_has_not_begun():
    lanes, gate = CallerLanes(), threading.Event()
    first = lanes.copy(lambda: gate.wait(20), ())
    second = lanes.copy(lambda: None, ())
    closing = threading.Thread(target=lanes.close)
    while not first.end.begun:
        pass
    closing.start()
    while not second.end.done:
        pass
    gate.set()
    closing.join(20)
    assert second.end.cancelled and first.end.done and not closing.is_alive()
