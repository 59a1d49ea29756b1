"""Requests that browsers send for pages of other origins: answered as `--allowed-origins` says, else not at all."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

EXPOSED = ("retry-after", "x-request-id")
"""Headers of answers that scripts may read, beside the few that they always may."""


class Cors(CORSMiddleware):
    """Adds the headers by which a browser lets a page read an answer.

    Keys come as headers, which scripts set themselves, so cookies are never asked for.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        super().__init__(
            app,
            allow_origins=tuple(origins),
            allow_methods=("GET", "POST", "OPTIONS"),
            allow_headers=("*",),
            expose_headers=EXPOSED,
        )
