"""Addresses of nodes: how they are written, which one is one's own, and ports that are told after they are bound."""

from __future__ import annotations

import socket

import pytest
from servekit.config import ConfigError
from servekit.runtime.nodes.addresses import (
    Address,
    address_of,
    interface_of,
    listen_at,
    listen_within,
    own_ip,
    resolve,
    split_address,
    split_ports,
)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("10.0.0.1:5000", "10.0.0.1", 5000), ("[fd00::1]:1", "fd00::1", 1), ("head.example:65535", "head.example", 65535)],
)
def test_an_address_is_split(text, host, port):
    assert split_address(text) == (host, port)


@pytest.mark.parametrize(
    "text", ["", "10.0.0.1", ":5000", "10.0.0.1:", "fd00::1:5000", "[10.0.0.1:5000", "a:0", "a:65536", "a:-1", "a:5٠"]
)
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ConfigError, match="--dist-init-addr"):
        split_address(text)


@pytest.mark.parametrize("text", ["", "5000", "5000-", "-5000", "6000-5000", "0-5", "1-70000", "a-b"])
def test_what_is_no_range_is_refused(text):
    with pytest.raises(ConfigError, match="--dist-port-range"):
        split_ports(text)
    assert list(split_ports("5000-5002")) == [5000, 5001, 5002]


def test_names_mean_addresses_and_unknown_ones_none():
    assert resolve("localhost:5000").is_loopback
    assert str(resolve("[::1]:5000")) == "[::1]:5000"
    with pytest.raises(ConfigError, match=r"'no\.such\.name\.invalid' means no address here"):
        resolve("no.such.name.invalid:5000")


def test_the_own_address_is_that_of_the_route():
    assert own_ip(Address("127.0.0.9", 5000)) == "127.0.0.1"
    assert own_ip(Address("::1", 5000)) == "::1"


def test_the_interface_of_an_address_is_found():
    assert interface_of("127.0.0.1") == interface_of("127.0.1.1") == interface_of("::1") == "lo"
    with pytest.raises(ConfigError, match=r"--node-ip 192\.0\.2\.200 is no address of this machine"):
        interface_of("192.0.2.200")


def test_ports_come_from_the_range_as_long_as_there_are_some():
    with listen_within("127.0.0.1", None) as first:
        port = address_of(first).port
        with pytest.raises(ConfigError, match=f"--dist-port-range {port}-{port}: none of these ports is free"):
            listen_within("127.0.0.1", range(port, port + 1))
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is in use"):
            listen_at(Address("127.0.0.1", port), "--dist-init-addr")
    with listen_within("127.0.0.1", range(port, port + 1)) as again:
        assert address_of(again) == Address("127.0.0.1", port)


def test_an_address_of_another_machine_can_not_be_listened_on():
    with pytest.raises(ConfigError, match=r"can't listen on 192\.0\.2\.200:0"):
        listen_within("192.0.2.200", range(0, 3))


def test_listening_sockets_do_not_block_and_take_connections_before_anybody_accepts():
    with listen_within("127.0.0.1", None) as sock, socket.create_connection(address_of(sock)):
        assert not sock.getblocking()
