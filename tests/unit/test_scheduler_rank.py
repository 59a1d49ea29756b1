"""The rank's loop over a link: rows and load reports, control messages, and the end."""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servekit.engine.dummy_runner import DummyRunner
from servekit.messages.batches import BatchEmbeddingOutput, BatchTokenIDOutput
from servekit.messages.envelope import Envelope, Kind, Load
from servekit.messages.requests import (
    AbortReq,
    ContinueReq,
    ControlReply,
    FlushCacheReq,
    GetStateReq,
    PauseReq,
    ProfileReq,
    SamplingParams,
    SetLogLevelReq,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)
from servekit.scheduler.embedding import EmbeddingConfig
from servekit.scheduler.rank import TorchRank
from servekit.scheduler.scheduler import SchedulerConfig

from tests.unit.test_embedding_scheduler import Sums, text


class FakeLink:
    """A link whose other end is a list of deliveries, one for each call of `receive`."""

    def __init__(self, deliveries: list[list[tuple[Envelope, Any]]]) -> None:
        self._deliveries = deque(deliveries)
        self.greeting: Load | None = None
        self.last_dispatch = 0
        self.timeouts: list[float | None] = []
        self.sent: list[tuple[Any, Load | None]] = []
        self.replies: list[tuple[int, ControlReply]] = []
        self.stop = threading.Event()

    def receive(self, timeout_s: float | None) -> list[tuple[Envelope, Any]]:
        if not self.timeouts:
            # What a rank reports before it has heard anything.
            ((batch, self.greeting),) = self.sent
            assert batch.rids == []
            self.sent.clear()
        self.timeouts.append(timeout_s)
        if not self._deliveries:
            if timeout_s is None:
                self.stop.set()
            return []
        found = self._deliveries.popleft()
        self.last_dispatch = max([self.last_dispatch, *(envelope.dispatch for envelope, _ in found)])
        return found

    def enter(self, phase: str, step: int | None = None) -> None:
        pass

    def send_batch(self, batch: Any, load: Load | None, last_dispatch: int | None = None) -> None:
        self.sent.append((batch, load))

    def reply(self, request: Envelope, reply: ControlReply) -> None:
        self.replies.append((request.id, reply))


def generate(rid: int, prompt: int = 5, **params: Any) -> tuple[Envelope, Any]:
    sampling = SamplingParams(**{"max_new_tokens": 4, "ignore_eos": True, "seed": rid, **params})
    body = TokenizedGenerateReqInput(rid, np.arange(rid, rid + prompt, dtype="<u4").tobytes(), sampling)
    return Envelope(Kind.GENERATE, rid, dispatch=rid), body


def control(kind: Kind, body: Any, id_: int = 77) -> tuple[Envelope, Any]:
    return Envelope(kind, id_), body


def run(deliveries: list[list[tuple[Envelope, Any]]], **changes: Any) -> FakeLink:
    sizes = {"max_running": 4, "max_waiting": 50, "max_prefill_tokens": 32, "chunked_prefill_size": 8, "page": 4}
    config = SchedulerConfig(
        **{**sizes, "pages": 40, "max_model_len": 100, "vocab_size": 50, "end_ids": (2,), **changes}  # type: ignore[arg-type]
    )
    link = FakeLink(deliveries)
    TorchRank(DummyRunner(50), config, rank=1, epoch=3).run(link, link.stop.is_set)  # type: ignore[arg-type]
    return link


def ends(link: FakeLink) -> dict[int, str]:
    found: dict[int, str] = {}
    for batch, _ in link.sent:
        for rid, reason in zip(batch.rids, batch.finished_reasons or (), strict=False):
            if reason is not None:
                assert rid not in found
                found[rid] = reason.type
    return found


def test_a_step_is_one_message_with_the_load_after_it() -> None:
    link = run([[generate(1), generate(2)]])
    assert [batch.rids for batch, _ in link.sent] == [[1, 2]] * 4
    assert [batch.completion_tokens for batch, _ in link.sent] == [[n, n] for n in (1, 2, 3, 4)]
    assert all(len(ids) == 4 for batch, _ in link.sent for ids in batch.decode_ids)
    loads = [load for _, load in link.sent]
    assert [load.running for load in loads if load] == [2, 2, 2, 0]
    assert loads[0] == Load(running=2, waiting=0, held_tokens=10, pending_tokens=0, pool_tokens=160)
    assert loads[-1] == Load(pool_tokens=160)
    assert ends(link) == {1: "length", 2: "length"}


