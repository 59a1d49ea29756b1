"""A rank without a model: every running request gets one token a step. The cheapest process of the server.

It speaks the wire, takes aborts and reports load as a real rank does, so everything around a model can be tested and
measured with it. Unscripted requests cycle `CYCLE` from its first id up to their limit of new tokens; a script
(`mock_script.py`) gives single requests other tokens, other timings and faults.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import struct
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from servekit.messages import requests as r
from servekit.messages.batches import BatchEmbeddingOutput, BatchTokenIDOutput, FinishReason
from servekit.messages.envelope import Envelope, Kind, Load
from servekit.scheduler.log_level import set_log_level
from servekit.scheduler.mock_requests import CYCLE, Cycling, Request, Rows
from servekit.scheduler.mock_scores import Scores
from servekit.scheduler.mock_script import Fault, Rule, Rules, Script, ScriptError, load_script
from servekit.scheduler.mock_waits import Waits
from servekit.transport.rank_link import RankLink

if TYPE_CHECKING:
    from servekit.runtime.child import ChildContext

logger = logging.getLogger("servekit.scheduler")

MAX_RUNNING_REQUESTS = 4096
EMBEDDING_DIMENSIONS = 8
REPORT_WITHIN_S = 0.01
"""A changed load that no step will report within this time is reported by an empty batch."""


class MockRank:
    """A `Rank` that computes nothing.

    Attributes:
        info: what it can do; there is no cache, so the pool is as large as its batch can ask for.
    """

    def __init__(
        self, *, rank: int, epoch: int, step_s: float, max_len: int, most: int, pool: int, vocab_size: int, rules: Rules
    ) -> None:
        """Set up an idle rank.

        Args:
            rank, epoch: which one it is.
            step_s: seconds of a step; 0 steps as fast as it can.
            max_len: context in tokens.
            most: most requests that run at once.
            pool: tokens that it pretends to have room for.
            vocab_size: ids that it names in logprobs are below it.
            rules: what its script says.
        """
        self.info: dict[str, Any] = {
            "engine": "mock",
            "device": "none",
            "dtype": "none",
            "max_model_len": max_len,
            "max_running_requests": most,
            "kv_pool_tokens": pool,
        }
        self._rank, self._epoch, self._step_s = rank, epoch, step_s
        self._max_len, self._most, self._pool = max_len, most, pool
        self._rules = rules
        self._vocab_size = vocab_size
        self._cycling = Cycling()
        self._scripted: dict[int, Request] = {}
        self._waiting: deque[Request] = deque()
        self._held = self._pending = 0
        self._embeddings: list[r.TokenizedEmbeddingReqInput] = []
        self._waits = Waits()
        self._closing = Rows(self._waits)
        self._finish_again: list[Request] = []
        self._reported: tuple[Load | None, int] = (None, 0)
        self._frozen: tuple[Load | None, int] = (None, 0)
        self._frozen_until = 0.0
        self._paused = False

    # The loop

    def run(self, link: RankLink, stopping: Callable[[], bool]) -> None:
        """Serve until `stopping()`: blocks while idle, sleeps exactly to the next step otherwise."""
        next_step = 0.0
        idle = True
        while not stopping():
            if idle:
                messages = link.receive(None)
                next_step = time.monotonic() + self._step_s
            else:
                messages = link.receive(max(0.0, next_step - time.monotonic()))
            for envelope, body in messages:
                self._take(link, envelope, body)
            self._admit()
            now = time.monotonic()
            if self._busy() and now >= next_step:
                self._step(link, now)
                # A rank that fell behind catches up by one step, not by a burst.
                next_step = max(next_step + self._step_s, time.monotonic() - self._step_s)
            elif self._closing.rids or next_step - now > REPORT_WITHIN_S or not self._busy():
                self._report(link)
            idle = not self._busy()
        self._close_all(link)

    def _busy(self) -> bool:
        work = self._cycling or self._scripted or self._embeddings or self._finish_again
        return bool(work) and not self._paused

    def _running(self) -> int:
        return len(self._cycling) + len(self._scripted)

    def _runs(self, rid: int) -> bool:
        return rid in self._cycling or rid in self._scripted

    # Messages

    def _take(self, link: RankLink, envelope: Envelope, body: Any) -> None:
        match envelope.kind:
            case Kind.GENERATE:
                self._accept(body)
            case Kind.EMBEDDING:
                self._embeddings.append(body)
            case Kind.ABORT:
                self._abort(body.rid)
            case _:
                link.reply(envelope, self._obey(envelope.kind, body))

    def _obey(self, kind: Kind, body: Any) -> r.ControlReply:
        """Carry out a control message."""
        match kind:
            case Kind.GET_STATE:
                self._admit()
                return r.ControlReply(True, data=json.dumps(self._state()).encode())
            case Kind.PAUSE | Kind.CONTINUE:
                self._paused = kind == Kind.PAUSE
                return r.ControlReply(True)
            case Kind.FLUSH_CACHE:
                live = self._state()["live"]
                return r.ControlReply(not live, f"{live} requests are live" if live else "")
            case Kind.PROFILE:
                return r.ControlReply(False, "the mock rank computes nothing that could be profiled")
            case Kind.SET_LOG_LEVEL:
                return set_log_level(body)
            case other:
                return r.ControlReply(False, f"the mock rank does not know {other.name}")

    def _accept(self, body: r.TokenizedGenerateReqInput) -> None:
        if self._runs(body.rid) or any(request.rid == body.rid for request in self._waiting):
            logger.warning("request %d came twice, the second is ignored", body.rid)
            return
        prompt = len(body.input_ids) // 4
        rule = self._rules.match(body.input_ids)
        limit = min(body.sampling_params.max_new_tokens, self._max_len - prompt)
        request = Request(body.rid, prompt, limit, frozenset(body.sampling_params.stop_token_ids), rule)
        if body.return_logprob:
            request.scores = Scores(body, self._vocab_size)
        if limit < 1:
            message = f"the prompt of {prompt} tokens leaves no room in a context of {self._max_len}"
            self._closing.add(request, b"", FinishReason("error", message=message, status=400))
            return
        self._waiting.append(request)
        self._pending += prompt

    def _admit(self) -> None:
        while not self._paused and self._waiting and self._running() < self._most:
            request = self._waiting.popleft()
            self._pending -= request.prompt
            self._held += request.prompt
            self._waits.admitted(request.rid, time.monotonic() - request.since)
            if request.rule is None and not request.stops and request.scores is None:
                self._cycling.add(request)
                continue
            self._scripted[request.rid] = request
            if request.rule is not None and request.rule.first_ms is not None:
                request.due = time.monotonic() + request.rule.first_ms / 1000

    def _abort(self, rid: int) -> None:
        request: Request | None
        if rid in self._cycling:
            request = self._cycling.take_out(rid)
            self._held -= request.prompt + request.done
        elif rid in self._scripted:
            request = self._scripted[rid]
            self._release(request)
        else:
            request = next((each for each in self._waiting if each.rid == rid), None)
            if request is None:
                self._embeddings = [each for each in self._embeddings if each.rid != rid or self._drop(each)]
                return
            self._waiting.remove(request)
            self._pending -= request.prompt
        self._closing.add(request, b"", FinishReason("abort"))

    def _drop(self, body: r.TokenizedEmbeddingReqInput) -> bool:
        request = Request(body.rid, len(body.input_ids) // 4, 0, frozenset(), None)
        self._closing.add(request, b"", FinishReason("abort"))
        return False

    def _release(self, request: Request) -> None:
        del self._scripted[request.rid]
        self._held -= request.prompt + request.done

    # Steps

    def _step(self, link: RankLink, now: float) -> None:
        rows, self._closing = self._closing, Rows(self._waits)
        again, self._finish_again = self._finish_again, []
        for request in again:
            rows.add(request, b"", FinishReason("length"))
        added, released = self._cycling.step(rows)
        self._held += added - released
        ended = [request for request in self._scripted.values() if self._play(link, request, now, rows) is not None]
        for request in ended:
            self._release(request)
        self._admit()
        if self._embeddings:
            embeddings, self._embeddings = self._embeddings, []
            self._send(link, _embed(embeddings))
        if rows.rids:
            self._send(link, rows.batch())

    def _play(self, link: RankLink, request: Request, now: float, rows: Rows) -> FinishReason | None:
        """One step of a request that does not just cycle; its end if it ends."""
        if now < request.due:
            return None
        rule = request.rule or Rule()
        if rule.step_ms is not None:
            request.due = max(request.due, now) + rule.step_ms / 1000
        faults: dict[str, Fault] = {fault.kind: fault for fault in rule.faults if fault.at == request.rows}
        self._strike(link, faults)
        tokens, end = self._next_tokens(request, rule)
        if "bad_utf8" in faults:
            tokens = self._rules.bad_ids
        tokens, end = _cut(request, tokens, end)
        request.done += len(tokens)
        request.rows += 1
        self._held += len(tokens)
        if end is not None:
            kinds = {fault.kind for fault in rule.faults}
            if "double_finish" in kinds:
                self._finish_again.append(request)
            if "lost_finish" in kinds:
                rows.add(request, struct.pack(f"<{len(tokens)}I", *tokens))
                return end
        more = None if request.scores is None else request.scores.columns(tokens)
        rows.add(request, struct.pack(f"<{len(tokens)}I", *tokens), end, more)
        return end

    def _next_tokens(self, request: Request, rule: Rule) -> tuple[list[int], FinishReason | None]:
        if rule.tokens is None:
            return [CYCLE[request.done % len(CYCLE)]], None
        n = len(rule.tokens)
        last = not rule.repeat and request.rows >= n - 1
        tokens: list[int] = []
        if n:
            step = rule.tokens[request.rows % n]
            tokens = [step] if isinstance(step, int) else list(step)
        finish = rule.finish
        return tokens, FinishReason(finish.type, finish.matched, finish.message, finish.status) if last else None

    def _strike(self, link: RankLink, faults: dict[str, Fault]) -> None:
        for kind, fault in faults.items():
            match kind:
                case "die":
                    if fault.status is None:
                        os.kill(os.getpid(), signal.SIGKILL)
                    os._exit(fault.status or 0)
                case "hang" | "slow":
                    time.sleep(fault.for_ms / 1000)
                case "malformed":
                    link.send_raw(Envelope(Kind.BATCH_TOKEN_ID, rank=self._rank, rows=1), b"\xc1 no batch")
                case "stale_report" | "missing_report":
                    self._frozen = self._reported if kind == "stale_report" else (None, 0)
                    self._frozen_until = time.monotonic() + fault.for_ms / 1000

    # Reports

    def _load(self) -> Load:
        waiting = len(self._waiting) + len(self._embeddings)
        return Load(self._running(), waiting, self._held, self._pending, self._pool)

    def _send(self, link: RankLink, batch: BatchTokenIDOutput | BatchEmbeddingOutput) -> None:
        if time.monotonic() < self._frozen_until:
            load, seen = self._frozen
            link.send_batch(batch, load, last_dispatch=seen)
            return
        self._reported = (self._load(), link.last_dispatch)
        link.send_batch(batch, self._reported[0])

    def _report(self, link: RankLink) -> None:
        """Send what must not wait for a step: ends of aborted requests, and a load that changed."""
        rows, self._closing = self._closing, Rows(self._waits)
        if rows.rids or self._reported != (self._load(), link.last_dispatch):
            self._send(link, rows.batch() if rows.rids else BatchTokenIDOutput(rids=[]))

    def _state(self) -> dict[str, Any]:
        waiting = [request.rid for request in self._waiting]
        return {
            "engine": "mock",
            "rank": self._rank,
            "epoch": self._epoch,
            "pid": os.getpid(),
            "paused": self._paused,
            "live": self._running() + len(self._waiting) + len(self._embeddings),
            "running": self._running(),
            "waiting": len(self._waiting) + len(self._embeddings),
            "held_tokens": self._held,
            "pending_tokens": self._pending,
            "pool_tokens": self._pool,
            "pages_held": 0,
            "requests": [str(rid) for rid in (*self._cycling.rids, *self._scripted, *waiting)],
        }

    def _close_all(self, link: RankLink) -> None:
        rows, self._closing = self._closing, Rows(self._waits)
        cycling = [self._cycling.take_out(rid) for rid in list(self._cycling.rids)]
        for request in [*cycling, *self._scripted.values(), *self._waiting]:
            rows.add(request, b"", FinishReason("error", message="the rank was stopped", status=503))
        for body in self._embeddings:
            request = Request(body.rid, len(body.input_ids) // 4, 0, frozenset(), None)
            rows.add(request, b"", FinishReason("error", message="the rank was stopped", status=503))
        self._scripted.clear()
        self._waiting.clear()
        self._embeddings.clear()
        self._held = self._pending = 0
        if rows.rids:
            self._send(link, rows.batch())


def _cut(request: Request, tokens: list[int], end: FinishReason | None) -> tuple[list[int], FinishReason | None]:
    """A step's tokens up to the request's limit or its first stop token, and why it ends there."""
    for i, token in enumerate(tokens):
        if token in request.stops:
            return tokens[: i + 1], FinishReason("stop", matched=token)
        if request.done + i + 1 >= request.limit:
            # A script's own end at this very token tells more than the limit.
            return tokens[: i + 1], end if end is not None and i + 1 == len(tokens) else FinishReason("length")
    return tokens, end


def _embed(bodies: list[r.TokenizedEmbeddingReqInput]) -> BatchEmbeddingOutput:
    """Unit vectors that depend on the prompt alone."""
    vectors = []
    for body in bodies:
        source = random.Random(body.input_ids)
        values = [source.gauss(0.0, 1.0) for _ in range(body.dimensions or EMBEDDING_DIMENSIONS)]
        norm = sum(value * value for value in values) ** 0.5 or 1.0
        vectors.append(struct.pack(f"<{len(values)}f", *(value / norm for value in values)))
    return BatchEmbeddingOutput(
        rids=[body.rid for body in bodies],
        finished_reasons=[FinishReason("stop")] * len(bodies),
        prompt_tokens=[len(body.input_ids) // 4 for body in bodies],
        completion_tokens=[0] * len(bodies),
        embeddings=vectors,
    )


def create_mock_rank(ctx: ChildContext) -> MockRank:
    """The factory that `--engine mock` names; gives up the start if the script can't be used."""
    args, ports, model = ctx.config.server_args, ctx.config.port_args, ctx.config.model_info
    try:
        script = load_script(Path(args.mock_script)) if args.mock_script else Script()
        rules = Rules(script, ctx.index, ports.tokenizer_file)
    except ScriptError as error:
        ctx.fail(str(error))
    most = args.max_running_requests or MAX_RUNNING_REQUESTS
    return MockRank(
        rank=ctx.index,
        epoch=ctx.epoch,
        step_s=args.mock_step_ms / 1000,
        max_len=model.max_model_len,
        most=most,
        pool=args.max_total_tokens or most * model.max_model_len,
        vocab_size=model.vocab_size,
        rules=rules,
    )
