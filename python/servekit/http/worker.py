"""The HTTP worker process: sockets, tokenizer, application and server put together; ends when main says so."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop
import zmq

from servekit import __version__
from servekit.config.port_args import INGRESS
from servekit.config.tls import tls_settings
from servekit.http.app import create_app
from servekit.http.server import Server
from servekit.messages.columns import schema_hash
from servekit.messages.envelope import Envelope, Kind, http_worker_ipc
from servekit.tokenizer.chat_template import ChatTemplate, ChatTemplateError
from servekit.tokenizer.encoding import TextEncoder
from servekit.tokenizer.manager import TokenizerManager
from servekit.tokenizer.no_tokenizer import NoTokenizer
from servekit.tokenizer.refusal import Refusal
from servekit.transport.receiver import Expected, Receiver
from servekit.transport.sender import Link, LinkFull, SenderWrapper

if TYPE_CHECKING:
    from servekit.runtime.child import ChildContext

log = logging.getLogger(__name__)

GC_THRESHOLDS = (20_000, 20, 20)
"""Python's own (700, 10, 10) look through all live requests several times a second, for hardly any cycles."""
DEFAULT_RUNNING = 4096
"""Requests that a rank runs at once, as long as it has not told."""


class TokenizerWorker:
    """One worker process over its `TokenizerManager`.

    Raises:
        ValueError: the tokenizer or the chat template can't be loaded; the text is one line.
    """

    def __init__(self, ctx: ChildContext) -> None:
        self._ctx = ctx
        config = ctx.config
        ports, model = config.port_args, config.model_info
        self._rank_infos: list[dict[str, Any]] | None = None
        self._told_capacity: int | None = None
        args = config.server_args
        encoder = NoTokenizer() if args.skip_tokenizer_init else TextEncoder(ports.tokenizer_file, model)
        template = (
            None if model.chat_template is None else ChatTemplate(model.chat_template, model.bos_token, model.eos_token)
        )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        run_dir = Path(ports.run_dir)
        link = Link(ctx.index, ctx.epoch, ports.control_epoch, f"http[{ctx.index}]", schema_hash(), __version__)
        self._sender = SenderWrapper(self._context, run_dir / INGRESS, link)
        self.manager = TokenizerManager(
            config, ctx.index, ctx.epoch, ctx.state_page, self._sender, encoder, self._capacity
        )
        self._receiver = Receiver(
            self._context,
            run_dir / http_worker_ipc(ctx.index, ctx.epoch),
            Expected(ctx.epoch, ports.control_epoch, link.schema),
            self.manager.dispatcher,
            self.manager.lost_frames,
            self._acknowledge,
            urgent=(Kind.CONTROL_REPLY, Kind.SET_LOG_LEVEL, Kind.ABORT_REQUESTS),
            on_turn=self.manager.write_out,
        )
        app = create_app(self.manager, template, self._scheduler_info, self._counters, ctx.secrets)
        self._server = Server(
            app,
            config.server_args.access_log,
            self._started,
            on_second=self._publish_counters,
            count=self.manager.meter.count,
            tls=tls_settings(config.server_args, ctx.secrets),
        )
        self._published = dict.fromkeys(self._counters(), 0)
        self._began = time.monotonic()

    async def serve(self, listener: socket.socket) -> None:
        """Serve connections of a listening socket until main says stop."""
        loop = asyncio.get_running_loop()
        self._receiver.start(loop)
        loop.add_reader(self._ctx.fileno(), self._obey)
        watch = asyncio.create_task(self.manager.watch_control())
        try:
            await self._server.serve(sockets=[listener])
        finally:
            watch.cancel()
            loop.remove_reader(self._ctx.fileno())
            self._receiver.close()
            self._sender.close()
            self.manager.encoder.close()
            self._context.term()

    def _acknowledge(self, number: int) -> bool:
        try:
            self._sender.send(Envelope(Kind.ACK, number), None)
        except LinkFull:
            # Whoever sends a request next says so; this is tried again.
            return False
        return True

    def _started(self) -> None:
        # What was loaded stays: no later collection has to look through it.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        self._ctx.ready({"seconds": round(time.monotonic() - self._began, 3)})

    def _obey(self) -> None:
        for command in self._ctx.take_commands():
            message = str(command.get("message") or "the server is shutting down")
            match command.get("command"):
                case "stop":
                    self.manager.stop(Refusal(503, message))
                    self._server.stop()
                case "fail_streams":
                    self.manager.fail_all(Refusal(503, message))
                case other:
                    log.warning("ignored the command %r, which no worker knows", other)

    def _scheduler_info(self) -> list[dict[str, Any]] | None:
        if self._rank_infos is None and (info := self._ctx.scheduler_info()) is not None:
            self._rank_infos = info.ranks
        return self._rank_infos

    def _capacity(self) -> int:
        if self._told_capacity is not None:
            return self._told_capacity
        args = self._ctx.config.server_args
        told = self._scheduler_info()
        infos = told or [{}] * args.data_parallel_size
        default = args.max_running_requests or DEFAULT_RUNNING
        capacity = args.max_queued_requests + sum(info.get("max_running_requests") or default for info in infos)
        self._told_capacity = None if told is None else capacity
        return capacity

    def _publish_counters(self) -> None:
        """Let the state page know what the sockets dropped."""
        now, before = self._counters(), self._published
        self._published = now
        grown = {name: now[name] - before[name] for name in now}
        for field, n in (
            ("fenced", grown["fenced"]),
            ("dropped", grown["malformed"] + grown["unknown"]),
            ("gaps", grown["gaps"]),
        ):
            if n:
                self.manager.meter.count(field, n)

    def _counters(self) -> dict[str, int]:
        receiver, manager = self._receiver, self.manager
        return {
            "fenced": receiver.fenced,
            "malformed": receiver.malformed + manager.malformed,
            "gaps": receiver.gaps,
            "unknown": manager.dispatcher.unknown,
        }


def run(ctx: ChildContext) -> None:
    """Entry of the process; returns when main said stop.

    Raises:
        SystemExit: the tokenizer or the chat template can't be loaded.
    """
    for name in ("uvicorn", "uvicorn.error", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    assert ctx.listener is not None
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            worker = runner.run(_create(ctx))
        except (ValueError, ChatTemplateError) as error:
            ctx.fail(str(error))
        with contextlib.suppress(asyncio.CancelledError):
            runner.run(worker.serve(ctx.listener))


async def _create(ctx: ChildContext) -> TokenizerWorker:
    return TokenizerWorker(ctx)
