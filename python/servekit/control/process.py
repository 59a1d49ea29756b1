"""Entry of the control process: start the Rust threads, then wait for main's commands and for the threads' reports."""

from __future__ import annotations

import logging
import os
import select
import threading
import time

from servekit import _core
from servekit.config.port_args import EGRESS, rank_ipc
from servekit.runtime.child import ChildContext
from servekit.runtime.logs import set_level

logger = logging.getLogger("servekit.control")

FAIL_S = 1.0
"""How long the ends of failed requests may take to reach the sockets."""
STOP_S = 0.5
"""How long the threads may take to end."""
FOREVER_S = 86400.0
LOOK_FOR_MAIN_S = 1.0
"""How often control, which no parent-death signal ends, looks whether main is still there."""


def run(ctx: ChildContext) -> None:
    """Run the control plane; returns when main says stop.

    Raises:
        SystemExit: the plane can't start, or one of its threads has ended for good.
    """
    try:
        plane = create_plane(ctx)
        plane.start()
    except _core.ServekitError as error:
        ctx.fail(f"the control plane can't start: {error}")
    threading.Thread(target=_log, args=(plane,), name="logs", daemon=True).start()
    try:
        reader, writer = os.pipe()
    except OSError as error:
        ctx.fail(f"the control plane can't start: {error.strerror}")
    end: list[str] = []
    threading.Thread(target=_watch, args=(plane, end, writer), name="watch", daemon=True).start()
    ctx.ready({})
    while True:
        ready, _, _ = select.select([ctx.fileno(), reader], [], [], LOOK_FOR_MAIN_S)
        if not ctx.main_lives():
            # The death pipe has told so already, unless somebody else holds its other end.
            ctx.clean_up_behind_main()
        if reader in ready:
            ctx.fail(f"the control plane ended: {end[0]}")
        for command in ctx.take_commands():
            if not _obey(ctx, plane, command):
                plane.stop(STOP_S)
                return
        if ctx.hung_up:
            time.sleep(0.01)


def create_plane(ctx: ChildContext) -> _core.ControlPlane:
    """The control plane that the configuration asks for."""
    args, ports = ctx.config.server_args, ctx.config.port_args
    return _core.ControlPlane(
        run_dir=ports.run_dir,
        epoch=ctx.epoch,
        rank_epochs=ports.rank_epochs,
        worker_epochs=ports.worker_epochs,
        detokenizer_workers=args.detokenizer_workers,
        load_balance_method=args.load_balance_method,
        tokenizer_file=None if args.skip_tokenizer_init else ports.tokenizer_file,
        state_page=ports.state_page,
        rank_wait_timeout=args.rank_wait_timeout,
        max_queued_requests=args.max_queued_requests,
        max_queued_tokens=args.max_queued_tokens,
        max_requests_per_worker=args.max_requests_per_worker,
        resume_memory=args.resume_memory,
        remote=_remote(ctx),
    )


def _remote(ctx: ChildContext) -> tuple[str, int, list[tuple[int, int]]] | None:
    """Key and sockets for ranks on other nodes, if there are any."""
    if ctx.keys is None or EGRESS not in ctx.sockets:
        return None
    ranks = [
        (rank, ctx.sockets[rank_ipc(rank)])
        for rank in range(len(ctx.config.port_args.rank_epochs))
        if rank_ipc(rank) in ctx.sockets
    ]
    return ctx.keys.secret, ctx.sockets[EGRESS], ranks


def _obey(ctx: ChildContext, plane: _core.ControlPlane, command: dict[str, object]) -> bool:
    """Carry out one of main's commands; False for `stop`."""
    match command:
        case {"command": "rank_up", "rank": int(rank), "max_running": int(most)}:
            plane.set_rank(rank, True, "", most)
        case {"command": "rank_down", "rank": int(rank), "reason": str(reason)}:
            plane.set_rank(rank, False, reason, 0)
        case {"command": "fail_all", "message": str(message)}:
            plane.fail_all(message, FAIL_S)
        case {"command": "stop"}:
            return False
        case _:
            logger.warning("main sent %r, which control does not know", command)
    return True


def _watch(plane: _core.ControlPlane, end: list[str], writer: int) -> None:
    reason = None
    while reason is None:
        reason = plane.wait(FOREVER_S)
    end.append(reason)
    os.write(writer, b"\0")


def _log(plane: _core.ControlPlane) -> None:
    """Lines of the Rust threads join this process's log; a level that a control message sets holds for all of it."""
    least = 0
    while True:
        line = plane.next_log(FOREVER_S)
        if plane.log_level != least:
            least = plane.log_level
            set_level(logging.getLevelName(least).lower())
        if line is not None:
            level, thread, message = line
            logging.getLogger(f"servekit.control.{thread}").log(level, "%s", message)
