"""How a node other than node 0 tells probes that it lives, and what its ranks do: a very small HTTP server."""

from __future__ import annotations

import http.server
import json
import socket
import socketserver
import threading
from collections.abc import Callable
from typing import Any

from servekit.config import ConfigError

TIMEOUT_S = 5.0
"""How long a connection may take for its request, and for its answer."""
MOST = 16
"""Connections at once; more are hung up on."""


class State:
    """What is told.

    Attributes:
        alive: the answer to `/health`: its main works and a rank of it lives.
        ready: the answer to `/ready`: and one of them serves.
        details: both answers' body, as JSON values.
    """

    def __init__(self, alive: bool, ready: bool, details: dict[str, Any]) -> None:
        self.alive, self.ready, self.details = alive, ready, details


class _Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], family: int, state: Callable[[], State]) -> None:
        self.address_family = family
        self.state = state
        self._places = threading.BoundedSemaphore(MOST)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: whoever asks in a broken way, or not to the end, has nobody to be told of it here."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    timeout = TIMEOUT_S
    server_version, sys_version = "servekit", ""

    def do_GET(self) -> None:
        state = self.server.state()
        good = {"/health": state.alive, "/ready": state.ready}.get(self.path.partition("?")[0])
        body = json.dumps({"error": "only /health and /ready are here"} if good is None else state.details).encode()
        self.send_response(404 if good is None else 200 if good else 503)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: probes come every few seconds."""


class HealthEndpoint:
    """Answers at an address until it is closed, in threads of its own.

    Attributes:
        port: where it listens.
    """

    def __init__(self, host: str, port: int, state: Callable[[], State]) -> None:
        """Listen.

        Args:
            host: name or address.
            port: 0 takes a free one.
            state: what is told; called from other threads.

        Raises:
            ConfigError: it can't listen there.
        """
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._server = _Server((str(address[0]), int(address[1])), family, state)
        except OSError as error:
            raise ConfigError(f"--health-port {port}: can't listen on {host}: {error.strerror}") from None
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, name="health", daemon=True).start()

    def close(self) -> None:
        """Stop to answer."""
        self._server.shutdown()
        self._server.server_close()
