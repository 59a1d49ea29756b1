"""The torch engine as a rank: the loop between the link to the control process, the scheduler and a model runner."""

from __future__ import annotations

import json
import logging
import os
import random
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from servekit.engine.dummy_runner import DummyRunner
from servekit.engine.embedding_plan import EmbeddingRunner
from servekit.engine.plan import ModelRunner, Plan
from servekit.messages.batches import BatchEmbeddingOutput, BatchTokenIDOutput, FinishReason
from servekit.messages.envelope import Envelope, Kind, Load
from servekit.messages.requests import ControlReply
from servekit.scheduler.embedding import EmbeddingConfig, EmbeddingScheduler
from servekit.scheduler.follower import LeadingRunner
from servekit.scheduler.log_level import set_log_level
from servekit.scheduler.orders import FOLLOWED, OrderSender, ResultReceiver
from servekit.scheduler.part import (
    load_part,
    offer_receiver,
    offer_sender,
    order_receiver,
    order_sender,
    profiles_of,
    result_receiver,
)
from servekit.scheduler.profiling import Profiler
from servekit.scheduler.scheduler import Scheduler, SchedulerConfig

if TYPE_CHECKING:
    from servekit.runtime.child import ChildContext
    from servekit.transport.rank_link import RankLink

logger = logging.getLogger(__name__)

MAX_RUNNING_CPU = 64
MAX_RUNNING_CUDA = 256
_DUMMY_CONTEXTS = 8
"""KV pool of the dummy runner, in contexts."""


