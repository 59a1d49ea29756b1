"""The line between main and a child: whole messages, in order, and never a wait that was not asked for."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest
from servekit.runtime.channel import Channel, ChannelError


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    one, two = Channel(ours), Channel(theirs)
    yield one, two
    one.close()
    two.close()


def test_messages_arrive_whole_and_in_order(ends):
    one, two = ends
    sent = [{"n": i, "text": "é\n" * i} for i in range(50)]
    assert all(one.send(message) for message in sent)
    got = []
    while len(got) < len(sent):
        got += two.receive(wait=True)
    assert got == sent
    assert two.receive() == []


def test_a_line_may_come_in_pieces():
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    theirs.sendall(b'{"a"')
    assert channel.receive() == []
    theirs.sendall(b': 1}\n{"b": 2}\n{')
    assert channel.receive() == [{"a": 1}, {"b": 2}]
    theirs.close()
    channel.close()


def test_the_end_is_seen(ends):
    one, two = ends
    one.send({"last": True})
    one.close()
    assert two.receive() == [{"last": True}]
    assert two.closed
    assert not two.send({"any": "thing"})


def test_a_peer_that_does_not_read_does_not_block(ends):
    one, _ = ends
    sent = 0
    while one.send({"x": "y" * 100}):
        sent += 1
        assert sent < 100_000
    assert sent > 10


def test_sending_from_many_threads_keeps_lines_apart(ends):
    one, two = ends
    threads = [threading.Thread(target=lambda n=n: [one.send({"n": n, "i": i}) for i in range(50)]) for n in range(4)]
    for thread in threads:
        thread.start()
    got = []
    while len(got) < 200:
        got += two.receive(wait=True)
    for thread in threads:
        thread.join()
    assert all([m["i"] for m in got if m["n"] == n] == list(range(50)) for n in range(4))


@pytest.mark.parametrize("rubbish", [b"no json\n", b"[1]\n", b"x" * (5 << 20)])
def test_rubbish_is_an_error(rubbish):
    ours, theirs = socket.socketpair()
    channel = Channel(ours)

    def send() -> None:
        with contextlib.suppress(OSError):
            theirs.sendall(rubbish)

    sender = threading.Thread(target=send)
    sender.start()

    def read() -> None:
        while True:
            channel.receive(wait=True)

    with pytest.raises(ChannelError):
        read()
    channel.close()
    sender.join()
    theirs.close()
