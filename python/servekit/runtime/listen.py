"""Where HTTP listens: a port, probed once, then one listening socket per worker; or one Unix socket that they share."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

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


MAX_PATH = 107
"""Bytes of the longest path of a Unix socket."""


class UnixListener:
    """A listening Unix socket, and its file.

    Attributes:
        sockets: one per worker, all the same socket.
    """

    def __init__(self, path: str, mode: int, workers: int) -> None:
        """Listen; the file that a dead server left behind is replaced.

        Args:
            path: of the file.
            mode: its mode, which says who may connect.
            workers: number of sockets, at least 1.

        Raises:
            ListenError: somebody listens there, something else lies there, or the system refuses.
        """
        if len(os.fsencode(path)) > MAX_PATH:
            raise ListenError(f"--uds {path!r} is longer than the {MAX_PATH} bytes of a socket's path")
        self._path = Path(path)
        _remove_stale(self._path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # The mode holds from the first moment on; nobody gets in between.
        before = os.umask(0o777 & ~mode)
        try:
            sock.bind(path)
            self._id = _id_of(self._path)
            sock.listen(BACKLOG)
        except OSError as error:
            sock.close()
            raise ListenError(f"can't listen on --uds {path!r}: {os.strerror(error.errno or 0)}") from None
        finally:
            os.umask(before)
        self.sockets = [sock, *(sock.dup() for _ in range(workers - 1))]

    def remove(self) -> None:
        """Remove the file, unless another server has put its own there."""
        if _id_of(self._path) == self._id:
            self._path.unlink(missing_ok=True)


def _id_of(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _remove_stale(path: Path) -> None:
    """Remove a socket on which nobody listens.

    Raises:
        ListenError: somebody does, or it is no socket.
    """
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ListenError(f"--uds {str(path)!r}: {error.strerror}") from None
    if not is_socket:
        raise ListenError(f"--uds {str(path)!r} exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        failure = probe.connect_ex(str(path))
    if failure not in (errno.ECONNREFUSED, errno.ENOENT):
        raise ListenError(f"can't listen on --uds {str(path)!r}: Address already in use")
    path.unlink(missing_ok=True)


def url_of(host: str, port: int, scheme: str = "http") -> str:
    """URL under which a client on this machine reaches an address."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
