"""Entries of ranks that fail in their own ways; a server is given one instead of the scheduler."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from servekit.cli.serve import parse
from servekit.runtime.supervisor import serve
from servekit.scheduler import process

FAILING = "servekit::scheduler[dp=0,pp=0,tp=1]"


def gives_up(ctx: Any) -> None:
    """One rank has a reason; the others only see that it does not come."""
    if ctx.title == FAILING:
        ctx.fail("the weights of tensor rank 1 are not there")
    process.run(ctx)


def lacks_a_file(ctx: Any) -> None:
    """A rank on another node has a reason."""
    if ctx.title == "servekit::scheduler[dp=1]":
        ctx.fail("the weights of rank 1 are not there")
    process.run(ctx)


def is_killed(ctx: Any) -> None:
    """One rank dies without a word, when the others have begun to wait for it."""
    if ctx.title == FAILING:
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    process.run(ctx)


if __name__ == "__main__":
    sys.exit(serve(parse(sys.argv[2:]), f"tests.integration.entries:{sys.argv[1]}"))
