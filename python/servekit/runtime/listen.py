"""The HTTP port: probed once, then one listening socket per worker."""

from __future__ import annotations

import os
import socket

BACKLOG = 2048
"""Connections that may wait for a worker to take them; the kernel cuts it to `net.core.somaxconn`."""


class ListenError(RuntimeError):
    """The address can't be listened on; the text is one line."""


def listen(host: str, port: int, workers: int) -> list[socket.socket]:
    """Listening sockets for an address, one per worker, that share the port by `SO_REUSEPORT`.

    A plain bind comes first: with `SO_REUSEPORT` alone, a second server of the same user would silently share it.

    Args:
        host: name or address, IPv4 or IPv6.
        port: 0 lets the system choose one; all sockets get the same.
        workers: number of sockets, at least 1.

    Raises:
        ListenError: the host is unknown, or the port is in use or not allowed.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise ListenError(f"--host {host!r} is no address that can be listened on: {error}") from None
    family, _, _, _, address = found[0]
    sockets: list[socket.socket] = []
    try:
        with _bound(family, address, share=False) as probe:
            probe.listen(1)
        for _ in range(workers):
            sockets.append(_bound(family, address, share=True))
            address = sockets[0].getsockname()
        for each in sockets:
            each.listen(BACKLOG)
    except OSError as error:
        for each in sockets:
            each.close()
        raise ListenError(f"can't listen on {host} port {port}: {os.strerror(error.errno or 0)}") from None
    return sockets


def _bound(family: int, address: object, *, share: bool) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections of an earlier server that still wait in TIME_WAIT don't keep the port.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)  # type: ignore[arg-type]
    except OSError:
        sock.close()
        raise
    return sock


def url_of(host: str, port: int) -> str:
    """URL under which a client on this machine reaches an address."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
