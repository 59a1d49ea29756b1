"""uvicorn, as a worker runs it: no signals, no polling, errors of the protocol in OpenAI's shape."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Generator, Mapping
from typing import Any

import httptools
import uvicorn
from fastapi import FastAPI

from servekit.http.patience import SWEEP_S, PatientProtocol, Sweep, connection_limit
from servekit.http.protocol import StreamingProtocol
from servekit.tokenizer.refusal import Refusal

FINISH_S = 2
"""Seconds that open responses get to write what is left when the server stops."""
KEEP_ALIVE_S = 65
MAX_HEAD = 64 << 10
"""Most bytes of a request's line and headers, beside those of the read in which it began."""


class _Protocol(StreamingProtocol, PatientProtocol):
    """uvicorn's protocol, with heads of bounded size, and without upgrades: an offer of one is passed over.

    A request that is no HTTP at all gets an error that clients can read.
    """

    _head_size = 0
    _in_head = False
    _begun = False

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_size, self._in_head, self._begun = 0, True, True

    def on_headers_complete(self) -> None:
        self._in_head = False
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        """Bytes from the client."""
        if self.last_words is not None:
            # Nobody can say where a next request would begin.
            return
        self._unset_keepalive_if_required()
        self._begun = False
        rest: bytes | memoryview = data
        try:
            while rest:
                rest = self._feed(rest)
        except httptools.HttpParserError:
            self.send_400_response("it can't be parsed")
            return
        if self._in_head and not self._begun:
            # The parser joins a long header again with every piece of it: megabytes would block the loop for seconds.
            self._head_size += len(data)
            if self._head_size > MAX_HEAD:
                refusal = Refusal(431, f"the request's headers are larger than {MAX_HEAD} bytes", code="invalid_http")
                self.refuse(refusal)

    def _feed(self, data: bytes | memoryview) -> bytes | memoryview:
        """Parse up to the first offer of an upgrade, which is passed over as RFC 9110 wants; what comes after it.

        The HTTP client of Java and `curl --http2` offer h2c with every request that they send without TLS. The parser
        gives up at the end of such a head, so it gets the head again, without the offer.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            method = self.parser.get_method()
            if method == b"CONNECT":
                self.send_400_response("CONNECT is for proxies")
                return b""
            lines = [b"%b %b HTTP/%b" % (method, self.url, self.parser.get_http_version().encode())]
            lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self.parser.feed_data(b"\r\n".join(lines) + b"\r\n\r\n")
            # A client may put thousands of them into one packet, so nothing is copied.
            return memoryview(data)[upgrade.args[0] :]
        return b""

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, and close the connection."""
        self.refuse(Refusal(400, f"this is no valid HTTP request: {msg}", code="invalid_http"))


def without_query(record: logging.LogRecord) -> bool:
    """A filter for the access log: no route reads a query, so what is in one is a mistake, and may be a key."""
    if isinstance(record.args, tuple) and len(record.args) == 5:
        client, method, path, version, status = record.args
        record.args = (client, method, str(path).partition("?")[0], version, status)
    return True


class Server(uvicorn.Server):
    """Serves until `stop`; signals are main's business.

    Args:
        on_started: called once connections are taken.
        on_second: called about once a second.
        count: told of connections that were ended and how many: slow_senders, slow_readers or crowded.
        tls: uvicorn's settings that begin with `ssl_`.
    """

    def __init__(
        self,
        app: FastAPI,
        access_log: bool,
        on_started: Callable[[], None],
        *,
        on_second: Callable[[], None],
        count: Callable[[str, int], None],
        tls: Mapping[str, Any],
    ) -> None:
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
                limit_concurrency=connection_limit(),
                **tls,
            )
        )
        logging.getLogger("uvicorn.access").addFilter(without_query)
        self._on_started = on_started
        self._on_second = on_second
        self._count = count
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Take no more connections, let open responses finish for `FINISH_S` seconds, return from `serve`."""
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        """Wait for `stop`; once a second is often enough for the date header and for clients that are too slow."""
        self._on_started()
        sweep = Sweep(asyncio.get_running_loop(), self._count)
        while not await self.on_tick(0):
            sweep(self.server_state.connections)
            self._on_second()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), SWEEP_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals alone."""
        yield
