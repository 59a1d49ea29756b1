"""Telling and hearing that a server serves, by systemd's protocol."""

from __future__ import annotations

import socket

import pytest
from servekit.runtime.notify import NOTIFY_SOCKET, Notifications, tell_ready, tell_stopping


def test_what_a_child_tells_is_heard_once_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    notifications = Notifications()
    try:
        monkeypatch.setenv(NOTIFY_SOCKET, notifications.environment[NOTIFY_SOCKET])
        tell_stopping()
        assert not notifications.is_ready()
        tell_ready()
        assert notifications.is_ready() and notifications.is_ready()
    finally:
        notifications.close()
    # Who listened is gone.
    tell_ready()


def test_names_that_are_in_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind("\0servekit-test-notify")
        sock.settimeout(5)
        monkeypatch.setenv(NOTIFY_SOCKET, "@servekit-test-notify")
        tell_ready()
        assert sock.recv(100) == b"READY=1"


@pytest.mark.parametrize("address", ["", "tcp:somewhere"])
def test_nobody_to_tell(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv(NOTIFY_SOCKET, address)
    tell_ready()
