"""The first thing that runs in every child, and what it hands to the role: `python -m servekit.runtime.child`.

Arguments: role, index, and a JSON object with what main passes (`Boot`).
"""

from __future__ import annotations

import faulthandler
import importlib
import logging
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from setproctitle import setproctitle

from servekit import _core
from servekit.config import Config, SchedulerInfo
from servekit.config.secrets import Keys, Secrets
from servekit.runtime import logs
from servekit.runtime.channel import Channel
from servekit.runtime.placement import take_cores
from servekit.runtime.ranks import Rank, Sizes, make_ranks
from servekit.runtime.shared_memory import read_from_shared_memory, segment_name, segment_path

logger = logging.getLogger("servekit.runtime")

CONTROL, HTTP, SCHEDULER, FOLLOWER = "control", "http", "scheduler", "follower"
"""Roles. A scheduler leads a data-parallel rank, followers are the other ranks of its group."""
CLEAN_S = 5.0
"""How long cleaning up behind main may take, when the rest of this process is over."""
STACKS_SIGNAL = signal.SIGUSR1
"""Makes a child write the stacks of its threads to standard error."""


class Boot(msgspec.Struct, frozen=True):
    """What main tells a child on its command line.

    Attributes:
        main_pid: process id of main.
        epoch: which life of this role and index this is, from 1.
        config: name of the segment with `Config`.
        run_dir: folder that control removes when main has died.
        channel, death_pipe: descriptors of the line to main and of the read end of the death pipe.
        log_level, log_format: as in `ServerArgs`, known before the configuration is.
        listener: descriptor of an HTTP worker's listening socket, -1 for other roles.
        uds: path of the Unix socket that the server listens on, "" if it listens on a port.
        title: the process title.
        entry: what runs, as `module:function`; it is given a `ChildContext`.
        rank: place in the table of ranks, -1 if it is none.
        sockets: descriptors of TCP sockets that listen for others, by name: where the ranks of a replica meet, for the
            one that keeps their store, and those for processes on other nodes.
        cleans: whether it removes what main owned once that is gone.
    """

    main_pid: int
    epoch: int
    config: str
    run_dir: str
    channel: int
    death_pipe: int
    log_level: str
    log_format: str
    listener: int = -1
    uds: str = ""
    title: str = ""
    entry: str = ""
    rank: int = -1
    sockets: dict[str, int] = {}
    cleans: bool = False


class Told(msgspec.Struct, frozen=True):
    """What main tells a child on their line when it may begin: what must not be written anywhere."""

    secrets: Secrets = Secrets()
    keys: Keys | None = None


class ChildContext:
    """A child's view of the server.

    Attributes:
        role, index: which child this is: control, http, scheduler or follower, and its number; a scheduler's is that
            of its data-parallel rank, followers are counted by themselves.
        title: the process title.
        epoch: which life of that child this is, from 1.
        config: flags, addresses and model.
        state_page: the state page that all processes share.
        listener: an HTTP worker's listening socket, None for other roles.
        secrets: keys, for HTTP workers; other roles are told none.
        sizes: of the groups of ranks.
        sockets: see `Boot`.
        keys: of the sockets between nodes, None where there is one node, or for an HTTP worker.
        sharing: ranks that share the cores of this one.
    """

    def __init__(self, role: str, index: int, boot: Boot, config: Config, channel: Channel, told: Told) -> None:
        self.role, self.index, self.title = role, index, boot.title
        self.epoch = boot.epoch
        self.config = config
        self.secrets, self.keys = told.secrets, told.keys
        self.state_page = _core.StatePage.open(config.port_args.state_page)
        self.listener = socket.socket(fileno=boot.listener) if boot.listener >= 0 else None
        self.sizes, self.sockets = Sizes.of(config.server_args), boot.sockets
        self._boot, self._channel = boot, channel
        ranks = make_ranks(self.sizes) if boot.rank >= 0 else []
        self._rank = ranks[boot.rank] if ranks else None
        here = [place for place, rank in enumerate(ranks) if self._rank and rank.node == self._rank.node]
        self.sharing = len(here)
        if self.sizes.world > 1 and self._rank is not None:
            self.sharing = take_cores(here.index(boot.rank), len(here))

    @property
    def rank(self) -> Rank:
        """Where this process is in the table of ranks.

        Raises:
            RuntimeError: it is no rank.
        """
        if self._rank is None:
            raise RuntimeError(f"{self.title} is no rank")
        return self._rank

    @cached_property
    def pulse(self) -> _core.Pulse:
        """Shows that this rank lives, from the first look at it on, and what it does."""
        # The state page counts followers behind the data-parallel ranks.
        place = self.index if self.rank.leader else self.config.server_args.data_parallel_size + self.index
        return _core.Pulse(self.config.port_args.state_page, place, self.epoch)

    def ready(self, info: dict[str, Any]) -> None:
        """Tell main that this process can serve; for a rank, `info` is its `Rank.info`."""
        self._channel.send({"event": "ready", "info": info})

    def progress(self, done: float, total: float, what: str) -> None:
        """Tell main how far a long start has come, as `done` of `total`; `what` is one word such as weights."""
        self._channel.send({"event": "progress", "done": done, "total": total, "what": what})

    def stage(self, what: str) -> None:
        """Tell main with what a long start goes on, in words; `what` of `progress` tells it too."""
        self._channel.send({"event": "stage", "what": what})

    def fail(self, message: str) -> NoReturn:
        """End this process with status 1; `message` is the one line that the operator reads."""
        self._channel.send({"event": "failed", "message": message})
        raise SystemExit(1)

    def commands(self) -> Iterator[dict[str, Any]]:
        """Main's commands as they come, for a thread of its own; ends when main is gone.

        Each is an object with `command`: `stop` ends the process; HTTP workers get `fail_streams`, control gets
        `fail_all`, both with `message`; control gets `rank_up` with `rank` and `max_running`, and `rank_down` with
        `rank` and `reason`.
        """
        while not self._channel.closed:
            yield from self._channel.receive(wait=True)

    def fileno(self) -> int:
        """Descriptor that is readable when `take_commands` has something to do, for an event loop."""
        return self._channel.fileno()

    def take_commands(self) -> list[dict[str, Any]]:
        """Commands that have arrived, without waiting; see `commands`."""
        return self._channel.receive()

    @property
    def hung_up(self) -> bool:
        """Main's end of the line is closed: it is ending."""
        return self._channel.closed

    def main_lives(self) -> bool:
        """Whether main is still this process's parent."""
        return os.getppid() == self._boot.main_pid

    def clean_up_behind_main(self) -> NoReturn:
        """Remove main's shared memory and run directory, then end; for control, when main has died."""
        for path in map(Path, _owned_by_main(self._boot)):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        os._exit(1)

    def scheduler_info(self) -> SchedulerInfo | None:
        """What the ranks reported when they were ready; None until all are."""
        name = self.config.port_args.info
        return read_from_shared_memory(name, SchedulerInfo) if segment_path(name).exists() else None


