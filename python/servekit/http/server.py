"""uvicorn, as a worker runs it: no signals, no polling, errors of the protocol in OpenAI's shape."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from servekit.http.errors import error_body
from servekit.http.generation import CUT_EXTENSION
from servekit.tokenizer.refusal import Refusal

FINISH_S = 2
"""Seconds that open responses get to write what is left when the server stops."""
KEEP_ALIVE_S = 65


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol; a request that is no HTTP at all gets an error that clients can read."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        extensions: dict[str, Any] = {CUT_EXTENSION: self.transport.abort}
        self.scope["extensions"] = extensions

    def send_400_response(self, msg: str) -> None:
        body = error_body(Refusal(400, f"this is no valid HTTP request: {msg}", code="invalid_http"))
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.transport.close()


class Server(uvicorn.Server):
    """Serves until `stop`; signals are main's business.

    Args:
        on_started: called once connections are taken.
    """

    def __init__(self, app: FastAPI, access_log: bool, on_started: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="none",
                http=_Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=access_log,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=FINISH_S,
            )
        )
        self._on_started = on_started
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Take no more connections, let open responses finish for `FINISH_S` seconds, return from `serve`."""
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        """Wait for `stop`; once a second is often enough for the date header."""
        self._on_started()
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), 1)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals alone."""
        yield
