"""From started children to a server that answers: who is ready, how long it took, what it can hold."""

from __future__ import annotations

import json
import logging
import math
import shlex
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from servekit.config import SchedulerInfo
from servekit.runtime.launcher import SCHEDULER
from servekit.runtime.listen import url_of
from servekit.runtime.loading import LOOK_EVERY_S, Loading, LoadingError
from servekit.runtime.notify import tell_ready
from servekit.runtime.phase import Phase
from servekit.runtime.progress import Progress
from servekit.runtime.watch import Ended, Message, Signal

if TYPE_CHECKING:
    from servekit.runtime.supervisor import Server

logger = logging.getLogger("servekit.runtime")

SILENCE_S = {"control": 60.0, "http": 60.0}
"""How long a child may take to its next sign of life while it starts; ranks have `--load-timeout`."""

GREETING_S = 10.0
"""How long control may take to see a rank that said that it is ready."""


class StartError(RuntimeError):
    """The server can't start; the text is the one line that the operator reads."""


def start(server: Server) -> int | None:
    """Wait until every child is ready and every rank active, then open the doors.

    Returns:
        None when the server is ready; the number of a signal that ended the start.

    Raises:
        StartError: a child failed, died or said nothing for too long.
    """
    progress = Progress()
    loading = Loading(server.args.load_timeout)
    try:
        while waiting := [child for child in server.children if child.ready_after is None]:
            for child in waiting:
                if time.monotonic() - child.last_news > SILENCE_S.get(child.role, math.inf):
                    raise StartError(
                        f"{child.title} (pid {child.pid}) gave no sign of life for {SILENCE_S[child.role]:g} s"
                    )
            for event in server.watch.wait(LOOK_EVERY_S):
                if isinstance(event, Signal):
                    return event.number
                _take(server, event, progress)
            loading.look(server)
    except LoadingError as error:
        raise StartError(str(error)) from None
    finally:
        progress.close()
    ranks = sorted((c for c in server.children if c.role == SCHEDULER), key=lambda c: c.index)
    server.publish(SchedulerInfo([child.info for child in ranks]))
    deadline = time.monotonic() + GREETING_S
    while not all(server.state_page.active_ranks()):
        if time.monotonic() > deadline:
            late = [ranks[i].title for i, active in enumerate(server.state_page.active_ranks()) if not active]
            raise StartError(f"control has not heard from {', '.join(late)} within {GREETING_S:g} s")
        for event in server.watch.wait(0.005):
            if isinstance(event, Signal):
                return event.number
            _take(server, event, progress)
    server.state_page.phase = Phase.READY
    server.state_page.mark_ready()
    tell_ready()
    return None


def _take(server: Server, event: Message | Ended, progress: Progress) -> None:
    child = event.child
    if isinstance(event, Ended):
        reason = child.failure or f"{child.title} (pid {child.pid}) {child.how_it_ended()} before it was ready"
        raise StartError(reason)
    body = event.body
    match body.get("event"):
        case "ready":
            child.ready_after = time.monotonic() - child.started
            child.info = body.get("info") or {}
            logger.info("%s ready in %.2f s", child.title, child.ready_after)
            _tell_ranks(server)
        case "progress":
            progress.show(child.title, body["done"], body["total"], body["what"])
            child.stood.take(body["what"], body["done"] / max(body["total"], 1e-9))
        case "stage":
            child.stood.take(body["what"])
        case "failed":
            child.failure = body.get("message")
        case other:
            raise StartError(f"{child.title} said {other!r}, which main does not know")


def _tell_ranks(server: Server) -> None:
    """Tell control of ranks that are ready, as soon as both sides are."""
    control = server.control
    if control is None or control.ready_after is None:
        return
    for child in server.of(SCHEDULER):
        if child.ready_after is not None and not child.announced:
            most = int(child.info.get("max_running_requests") or 1)
            child.announced = control.command("rank_up", rank=child.index, max_running=most)


def announce(server: Server, took: float) -> None:
    """Say what the server can hold, where it is, and how to try it."""
    info = [child.info for child in server.of(SCHEDULER)]
    ports, model = server.config.port_args, server.config.model_info
    args = server.args
    scheme = "https" if args.ssl_certfile else "http"
    url = url_of(ports.host, ports.port, scheme) if args.uds is None else f"{scheme}://localhost"
    each = " in each rank" if len(info) > 1 else ""
    logger.info(
        "context %s tokens, KV pool %s tokens%s, at most %s requests at once%s",
        _least(info, "max_model_len"),
        _least(info, "kv_pool_tokens"),
        each,
        _least(info, "max_running_requests"),
        each,
    )
    logger.info("%s is served on %s after %.2f s", model.name, args.uds or url, took)
    if args.log_format == "text":
        options = [] if args.uds is None else ["--unix-socket", args.uds]
        if args.api_key or args.api_key_file:
            options += ["-H", "authorization: Bearer KEY"]
        kind = "chat/completions" if model.chat_template is not None else "completions"
        if any("embedding_size" in rank for rank in info):
            kind = "embeddings"
        line = curl_line(url, model.name, kind, options)
        try:
            print(line, flush=True)  # noqa: T201 (to be copied)
        except OSError:
            # Nobody reads it, or its disk is full: that must not end the server, nor may Python try again at its end.
            sys.stdout = None


def _least(info: list[dict[str, Any]], key: str) -> str:
    """The smallest rank's value: what holds for every request."""
    values = [rank[key] for rank in info if rank.get(key) is not None]
    return str(min(values)) if values else "?"


def curl_line(url: str, model: str, kind: str, options: Sequence[str] = ()) -> str:
    """A command line that asks the model something.

    Args:
        kind: `chat/completions`, `completions` or `embeddings`.
        options: of curl, before the body.
    """
    body: dict[str, Any] = {"model": model}
    if kind == "embeddings":
        body["input"] = "The capital of France is Paris."
    else:
        body |= {"max_tokens": 64, "temperature": 0}
        if kind == "completions":
            body["prompt"] = "The capital of France is"
        else:
            body["messages"] = [{"role": "user", "content": "What is the capital of France?"}]
    further = "".join(f" {shlex.quote(each)}" for each in options)
    return f"curl {url}/v1/{kind}{further} -H 'content-type: application/json' -d {shlex.quote(json.dumps(body))}"
