"""How nodes meet: in any order, each once, only those that fit, and nobody who is not one."""

from __future__ import annotations

import contextlib
import os
import re
import socket

import msgspec
import pytest
import zmq
from servekit.config import ConfigError
from servekit.runtime.nodes.link import NodeLink, Said
from servekit.runtime.nodes.meeting import MEETING
from servekit.runtime.nodes.secret import make_keys
from servekit.runtime.startup import StartError
from servekit.runtime.watch import Ended, Message

from tests.unit.nodes.conftest import SECRET, SHAPE


def test_nodes_meet_in_any_order_and_are_told_all_addresses_and_the_same_keys(world):
    three = world(3)
    late = three.member(2)
    for _ in range(20):
        three.turn()
    head, other = three.head(), three.member(1)
    three.meet(head, other, late)
    assert other.keys == late.keys == head.keys
    assert set(other.addresses) == {"egress.ipc", "rank1.ipc", "rank2.ipc"}
    assert other.addresses == late.addresses == head.addresses
    assert [rank.pid for rank in head.ranks] == [1001, 1002]
    assert three.events == []


def test_no_node_begins_before_all_are_there_and_the_missing_one_is_named(world):
    three = world(3)
    head, member = three.head(), three.member(1)
    for _ in range(60):
        three.turn()
    assert not head.is_complete
    assert not member.taking_part
    assert re.fullmatch(
        rf"node 2 of --nnodes 3 did not come to {re.escape(str(three.address))} within 5 s \(--dist-timeout\)",
        head.who_is_missing(),
    )


def test_nodes_that_come_before_node_0_knows_its_model_wait(world):
    two = world()
    head, member = two.head(shape=None), two.member(1)
    for _ in range(60):
        two.turn()
    assert not head.is_complete
    assert member.end is None
    head.expect(two.mains[head], SHAPE)
    two.meet(head, member)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"build": "2.0"}, "its servekit is 2.0 and that of node 0 is 1.0: both must be the same build"),
        ({"schema": "0x2"}, "both must be the same build"),
        ({"flags": {"dtype": "float32"}}, "its --dtype is float32 and that of node 0 is auto: they must be the same"),
        ({"flags": {}}, "its --dtype is not given and that of node 0 is auto"),
        ({"files": {"config.json": "01"}}, "its model has another config.json than that of node 0"),
        ({"files": {}}, "its model has another config.json"),
    ],
)
def test_a_node_that_does_not_fit_is_refused_with_the_reason_on_both_sides(world, caplog, change, line):
    two = world()
    head, member = two.head(), two.member(1, msgspec.structs.replace(SHAPE, **change))
    two.until(lambda: member.end)
    status, reason = member.end
    assert status == 1
    assert line in reason
    assert reason.startswith("node 0 refuses node 1: ")
    assert line in caplog.text
    assert line in head.who_is_missing()
    assert not head.is_complete
    two.remove(member)
    two.meet(head, two.member(1))


def test_a_node_number_that_there_is_not_is_refused(world):
    two, three = world(), world(3)
    head = two.head()
    three.address = two.address
    three.args = msgspec.structs.replace(three.args, dist_init_addr=str(two.address))
    stranger = three.member(2)
    two.until(lambda: three.turn() or stranger.end)
    assert "--nnodes 2 has no node 2" in stranger.end[1]
    assert not head.is_complete


def test_a_second_life_waits_while_the_first_is_heard_of_and_is_refused_once_all_have_begun(world):
    two = world()
    head, first = two.head(), two.member(1)
    two.until(lambda: head.is_complete)
    second = two.member(1)
    for _ in range(60):
        two.turn()
    assert second.end is None
    head.begin()
    two.until(lambda: first.taking_part and second.end)
    assert "node 1 has taken part in this run before" in second.end[1]
    assert first.end is None
    assert two.events == []


def test_a_node_that_dies_before_the_start_is_replaced_by_its_next_life(world, monkeypatch):
    monkeypatch.setattr("servekit.runtime.nodes.head.FORGET_S", 0.3)
    two = world()
    head, first = two.head(), two.member(1)
    two.until(lambda: head.is_complete)
    two.remove(first)
    second = two.member(1)
    two.until(lambda: not head.is_complete)
    two.meet(head, second)


