"""Structures handed from main to its children through shared memory: versioned msgpack, readable by this user only.

A segment is a file in `/dev/shm` whose name carries main's process id. The first that main writes is its
configuration, the last that goes; it is locked by main as long as main lives, so that a later start can tell a stale
set of segments from one in use.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import struct
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from servekit.runtime.ownership import Owner, is_stale, lock, myself

T = TypeVar("T")

SEGMENTS = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path("/tmp")
"""Where segments live; plain files in `/tmp` on systems without `/dev/shm`."""

_MAGIC = b"SVKSHM"
_VERSION = 1
_HEAD = struct.Struct("<6sHQQQ")  # magic, version, owner's pid, owner's start, bytes of the payload
_NAME = re.compile(r"servekit-(\d+)-[a-z]+")


class SegmentError(RuntimeError):
    """A segment that can't be written or is not what was expected; the text says why."""


def segment_name(pid: int, what: str) -> str:
    """Name of main's segment for `what`: config, state or info."""
    return f"servekit-{pid}-{what}"


def segment_path(name: str) -> Path:
    """File of a segment.

    Raises:
        SegmentError: the name is not one of servekit's.
    """
    if not _NAME.fullmatch(name):
        raise SegmentError(f"{name!r} is no name of a shared memory segment")
    return SEGMENTS / name


def write_to_shared_memory(obj: Any, name: str) -> int:
    """Write a msgspec structure to a new segment with mode 0600.

    Args:
        obj: anything that msgspec encodes.
        name: from `segment_name`; no segment of that name may exist.

    Returns:
        An open descriptor that holds the segment's lock; close it when the segment is unlinked.

    Raises:
        SegmentError: the segment exists, or there is no room for it.
    """
    payload = msgspec.msgpack.encode(obj)
    path = segment_path(name)
    owner = myself()
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise SegmentError(f"can't create shared memory {path}: {error.strerror}") from None
    try:
        lock(fd)
        os.posix_fallocate(fd, 0, _HEAD.size + len(payload))
        os.pwrite(fd, payload, _HEAD.size)
        os.pwrite(fd, _HEAD.pack(_MAGIC, _VERSION, owner.pid, owner.start, len(payload)), 0)
    except OSError as error:
        os.close(fd)
        path.unlink(missing_ok=True)
        raise SegmentError(f"can't write shared memory {path}: {error.strerror}") from None
    return fd


def read_from_shared_memory(name: str, type: type[T]) -> T:
    """Read back what `write_to_shared_memory` wrote, checked against its type.

    Raises:
        SegmentError: there is no such segment, it is not this user's, or it holds something else.
    """
    path = segment_path(name)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise SegmentError(f"can't open shared memory {path}: {error.strerror}") from None
    try:
        payload = _read(fd, path)
    finally:
        os.close(fd)
    try:
        return msgspec.msgpack.decode(payload, type=type)
    except msgspec.DecodeError as error:
        raise SegmentError(f"shared memory {path} does not hold {type.__name__}: {error}") from None


def _read(fd: int, path: Path) -> bytes:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise SegmentError(f"shared memory {path} is not a private file of this user")
    head = os.pread(fd, _HEAD.size, 0)
    if len(head) < _HEAD.size or not head.startswith(_MAGIC):
        raise SegmentError(f"shared memory {path} was not written by servekit, or not completely")
    _, version, _, _, size = _HEAD.unpack(head)
    if version != _VERSION:
        raise SegmentError(f"shared memory {path} has version {version}, this build reads {_VERSION}")
    if status.st_size != _HEAD.size + size:
        raise SegmentError(f"shared memory {path} has {status.st_size} bytes instead of {_HEAD.size + size}")
    return os.pread(fd, size, _HEAD.size)


def unlink_segment(name: str) -> None:
    """Remove a segment; nothing happens if it is gone."""
    segment_path(name).unlink(missing_ok=True)


def sweep_segments() -> list[str]:
    """Remove the segments of this user's dead servers.

    Returns:
        Names of what was removed.
    """
    removed = []
    for path in SEGMENTS.glob("servekit-*-config"):
        match = _NAME.fullmatch(path.name)
        if match is None or not _is_stale(path):
            continue
        # The configuration goes last: it is the record that tells whose the others are.
        others = [p for p in SEGMENTS.glob(f"servekit-{match[1]}-*") if p != path and _NAME.fullmatch(p.name)]
        for each in [*others, path]:
            with contextlib.suppress(OSError):
                each.unlink()
                removed.append(each.name)
    return removed


def _is_stale(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if os.fstat(fd).st_uid != os.geteuid():
            return False
        head = os.pread(fd, _HEAD.size, 0)
        named = Owner(int(path.name.split("-")[1]), 0)
        if len(head) == _HEAD.size and head.startswith(_MAGIC):
            named = Owner(*_HEAD.unpack(head)[2:4])
        return is_stale(fd, named)
    finally:
        os.close(fd)
