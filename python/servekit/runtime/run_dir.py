"""The folder that holds a server's sockets: private, short enough for a socket path, gone at exit."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from pathlib import Path

import msgspec

from servekit.config.server_args import MAX_WORKERS
from servekit.messages.envelope import http_worker_ipc
from servekit.runtime.ownership import Owner, is_stale, lock, myself

SOCKET_PATH_BYTES = 107
"""Longest path of a Unix socket on Linux, without the closing zero."""

_LONGEST_NAME = http_worker_ipc(MAX_WORKERS, 4095)
_OWNER = "owner"


class RunDirError(RuntimeError):
    """No run directory can be made; the text says why."""


class RunDir:
    """A run directory that this process made and holds.

    Attributes:
        path: the folder; its sockets' paths fit into a Unix address.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(mode=0o700)
        self._fd = os.open(path / _OWNER, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        lock(self._fd)
        os.write(self._fd, msgspec.json.encode(myself()))

    def remove(self) -> None:
        """Delete the folder with all that is in it; twice is harmless."""
        if self._fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._fd)
            self._fd = -1


def create_run_dir() -> RunDir:
    """Sweep what dead servers of this user left behind, then make a run directory of our own.

    Raises:
        RunDirError: every place is too long, taken or not writable.
    """
    reasons = []
    for path in _places(os.getpid()):
        if len(os.fsencode(path / _LONGEST_NAME)) > SOCKET_PATH_BYTES:
            reasons.append(f"{path} is too long for socket paths of {SOCKET_PATH_BYTES} bytes")
            continue
        sweep_run_dirs(path.parent)
        try:
            return RunDir(path)
        except OSError as error:
            reasons.append(f"{path}: {error.strerror}")
    raise RunDirError("can't make a run directory: " + "; ".join(reasons))


def _places(pid: int) -> list[Path]:
    places = [Path(f"/tmp/servekit-{os.geteuid()}-{pid}")]
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        places.insert(0, Path(runtime) / f"servekit-{pid}")
    return places


def sweep_run_dirs(parent: Path) -> list[Path]:
    """Remove the run directories of this user's dead servers from a folder.

    Returns:
        The folders that were removed.
    """
    removed = []
    for path in parent.glob("servekit-*"):
        if path.name.rpartition("-")[2].isdigit() and _is_stale(path):
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


def _is_stale(path: Path) -> bool:
    pid = int(path.name.rpartition("-")[2])
    with contextlib.suppress(OSError):
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return False
        try:
            fd = os.open(path / _OWNER, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            # Killed between making the folder and claiming it: only the name tells the owner.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            owner = Owner(pid, 0)
        else:
            owner = _read_owner(fd, pid)
        try:
            return is_stale(fd, owner)
        finally:
            os.close(fd)
    return False


def _read_owner(fd: int, pid: int) -> Owner:
    try:
        return msgspec.json.decode(os.pread(fd, 256, 0), type=Owner)
    except msgspec.DecodeError:
        return Owner(pid, 0)
