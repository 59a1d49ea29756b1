"""Phases of a server's life, as main writes them on the state page."""

from __future__ import annotations

import enum


class Phase(enum.IntEnum):
    """Requests are taken in `READY` only."""

    STARTING = 0
    READY = 1
    DRAINING = 2
    STOPPING = 3
