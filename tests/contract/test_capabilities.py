"""What the wheel must bring along."""

from servekit import _core


def test_libzmq_speaks_curve():
    assert _core.zmq_has("curve")
    assert not _core.zmq_has("no such capability")