def test_the_load_is_reported_when_nothing_else_is() -> None:
    link = run([[generate(1, prompt=20)]])
    (first, load), (second, later) = link.sent[:2]
    assert (first.rids, second.rids) == ([], [])
    assert load is not None and later is not None
    assert (load.pending_tokens, later.pending_tokens) == (12, 4)
    # The second delivery brings a dispatch number and nothing to do: it is told, once.
    link = run([[generate(1)], [], [], [], [], [(Envelope(Kind.GENERATE, 9, dispatch=9), generate(9, 0)[1])], []])
    assert [batch.rids for batch, _ in link.sent][-1] == [9]
    assert ends(link) == {1: "length", 9: "error"}


def test_it_blocks_only_when_there_is_nothing_to_compute() -> None:
    link = run([[generate(1)], [], [], [], [generate(2)]])
    assert link.timeouts == [None, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, None]


def test_an_abort_is_answered_before_the_next_step() -> None:
    link = run([[generate(1, max_new_tokens=50), generate(2)], [control(Kind.ABORT, AbortReq(1, "gone"), 1)]])
    assert link.sent[1][0].rids == [1]
    reason = link.sent[1][0].finished_reasons[0]
    assert (reason.type, reason.message) == ("abort", "gone")
    assert ends(link) == {1: "abort", 2: "length"}


def test_an_abort_of_an_unknown_request_is_nothing() -> None:
    assert run([[control(Kind.ABORT, AbortReq(5), 5)]]).sent == []


def test_a_rank_reports_its_pool_before_the_first_request() -> None:
    assert run([]).greeting == Load(pool_tokens=160)


def test_a_request_that_came_twice_ends_once() -> None:
    assert ends(run([[generate(1), generate(1)]])) == {1: "length"}


def test_an_embedding_is_refused_with_its_own_kind_of_row() -> None:
    link = run([[(Envelope(Kind.EMBEDDING, 6, dispatch=1), TokenizedEmbeddingReqInput(6, b"\1\0\0\0"))]])
    batch = link.sent[0][0]
    assert isinstance(batch, BatchEmbeddingOutput)
    assert (batch.rids, batch.finished_reasons[0].type, batch.finished_reasons[0].status) == ([6], "error", 400)


def test_an_embedding_model_embeds_and_refuses_to_generate() -> None:
    deliveries = [
        [(Envelope(Kind.EMBEDDING, rid, dispatch=rid), text(rid, [rid, 3])) for rid in (1, 2)],
        [generate(3)],
    ]
    link = FakeLink(deliveries)
    config = EmbeddingConfig(4, 50, 32, 16, 50, size=3, normalized=True)
    TorchRank(Sums(), config, rank=1, epoch=3).run(link, link.stop.is_set)  # type: ignore[arg-type]
    (batch, load), (refusal, _), *_ = link.sent
    assert isinstance(batch, BatchEmbeddingOutput) and isinstance(batch.embeddings, list)
    assert (batch.rids, [len(vector) for vector in batch.embeddings]) == ([1, 2], [12, 12])
    assert load == Load(pool_tokens=64)
    assert isinstance(refusal, BatchTokenIDOutput)
    assert (refusal.rids, refusal.finished_reasons[0].status) == ([3], 400)


def test_state_shows_what_is_held() -> None:
    link = run([[generate(1), generate(2), generate(3)], [control(Kind.GET_STATE, GetStateReq())]], max_running=2)
    correlation, reply = link.replies[0]
    state = json.loads(reply.data)
    assert (correlation, reply.ok) == (77, True)
    assert (state["live"], state["running"], state["waiting"], state["pages_held"]) == (3, 2, 1, 4)
    assert (state["rank"], state["epoch"], state["pages_free"], state["held_tokens"]) == (1, 3, 36, 10)


def test_what_it_can_not_do_is_said() -> None:
    link = run([[control(Kind.LOAD_ADAPTER, None)]])
    assert link.replies == [(77, ControlReply(False, "LOAD_ADAPTER is not supported by this engine"))]


