"""Which cores a rank gets, and that it never matters for whether it starts."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servekit.runtime.placement import cores_of, take_cores


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=64, unique=True).map(sorted), st.integers(1, 16))
def test_ranks_share_what_was_granted_and_nothing_else(granted, ranks):
    parts = [cores_of(granted, i, ranks) for i in range(ranks)]
    if len(granted) < ranks:
        assert parts == [granted] * ranks
        return
    assert [core for part in parts for core in part] == granted
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.fixture
def granted():
    before = os.sched_getaffinity(0)
    yield before
    os.sched_setaffinity(0, before)


def test_a_rank_stays_on_its_part_and_has_it_for_itself(granted):
    if len(granted) < 2:
        pytest.skip("needs two cores")
    assert take_cores(1, 2) == 1
    assert os.sched_getaffinity(0) == set(cores_of(sorted(granted), 1, 2))


def test_too_few_cores_are_shared_by_all(granted):
    ranks = len(granted) + 1
    assert take_cores(0, ranks) == ranks
    assert os.sched_getaffinity(0) == granted


def test_a_system_that_refuses_is_no_reason_to_fail(granted, monkeypatch):
    def refuse(pid, cores):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    assert take_cores(0, len(granted)) == len(granted)
    monkeypatch.undo()
