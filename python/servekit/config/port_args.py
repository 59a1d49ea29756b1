"""Where the processes of one server find each other."""

from __future__ import annotations

import msgspec


class PortArgs(msgspec.Struct, kw_only=True, frozen=True):
    """Addresses and epochs of one server's life, told by main.

    Attributes:
        run_dir: folder of the sockets, mode 0700.
        main_pid: process id of main; shared memory segments carry it in their names.
        host, port: address on which HTTP listens, with the port that was really bound.
        state_page: name of the state page's segment.
        info: name of the segment with `SchedulerInfo`; it exists once every rank is ready.
        control_epoch: epoch of the control process.
        worker_epochs: epoch of each HTTP worker.
        rank_epochs: epoch of each rank.
        tokenizer_file: `tokenizer.json` that workers, control and ranks load.
        interface: network interface over which this node reaches the others, None where there is one node.
        tcp: host and port of sockets, by name: where the ranks of a replica meet, and those of other nodes.
    """

    run_dir: str
    main_pid: int
    host: str
    port: int
    state_page: str
    info: str
    control_epoch: int
    worker_epochs: list[int]
    rank_epochs: list[int]
    tokenizer_file: str
    interface: str | None = None
    tcp: dict[str, str] = {}

    def address(self, name: str) -> str:
        """ZeroMQ address of a socket such as `ingress.ipc`: in the run directory, or on another node."""
        return f"tcp://{self.tcp[name]}" if name in self.tcp else self.own_address(name)

    def own_address(self, name: str) -> str:
        """ZeroMQ address at which a process of this node listens for others of it."""
        return f"ipc://{self.run_dir}/{name}"


INGRESS = "ingress.ipc"
"""Socket on which control receives from the HTTP workers."""
EGRESS = "egress.ipc"
"""Socket on which control receives from the ranks."""


def rank_ipc(rank: int) -> str:
    """File name of the socket on which a rank receives."""
    return f"rank{rank}.ipc"


def orders_ipc(replica: int, world: int) -> str:
    """File name of the socket on which a follower hears its leader."""
    return f"orders{replica}-{world}.ipc"


def offers_ipc(replica: int) -> str:
    """File name of the socket on which the first leader of a replica hears the others."""
    return f"offers{replica}.ipc"


def store_name(replica: int) -> str:
    """Name of the socket on which the ranks of a replica meet."""
    return f"store{replica}"


def results_ipc(dp: int) -> str:
    """File name of the socket on which a leader hears of the last stage."""
    return f"results{dp}.ipc"
