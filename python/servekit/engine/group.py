"""The ranks of a replica as torch.distributed sees them: Gloo between CPUs, NCCL between GPUs.

A rank that is alone has no group, and runs none of this. All ranks of a group run the same steps in the same order;
who is first to do so is said in `scheduler/orders.py`.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F

from servekit.models.split import Part, Span
from servekit.runtime.ranks import GroupError, Rank, Sizes

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Self = TypeVar("_Self", bound="_Peers")


class _Peers:
    """Others that a rank waits for; `awaits` is told when it begins to, and when it has ended."""

    def __init__(self, awaits: Callable[[bool], None]) -> None:
        self.awaits = awaits


def _needs_peers(call: Callable[Concatenate[_Self, _P], _R]) -> Callable[Concatenate[_Self, _P], _R]:
    @wraps(call)
    def guarded(self: _Self, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        self.awaits(True)
        with _lost():
            found = call(self, *args, **kwargs)
        self.awaits(False)
        return found

    return guarded


@contextmanager
def _lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise GroupError(f"lost a rank of the group: {str(error).splitlines()[0]}") from error


class StageGroup(_Peers):
    """The tensor ranks of a stage."""

    def __init__(self, members: Any, size: int, awaits: Callable[[bool], None]) -> None:
        super().__init__(awaits)
        self._members, self._size = members, size

    @_needs_peers
    def sum_(self, x: torch.Tensor) -> torch.Tensor:
        """Add up what all ranks have, in place, the same sum everywhere; returns x."""
        dist.all_reduce(x, group=self._members)
        return x

    @_needs_peers
    def join(self, x: torch.Tensor, span: Span) -> torch.Tensor:
        """Columns of all ranks side by side.

        Args:
            x: [rows, span.count], this rank's.
            span: which of all they are, as `Part` splits them.

        Returns:
            [rows, span.total].
        """
        # Where the columns do not divide, some ranks have one more: all send as many, and what is too much goes.
        width = -(-span.total // self._size)
        mine = F.pad(x, (0, width - span.count)).contiguous()
        found = [torch.empty_like(mine) for _ in range(self._size)]
        dist.all_gather(found, mine, group=self._members)
        counts = [Part(i, self._size).span(span.total).count for i in range(self._size)]
        return torch.cat([part[:, :count] for part, count in zip(found, counts, strict=True)], -1)


class ReplicaGroup(_Peers):
    """All ranks of a replica.

    Attributes:
        rank, sizes: which rank this is, and among how many.
        stage: the tensor ranks beside this one, None where there are none.
    """

    def __init__(self, rank: Rank, sizes: Sizes, awaits: Callable[[bool], None]) -> None:
        super().__init__(awaits)
        self.rank, self.sizes = rank, sizes
        # Everybody takes part in the making of every group.
        stages = [list(range(p * sizes.tensor, (p + 1) * sizes.tensor)) for p in range(sizes.pipeline)]
        made = [dist.new_group(stage) for stage in stages] if sizes.tensor > 1 else []
        self.stage = StageGroup(made[rank.pp], sizes.tensor, awaits) if made else None
        self._leaving: deque[tuple[Any, torch.Tensor]] = deque()

    @_needs_peers
    def pass_on(self, x: torch.Tensor) -> None:
        """Send a step's states to the next stage. Doesn't wait for it; x must not change any more."""
        self._leaving.append((dist.isend(x, self.rank.world + self.sizes.tensor), x))
        while len(self._leaving) > self.sizes.pipeline:
            self._leaving.popleft()[0].wait()

    @_needs_peers
    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Wait for a step's states of the stage before, and put them in x; returns x."""
        dist.recv(x, self.rank.world - self.sizes.tensor)
        return x

    @_needs_peers
    def least(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        found = torch.tensor(number)
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return int(found)


@_lost()
def join_group(
    rank: Rank,
    sizes: Sizes,
    address: str,
    listener: int,
    device: torch.device,
    timeout_s: float,
    interface: str | None = None,
    awaits: Callable[[bool], None] = lambda peers: None,
) -> ReplicaGroup:
    """Meet the other ranks of the replica; returns when all are there.

    Args:
        rank, sizes: which rank this is, and among how many.
        address: host and port where the replica's first rank keeps the store.
        listener: descriptor of the socket that is bound to it already, for that rank; -1 for the others.
        device: what the ranks compute on.
        timeout_s: how long to wait for the others, here and in every step.
        interface: of the network on which they talk, if some are on other nodes; else they do on loopback.
        awaits: called with True when a step has to wait for others, and with False when it goes on.

    Raises:
        GroupError: they did not come.
    """
    host, _, port = address.rpartition(":")
    # Left to itself, Gloo takes the address that the host's name means.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface or _loopback())
    if interface is not None:
        # Without the sign it would be any interface whose name begins so.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    timeout = timedelta(seconds=timeout_s)
    # Bound by whoever asks for it: on its own the store would listen on every interface.
    owned = {"master_listen_fd": listener} if listener >= 0 else {}
    store = dist.TCPStore(
        host.strip("[]"), int(port), sizes.world, listener >= 0, timeout, wait_for_workers=False, **owned
    )
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
    dist.init_process_group(backend, store=store, rank=rank.world, world_size=sizes.world, timeout=timeout)
    return ReplicaGroup(rank, sizes, awaits)


def _loopback() -> str:
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