class TorchRank:
    """A `Rank` that runs a scheduler over a model runner; it plans as many steps ahead as the runner wants.

    Args:
        runner, config: what computes, and what is computed.
        rank, epoch: which rank this is, and which life of it.
        profiles: folder of the traces that name no other.
        orders: to the followers of its group, None if it is alone.
    """

    def __init__(
        self,
        runner: ModelRunner | EmbeddingRunner,
        config: SchedulerConfig | EmbeddingConfig,
        *,
        rank: int,
        epoch: int,
        profiles: Path = Path("profiles"),
        orders: OrderSender | None = None,
    ) -> None:
        self._runner: Any = runner
        self._orders = orders
        self._embeds = isinstance(config, EmbeddingConfig)
        self._ahead = 0 if self._embeds else cast(ModelRunner, runner).ahead
        self._scheduler: Any = EmbeddingScheduler(config) if isinstance(config, EmbeddingConfig) else Scheduler(config)
        self._identity = {"engine": "torch", "rank": rank, "epoch": epoch, "pid": os.getpid()}
        self._reported: tuple[Load, int] | None = None
        self._paused = False
        self._profiler = Profiler(profiles, f"rank{rank}-epoch{epoch}")
        self.info: dict[str, Any] = {
            "engine": "torch",
            **runner.info,
            "kv_pool_tokens": self._scheduler.pool_tokens,
            "max_running_requests": config.max_running,
            "max_model_len": self._scheduler.max_tokens,
        }
        if isinstance(config, SchedulerConfig):
            self.info["page_size"] = config.page

    def run(self, link: RankLink, stopping: Callable[[], bool]) -> None:
        """Serve until `stopping()`: blocks while there is nothing to compute, and takes messages between steps."""
        scheduler, runner = self._scheduler, self._runner
        # Steps that are launched and not collected, the oldest first.
        flying: deque[tuple[Any, Any]] = deque()
        # Before the first request, so that everyone knows the size of the pool.
        self._send(link, report=True)
        idle = True
        while not stopping():
            for envelope, body in link.receive(None if idle else 0.0):
                self._take(link, envelope, body)
            # What ended without a step (aborts, refusals) does not wait for the next one.
            self._send(link)
            step = None if self._paused else scheduler.plan()
            idle = step is None and not flying
            if step is not None:
                link.enter("computing", step.plan.step)
                flying.append((step, runner.launch(step.plan)))
            if len(flying) > (0 if step is None else self._ahead):
                oldest, handle = flying.popleft()
                scheduler.complete(oldest, runner.collect(handle))
                link.enter("working")
                self._profiler.step()
            self._send(link, report=True)
        scheduler.close_all("the rank was stopped", 503)
        self._send(link)
        if self._orders is not None:
            self._orders.stop()

    def _compute(self, link: RankLink, plans: list[Plan | None], step: Any, results: ResultReceiver | None) -> None:
        """Compute a step of several data-parallel ranks, and take in this one's part of it, if it has any."""
        link.enter("computing", None if step is None else step.plan.step)
        handle = self._runner.launch_joint(plans)
        if step is not None:
            plan: Plan = step.plan
            result = self._runner.collect(handle) if results is None else results.next(plan.step)
            self._scheduler.complete(step, result)
        link.enter("working")
        self._profiler.step()

    def _take(self, link: RankLink, envelope: Envelope, body: Any) -> None:
        match envelope.kind:
            case Kind.GENERATE | Kind.EMBEDDING:
                if (envelope.kind == Kind.EMBEDDING) != self._embeds:
                    link.send_batch(self._other_kind(envelope.id), None)
                elif not self._scheduler.add(envelope.id, body):
                    logger.warning("request %d came twice, the second is ignored", envelope.id)
            case Kind.ABORT:
                self._scheduler.abort(envelope.id, body.reason)
            case _:
                link.reply(envelope, self._obey(envelope.kind, body))

    def _obey(self, kind: Kind, body: Any) -> ControlReply:
        """Carry out a control message, in the same step as the followers do."""
        if self._orders is not None and kind in FOLLOWED:
            self._orders.control(kind, body)
        match kind:
            case Kind.GET_STATE:
                state = {**self._identity, "paused": self._paused, **self._scheduler.state()}
                return ControlReply(True, data=json.dumps(state).encode())
            case Kind.PAUSE | Kind.CONTINUE:
                # A paused rank takes requests, aborts and questions; it only computes nothing.
                self._paused = kind == Kind.PAUSE
                return ControlReply(True)
            case Kind.FLUSH_CACHE:
                empty = self._scheduler.flush_cache()
                return ControlReply(empty, "" if empty else "what live requests use stays, the rest is dropped")
            case Kind.PROFILE:
                return self._profiler.obey(body)
            case Kind.SET_LOG_LEVEL:
                return set_log_level(body)
            case other:
                return ControlReply(False, f"{other.name} is not supported by this engine")

    def _other_kind(self, rid: int) -> BatchTokenIDOutput | BatchEmbeddingOutput:
        """The error row, of its own kind, for a request that this model can't serve."""
        if self._embeds:
            reason = FinishReason("error", message="this model makes embeddings, it generates no text", status=400)
            return BatchTokenIDOutput(rids=[rid], finished_reasons=[reason], decode_ids=[b""])
        reason = FinishReason("error", message="this model generates text, it has no embeddings", status=400)
        return BatchEmbeddingOutput(rids=[rid], finished_reasons=[reason], embeddings=[b""])

    def _send(self, link: RankLink, report: bool = False) -> None:
        """Send the rows that are there; without any, and if asked to, a load that changed."""
        batch = self._scheduler.take_batch()
        if batch is None and not report:
            return
        now = (self._scheduler.load(), link.last_dispatch)
        if batch is not None or now != self._reported:
            self._reported = now
            empty = BatchEmbeddingOutput(rids=[]) if self._embeds else BatchTokenIDOutput(rids=[])
            link.send_batch(batch or empty, now[0])


