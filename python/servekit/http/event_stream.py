"""The response that streams events: through the connection where the server offers it, through ASGI where not."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from servekit.http.errors import error_body
from servekit.http.protocol import EXTENSION, ResponseStream
from servekit.http.shapes import Shape
from servekit.http.sse import DONE, event
from servekit.tokenizer.manager import TokenizerManager
from servekit.tokenizer.refusal import ClientGone, Refusal
from servekit.tokenizer.state import Choice, Job

log = logging.getLogger(__name__)

_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"x-accel-buffering", b"no"),
]


async def first_events(job: Job, shape: Shape) -> bytes:
    """Wait for the first events of a stream. Nothing has been sent yet, so an error is still a plain response.

    Raises:
        Refusal, ClientGone: the job ended before.
    """
    while True:
        if first := _events(shape, await job.changed()):
            return first


class EventStream(Response):
    """All events of a job, each as soon as it is there, then [DONE] unless the client is gone.

    Args:
        first: events that come before all that the job has new.
        close: called once at the end, also when the client is gone.
    """

    media_type = "text/event-stream"

    def __init__(
        self, manager: TokenizerManager, job: Job, shape: Shape, first: bytes, close: Callable[[], None]
    ) -> None:
        # The base class is there for FastAPI, which looks at these; it would only encode headers.
        self.status_code = 200
        self.background = None
        self.body = b""
        self.raw_headers = list(_HEADERS)
        self._manager = manager
        self._job = job
        self._shape = shape
        self._piece = first
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the head, then every event as it comes."""
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        stream: ResponseStream | None = scope.get("extensions", {}).get(EXTENSION)
        try:
            if stream is None:
                await send(start)
                await self._through_send(send)
            else:
                stream.open(functools.partial(self._manager.take_over, self._job))
                await send(start)
                await self._through_connection(stream, send)
        finally:
            self._close()

    async def _through_send(self, send: Send) -> None:
        """The coroutine wakes for each event; `send` waits for a client that is behind, and events merge meanwhile."""
        try:
            while self._job.live:
                await send({"type": "http.response.body", "body": self._take(), "more_body": True})
                self._piece = _events(self._shape, await self._job.changed())
            last = self._last()
        except ClientGone:
            return
        except Exception as error:  # noqa: BLE001
            last = self._failed(error)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _through_connection(self, stream: ResponseStream, send: Send) -> None:
        """The coroutine wakes for ends and for whatever is more than text; text goes past it.

        While the client is behind nothing goes past: the job merges what comes until the connection has drained.
        """
        job = self._job
        try:
            while job.live:
                stream.write(self._take())
                if stream.paused:
                    await stream.drain()
                else:
                    self._hand_over(stream)
                self._piece = _events(self._shape, await job.changed())
            last = self._last()
        except ClientGone:
            return
        except Exception as error:  # noqa: BLE001
            last = self._failed(error)
            self._manager.take_over(job)
        await stream.finish(send, last)

    def _hand_over(self, stream: ResponseStream) -> None:
        """Let the text of all choices that have begun go straight to the connection."""
        for choice in self._job.choices:
            if self._manager.decodes and not choice.direct and not choice.changed and choice.finish is None:
                template = self._shape.template(choice)
                if template is not None:
                    self._manager.hand_over(choice, *template, stream.chunked, stream.sink)

    def _take(self) -> bytes:
        piece, self._piece = self._piece, b""
        return piece

    def _last(self) -> bytes:
        self._job.raise_failure()
        return self._take() + (self._shape.usage(self._job) or b"") + DONE

    def _failed(self, error: Exception) -> bytes:
        if not isinstance(error, Refusal):
            log.error("a stream failed inside the server", exc_info=error)
            error = Refusal(500, "internal error; the server's log says more")
        return self._take() + event(error_body(error)) + DONE


def _events(shape: Shape, changed: list[Choice]) -> bytes:
    return b"".join([chunk for choice in changed for chunk in shape.chunks(choice)])
