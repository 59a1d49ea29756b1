"""Entries of ranks that fail in their own ways; a server is given one instead of the scheduler.

`VICTIM` in the environment is the title of the rank that fails, `HANG` a file that makes it hang as long as it exists.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from servekit.cli.serve import parse
from servekit.runtime.supervisor import serve
from servekit.scheduler import process


def gives_up(ctx: Any) -> None:
    """One rank has a reason; the others only see that it does not come."""
    if ctx.title == os.environ["VICTIM"]:
        ctx.fail(f"the weights of {ctx.title} are not there")
    process.run(ctx)


def lacks_a_file(ctx: Any) -> None:
    """A rank on another node has a reason."""
    if ctx.title == "servekit::scheduler[dp=1]":
        ctx.fail("the weights of rank 1 are not there")
    process.run(ctx)


def is_killed(ctx: Any) -> None:
    """One rank dies without a word, when the others have begun to wait for it."""
    if ctx.title == os.environ["VICTIM"]:
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    process.run(ctx)


def never_loads(ctx: Any) -> None:
    """One rank hangs while it reads its weights; the others wait for it."""
    if ctx.title == os.environ["VICTIM"]:
        progress = ctx.progress

        def hang(done: int, total: int, what: str) -> None:
            progress(1, 4, what)
            time.sleep(600)

        ctx.progress = hang
    process.run(ctx)


def hangs(ctx: Any) -> None:
    """One rank does not begin its part of a step while there is a file."""
    if ctx.title == os.environ["VICTIM"]:
        from servekit.engine.torch_runner import TorchRunner

        def late(compute: Callable[..., Any]) -> Callable[..., Any]:
            def launch(*args: Any) -> Any:
                while Path(os.environ["HANG"]).exists():
                    time.sleep(0.01)
                return compute(*args)

            return launch

        for name in ("launch", "launch_joint"):
            setattr(TorchRunner, name, late(getattr(TorchRunner, name)))
    process.run(ctx)


def is_slow(ctx: Any) -> None:
    """Each layer takes a second longer, everywhere."""
    from servekit.models.decoder import DecoderLayer

    compute = DecoderLayer.forward

    def forward(*args: Any) -> Any:
        time.sleep(1.0)
        return compute(*args)

    DecoderLayer.forward = forward  # type: ignore[method-assign]
    process.run(ctx)


if __name__ == "__main__":
    sys.exit(serve(parse(sys.argv[2:]), f"tests.integration.entries:{sys.argv[1]}"))
