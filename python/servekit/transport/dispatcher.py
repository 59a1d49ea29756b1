"""From a message's kind to the one function that handles it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from servekit.messages.envelope import Envelope, Kind

log = logging.getLogger(__name__)

Handler = Callable[[Envelope, Sequence[bytes]], None]
"""Takes a parsed envelope and the frames after it: the body, then attachments."""


class TypeBasedDispatcher:
    """Kind to handler, with no default: what nobody registered for is counted, logged once per kind and dropped.

    Attributes:
        unknown: messages of a kind without a handler, since the start.
    """

    def __init__(self, handlers: Mapping[Kind, Handler]) -> None:
        self._handlers = dict(handlers)
        self._logged: set[Kind] = set()
        self.unknown = 0

    def dispatch(self, envelope: Envelope, frames: Sequence[bytes]) -> bool:
        """Hand the message to its handler; False if there is none."""
        handler = self._handlers.get(envelope.kind)
        if handler is None:
            self.unknown += 1
            if envelope.kind not in self._logged:
                self._logged.add(envelope.kind)
                log.warning("dropped a message of kind %s, which nobody handles here", envelope.kind.name)
            return False
        handler(envelope, frames)
        return True
