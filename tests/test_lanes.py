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


def test_a_layer_that_is_captured_on_one_of_its_streams_takes_others(pool):
    """A graph is captured on a stream that torch made later than the layer's, perhaps the same."""
    driven = SimpleNamespace(cuda=True, streams=[], tables=SimpleNamespace(device=torch.device("cuda", 0)))
    DeviceDriven._own_streams(driven)
    kept = list(driven.streams)
    DeviceDriven._own_streams(driven)
    assert driven.streams == kept and pool[0] not in kept
    for taken in kept:
        pool[0] = taken
        DeviceDriven._own_streams(driven)
        assert taken not in driven.streams and len({stream.number for stream in driven.streams}) == 2


def test_lanes_of_the_host_wait_for_the_streams_that_they_leave(pool):
    found = SimpleNamespace(streams=[pool[0], *lanes.beside(2, torch.device("cuda", 0))])
    before = [stream.number for stream in found.streams[1:]]
    pool[0] = found.streams[2]
    StreamLanes.enter(found)
    assert found.streams[0] == pool[0] and pool[0] not in found.streams[1:]
    assert [stream.waited for stream in found.streams[1:]] == [[number] for number in before]
    StreamLanes.enter(found)
    assert [stream.waited for stream in found.streams[1:]] == [[number] for number in before]
