"""The HTTP port: one socket per worker, and no sharing with anybody else."""

from __future__ import annotations

import socket

import pytest
from servekit.runtime.listen import ListenError, listen, url_of


def test_each_worker_gets_a_socket_on_one_free_port():
    sockets = listen("127.0.0.1", 0, 3)
    ports = {each.getsockname()[1] for each in sockets}
    assert len(sockets) == 3 and len(ports) == 1 and ports != {0}
    with socket.create_connection(("127.0.0.1", ports.pop()), timeout=5):
        pass
    for each in sockets:
        each.close()


@pytest.mark.parametrize("share", [False, True])
def test_a_port_in_use_is_refused_even_if_its_owner_would_share(share):
    with socket.socket() as other:
        if share:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ListenError, match=f"can't listen on 127.0.0.1 port {port}: Address already in use"):
            listen("127.0.0.1", port, 2)


def test_a_port_is_free_again_at_once_though_connections_linger():
    (first,) = listen("127.0.0.1", 0, 1)
    port = first.getsockname()[1]
    client = socket.create_connection(("127.0.0.1", port), timeout=5)
    served, _ = first.accept()
    # Closed here first, this side waits in TIME_WAIT.
    served.close()
    client.close()
    first.close()
    (again,) = listen("127.0.0.1", port, 1)
    again.close()


def test_ipv6():
    (sock,) = listen("::1", 0, 1)
    assert sock.family == socket.AF_INET6
    sock.close()


def test_a_host_that_is_none():
    with pytest.raises(ListenError, match="--host 'no such host'"):
        listen("no such host", 0, 1)


def test_an_address_of_another_machine():
    with pytest.raises(ListenError, match=r"203\.0\.113\.1"):
        listen("203.0.113.1", 0, 1)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("example.org", "http://example.org:80"),
    ],
)
def test_urls_that_a_client_can_use(host, url):
    assert url_of(host, 80) == url
