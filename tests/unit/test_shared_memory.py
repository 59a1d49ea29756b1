"""Segments: what is written is read, nobody else reads it, and only dead servers' segments are swept."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest
from servekit.runtime import shared_memory
from servekit.runtime.shared_memory import (
    SegmentError,
    read_from_shared_memory,
    segment_name,
    segment_path,
    sweep_segments,
    unlink_segment,
    write_to_shared_memory,
)


class Thing(msgspec.Struct):
    name: str
    sizes: list[int]


@pytest.fixture(autouse=True)
def private_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "SEGMENTS", tmp_path)


def dead_pid() -> int:
    """A process id that was just used and is free again."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(timeout=30)
    return process.pid


NAME = segment_name(os.getpid(), "config")


def test_read_gives_what_was_written():
    fd = write_to_shared_memory(Thing("a", [1, 2]), NAME)
    assert read_from_shared_memory(NAME, Thing) == Thing("a", [1, 2])
    assert segment_path(NAME).stat().st_mode & 0o777 == 0o600
    os.close(fd)
    unlink_segment(NAME)
    unlink_segment(NAME)
    with pytest.raises(SegmentError, match="can't open"):
        read_from_shared_memory(NAME, Thing)


def test_a_name_is_used_once():
    os.close(write_to_shared_memory(1, NAME))
    with pytest.raises(SegmentError, match="can't create"):
        write_to_shared_memory(2, NAME)
    assert read_from_shared_memory(NAME, int) == 1


@pytest.mark.parametrize("name", ["../servekit-1-config", "servekit-1-", "other-1-config", "servekit-x-config"])
def test_names_lead_nowhere_else(name):
    with pytest.raises(SegmentError, match="no name"):
        write_to_shared_memory(1, name)


def spoil_version(path):
    data = bytearray(path.read_bytes())
    data[6] += 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda path: path.chmod(0o644), "private"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes instead of"),
        (lambda path: path.write_bytes(b""), "not written by servekit"),
        (lambda path: path.write_bytes(b"x" * 100), "not written by servekit"),
        (spoil_version, "version 2"),
    ],
)
def test_what_is_not_ours_is_refused(spoil, complaint):
    os.close(write_to_shared_memory(Thing("a", []), NAME))
    spoil(segment_path(NAME))
    with pytest.raises(SegmentError, match=complaint):
        read_from_shared_memory(NAME, Thing)


def test_a_link_is_not_followed(tmp_path):
    os.close(write_to_shared_memory(Thing("a", []), NAME))
    segment_path(NAME).rename(tmp_path / "elsewhere")
    segment_path(NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SegmentError, match="can't open"):
        read_from_shared_memory(NAME, Thing)


def test_another_type_is_refused():
    os.close(write_to_shared_memory(["no", "thing"], NAME))
    with pytest.raises(SegmentError, match="does not hold Thing"):
        read_from_shared_memory(NAME, Thing)


def forge(pid: int, start: int, *, state: bool = True) -> None:
    """Segments as a server of that process left them."""
    os.close(write_to_shared_memory(Thing("a", []), segment_name(pid, "config")))
    path = segment_path(segment_name(pid, "config"))
    data = path.read_bytes()
    path.write_bytes(shared_memory._HEAD.pack(b"SVKSHM", 1, pid, start, len(data)) + data[shared_memory._HEAD.size :])
    if state:
        segment_path(segment_name(pid, "state")).write_bytes(b"x")


def test_segments_of_the_dead_are_swept():
    pid = dead_pid()
    forge(pid, 12345)
    assert set(sweep_segments()) == {segment_name(pid, "config"), segment_name(pid, "state")}
    assert not list(shared_memory.SEGMENTS.iterdir())


def test_segments_of_a_reused_process_id_are_swept():
    forge(os.getpid(), 12345)
    assert len(sweep_segments()) == 2


def test_segments_of_the_living_stay():
    fd = write_to_shared_memory(Thing("a", []), NAME)
    segment_path(segment_name(os.getpid(), "state")).write_bytes(b"x")
    assert sweep_segments() == []
    os.close(fd)
    # Not even the lock is needed while process id and start fit.
    assert sweep_segments() == []


def test_a_held_lock_protects_an_owner_whose_process_is_out_of_sight():
    pid = dead_pid()
    fd = write_to_shared_memory(Thing("a", []), segment_name(pid, "config"))
    path = segment_path(segment_name(pid, "config"))
    os.pwrite(fd, shared_memory._HEAD.pack(b"SVKSHM", 1, pid, 1, path.stat().st_size - shared_memory._HEAD.size), 0)
    assert sweep_segments() == []
    os.close(fd)
    assert sweep_segments() == [path.name]


def test_files_of_others_are_left_alone(tmp_path):
    for name in ("servekit-abc-config", "servekit--config", "other-1-config"):
        (tmp_path / name).write_bytes(b"")
    assert sweep_segments() == []
    assert len(list(tmp_path.iterdir())) == 3
