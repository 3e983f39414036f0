"""Streams beside the caller's: different ones, whatever torch's pool hands out."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from dualdeadline.engine.device import DeviceDriven
from dualdeadline.engine.lanes import StreamLanes
from dualdeadline.streams import lanes


class Stream:
    """A stream of a pool of four that are handed out in turn, as torch's 32 are."""

    taken = itertools.count()

    def __init__(self, device=None):
        self.number, self.device, self.waited = next(Stream.taken) % 4, device, []

    def __eq__(self, other):
        return isinstance(other, Stream) and self.number == other.number

    __hash__ = None

    def wait_stream(self, other):
        self.waited.append(other.number)


@pytest.fixture
def pool(monkeypatch):
    """The current stream as a list of one, which a test may change."""
    Stream.taken = itertools.count()
    current = [Stream()]
    monkeypatch.setattr(lanes.torch.cuda, "Stream", Stream)
    monkeypatch.setattr(lanes.torch.cuda, "current_stream", lambda device=None: current[0])
    return current


def test_streams_beside_the_callers_differ_from_it_and_from_each_other(pool):
    seen = []
    for turn in range(8):
        pool[0] = SimpleNamespace(number=-1) if turn == 7 else Stream()
        found = lanes.beside(2, torch.device("cuda", 0))
        assert len({stream.number for stream in found} | {pool[0].number}) == 3
        seen.append(pool[0].number)
    assert set(seen) == {-1, 0, 1, 2, 3}  # each stream of the pool was the caller's once
    with pytest.raises(ValueError, match="5 streams were asked for; needed: less than"):
        lanes.beside(5, torch.device("cuda", 0))


def test_copy_streams_of_a_schedule_are_beside_its_compute_stream(pool, monkeypatch):
    monkeypatch.setattr(lanes.CudaLanes, "_event", lambda self: SimpleNamespace(record=lambda stream: None))
    monkeypatch.setattr(Stream, "wait_event", lambda self, event: None, raising=False)
    for _ in range(6):
        pool[0] = Stream()
        found = lanes.CudaLanes(torch.device("cuda", 0), copy_streams=2)
        assert found.streams[0] == pool[0] and len({stream.number for stream in found.streams}) == 3


def test_a_layer_that_is_captured_on_one_of_its_streams_takes_others(pool):
    """A graph is captured on a stream that torch made later than the layer's, perhaps the same."""
    captures = [False]
    driven = SimpleNamespace(cuda=True, streams=[], tables=SimpleNamespace(device=torch.device("cuda", 0)))
    driven.capturing = lambda: captures[0]
    DeviceDriven._own_streams(driven)
    kept = list(driven.streams)
    DeviceDriven._own_streams(driven)
    assert driven.streams == kept and pool[0] not in kept
    for place, captures[0] in enumerate((False, True)):
        before = [stream.number for stream in driven.streams]
        pool[0] = driven.streams[place]
        DeviceDriven._own_streams(driven)
        assert pool[0] not in driven.streams and len({stream.number for stream in driven.streams}) == 2
        waited = [stream.waited for stream in driven.streams]
        assert waited == ([[], []] if captures[0] else [[number] for number in before])


def test_lanes_of_the_host_wait_for_the_streams_that_they_leave(pool):
    found = SimpleNamespace(streams=[pool[0], *lanes.beside(2, torch.device("cuda", 0))])
    before = [stream.number for stream in found.streams[1:]]
    pool[0] = found.streams[2]
    StreamLanes.enter(found)
    assert found.streams[0] == pool[0] and pool[0] not in found.streams[1:]
    assert [stream.waited for stream in found.streams[1:]] == [[number] for number in before]
    StreamLanes.enter(found)
    assert [stream.waited for stream in found.streams[1:]] == [[number] for number in before]
