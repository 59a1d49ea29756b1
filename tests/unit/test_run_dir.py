"""Run directories: private, short, gone at exit, and swept when their server is dead."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from servekit.runtime import run_dir
from servekit.runtime.ownership import Owner, process_start
from servekit.runtime.run_dir import RunDir, RunDirError, create_run_dir, sweep_run_dirs


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(timeout=30)
    return process.pid


def test_it_is_private_and_goes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    made = create_run_dir()
    assert made.path == tmp_path / f"servekit-{os.getpid()}"
    assert made.path.stat().st_mode & 0o777 == 0o700
    (made.path / "rank0.ipc").write_bytes(b"")
    made.remove()
    made.remove()
    assert not made.path.exists()


def test_without_a_runtime_folder_it_is_in_tmp(monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nowhere")
    made = create_run_dir()
    assert made.path == Path(f"/tmp/servekit-{os.geteuid()}-{os.getpid()}")
    made.remove()


def test_a_path_too_long_for_sockets_is_not_used(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    made = create_run_dir()
    assert made.path.parent == Path("/tmp")
    assert len(str(made.path / "w4095-4095.ipc")) <= 107
    made.remove()


def test_a_place_that_is_taken_is_refused(monkeypatch, tmp_path):
    (tmp_path / "taken").mkdir()
    monkeypatch.setattr(run_dir, "_places", lambda pid: [tmp_path / "taken"])
    with pytest.raises(RunDirError, match="File exists"):
        create_run_dir()


def forge(parent: Path, pid: int, owner: Owner | None) -> Path:
    path = parent / f"servekit-{pid}"
    path.mkdir()
    (path / "w0-1.ipc").write_bytes(b"")
    if owner is not None:
        (path / "owner").write_bytes(msgspec.json.encode(owner))
    return path


def test_the_dead_are_swept(tmp_path):
    pid = dead_pid()
    with_record = forge(tmp_path, pid, Owner(pid, 12345))
    (tmp_path / "other").mkdir()
    assert sweep_run_dirs(tmp_path) == [with_record]
    without_record = forge(tmp_path, pid, None)
    assert sweep_run_dirs(tmp_path) == [without_record]
    reused = forge(tmp_path, os.getpid(), Owner(os.getpid(), 12345))
    assert sweep_run_dirs(tmp_path) == [reused]
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_the_living_stay(tmp_path):
    me = os.getpid()
    path = forge(tmp_path, me, Owner(me, process_start(me) or 0))
    forge(tmp_path, os.getppid(), None)
    assert sweep_run_dirs(tmp_path) == []
    assert path.exists()


def test_a_lock_protects_an_owner_out_of_sight(tmp_path):
    pid = dead_pid()
    made = RunDir(tmp_path / f"servekit-{pid}")
    (made.path / "owner").write_bytes(msgspec.json.encode(Owner(pid, 1)))
    assert sweep_run_dirs(tmp_path) == []
    made.remove()


def test_a_link_is_no_run_directory(tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (tmp_path / f"servekit-{dead_pid()}").symlink_to(precious)
    assert sweep_run_dirs(tmp_path) == []
    assert precious.exists()
