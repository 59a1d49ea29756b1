"""Who notices that whom is gone, and what is said of it."""

from __future__ import annotations

import pytest
from servekit.runtime.nodes.link import Silence
from servekit.runtime.startup import StartError
from servekit.runtime.watch import Ended


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("head", "member"):
        monkeypatch.setattr(f"servekit.runtime.nodes.{module}.SILENCE_S", 0.5)


def test_silence_is_counted_while_this_process_runs_and_ends_with_a_word():
    silence = Silence()
    began = silence._looked
    assert silence.look(began + 1) == 1
    assert silence.look(began + 2) == 2
    # It stood still itself.
    assert silence.look(began + 100) == 4
    silence.heard()
    assert silence.look(began + 101) == 1


def test_a_node_that_is_killed_is_gone_after_two_beats_with_its_ranks(world):
    two = world()
    head, member = two.head(), two.member(1)
    two.meet(head, member)
    two.remove(member)
    two.until(lambda: two.events, 1.0)
    assert two.events == [Ended(head.ranks[0])]
    assert head.ranks[0].how_it_ended() == "went with node 1, which is not connected any more"


def test_a_node_that_is_connected_and_silent_is_gone_and_is_told_so(world, short):
    three = world(3)
    head, silent, other = three.head(), three.member(1), three.member(2)
    three.meet(head, silent, other)
    three.lines.remove(silent)
    three.until(lambda: three.events)
    assert three.events == [Ended(head.ranks[0])]
    assert "node 1, which was not heard of for" in head.ranks[0].how_it_ended()
    assert head.ranks[1].status is None
    three.lines.append(silent)
    three.until(lambda: silent.end)
    assert silent.end == (1, "node 0 goes on without this node, which was not heard of for 0.5 s")
    assert other.end is None


@pytest.mark.parametrize("gone", [True, False], ids=["killed", "silent"])
def test_a_node_without_node_0_ends(world, short, gone):
    two = world()
    head, member = two.head(), two.member(1)
    two.meet(head, member)
    if gone:
        two.remove(head)
    else:
        two.lines.remove(head)
    two.until(lambda: member.end, 2.0)
    assert member.end[0] == 1
    assert ("is not connected any more" if gone else "was not heard of for 0.5 s") in member.end[1]
    if not gone:
        two.lines.append(head)


def test_a_node_of_an_earlier_run_is_not_taken_for_one_of_this(world, short):
    two = world()
    head, member = two.head(), two.member(1)
    two.meet(head, member)
    two.remove(head)
    second = two.head()
    two.until(lambda: member.end, 3.0)
    # It heard nothing of what the second one says: that is not its node 0.
    assert "goes on without" not in member.end[1]
    assert not second.is_complete
    assert two.events == []


def test_lost_messages_end_what_can_not_go_on_without_them(world):
    two = world()
    head, member = two.head(), two.member(1)
    two.meet(head, member)
    member._link._number += 1
    two.until(lambda: two.events and member.end)
    assert head.ranks[0].how_it_ended() == "went with node 1, which lost messages with its connection"
    assert member.end == (1, "node 0 goes on without this node, which lost messages with its connection")


def test_why_node_0_ends_is_told_to_the_others(world):
    two = world()
    head, member = two.head(), two.member(1)
    two.meet(head, member)
    head.leave(StartError, StartError("rank 0 has no memory"), None)
    two.lines.remove(head)
    two.until(lambda: member.end)
    assert member.end == (1, "rank 0 has no memory")


def test_why_a_node_ends_is_told_to_node_0(world):
    two = world()
    head, member = two.head(), two.member(1)
    two.meet(head, member)
    member.leave(StartError, StartError("no such model"), None)
    two.lines.remove(member)
    two.until(lambda: two.events)
    assert two.events == [Ended(head.ranks[0])]
    assert head.ranks[0].failure == "node 1: no such model"
