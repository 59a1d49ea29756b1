"""The main process: makes what the others share, starts them, watches them, cleans up behind them."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from setproctitle import setproctitle

from servekit import _core
from servekit.config import Config, ConfigError, ModelError, PortArgs, SchedulerInfo, ServerArgs
from servekit.config.secrets import Secrets, take_secrets
from servekit.config.tls import check_tls
from servekit.runtime import logs
from servekit.runtime.child import Boot, Told
from servekit.runtime.descriptors import raise_descriptor_limit
from servekit.runtime.launcher import CONTROL, FOLLOWER, HTTP, SCHEDULER, Child, DeathPipe, Process
from servekit.runtime.listen import ListenError, UnixListener, listen
from servekit.runtime.nodes.addresses import LOOPBACK
from servekit.runtime.nodes.lines import CONTROL as CONTROL_PLACE
from servekit.runtime.nodes.lines import Listeners, make_lines, reached_by_tcp
from servekit.runtime.phase import Phase
from servekit.runtime.ranks import Rank, Sizes, make_ranks, number_of, title_of
from servekit.runtime.run_dir import RunDir, RunDirError, create_run_dir
from servekit.runtime.shared_memory import (
    SegmentError,
    segment_name,
    sweep_segments,
    unlink_segment,
    write_to_shared_memory,
)
from servekit.runtime.shutdown import OK, after_death, at_once, drain, end_children, goes_on
from servekit.runtime.startup import StartError, announce, start
from servekit.runtime.watch import Ended, Message, Signal, Stopped, Watch
from servekit.runtime.watchdog import LOOK_EVERY_S, Watchdog

if TYPE_CHECKING:
    from servekit.runtime.nodes.head import Head
    from servekit.runtime.nodes.member import Member

logger = logging.getLogger("servekit.runtime")

FIRST_EPOCH = 1
START_FAILED = 1
INTERRUPTED = 130

RANK_ENTRY = "servekit.scheduler.process:run"
_ENTRIES = {CONTROL: "servekit.control.process:run", HTTP: "servekit.http.worker:run"}


class Server:
    """All that one server's main process holds; `close` leaves nothing of it behind.

    Attributes:
        args: the flags.
        config: what the children are told.
        state_page: the state page, once `has_page`.
        sizes, ranks: the groups of ranks, and every rank.
        children: every child that was started, and on node 0 the ranks of other nodes; dead ones included.
        head: on node 0 of several, the others as it sees them; else None.
        member: on another node, node 0 as that one sees it; else None.
        lost: replicas of which a rank has died.
        watch: where main waits.
    """

    def __init__(self, args: ServerArgs, secrets: Secrets, stack: contextlib.ExitStack, rank_entry: str) -> None:
        """Take the port and make the run directory; no child runs yet.

        Args:
            args: validated flags, without secrets.
            secrets: for the HTTP workers.
            stack: is given what undoes it all, in the right order.
            rank_entry: what ranks run, as `module:function`.
        """
        self.args = args
        self._rank_entry = rank_entry
        self.sizes = Sizes.of(args)
        self.ranks = make_ranks(self.sizes)
        self._secrets = secrets
        self.children: list[Process] = []
        self.lost: set[int] = set()
        self.has_page = False
        self._stack = stack
        self._pid = os.getpid()
        self.watch = Watch()
        stack.callback(self.watch.close)
        self._port = 0
        self.listeners: list[socket.socket] = []
        if not self.is_head:
            pass
        elif args.uds is not None:
            unix = UnixListener(args.uds, int(args.uds_mode, 8), args.tokenizer_workers)
            stack.callback(unix.remove)
            self.listeners = unix.sockets
        else:
            self.listeners = listen(args.host, args.port, args.tokenizer_workers)
            self._port = self.listeners[0].getsockname()[1]
        self._lines = make_lines(self.sizes, self.ranks)
        self.head: Head | None = None
        self.member: Member | None = None
        self._sockets = self._find_nodes()
        stack.callback(self._close_listeners)
        sweep_segments()
        self.run_dir: RunDir = create_run_dir()
        stack.callback(self.run_dir.remove)
        self.death_pipe = DeathPipe()
        stack.callback(self.death_pipe.close)

    @property
    def nodes(self) -> Head | Member | None:
        """The line to the other nodes, None if there are none."""
        return self.head or self.member

    def _find_nodes(self) -> Listeners:
        """Open the line to the other nodes, if there are any; the TCP sockets of this one."""
        if self.sizes.nodes == 1:
            return Listeners(self._lines, 0, LOOPBACK)
        # ZeroMQ comes with it, which a main alone has no use for.
        from servekit.runtime.nodes.head import Head
        from servekit.runtime.nodes.meeting import find_place
        from servekit.runtime.nodes.member import Member

        place = find_place(self.args, self._lines)
        line: Head | Member
        if self.is_head:
            line = self.head = Head(self.args, self.sizes, self.ranks, place)
        else:
            line = self.member = Member(self.args, place)
        self.watch.attach(line)
        return place.listeners

    @property
    def is_head(self) -> bool:
        """Whether this is node 0, which has control and the HTTP workers."""
        return self.args.node_rank == 0

    @property
    def is_ready(self) -> bool:
        """Whether all its ranks have been ready."""
        return self.state_page.phase == Phase.READY

    def _make_config(self) -> Config:
        from servekit.config.model_source import resolve_model

        args, pid = self.args, self._pid
        with self.watch.interruptible():
            model = resolve_model(args, self.run_dir.path)
        if self.nodes is not None:
            self.nodes.meet(self, model)
        addresses = self._sockets.addresses if self.nodes is None else self.nodes.addresses
        ports = PortArgs(
            run_dir=str(self.run_dir.path),
            main_pid=pid,
            host=args.host,
            port=self._port,
            state_page=segment_name(pid, "state"),
            info=segment_name(pid, "info"),
            control_epoch=FIRST_EPOCH,
            worker_epochs=[FIRST_EPOCH] * args.tokenizer_workers,
            rank_epochs=[FIRST_EPOCH] * args.data_parallel_size,
            tokenizer_file=model.tokenizer_file,
            interface=None if self.nodes is None else self.nodes.interface,
            tcp=reached_by_tcp(self._lines, args.node_rank, addresses),
        )
        return Config(args, ports, model)

    def start_children(self) -> None:
        """Start every child at once. They load their modules while main looks for the model."""
        self._undo_children()
        if self.is_head:
            self._start(CONTROL, 0, "servekit::control", sockets=self._sockets.of(CONTROL_PLACE))
        for place, rank in enumerate(self.ranks):
            if rank.node == self.args.node_rank:
                self._start_rank(place, rank)
        for worker, listener in enumerate(self.listeners):
            self._start(HTTP, worker, f"servekit::http[{worker}]", listener=listener)
        # A child's death must close its socket, so main keeps no copy.
        self._close_listeners()
        if self.nodes is not None:
            self.children += self.nodes.ranks

    def _start_rank(self, place: int, rank: Rank) -> None:
        role = SCHEDULER if rank.leader else FOLLOWER
        index, title = number_of(self.ranks, place), title_of(rank, self.sizes)
        self._start(role, index, title, place, sockets=self._sockets.of(place))

    def _start(self, role: str, index: int, title: str, rank: int = -1, **sockets: Any) -> None:
        boot = Boot(
            main_pid=self._pid,
            epoch=FIRST_EPOCH,
            config=segment_name(self._pid, "config"),
            run_dir=str(self.run_dir.path),
            channel=-1,
            death_pipe=self.death_pipe.read_end,
            log_level=self.args.log_level,
            log_format=self.args.log_format,
            uds="" if self.args.uds is None else str(Path(self.args.uds).absolute()),
            title=title,
            entry=_ENTRIES.get(role, self._rank_entry),
            rank=rank,
            # The first child: control, or where there is none a rank.
            cleans=not self.children,
        )
        child = Child(role, index, boot, **sockets)
        self.children.append(child)
        self.watch.add(child)

    def hand_over(self) -> None:
        """Find the model, write what the children must know to shared memory, and tell them to begin."""
        self.config = self._make_config()
        name = segment_name(self._pid, "config")
        # Undone last of the segments: it tells a later start whose the others are.
        self._stack.callback(unlink_segment, name)
        self._stack.callback(os.close, write_to_shared_memory(self.config, name))
        ports, args = self.config.port_args, self.args
        followers = sum(not rank.leader for rank in self.ranks)
        self.state_page = _core.StatePage.create(
            ports.state_page, args.tokenizer_workers, args.data_parallel_size, followers
        )
        self.has_page = True
        self._stack.callback(unlink_segment, ports.state_page)
        # Children must be dead before what they write to goes.
        self._undo_children()
        keys = None if self.nodes is None else self.nodes.keys
        for child in self.children:
            mine = isinstance(child, Child)
            # Process ids of other machines mean something else here.
            self.state_page.set_process(child.role, child.index, FIRST_EPOCH, child.pid if mine else 0)
            child.last_news = time.monotonic()
            if mine:
                told = Told(secrets=self._secrets) if child.role == HTTP else Told(keys=keys)
                child.command("begin", **msgspec.to_builtins(told))

    def publish(self, info: SchedulerInfo) -> None:
        """Write what the ranks told to the second segment, where the workers find it."""
        name = self.config.port_args.info
        os.close(write_to_shared_memory(info, name))
        self._stack.callback(unlink_segment, name)

    def of(self, role: str) -> Iterator[Process]:
        """Living processes of a role, on all nodes that this one knows of."""
        return (child for child in self.children if child.role == role and child.status is None)

    def group_of(self, child: Process) -> list[Process]:
        """Living ranks of a rank's replica, its own process too while it lives; none of another child."""
        if child.rank < 0:
            return []
        replica = self.ranks[child.rank].replica
        ranks = [*self.of(SCHEDULER), *self.of(FOLLOWER)]
        return [each for each in ranks if self.ranks[each.rank].replica == replica]

    def is_lost(self, child: Process) -> bool:
        """Whether a child is a rank of a replica that ends or has ended."""
        return child.rank >= 0 and self.ranks[child.rank].replica in self.lost

    @property
    def control(self) -> Process | None:
        """The control process, None when it is dead."""
        return next(self.of(CONTROL), None)

    def open_requests(self) -> int:
        """Requests that living workers have not answered to the end."""
        workers = self.state_page.snapshot()["workers"]
        return sum(workers[child.index]["open_streams"] for child in self.of(HTTP))

    def _close_listeners(self) -> None:
        for each in self.listeners:
            each.close()
        self._sockets.close()

    def _undo_children(self) -> None:
        """At the end tell other nodes why, then kill what still runs on this one; to be asked for twice is harmless."""
        self._stack.callback(self._kill_children)
        if self.nodes is not None:
            self._stack.push(self.nodes.leave)

    def _kill_children(self) -> None:
        end_children(self, grace_s=0.0)
        for child in self.children:
            child.close()


