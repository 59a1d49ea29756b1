"""`TokenizerManager`: everything between a worker's routes and the wire."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from servekit._core import MalformedError, TextStreams
from servekit.config import Config
from servekit.messages.batches import QUEUE_TIME, BatchEmbeddingOutput, BatchStrOutput, BatchTokenIDOutput, FinishReason
from servekit.messages.envelope import (
    Envelope,
    Kind,
    mint_rid,
    party_title,
)
from servekit.messages.requests import AbortReq, AbortRequestsReq, ControlReply, GetStateReq
from servekit.runtime.phase import Phase
from servekit.tokenizer import options as opt
from servekit.tokenizer.ask import Ask, messages_of, plan
from servekit.tokenizer.control_messages import Answers, ControlMessages
from servekit.tokenizer.embedding import embedding_messages_of, plan_embeddings, vectors_of
from servekit.tokenizer.encoding import TextEncoder
from servekit.tokenizer.meter import UNKNOWN, Meter
from servekit.tokenizer.refusal import Refusal
from servekit.tokenizer.silence import TICK_S, ControlSilence
from servekit.tokenizer.state import Choice, Job, Prompt
from servekit.tokenizer.turns import Turns
from servekit.transport.dispatcher import TypeBasedDispatcher
from servekit.transport.sender import LinkFull, SenderWrapper

if TYPE_CHECKING:
    from servekit._core import StatePage

log = logging.getLogger(__name__)

CONTROL_SILENCE_S = 5.0
"""A control process that has not been heard for that long is dead to its workers."""
RETRY_AFTER_S = 1
MAX_CHOICES = 1024
"""Most prompts times choices in one request."""


class TokenizerManager:
    """Owns the live requests of one worker: admits, sends, hands out what comes back, aborts.

    Everything runs on the worker's event loop.

    Args:
        config: what main told this process.
        worker, epoch: which worker this is, and which life of it.
        page: the state page.
        sender: link to the control process.
        encoder: the model's tokenizer.
        capacity: most requests the server takes at once, running and queued.
    """

    def __init__(
        self,
        config: Config,
        worker: int,
        epoch: int,
        page: StatePage,
        sender: SenderWrapper,
        encoder: TextEncoder,
        capacity: Callable[[], int],
    ) -> None:
        self.config = config
        self.worker = worker
        self.epoch = epoch
        self.page = page
        self.encoder = encoder
        self.turns = Turns()
        self.decodes = not config.server_args.skip_tokenizer_init
        self.silence = ControlSilence(page)
        self.meter = Meter(page, worker)
        self.malformed = 0
        self._sender = sender
        self._capacity = capacity
        self._entropy = random.Random(
            None if config.server_args.seed is None else f"{config.server_args.seed}/{worker}"
        )
        self._counter = itertools.count(1)
        self._live: dict[int, tuple[Job, Choice]] = {}
        self._direct = TextStreams()
        self._written: dict[Callable[[bytes], None], list[bytes]] = {}
        self._jobs: set[Job] = set()
        self._controls = ControlMessages(worker, sender, self._mint)
        self._batch = msgspec.msgpack.Decoder(BatchStrOutput)
        self._undecoded = msgspec.msgpack.Decoder(BatchTokenIDOutput)
        self._embeddings = msgspec.msgpack.Decoder(BatchEmbeddingOutput)
        self._aborts = msgspec.msgpack.Decoder(AbortRequestsReq)
        self._stopped: Refusal | None = None
        self.dispatcher = TypeBasedDispatcher(
            {
                Kind.BATCH_STR: self._take_batch,
                Kind.BATCH_TOKEN_ID: self._take_ids,
                Kind.BATCH_EMBEDDING: self._take_embeddings,
                Kind.CONTROL_REPLY: self._controls.take_reply,
                Kind.SET_LOG_LEVEL: self._controls.take_log_level,
                Kind.ABORT_REQUESTS: self._take_abort_requests,
            }
        )

    # Admission

    def why_not(self) -> str | None:
        """Why a request sent now would be refused, None if it would be taken."""
        if self._stopped is not None:
            return self._stopped.message
        phase = self.page.phase
        if phase != Phase.READY:
            return "the server is starting" if phase == Phase.STARTING else "the server is shutting down"
        if self.silence.seconds() > CONTROL_SILENCE_S:
            return "the control process is not heard"
        return None

    def _queue_is_full(self) -> bool:
        """Whether more prompt tokens wait than may; the router looks again, at the request's own."""
        most = self.config.server_args.max_queued_tokens
        return most is not None and self.page.queued_tokens() >= most

    def has_room(self) -> bool:
        """Whether a request of one message would find a place."""
        if self._queue_is_full() or not self.page.reserve(self.worker, 1, 0, self._capacity()):
            return False
        self.page.release(self.worker, 1, 0)
        return True

    def admit(self, requests: int, tokens: int) -> Job:
        """Reserve places for a request before any work is done for it; `close` gives them back.

        Args:
            requests: messages it will become.
            tokens: estimated length of its prompts in tokens.

        Raises:
            Refusal: 503, the server is full or does not take requests now.
        """
        why = self.why_not()
        if why is None and self._queue_is_full():
            why = "the server is full: as many prompt tokens wait as it takes"
        if why is None and not self.page.reserve(self.worker, requests, tokens, self._capacity()):
            why = "the server is full: as many requests run and wait as it takes"
        if why is not None:
            self.meter.count("refused")
            raise Refusal(503, why, code="overloaded", retry_after=RETRY_AFTER_S)
        job = Job(reserved_requests=requests, reserved_tokens=tokens)
        self._jobs.add(job)
        return job

    def close(self, job: Job) -> None:
        """End a job whatever state it is in: abort what lives, give back what was reserved. Twice is harmless."""
        if job.closed:
            return
        job.closed = True
        self._jobs.discard(job)
        self.take_over(job)
        live = [choice.rid for choice in job.choices if self._live.pop(choice.rid, None) is not None]
        for rid in live:
            self._abort(rid)
        if live:
            self.meter.count("aborted" if job.gone else "failed", len(live))
        self.page.release(self.worker, job.reserved_requests, job.reserved_tokens)

    # Sending

    def submit(self, job: Job, asks: Sequence[Ask], rank: int) -> None:
        """Send a request's choices to the ranks.

        Args:
            job: from `admit`.
            asks: at least one, each with at least one id. A limit of 0 sends nothing and ends the choices at once,
                unless the prompt's logprobs are wanted.
            rank: named by the client, -1 for none.

        Raises:
            Refusal: a prompt is too long for the context, or the control process does not read.
        """
        planned = plan(asks, self.config.model_info, self._entropy)
        self._begin(job, [each.choice for each in planned])
        job.streamed = asks[0].options.streamed
        named = self.config.server_args.load_balance_method == "cache_aware"
        for choice, envelope, body in messages_of(planned, rank, self._mint, decoded=self.decodes, prefixes=named):
            self._send(job, choice, envelope, body)
        for each in planned:
            if each.params.max_new_tokens == 0:
                job.put(each.choice, "", b"", FinishReason("length"))

    def submit_embeddings(self, job: Job, prompts: Sequence[Prompt], options: opt.EmbeddingOptions, rank: int) -> None:
        """Send prompts to be embedded.

        Args:
            job: from `admit`.
            prompts: at least one, each with at least one id.
            options: checked.
            rank: named by the client, -1 for none.

        Raises:
            Refusal: a prompt is longer than the context, or the control process does not read.
        """
        self._begin(job, plan_embeddings(prompts, self.config.model_info.max_model_len))
        for choice, envelope, body in embedding_messages_of(job.choices, options, rank, self._mint):
            self._send(job, choice, envelope, body)

    def _begin(self, job: Job, choices: list[Choice]) -> None:
        job.choices, job.live = choices, len(choices)

    def _mint(self) -> int:
        return mint_rid(self.worker, self.epoch, next(self._counter))

    def _send(self, job: Job, choice: Choice, envelope: Envelope, body: msgspec.Struct) -> None:
        try:
            self._sender.send(envelope, body)
        except LinkFull as error:
            log.error("a request could not be sent: %s", error)
            raise Refusal(503, "the control process does not read", retry_after=RETRY_AFTER_S) from None
        # Choices of no tokens end without a rank, and count as neither started nor finished.
        self.meter.count("requests")
        self._live[choice.rid] = (job, choice)

    def _abort(self, rid: int) -> None:
        try:
            self._sender.send(Envelope(Kind.ABORT, rid), AbortReq(rid))
        except LinkFull as error:
            log.error("an abort could not be sent: %s", error)

    # Receiving

    def hand_over(
        self, choice: Choice, before: bytes, after: bytes, chunked: bool, sink: Callable[[bytes], None]
    ) -> None:
        """From now on a choice's text goes to `sink` as ready-made events; only its last row still comes to its job.

        Args:
            choice: live, with nothing that its job has not taken.
            before, after: what stands around the text's JSON string.
            chunked: make each event an HTTP chunk.
            sink: must not block or raise.
        """
        self._direct.open(choice.rid, before, after, chunked, sink, choice.completion_tokens)
        choice.direct = True

    def take_over(self, job: Job) -> None:
        """All that comes for a job goes to the job again."""
        for choice in job.choices:
            if choice.direct:
                choice.direct = False
                choice.completion_tokens = self._direct.close(choice.rid) or choice.completion_tokens
                choice.piece_at = UNKNOWN

    def leave(self, job: Job) -> None:
        """A job's client is gone."""
        self.take_over(job)
        job.leave()

    def _take_batch(self, envelope: Envelope, frames: Sequence[bytes]) -> None:
        try:
            events, left, metered = self._direct.render(frames[0])
        except MalformedError as error:
            self._count_malformed(error)
            return
        for sink, data in events:
            self._written.setdefault(sink, []).append(data)
        self.meter.past(*metered)
        if left is not None and (batch := self._decode(self._batch, left)) is not None:
            self._take_rows(envelope, batch, batch.output_strs, batch.output_ids)

    def write_out(self) -> None:
        """Write what has come for streams past their jobs; of several messages, all that is one stream's at once."""
        if self._written:
            written, self._written = self._written, {}
            for sink, parts in written.items():
                sink(parts[0] if len(parts) == 1 else b"".join(parts))

    def _take_ids(self, envelope: Envelope, frames: Sequence[bytes]) -> None:
        if (batch := self._decode(self._undecoded, frames[0])) is not None:
            self._take_rows(envelope, batch, None, batch.decode_ids)

    def _take_rows(
        self,
        envelope: Envelope,
        batch: BatchStrOutput | BatchTokenIDOutput,
        texts: Sequence[str | None] | None,
        ids: Sequence[bytes | None] | None,
    ) -> None:
        none = [None] * len(batch.rids)
        texts, ids = texts or none, ids or none
        finishes, prompts = batch.finished_reasons or none, batch.prompt_tokens or none
        completions, cached, ranks = (
            batch.completion_tokens or none,
            batch.cached_tokens or none,
            batch.dp_ranks or none,
        )
        waits = (batch.time_stats or {}).get(QUEUE_TIME) or none
        step = self.meter.step()
        rows = zip(batch.rids, texts, ids, finishes, prompts, completions, cached, ranks, waits, strict=True)
        for row, (rid, text, row_ids, finish, prompt_tokens, completion_tokens, cached_tokens, rank, wait) in enumerate(
            rows
        ):
            entry = self._live.get(rid)
            if entry is None:
                continue
            job, choice = entry
            before = choice.completion_tokens
            if prompt_tokens:
                choice.prompt_tokens = prompt_tokens
            if completion_tokens is not None:
                choice.completion_tokens = completion_tokens
            elif row_ids:
                # Not every rank counts what nobody has looked at yet.
                choice.completion_tokens += len(row_ids) // 4
            choice.cached_tokens = cached_tokens or 0
            choice.dp_rank = envelope.rank if rank is None else rank
            if choice.logprobs is not None and not choice.logprobs.put(batch, row):
                job.fail(Refusal(500, "the rank sent logprobs that do not fit together"))
            if choice.prompt_only:
                # How the one token ended says nothing of what the client asked for.
                choice.completion_tokens, text, row_ids = 0, "", b""
                finish = FinishReason("length") if finish is not None and finish.type == "stop" else finish
            if not choice.direct:
                step.row(job, choice, finish, choice.completion_tokens - before, wait)
            if finish is not None:
                del self._live[rid]
                choice.direct = False
            kept = job.put(choice, text or "", row_ids or b"", finish)
            if finish is not None:
                step.end(job, finish)
            if not kept:
                log.warning("cut off a client that does not read its stream")
                self.meter.count("slow_readers")
                self.close(job)
                job.cut_off()
        step.close()

    def _take_embeddings(self, envelope: Envelope, frames: Sequence[bytes]) -> None:
        batch = self._decode(self._embeddings, frames[0])
        if batch is None:
            return
        vectors = vectors_of(batch)
        finishes = batch.finished_reasons or [None] * len(batch.rids)
        prompts = batch.prompt_tokens or [0] * len(batch.rids)
        step = self.meter.step()
        for rid, vector, finish, prompt_tokens in zip(batch.rids, vectors, finishes, prompts, strict=True):
            entry = self._live.get(rid)
            if entry is None or finish is None:
                continue
            job, choice = entry
            choice.prompt_tokens = prompt_tokens or choice.prompt_tokens
            choice.vector = vector
            choice.dp_rank = envelope.rank
            step.row(job, choice, finish, 0)
            del self._live[rid]
            if not vector and finish.type == "stop":
                job.fail(Refusal(500, "the rank sent no vector"))
            job.put(choice, "", b"", finish)
            step.end(job, finish)
        step.close()

    def _take_abort_requests(self, envelope: Envelope, frames: Sequence[bytes]) -> None:
        request = self._decode(self._aborts, frames[0])
        if request is None:
            return
        wanted = set(request.ids)
        jobs = [job for job in self._jobs if request.everything or not wanted.isdisjoint(_ids_of(job))]
        for job in jobs:
            job.fail(Refusal(500, "an operator aborted the request", code="aborted"))
        self._controls.reply(envelope, ControlReply(True, data=msgspec.json.encode({"aborted": len(jobs)})))

    def _decode(self, decoder: Any, body: bytes) -> Any:
        try:
            return decoder.decode(body)
        except msgspec.DecodeError as error:
            self._count_malformed(error)
            return None

    def _count_malformed(self, error: Exception) -> None:
        self.malformed += 1
        if self.malformed == 1:
            log.error("dropped a malformed body: %s (later ones are only counted)", error)

    # Supervision

    def fail_all(self, refusal: Refusal) -> None:
        """End every live job with an error; each aborts what it still has when its handler closes it."""
        for job in list(self._jobs):
            job.fail(refusal)

    def stop(self, refusal: Refusal) -> None:
        """End every live job and refuse all that come later."""
        self._stopped = refusal
        self.fail_all(refusal)

    def lost_frames(self, why: str) -> None:
        """The link from the control process lost frames: no live stream can be trusted to be whole."""
        log.error("%s: ending %d requests", why, len(self._jobs))
        self.fail_all(Refusal(500, why))

    async def watch_control(self) -> None:
        """Once a second: end the live jobs if the control process is silent, and count. Runs as long as the worker."""
        while True:
            await asyncio.sleep(TICK_S)
            self.silence.tick()
            self.meter.cache(self.encoder.cache_counts)
            if self._jobs and (age := self.silence.seconds()) > CONTROL_SILENCE_S:
                log.error("the control process has been silent for %.1f s: ending %d requests", age, len(self._jobs))
                self.fail_all(Refusal(503, "the control process does not answer", retry_after=RETRY_AFTER_S))

    # Questions

    def live_requests(self) -> list[dict[str, Any]]:
        """Live choices of this worker, for `/debug/state`."""
        return [
            {
                "rid": f"{rid:016x}",
                "prompt_tokens": choice.prompt_tokens,
                "completion_tokens": self._direct.tokens(rid) or choice.completion_tokens,
                "dp_rank": choice.dp_rank,
            }
            for rid, (_, choice) in self._live.items()
        ]

    async def control(self, kind: Kind, body: msgspec.Struct, deadline_s: float) -> Answers:
        """Send a control message to every active rank, and gather what is answered within the deadline.

        Args:
            kind, body: PROFILE, FLUSH_CACHE, PAUSE, CONTINUE, SET_LOG_LEVEL or GET_STATE, and its struct.
            deadline_s: seconds; who has not answered by then is named in the answers' `silent`.
        """
        return await self._controls.ask(kind, body, deadline_s)

    async def ask_state(self, deadline_s: float) -> dict[int, Any]:
        """What each process holds: rank (-1 for control) to its state, None for those that did not answer in time."""
        answers = await self.control(Kind.GET_STATE, GetStateReq(), deadline_s)
        if answers.silent:
            log.warning("the state of %s is missing: no answer in time", ", ".join(answers.no_answer))
        states: dict[int, Any] = dict.fromkeys(answers.silent)
        for number, reply in answers.replies.items():
            try:
                states[number] = msgspec.json.decode(reply.data) if reply.data else {"message": reply.message}
            except msgspec.DecodeError as error:
                log.warning("the state of %s is no JSON: %s", party_title(number), error)
                states[number] = None
        return states


def _ids_of(job: Job) -> Iterator[str]:
    """What a request may be called by: the ids of its answer, and those of its choices on the wire."""
    yield from job.names
    for choice in job.choices:
        yield f"{choice.rid:016x}"