def test_a_wrong_secret_is_told_on_both_sides(world, tmp_path, caplog):
    files = []
    for name, text in (("right", SECRET), ("wrong", SECRET + "!")):
        files.append(tmp_path / name)
        files[-1].write_text(text)
        files[-1].chmod(0o600)
    two = world(cluster_secret_file=str(files[0]))
    head = two.head()
    wrong = two.member(1, cluster_secret_file=str(files[1]))
    # Its own waiting: it gives up before its time is over.
    with pytest.raises(StartError, match=r"hangs up: it has another secret \(--cluster-secret-file\)"):
        wrong.wait_for_node_0(two.mains[wrong])
    assert "come without the cluster's secret" in caplog.text
    assert "somebody came without the cluster's secret" in head.who_is_missing()
    two.meet(head, two.member(1))


def test_without_a_secret_only_loopback_is_taken(world):
    two = world()
    with pytest.raises(ConfigError, match=r"--node-ip 192\.0\.2\.1 is not on this machine alone.* need a secret"):
        two.member(1, node_ip="192.0.2.1")
    with pytest.raises(ConfigError, match=r"--dist-init-addr 192\.0\.2\.1 is not"):
        two.member(1, dist_init_addr="192.0.2.1:5000", node_ip="127.0.0.1")


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": bytes.fromhex("16030100c8010000c40303") + bytes(range(200)),
    "random": os.urandom(5000),
    "zmtp null": b"\xff"
    + bytes(8)
    + b"\x7f\x03\x00NULL"
    + bytes(48)
    + b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\6DEALER",
    "zmtp curve hello": b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(47) + b"\x04\xc8\x05HELLO" + bytes(194),
    "half open": b"",
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_harms_nothing_before_and_after_the_start(world, kind):
    two = world()
    head = two.head()
    strangers = []

    def disturb() -> None:
        for _ in range(20):
            strangers.append(socket.create_connection(two.address))
            strangers[-1].sendall(GARBAGE[kind])

    disturb()
    member = two.member(1)
    two.meet(head, member)
    disturb()
    for _ in range(60):
        two.turn()
    assert two.events == []
    assert member.end is None
    for each in strangers:
        each.close()


def test_no_number_of_strangers_holds_up_the_nodes(world):
    two = world()
    head, member = two.head(), two.member(1)
    two.meet(head, member)
    # More than libzmq's queue of events holds, each gone again before the next.
    for i in range(2500):
        with socket.create_connection(two.address, timeout=10) as stranger:
            stranger.sendall(GARBAGE["zmtp null"])
            stranger.settimeout(0.01)
            with contextlib.suppress(OSError):
                while stranger.recv(4096):
                    pass
        if i % 250 == 0:
            two.turn()
    member.pass_on(two.mains[member].children[0], {"event": "progress"})
    two.until(lambda: two.events)


def test_a_client_without_the_key_can_say_nothing_with_libzmq_either(world):
    two = world()
    head = two.head()
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.connect(f"tcp://{two.address}")
    stranger.send(b"let me in")
    member = two.member(1)
    two.meet(head, member)
    assert stranger.poll(300) == 0
    context.destroy(0)


def test_who_has_the_key_and_speaks_nonsense_is_not_heard(world, caplog):
    two = world()
    head, member = two.head(), two.member(1)
    two.meet(head, member)
    link = NodeLink(two.address, make_keys(b"", MEETING), b"nonsense")
    for body in (b"", b"\x00", b"\x93\x01\x02\x03", os.urandom(300)):
        link._socket.send(body)
    link.send(Said(1, {"event": "ready"}))
    for _ in range(60):
        two.turn()
    assert two.events == []
    assert member.end is None
    assert caplog.text.count("can't be read") == 1
    link._context.destroy(0)


def test_what_a_rank_says_and_its_end_reach_node_0_and_orders_reach_the_rank(world):
    two = world()
    head, member = two.head(), two.member(1)
    two.meet(head, member)
    rank, there = head.ranks[0], two.mains[member].children[0]
    member.pass_on(there, {"event": "progress", "done": 1, "total": 2, "what": "weights"})
    two.until(lambda: two.events)
    assert two.events == [Message(rank, {"event": "progress", "done": 1, "total": 2, "what": "weights"})]
    assert rank.command("stop")
    rank.write_stacks()
    rank.kill()
    two.until(lambda: len(there.told) == 3)
    assert there.told == [{"command": "stop"}, "stacks", "kill"]
    there.status = -9
    member.tell_of_end(there)
    two.until(lambda: len(two.events) == 2)
    assert two.events[1] == Ended(rank)
    assert rank.how_it_ended() == "was killed by SIGKILL"
    assert not rank.command("stop")
    assert member.end is None


def test_pulses_of_ranks_are_shown_at_node_0(world):
    two = world()
    head, member = two.head(), two.member(1)
    two.meet(head, member)
    page = two.mains[head].state_page
    two.until(lambda: page.relayed)
    assert page.relayed[0] == (1, 1, 0.1, "idle", 2.0, 1.5, 7, False)
