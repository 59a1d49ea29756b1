"""Where this node is: its address, the one where all meet, its sockets, and the secret without which none leaves it."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Iterable
from typing import NamedTuple

from servekit.config import ConfigError, ServerArgs
from servekit.runtime.nodes.addresses import Address, interface_of, own_ip, resolve, split_address, split_ports
from servekit.runtime.nodes.lines import Line, Listeners
from servekit.runtime.nodes.secret import read_secret

logger = logging.getLogger("servekit.runtime")

MEETING, DATA = "servekit: meeting of nodes", "servekit: links between nodes"
"""Purposes of keys."""


class Place(NamedTuple):
    """Where a node is.

    Attributes:
        head: where node 0 is met.
        is_name: `--dist-init-addr` is a name, so it may mean another address elsewhere.
        ip: this node's address.
        interface: its network interface.
        listeners: its sockets.
        secret: of the cluster; b"" on a machine alone.
    """

    head: Address
    is_name: bool
    ip: str
    interface: str
    listeners: Listeners
    secret: bytes


def find_place(args: ServerArgs, lines: Iterable[Line]) -> Place:
    """Find out where this node is, and bind its sockets.

    Raises:
        ConfigError: an address is none, or other than loopback without a secret.
    """
    secret = read_secret(args)
    head = resolve(str(args.dist_init_addr))
    host, _ = split_address(str(args.dist_init_addr))
    ip = args.node_ip or (head.ip if args.node_rank == 0 else own_ip(head))
    for flag, address in (("--dist-init-addr", head.ip), ("--node-ip", ip)):
        if secret is None and not ipaddress.ip_address(address).is_loopback:
            raise ConfigError(
                f"{flag} {address} is not on this machine alone, so nodes need a secret: --cluster-secret-file or"
                " SERVEKIT_CLUSTER_SECRET"
            )
    if secret is None:
        logger.warning("nodes have no --cluster-secret-file: every user of this machine can speak for one")
    ports = None if args.dist_port_range is None else split_ports(args.dist_port_range)
    interface = interface_of(ip, "--dist-init-addr" if args.node_rank == 0 and not args.node_ip else "--node-ip")
    return Place(head, host != head.ip, ip, interface, Listeners(lines, args.node_rank, ip, ports), secret or b"")