def test_a_paused_rank_computes_nothing_until_it_goes_on() -> None:
    pause, go_on = control(Kind.PAUSE, PauseReq(), 1), control(Kind.CONTINUE, ContinueReq(), 2)
    abort = control(Kind.ABORT, AbortReq(2), 2)
    ask = control(Kind.GET_STATE, GetStateReq(), 3)
    link = run([[generate(1), generate(2)], [pause, generate(3)], [abort], [ask], [go_on]])
    assert [reply.ok for _, reply in link.replies] == [True] * 3
    # While it is paused it waits for messages, reports its load and closes what is aborted.
    assert link.timeouts[:5] == [None, 0.0, None, None, None]
    assert [batch.rids for batch, _ in link.sent[:4]] == [[1, 2], [], [2], [1, 3]]
    state = json.loads(link.replies[1][1].data)
    assert (state["paused"], state["running"], state["waiting"]) == (True, 1, 1)
    assert ends(link) == {1: "length", 2: "abort", 3: "length"}


def test_the_cache_is_flushed_when_nothing_runs() -> None:
    flush = control(Kind.FLUSH_CACHE, FlushCacheReq())
    link = run([[flush, generate(1)], [flush]])
    assert [(reply.ok, reply.message) for _, reply in link.replies] == [
        (True, ""),
        (False, "what live requests use stays, the rest is dropped"),
    ]


def test_a_flush_drops_what_nobody_uses() -> None:
    state = control(Kind.GET_STATE, GetStateReq())
    deliveries = [[generate(1)], [], [], [], [state, control(Kind.FLUSH_CACHE, FlushCacheReq()), state]]
    before, flushed, after = (reply for _, reply in run(deliveries).replies)
    assert json.loads(before.data)["pages_cached"] == 2
    assert flushed == ControlReply(True)
    assert (json.loads(after.data)["pages_cached"], json.loads(after.data)["pages_free"]) == (0, 40)


def test_a_log_level_holds_for_the_process() -> None:
    root = logging.getLogger()
    before = root.level
    try:
        link = run([[control(Kind.SET_LOG_LEVEL, SetLogLevelReq(level)) for level in ("error", "loud")]])
        assert [reply.ok for _, reply in link.replies] == [True, False]
        assert root.level == logging.ERROR
    finally:
        root.setLevel(before)


def test_a_profile_is_written_where_it_is_wanted(tmp_path: Path) -> None:
    def profile(start: bool, folder: str = "") -> tuple[Envelope, Any]:
        return control(Kind.PROFILE, ProfileReq(start, folder))

    where = tmp_path / "traces"
    link = run([[profile(False), profile(True, str(where)), profile(True), generate(1)], [], [], [], [profile(False)]])
    assert [reply.ok for _, reply in link.replies] == [False, True, False, True]
    told = json.loads(link.replies[-1][1].data)
    assert told["steps"] == 4 and Path(told["path"]).parent == where
    assert json.loads(Path(told["path"]).read_text())["traceEvents"] is not None
    nowhere = tmp_path / "file"
    nowhere.write_text("")
    ((_, reply),) = run([[profile(True, str(nowhere))]]).replies
    assert not reply.ok and "the profile failed" in reply.message


def test_a_profile_that_nobody_stops_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("servekit.scheduler.profiling.MAX_STEPS", 2)
    start = control(Kind.PROFILE, ProfileReq(True, str(tmp_path)))
    link = run([[start, generate(1)], [], [], [], [control(Kind.PROFILE, ProfileReq(False))]])
    assert [(reply.ok, reply.message) for _, reply in link.replies] == [(True, ""), (False, "no profile is running")]
    assert [path.name.rpartition("-2-")[2] for path in tmp_path.iterdir()] == ["steps.json"]


def test_a_stopped_rank_ends_everyone_with_an_error() -> None:
    link = FakeLink([[generate(1, max_new_tokens=90), generate(2)]])
    config = SchedulerConfig(1, 50, 32, 8, 4, 40, 100, 50, (2,))
    steps = iter([False, False, False, True])
    TorchRank(DummyRunner(50), config, rank=0, epoch=1).run(link, lambda: next(steps))  # type: ignore[arg-type]
    assert ends(link) == {1: "error", 2: "error"}
    assert isinstance(link.sent[-1][0], BatchTokenIDOutput)
    assert link.sent[-1][0].finished_reasons[0].status == 503


@pytest.mark.parametrize("seed", range(3))
def test_a_request_without_a_seed_gets_its_own(seed: int) -> None:
    link = run([[generate(1, seed=None), generate(2, seed=None)]], seed=seed)
    first, second = (b"".join(batch.decode_ids[i] for batch, _ in link.sent) for i in (0, 1))
    assert first != second