def create_torch_rank(ctx: ChildContext) -> TorchRank:
    """The factory that `--engine torch` names; gives up the start if the model can't be loaded."""
    args, model = ctx.config.server_args, ctx.config.model_info
    began = time.monotonic()
    prefill = args.max_prefill_tokens
    runner: ModelRunner
    orders = None
    if args.load_format == "dummy":
        runner = DummyRunner(model.vocab_size)
        pool = args.max_total_tokens or _DUMMY_CONTEXTS * model.max_model_len
        vocab_size, pages, running = model.vocab_size, pool // args.page_size, MAX_RUNNING_CUDA
    else:
        # Imported here: the dummy runner works where torch is not installed.
        from servekit.models.registry import embeds
        from servekit.models.weights import WeightError

        try:
            if embeds(Path(model.path)):
                return _create_embedding_rank(ctx)
        except WeightError as error:
            ctx.fail(str(error))
        runner = load_part(ctx)
        if ctx.sizes.world > 1 and ctx.rank.world == 0:
            orders = order_sender(ctx)
        vocab_size, pages = runner.info["vocab_size"], runner.info["kv_pages"]
        running = MAX_RUNNING_CUDA
        if runner.info["device"] == "cpu":
            running = MAX_RUNNING_CPU
            # More rows at once make a CPU no faster, they only keep everyone else's tokens waiting.
            prefill = min(prefill, args.chunked_prefill_size)
    running = args.max_running_requests or running
    config = SchedulerConfig(
        max_running=running,
        # The router bounds what waits; this bounds what a rank would take if it did not.
        max_waiting=args.max_queued_requests + args.data_parallel_size * running,
        max_prefill_tokens=prefill,
        chunked_prefill_size=args.chunked_prefill_size,
        page=args.page_size,
        pages=pages,
        max_model_len=model.max_model_len,
        vocab_size=vocab_size,
        end_ids=tuple(model.end_ids),
        seed=args.seed if args.seed is not None else random.getrandbits(63),
        policy=args.schedule_policy,
        prefix_cache=args.prefix_caching,
        flights=ctx.sizes.pipeline if ctx.sizes.attn_dp == 1 else 1,
        max_rows=args.pp_max_micro_batch_size,
    )
    named: dict[str, Any] = {"rank": ctx.index, "epoch": ctx.epoch, "profiles": profiles_of(ctx), "orders": orders}
    rank = _make_rank(ctx, runner, config, named) if args.load_format != "dummy" else TorchRank(runner, config, **named)
    rank.info["load_seconds"] = round(time.monotonic() - began, 2)
    return rank


def _make_rank(ctx: ChildContext, runner: ModelRunner, config: SchedulerConfig, named: dict[str, Any]) -> TorchRank:
    """The kind of rank that a leader is: alone, of a group, or one of several leaders of one."""
    if ctx.sizes.world == 1:
        return TorchRank(runner, config, **named)
    results = result_receiver(ctx)
    if ctx.sizes.attn_dp == 1:
        return TorchRank(LeadingRunner(runner, named["orders"], results, config.flights - 1), config, **named)
    from servekit.scheduler.joint import FirstLeader, OtherLeader

    if ctx.rank.world == 0:
        heard = offer_receiver(ctx)
        return FirstLeader(runner, config, offers=heard, others=ctx.sizes.attn_dp - 1, results=results, **named)
    return OtherLeader(runner, config, heard=order_receiver(ctx), offers=offer_sender(ctx), results=results, **named)


def _create_embedding_rank(ctx: ChildContext) -> TorchRank:
    from servekit.engine.embedding_runner import load_embedding_runner

    args, model = ctx.config.server_args, ctx.config.model_info
    if ctx.sizes.world > 1:
        ctx.fail("an embedding model is not split: --tensor-parallel-size and --pipeline-parallel-size can be 1")
    runner = load_embedding_runner(
        Path(model.path),
        device=args.device,
        dtype=args.dtype,
        ranks=ctx.sharing,
        rank=ctx.rank.device,
        progress=lambda done, total: ctx.progress(done, total, "weights"),
    )
    running, tokens = MAX_RUNNING_CUDA, args.max_prefill_tokens
    if runner.info["device"] == "cpu":
        # As for prompts: more at once make it no faster.
        running, tokens = MAX_RUNNING_CPU, min(tokens, args.chunked_prefill_size)
    running = args.max_running_requests or running
    config = EmbeddingConfig(
        max_running=running,
        max_waiting=args.max_queued_requests + args.data_parallel_size * running,
        max_prefill_tokens=tokens,
        max_model_len=min(model.max_model_len, runner.info["context"]),
        vocab_size=runner.info["vocab_size"],
        size=runner.info["embedding_size"],
        normalized=runner.info["normalized"],
    )
    return TorchRank(runner, config, rank=ctx.index, epoch=ctx.epoch, profiles=profiles_of(ctx))
