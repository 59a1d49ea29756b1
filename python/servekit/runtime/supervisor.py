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
from typing import Any

import msgspec
from setproctitle import setproctitle

from servekit import _core
from servekit.config import Config, ConfigError, ModelError, PortArgs, SchedulerInfo, ServerArgs
from servekit.config.secrets import Secrets, take_secrets
from servekit.config.tls import check_tls
from servekit.runtime import logs
from servekit.runtime.child import Boot
from servekit.runtime.descriptors import raise_descriptor_limit
from servekit.runtime.launcher import CONTROL, FOLLOWER, HTTP, SCHEDULER, Child, DeathPipe
from servekit.runtime.listen import ListenError, UnixListener, listen
from servekit.runtime.ranks import Rank, Sizes, make_ranks
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
        state_page: the state page.
        sizes, ranks: the groups of ranks, and every rank.
        children: every child that was started, dead ones included.
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
        self.children: list[Child] = []
        self.lost: set[int] = set()
        self._stack = stack
        self._pid = os.getpid()
        self.watch = Watch()
        stack.callback(self.watch.close)
        self._port = 0
        if args.uds is not None:
            unix = UnixListener(args.uds, int(args.uds_mode, 8), args.tokenizer_workers)
            stack.callback(unix.remove)
            self.listeners = unix.sockets
        else:
            self.listeners = listen(args.host, args.port, args.tokenizer_workers)
            self._port = self.listeners[0].getsockname()[1]
        # Where the ranks of each replica meet.
        self._stores = [_loopback_socket() for _ in range(self.sizes.replicas if self.sizes.world > 1 else 0)]
        stack.callback(self._close_listeners)
        sweep_segments()
        self.run_dir: RunDir = create_run_dir()
        stack.callback(self.run_dir.remove)
        self.death_pipe = DeathPipe()
        stack.callback(self.death_pipe.close)

    def _make_config(self) -> Config:
        from servekit.config.model_source import resolve_model

        args, pid = self.args, self._pid
        with self.watch.interruptible():
            model = resolve_model(args, self.run_dir.path)
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
            stores=self._addresses,
        )
        return Config(args, ports, model)

    def start_children(self) -> None:
        """Start every child at once. They load their modules while main looks for the model."""
        self._stack.callback(self._kill_children)
        self._addresses = ["{}:{}".format(*store.getsockname()) for store in self._stores]
        self._start(CONTROL, 0, "servekit::control")
        for place, rank in enumerate(self.ranks):
            self._start_rank(place, rank)
        for worker in range(self.args.tokenizer_workers):
            self._start(HTTP, worker, f"servekit::http[{worker}]", listener=self.listeners[worker])
        # A child's death must close its socket, so main keeps no copy.
        self._close_listeners()

    def _start_rank(self, place: int, rank: Rank) -> None:
        store = self._stores[rank.replica] if self._stores and rank.world == 0 else None
        where = f"dp={rank.dp},pp={rank.pp},tp={rank.tp}" if self.sizes.world > 1 else f"dp={rank.dp}"
        role, index = (SCHEDULER, rank.dp) if rank.leader else (FOLLOWER, place)
        self._start(role, index, f"servekit::scheduler[{where}]", place, store=store)

    def _start(self, role: str, index: int, title: str, rank: int = -1, **sockets: socket.socket | None) -> None:
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
        self.state_page = _core.StatePage.create(ports.state_page, args.tokenizer_workers, args.data_parallel_size)
        self._stack.callback(unlink_segment, ports.state_page)
        # Children must be dead before what they write to goes.
        self._stack.callback(self._kill_children)
        for child in self.children:
            if child.role != FOLLOWER:
                self.state_page.set_process(child.role, child.index, child.epoch, child.pid)
            child.last_news = time.monotonic()
            secrets = {"secrets": msgspec.to_builtins(self._secrets)} if child.role == HTTP else {}
            child.command("begin", **secrets)

    def publish(self, info: SchedulerInfo) -> None:
        """Write what the ranks told to the second segment, where the workers find it."""
        name = self.config.port_args.info
        os.close(write_to_shared_memory(info, name))
        self._stack.callback(unlink_segment, name)

    def of(self, role: str) -> Iterator[Child]:
        """Living children of a role."""
        return (child for child in self.children if child.role == role and child.status is None)

    def group_of(self, child: Child) -> list[Child]:
        """Living ranks of a rank's replica, its own process too while it lives; none of another child."""
        if child.rank < 0:
            return []
        replica = self.ranks[child.rank].replica
        ranks = [*self.of(SCHEDULER), *self.of(FOLLOWER)]
        return [each for each in ranks if self.ranks[each.rank].replica == replica]

    def is_lost(self, child: Child) -> bool:
        """Whether a child is a rank of a replica that ends or has ended."""
        return child.rank >= 0 and self.ranks[child.rank].replica in self.lost

    @property
    def control(self) -> Child | None:
        """The control process, None when it is dead."""
        return next(self.of(CONTROL), None)

    def open_requests(self) -> int:
        """Requests that living workers have not answered to the end."""
        workers = self.state_page.snapshot()["workers"]
        return sum(workers[child.index]["open_streams"] for child in self.of(HTTP))

    def _close_listeners(self) -> None:
        for each in (*self.listeners, *self._stores):
            each.close()

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
        _check_built(Sizes.of(args))
        args, secrets = take_secrets(args)
        check_tls(args, secrets)
        raise_descriptor_limit()
        with contextlib.ExitStack() as stack:
            server = Server(args, secrets, stack, rank_entry)
            server.start_children()
            server.hand_over()
            stopped = start(server)
            if stopped is not None:
                return _status_of(stopped)
            announce(server, time.monotonic() - began)
            return _watch_over(server)
    except Stopped as stop:
        return _status_of(stop.number)
    except (ConfigError, ListenError, ModelError, RunDirError, SegmentError, StartError) as error:
        return _refuse(str(error))
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM):
            raise
        return _refuse(f"the system does not give what a server needs: {error.strerror}")


def _check_built(sizes: Sizes) -> None:
    """Refuse what can be shown and not yet served.

    Raises:
        ConfigError: several nodes.
    """
    if sizes.nodes > 1:
        raise ConfigError(f"--nnodes {sizes.nodes} can be shown by --show-ranks and not yet served: it can be 1")


def _loopback_socket() -> socket.socket:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen()
    return sock


def _refuse(why: str) -> int:
    print(f"servekit-serve: error: {why}", file=sys.stderr)  # noqa: T201 (the operator's one line)
    return START_FAILED


def _status_of(number: int) -> int:
    return INTERRUPTED if number == signal.SIGINT else OK


def _watch_over(server: Server) -> int:
    """Serve until a signal or a death, then end in the way that fits."""
    watchdog = Watchdog(server.args.watchdog_timeout)
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


def _note(child: Child, body: dict[str, Any]) -> None:
    if body.get("event") == "failed":
        logger.error("%s: %s", child.title, body.get("message"))
