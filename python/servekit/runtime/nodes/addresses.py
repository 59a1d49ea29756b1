"""Addresses between nodes: reading them, finding one's own by the route, and listening on a port that is told after."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path
from typing import NamedTuple

from servekit.config import ConfigError

LOOPBACK = "127.0.0.1"
BACKLOG = 1024
"""Connections that may wait until the process is there to which a socket was given."""

_SIOCGIFADDR = 0x8915


class PortTakenError(ConfigError):
    """Somebody listens there already."""


class Address(NamedTuple):
    """An address as numbers, IPv4 or IPv6, and a port."""

    ip: str
    port: int

    def __str__(self) -> str:
        return f"[{self.ip}]:{self.port}" if ":" in self.ip else f"{self.ip}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this machine reach it."""
        return ipaddress.ip_address(self.ip).is_loopback


def split_address(text: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[IPv6]:port`.

    Raises:
        ConfigError: it is none.
    """
    host, colon, port = text.rpartition(":")
    brackets = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if brackets else host
    is_host = bare and not set(bare) & {"[", "]"} and (":" in bare) == brackets
    if not colon or not is_host or not port.isascii() or not port.isdigit():
        raise ConfigError(f"--dist-init-addr must be like 10.0.0.1:5000 or [fd00::1]:5000, not {text!r}")
    if not 0 < int(port) < 65536:
        raise ConfigError(f"--dist-init-addr {text!r}: the port must be from 1 to 65535")
    return bare, int(port)


def split_ports(text: str) -> range:
    """Ports of `40000-40100`, both ends included.

    Raises:
        ConfigError: it is no range of ports.
    """
    first, _, last = text.partition("-")
    numbers = [int(each) for each in (first, last) if each.isascii() and each.isdigit()]
    if len(numbers) != 2 or not 0 < numbers[0] <= numbers[1] < 65536:
        raise ConfigError(f"--dist-port-range must be two ports such as 40000-40100, not {text!r}")
    return range(numbers[0], numbers[1] + 1)


def resolve(text: str) -> Address:
    """The address that `host:port` means on this machine, the first one if there are several.

    Raises:
        ConfigError: it is no address, or the name is unknown.
    """
    host, port = split_address(text)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"--dist-init-addr {text!r}: {host!r} means no address here: {error}") from None
    return Address(str(found[0][4][0]), port)


def own_ip(towards: Address) -> str:
    """The address under which this machine sends to another one. The name of this machine says nothing of it.

    Raises:
        ConfigError: there is no way there.
    """
    family = socket.AF_INET6 if ":" in towards.ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            # Nothing is sent: this asks the routing table.
            probe.connect(towards)
        except OSError as error:
            raise ConfigError(f"there is no route to node 0 at {towards}: {error.strerror}; --node-ip") from None
        return str(probe.getsockname()[0])


def listen_at(address: Address, what: str) -> socket.socket:
    """A listening socket that does not block.

    Raises:
        ConfigError: the address is in use, or none of this machine; `what` says which flag named it.
    """
    family = socket.AF_INET6 if ":" in address.ip else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections of an earlier life that still wait in TIME_WAIT don't keep the port.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise PortTakenError(f"{what}: port {address.port} of {address.ip} is in use") from None
        raise ConfigError(f"{what}: can't listen on {address}: {os.strerror(error.errno or 0)}") from None
    return sock


def listen_within(ip: str, ports: range | None) -> socket.socket:
    """A listening socket on a free port, of a range if one is given.

    Raises:
        ConfigError: no port of it is free, or the address is none of this machine.
    """
    if ports is None:
        return listen_at(Address(ip, 0), "--node-ip")
    for port in ports:
        with contextlib.suppress(PortTakenError):
            return listen_at(Address(ip, port), "--node-ip")
    raise ConfigError(f"--dist-port-range {ports[0]}-{ports[-1]}: none of these ports is free on {ip}")


def address_of(sock: socket.socket) -> Address:
    """Where a socket listens."""
    return Address(*sock.getsockname()[:2])


def interface_of(ip: str, flag: str = "--node-ip") -> str:
    """Name of the network interface that has an address.

    Args:
        ip: the address.
        flag: that named it.

    Raises:
        ConfigError: none has it.
    """
    wanted = ipaddress.ip_address(ip)
    # All of 127.0.0.0/8 is this machine, though an interface has but one of it.
    known = ipaddress.ip_address(LOOPBACK) if wanted.version == 4 and wanted.is_loopback else wanted
    for _, name in socket.if_nameindex():
        if known in _addresses_of(name):
            return name
    raise ConfigError(f"{flag} {ip} is no address of this machine")


def _addresses_of(interface: str) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    found: set[ipaddress.IPv4Address | ipaddress.IPv6Address] = set()
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        # A struct ifreq: 16 bytes of name, then a sockaddr_in, whose address is its bytes 4 to 8.
        request = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
        found.add(ipaddress.IPv4Address(request[20:24]))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            if name == interface:
                found.add(ipaddress.IPv6Address(int(digits, 16)))
    return found
