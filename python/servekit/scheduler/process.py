"""Entry of a rank's process: choose the engine, load it, run it until main says stop."""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

from servekit import _core
from servekit.runtime.ranks import GroupError
from servekit.transport.rank_link import LinkError, RankLink

if TYPE_CHECKING:
    from servekit.runtime.child import ChildContext

logger = logging.getLogger("servekit.scheduler")

PEER_S = 2.0
"""How long a rank that has lost another one waits before it says so."""

ENTRY_POINTS = "servekit.engines"
"""Group in which other packages name their engines: `name = "package.module:factory"`."""

_BUILT_IN = {
    "mock": "servekit.scheduler.mock:create_mock_rank",
    "torch": "servekit.scheduler.rank:create_torch_rank",
}


class Rank(Protocol):
    """An engine on a rank's two sockets.

    Attributes:
        info: what it can do, as plain JSON values: kv_pool_tokens, max_running_requests, max_model_len, device, dtype.
    """

    info: dict[str, Any]

    def run(self, link: RankLink, stopping: Callable[[], bool]) -> None:
        """Serve until `stopping()`; the link is woken when it becomes true.

        Every request that was accepted is closed with exactly one finished row, an aborted one too.
        """
        ...


RankFactory: TypeAlias = "Callable[[ChildContext], Rank]"


class EngineError(RuntimeError):
    """There is no such engine, or it can't be imported; the text is one line."""


def find_engine(name: str) -> RankFactory:
    """Factory of an engine: a built-in one, or another package's by its entry point.

    Raises:
        EngineError: nothing has that name, or its package can't be imported.
    """
    if name in _BUILT_IN:
        module, _, function = _BUILT_IN[name].partition(":")
        try:
            return cast(RankFactory, getattr(importlib.import_module(module), function))
        except ImportError as error:
            raise EngineError(f"--engine {name} needs a package that is missing here: {error}") from error
    found = entry_points(group=ENTRY_POINTS)
    if name not in found.names:
        names = ", ".join(sorted({*_BUILT_IN, *found.names}))
        raise EngineError(f"--engine {name!r} is unknown; installed are {names}")
    try:
        return cast(RankFactory, found[name].load())
    except Exception as error:
        raise EngineError(f"--engine {name}: its package can't be imported: {error}") from error


def run(ctx: ChildContext) -> None:
    """Run this rank; returns when main says stop, or to a follower its leader."""
    stop = threading.Event()
    try:
        if ctx.rank.leader:
            _lead(ctx, stop)
        else:
            _follow(ctx, stop)
    except GroupError as error:
        # The lost rank is heard first, by main, which then ends all ranks of its group.
        stop.wait(PEER_S)
        ctx.fail(f"{ctx.title}: {error}")


def _follow(ctx: ChildContext, stop: threading.Event) -> None:
    """Run a rank that only takes part in its group's steps."""
    args = ctx.config.server_args
    ctx.pulse.enter("loading", 0)
    ctx.stage("its modules")
    threading.Thread(target=_obey, args=(ctx, stop, lambda: None), name="commands", daemon=True).start()
    if args.engine == "torch" and args.load_format != "dummy":
        from servekit.scheduler.part import create_torch_follower

        follower = create_torch_follower(ctx)
        ctx.ready(follower.info)
        follower.run()
    elif args.engine in _BUILT_IN:
        # Where nothing is computed, the leader is enough.
        ctx.pulse.enter("idle", 0)
        ctx.ready({})
        stop.wait()
    else:
        ctx.fail(f"--engine {args.engine} has no groups: --tensor-parallel-size and --pipeline-parallel-size can be 1")


def _lead(ctx: ChildContext, stop: threading.Event) -> None:
    args = ctx.config.server_args
    build = _core.build_info()["version"]
    link = RankLink(ctx.config.port_args, ctx.index, ctx.epoch, ctx.title, build, ctx.pulse, ctx.keys)
    link.enter("loading")
    ctx.stage("its modules")
    threading.Thread(target=_obey, args=(ctx, stop, link.wake), name="commands", daemon=True).start()
    try:
        rank = find_engine(args.engine)(ctx)
    except EngineError as error:
        ctx.fail(str(error))
    except ModuleNotFoundError as error:
        # An engine imports what is large only when it is made.
        ctx.fail(f"--engine {args.engine} needs the package {error.name}, which is not installed")
    ctx.ready(rank.info)
    try:
        rank.run(link, stop.is_set)
    except LinkError as error:
        ctx.fail(str(error))
    link.close()
    ctx.pulse.close()


def _obey(ctx: ChildContext, stop: threading.Event, wake: Callable[[], None]) -> None:
    for command in ctx.commands():
        if command.get("command") == "stop":
            break
        logger.warning("main sent %r, which a rank does not know", command.get("command"))
    # Main's end of the line is closed, or main said stop: either way there is nobody to serve.
    stop.set()
    wake()
