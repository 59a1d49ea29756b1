"""Nodes without processes: both sides of the line between mains, driven by hand."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
from servekit.config import ServerArgs
from servekit.runtime.launcher import Process
from servekit.runtime.nodes.addresses import Address
from servekit.runtime.nodes.head import Head
from servekit.runtime.nodes.lines import make_lines
from servekit.runtime.nodes.meeting import Place, find_place
from servekit.runtime.nodes.member import Member
from servekit.runtime.nodes.shape import Shape
from servekit.runtime.ranks import Sizes, make_ranks

SECRET = "an example of a secret, long enough"
SHAPE = Shape("1.0", "0x1", {"dtype": "auto"}, {"config.json": "00"})


class Page:
    """A state page that remembers what it was told of ranks elsewhere."""

    def __init__(self) -> None:
        self.relayed: list[tuple] = []

    def relay_rank(self, *told) -> None:
        self.relayed.append(told)

    def snapshot(self) -> dict:
        rank = {"pulse_epoch": 1, "pulse_age_s": 0.1, "phase": "idle", "phase_age_s": 2.0, "step": 7}
        rank |= {"moved_age_s": 1.5, "awaits": 0}
        return {"ranks": [rank] * 8, "followers": []}


class Rank(Process):
    """A rank of another node, as that one's main has it; remembers what it was told."""

    def __init__(self, number: int) -> None:
        super().__init__("scheduler", number, f"servekit::scheduler[dp={number}]", number)
        self.pid = 1000 + number
        self.told: list = []

    def command(self, command: str, **fields) -> bool:
        self.told.append({"command": command, **fields})
        return True

    def reap(self) -> int | None:
        return self.status

    def kill(self) -> None:
        self.told.append("kill")

    def write_stacks(self) -> None:
        self.told.append("stacks")

    def wait(self, timeout: float) -> int | None:
        return self.status

    def close(self) -> None:
        pass


class Main:
    """Enough of a server for either side. `wait` drives all lines of the test, as each main would its own."""

    def __init__(self, world: World) -> None:
        self.children: list = []
        self.state_page, self.has_page, self.watch, self._world = Page(), True, self, world

    def of(self, role: str) -> list:
        return [child for child in self.children if child.role == role and child.status is None]

    def wait(self, timeout: float) -> list:
        return self._world.turn()


class World:
    """Node 0 and others on loopback.

    Attributes:
        events: what happened to ranks, as node 0 was told.
    """

    def __init__(self, nodes: int, **flags) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.address = Address(*sock.getsockname())
        self.args = ServerArgs(
            nnodes=nodes, data_parallel_size=nodes, dist_init_addr=str(self.address), dist_timeout=5.0, **flags
        )
        self.sizes = Sizes.of(self.args)
        self.ranks = make_ranks(self.sizes)
        self._lines = make_lines(self.sizes, self.ranks)
        self.lines: list = []
        self.places: list[Place] = []
        self.events: list = []
        self.mains: dict = {}

    def place(self, args: ServerArgs) -> Place:
        self.places.append(find_place(args, self._lines))
        return self.places[-1]

    def head(self, shape: Shape | None = SHAPE) -> Head:
        head = Head(self.args, self.sizes, self.ranks, self.place(self.args))
        self.mains[head] = Main(self)
        self.mains[head].children += head.ranks
        if shape is not None:
            head.expect(self.mains[head], shape)
        self.lines.append(head)
        return head

    def member(self, number: int, shape: Shape = SHAPE, **flags) -> Member:
        args = msgspec.structs.replace(self.args, node_rank=number, **flags)
        member = Member(args, self.place(args))
        self.mains[member] = Main(self)
        self.mains[member].children.append(Rank(number))
        member.ask(self.mains[member], shape)
        self.lines.append(member)
        return member

    def turn(self) -> list:
        time.sleep(0.005)
        events = [event for line in list(self.lines) for event in line.work()]
        self.events += events
        return events

    def until(self, condition: Callable[[], object], seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it did not come to that"
            self.turn()

    def remove(self, line: Head | Member) -> None:
        """It is gone without a word, as a process that is killed."""
        self.lines.remove(line)
        line._link._context.destroy(0)

    def meet(self, head: Head, *members: Member) -> None:
        self.until(lambda: head.is_complete)
        head.begin()
        self.until(lambda: all(member.taking_part for member in members))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., World]]:
    made: list[World] = []
    monkeypatch.delenv("SERVEKIT_CLUSTER_SECRET", raising=False)
    for module in ("head", "member", "link"):
        monkeypatch.setattr(f"servekit.runtime.nodes.{module}.BEAT_S", 0.05)

    def make(nodes: int = 2, **flags) -> World:
        made.append(World(nodes, **flags))
        return made[-1]

    yield make
    for each in made:
        for line in each.lines:
            line._link._context.destroy(0)
        for place in each.places:
            place.listeners.close()
