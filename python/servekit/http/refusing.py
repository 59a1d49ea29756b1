"""Errors for what is refused before there is a request to answer: in their turn, and then the connection ends."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from servekit.http.errors import raw_error
from servekit.tokenizer.refusal import Refusal


class RefusingProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which can end a connection with an error without breaking into a response.

    Attributes:
        last_words: what was refused; from then on nothing more of the connection is read.
    """

    last_words: Refusal | None = None

    def refuse(self, refusal: Refusal) -> None:
        """Answer with an error and close the connection, once the requests before have their answers."""
        if self.last_words is not None:
            return
        self.last_words = refusal
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            self._say_last_words()
        elif cycle.more_body and self.pipeline:
            # The request whose body is refused waits for its turn; the refusal takes its place.
            self.pipeline.popleft()
        elif cycle.more_body and cycle.response_started:
            self.transport.close()
        elif cycle.more_body:
            self._say_last_words()

    def on_response_complete(self) -> None:
        """The refusal follows the last answer."""
        last = not self.pipeline
        super().on_response_complete()
        if last and self.last_words is not None:
            self._say_last_words()

    def _say_last_words(self) -> None:
        assert self.last_words is not None
        self.transport.write(raw_error(self.last_words))
        self.transport.close()
