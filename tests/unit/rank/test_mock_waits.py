"""A mock request's wait is told with its first row and with its last."""

from __future__ import annotations

from servekit.messages.batches import QUEUE_TIME
from servekit.scheduler.mock_waits import Waits


def test_first_and_last_rows_tell_and_those_between_do_not() -> None:
    waits = Waits()
    waits.admitted(1, 0.5)
    waits.admitted(2, 0.25)
    assert waits.column([1], ()) == {QUEUE_TIME: [0.5]}
    assert waits.column([2, 1], ()) == {QUEUE_TIME: [0.25, None]}
    assert waits.column([1, 2], ()) is None
    assert waits.column([1, 2], {1: "end"}) == {QUEUE_TIME: [None, 0.25]}
    assert waits.column([1, 3], {0: "end", 1: "end"}) == {QUEUE_TIME: [0.5, None]}, "3 ended before it ran"
    assert waits.column([1], {0: "end"}) == {QUEUE_TIME: [None]}, "forgotten with its end"
