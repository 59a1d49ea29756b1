"""The log level of a rank's process, which a control message changes whatever its engine is."""

from __future__ import annotations

from servekit.messages.requests import ControlReply, SetLogLevelReq
from servekit.runtime.logs import set_level


def set_log_level(request: SetLogLevelReq) -> ControlReply:
    """Log from now on what is at least that important, and the reply to whoever asked for it."""
    try:
        set_level(request.level)
    except ValueError as error:
        return ControlReply(False, str(error))
    return ControlReply(True)
