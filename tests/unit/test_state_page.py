"""The state page: what one process writes, all read; nobody else can."""

from __future__ import annotations

import math
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from servekit import _core


@pytest.fixture
def page() -> Iterator[_core.StatePage]:
    page = _core.StatePage.create(f"servekit-test-{os.getpid()}-{time.monotonic_ns()}", 3, 2)
    yield page
    page.unlink()
    page.close()


def path_of(page: _core.StatePage) -> Path:
    return Path("/dev/shm") / page.name


def test_only_this_user_may_read_it_and_it_is_gone_after_unlink(page):
    assert stat.S_IMODE(path_of(page).stat().st_mode) == 0o600
    with pytest.raises(_core.ResourceError, match="exists"):
        _core.StatePage.create(page.name, 1, 1)
    page.unlink()
    assert not path_of(page).exists()
    page.unlink()
    assert page.phase == 0, "the map outlives the name"


def test_another_process_reads_what_this_one_writes(page):
    page.set_process("control", 0, 4, 40)
    page.set_process("http", 2, 5, 50)
    page.set_process("scheduler", 1, 6, 60)
    page.phase = 1
    page.mark_ready()
    page.count_tokens(2, 1, 7, 3, 1)
    program = (
        "import sys; from servekit import _core; p = _core.StatePage.open(sys.argv[1]); s = p.snapshot();"
        "p.worker_add(2, 'requests', 2);"
        "print(p.phase, p.ready_once, s['control']['pid'], s['workers'][2], s['ranks'][1]['epoch'],"
        "s['ranks'][1]['prompt_tokens'])"
    )
    done = subprocess.run([sys.executable, "-c", program, page.name], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("1 True 40 {'epoch': 5, 'pid': 50, 'open_streams': 0, ")
    assert done.stdout.endswith("'cache_hit_tokens': 0} 6 7\n")
    assert page.snapshot()["workers"][2]["requests"] == 2


def test_places_are_shared_by_all_workers(page):
    assert page.reserve(0, 3, 300, 8)
    assert page.reserve(1, 4, 400, 8)
    assert not page.reserve(2, 2, 1, 8)
    assert page.reserve(2, 1, 1, 8)
    assert not page.reserve(0, 1, 1, 8)
    page.release(1, 4, 400)
    assert page.reserve(0, 4, 0, 8)
    workers = page.snapshot()["workers"]
    assert [(worker["open_streams"], worker["reserved_tokens"]) for worker in workers] == [(7, 300), (0, 0), (1, 1)]


def test_numbers_stop_at_zero(page):
    page.release(0, 5, 5)
    page.worker_add(0, "aborted", -1)
    page.worker_add(0, "aborted", 2)
    worker = page.snapshot()["workers"][0]
    assert (worker["open_streams"], worker["reserved_tokens"], worker["aborted"]) == (0, 0, 2)


def test_a_new_life_of_a_worker_holds_nothing_and_its_totals_stay(page):
    page.set_process("http", 0, 1, 10)
    page.reserve(0, 2, 20, 8)
    page.worker_add(0, "requests", 9)
    page.set_process("http", 0, 2, 11)
    worker = page.snapshot()["workers"][0]
    assert (worker["epoch"], worker["pid"], worker["open_streams"], worker["reserved_tokens"]) == (2, 11, 0, 0)
    assert worker["requests"] == 9


def test_what_a_dead_worker_counted_stays_and_what_it_held_is_gone(page):
    page.set_process("http", 1, 1, 10)
    page.reserve(1, 2, 20, 8)
    page.count_tokens(1, 0, 5, 2, 9)
    page.observe(1, "gap", 0.02, 3)
    page.end_process("http", 1)
    page.end_process("control", 0)
    state = page.snapshot()
    assert [state["workers"][1][name] for name in ("pid", "open_streams", "reserved_tokens")] == [0, 0, 0]
    names = ("prompt_tokens", "cached_tokens", "generation_tokens")
    assert [state["ranks"][0][name] for name in names] == [5, 2, 9]
    bounds, counts, total = page.histograms()["gap"]
    assert counts[bounds.index(0.02)] == sum(counts) == 3
    assert len(counts) == len(bounds) + 1
    assert total == pytest.approx(0.06)


def test_nothing_was_heard_of_control_before_it_runs(page):
    assert math.isinf(page.control_age())
    assert page.snapshot()["control"]["age_s"] is None
    assert page.active_ranks() == [False, False]
    assert not page.ready_once


def test_wrong_arguments_raise(page):
    for wrong in ("", "../x", "a/b", ".hidden", "nul\0"):
        with pytest.raises(_core.SettingError):
            _core.StatePage.create(wrong, 1, 1)
    for workers, ranks in ((0, 1), (1, 0), (5000, 1)):
        with pytest.raises(_core.SettingError):
            _core.StatePage.create("servekit-test-size", workers, ranks)
    for call in (
        lambda: page.set_process("nobody", 0, 1, 1),
        lambda: page.set_process("http", 3, 1, 1),
        lambda: page.worker_add(0, "pid", 1),
        lambda: page.observe(0, "pid", 1.0),
        lambda: page.end_process("nobody", 0),
        lambda: setattr(page, "phase", 4),
    ):
        with pytest.raises(_core.SettingError):
            call()
    with pytest.raises(_core.ResourceError):
        _core.StatePage.open("servekit-test-missing")


@pytest.mark.parametrize("content", [b"", b"x" * 64, b"\0" * 4096, b"SVKSTATE" + b"\xff" * 2000])
def test_what_is_no_page_is_refused(content):
    path = Path(f"/dev/shm/servekit-test-{os.getpid()}-wrong")
    path.write_bytes(content)
    try:
        with pytest.raises(_core.SettingError):
            _core.StatePage.open(path.name)
    finally:
        path.unlink()


def test_a_page_of_another_size_or_version_is_refused(page):
    content = path_of(page).read_bytes()
    path = Path(f"/dev/shm/servekit-test-{os.getpid()}-wrong")
    for wrong, reason in (
        (content[:-8], "bytes do not fit"),
        (content + b"\0" * 8, "bytes do not fit"),
        (content[:8] + b"\x09" + content[9:], "layout version 9"),
    ):
        path.write_bytes(wrong)
        with pytest.raises(_core.SettingError, match=reason):
            _core.StatePage.open(path.name)
    path.unlink()


def test_a_closed_page_says_so(page):
    other = _core.StatePage.open(page.name)
    other.close()
    with pytest.raises(_core.PhaseError):
        other.snapshot()
