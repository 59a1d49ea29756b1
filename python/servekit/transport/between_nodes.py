"""Sockets that lie between nodes: ZeroMQ over TCP, with CURVE."""

from __future__ import annotations

import zmq

from servekit.config.secrets import Keys


def connect(socket: zmq.Socket[bytes], address: str, keys: Keys | None) -> None:
    """Connect to a socket of this node, or of another one.

    Args:
        socket: not connected yet.
        address: ZeroMQ's.
        keys: of the sockets between nodes.

    Raises:
        ValueError: it is one of another node, and there are no keys.
    """
    if address.startswith("tcp://"):
        if keys is None:
            raise ValueError(f"{address} is on another node, and there are no keys")
        # Whom this is, the one who listens need not know: that it knows the public key is enough.
        public, secret = zmq.curve_keypair()
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.public.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        socket.setsockopt(zmq.IPV6, 1)
    socket.connect(address)


def listen(socket: zmq.Socket[bytes], address: str, listener: int | None, keys: Keys | None) -> None:
    """Listen for processes of this node, and where a listener is given for those of others.

    Args:
        socket: not bound yet.
        address: ZeroMQ's, in the run directory.
        listener: descriptor of a TCP socket that listens; belongs to `socket` from now on.
        keys: of the sockets between nodes.
    """
    socket.bind(address)
    if listener is not None and keys is not None:
        # Options hold for what is bound after them: in the run directory it stays as it is.
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        socket.setsockopt(zmq.USE_FD, listener)
        socket.bind("tcp://127.0.0.1:0")
