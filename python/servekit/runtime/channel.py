"""The line between main and one child: JSON objects, one a line, both ways over a socket pair."""

from __future__ import annotations

import socket
import threading
from typing import Any

import msgspec

MAX_LINE = 4 << 20
"""Bytes of the longest line; a peer that sends more is broken."""


class ChannelError(RuntimeError):
    """The peer sent something that is no JSON object on a line."""


class Channel:
    """One end of the line. Sending is thread-safe; receiving belongs to one thread.

    Attributes:
        closed: the peer is gone, nothing more will come.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._rest = b""
        self.closed = False

    def fileno(self) -> int:
        """Descriptor that is readable when `receive` has something to do."""
        return self._sock.fileno()

    def send(self, message: dict[str, Any]) -> bool:
        """Send one object without waiting for the peer.

        Returns:
            False if the peer is gone or has not read for so long that its buffer is full.
        """
        line = msgspec.json.encode(message) + b"\n"
        if len(line) > MAX_LINE:
            raise ChannelError(f"a message of {len(line)} bytes is longer than {MAX_LINE}")
        with self._lock:
            try:
                sent = self._sock.send(line, socket.MSG_DONTWAIT)
                if sent < len(line):
                    # A line that was begun must be finished, or everything behind it is garbage; a reader
                    # that lives takes the rest at once.
                    self._sock.settimeout(5.0)
                    self._sock.sendall(line[sent:])
            except (BlockingIOError, TimeoutError, BrokenPipeError, ConnectionResetError):
                return False
        return True

    def receive(self, *, wait: bool = False) -> list[dict[str, Any]]:
        """Objects that have arrived.

        Args:
            wait: block until there is at least one, or the peer is gone.

        Raises:
            ChannelError: the peer broke the format.
        """
        found: list[dict[str, Any]] = []
        while not self.closed and not (wait and found):
            try:
                data = self._sock.recv(1 << 16, 0 if wait else socket.MSG_DONTWAIT)
            except (BlockingIOError, InterruptedError):
                break
            except TimeoutError:
                continue
            except ConnectionResetError:
                data = b""
            if not data:
                self.closed = True
                break
            *lines, self._rest = (self._rest + data).split(b"\n")
            if len(self._rest) > MAX_LINE:
                raise ChannelError(f"a line is longer than {MAX_LINE} bytes")
            found += [_parse(line) for line in lines]
        return found

    def close(self) -> None:
        """Hang up; twice is harmless."""
        self.closed = True
        self._sock.close()


def _parse(line: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ChannelError(f"not a JSON object: {line[:80]!r}: {error}") from None