def serve(args: ServerArgs, rank_entry: str = RANK_ENTRY) -> int:
    """Run a server until it is told to end.

    Args:
        args: validated flags.
        rank_entry: what ranks run, as `module:function`; it is given a `ChildContext`.

    Returns:
        Exit status: 0 after SIGTERM, 130 after Ctrl-C, 1 when it could not start or a child died.
    """
    setproctitle("servekit::main")
    logs.configure("servekit::main", 1, args.log_level, args.log_format)
    began = time.monotonic()
    try:
        args, secrets = take_secrets(args)
        check_tls(args, secrets)
        raise_descriptor_limit()
        with contextlib.ExitStack() as stack:
            server = Server(args, secrets, stack, rank_entry)
            server.start_children()
            server.hand_over()
            if server.member is not None:
                return server.member.follow(server)
            stopped = start(server)
            if stopped is not None:
                return _status_of(stopped)
            announce(server, time.monotonic() - began)
            status = _watch_over(server)
            if server.head is not None:
                server.head.status = status
            return status
    except Stopped as stop:
        return _status_of(stop.number)
    except (ConfigError, ListenError, ModelError, RunDirError, SegmentError, StartError) as error:
        return _refuse(str(error))
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM):
            raise
        return _refuse(f"the system does not give what a server needs: {error.strerror}")


def _refuse(why: str) -> int:
    print(f"servekit-serve: error: {why}", file=sys.stderr)  # noqa: T201 (the operator's one line)
    return START_FAILED


def _status_of(number: int) -> int:
    return INTERRUPTED if number == signal.SIGINT else OK


def _watch_over(server: Server) -> int:
    """Serve until a signal or a death, then end in the way that fits."""
    watchdog = Watchdog(server.args.soft_watchdog_timeout, server.args.watchdog_timeout)
    while True:
        for event in server.watch.wait(LOOK_EVERY_S):
            match event:
                case Signal(signal.SIGINT):
                    at_once(server, "the server was interrupted")
                    return INTERRUPTED
                case Signal():
                    return drain(server)
                case Ended(child):
                    if not goes_on(server, child):
                        return after_death(server, child)
                case Message(child, body):
                    _note(child, body)
        watchdog.look(server)


def _note(child: Process, body: dict[str, Any]) -> None:
    if body.get("event") == "failed":
        logger.error("%s: %s", child.title, body.get("message"))