def main() -> NoReturn:
    """Entry of a child process; never returns."""
    # Main decides when children end. It blocks these signals while it starts one, so none got through before.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    role, index = sys.argv[1], int(sys.argv[2])
    boot = msgspec.json.decode(sys.argv[3], type=Boot)
    channel = Channel(socket.socket(fileno=boot.channel))
    setproctitle(boot.title)
    _follow_parent(boot)
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL)
    logs.configure(boot.title, boot.epoch, boot.log_level, boot.log_format)
    status = 1
    try:
        run = _entry(boot.entry)
        told = _wait_for_begin(channel)
        run(ChildContext(role, index, boot, read_from_shared_memory(boot.config, Config), channel, told))
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        logger.exception("%s ends because of an error that it did not expect", boot.title)
    logging.shutdown()
    sys.stdout.flush()
    if boot.cleans and channel.closed:
        # Main is gone, and the thread at the death pipe is removing what it owned; it ends this process then.
        time.sleep(CLEAN_S)
    # Threads and destructors of libraries get no say in when this process ends.
    os._exit(status)


def _follow_parent(boot: Boot) -> None:
    """End with main, whichever way main ends."""
    # Killed by the parent-death signal, nobody could clean up behind main.
    if not boot.cleans:
        _core.set_parent_death_signal(signal.SIGKILL)
    _core.watch_death_pipe(boot.death_pipe, _owned_by_main(boot) if boot.cleans else [])
    if not boot.cleans and os.getppid() != boot.main_pid:
        # Main died before the signal was set; who cleans up learns it from the pipe.
        os._exit(1)


def _owned_by_main(boot: Boot) -> list[str]:
    """Paths that main would remove at its end; the configuration goes last, it tells whose the others are."""
    segments = [str(segment_path(segment_name(boot.main_pid, what))) for what in ("info", "state")]
    sockets = [boot.uds] if boot.uds else []
    return [*sockets, *segments, boot.run_dir, str(segment_path(boot.config))]


def _entry(name: str) -> Callable[[ChildContext], None]:
    """The child's entry; it imports only what its own role needs."""
    module, _, function = name.partition(":")
    run: Callable[[ChildContext], None] = getattr(importlib.import_module(module), function)
    return run


def _wait_for_begin(channel: Channel) -> Told:
    """Wait until main has written the configuration; what it says beside it.

    Raises:
        SystemExit: main ends before it comes to that.
    """
    while not channel.closed:
        messages = {message.get("command"): message for message in channel.receive(wait=True)}
        if "stop" in messages:
            break
        if "begin" in messages:
            return msgspec.convert(messages["begin"], Told)
    raise SystemExit(0)


if __name__ == "__main__":
    # Run as the importable module, or there would be two of each class.
    from servekit.runtime.child import main as run_main

    run_main()
