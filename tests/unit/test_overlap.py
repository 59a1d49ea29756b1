"""Steps that are planned while others are computed bring the tokens of steps that wait for each other."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from servekit.messages.envelope import Envelope, Kind
from servekit.messages.requests import AbortReq, SamplingParams, TokenizedGenerateReqInput
from servekit.scheduler.rank import TorchRank
from servekit.scheduler.scheduler import Scheduler

from tests.unit.late_device import HashModel, LateDevice
from tests.unit.scheduler_world import VOCAB, check_pages, config

Delivery = list[tuple[Envelope, Any]]


class Link:
    """Brings one delivery a turn and gathers, by request, what was told of it."""

    def __init__(self, deliveries: Iterable[Delivery]) -> None:
        self._deliveries = list(deliveries)[::-1]
        self.last_dispatch = 0
        self.stop = threading.Event()
        self.told: dict[int, dict[str, list[Any]]] = {}
        self.ends: dict[int, tuple[str, Any]] = {}
        self.phases: list[tuple[str, int | None]] = []

    def receive(self, timeout_s: float | None) -> Delivery:
        if self._deliveries:
            return self._deliveries.pop()
        if timeout_s is None:
            self.stop.set()
        return []

    def enter(self, phase: str, step: int | None = None) -> None:
        self.phases.append((phase, step))

    def send_batch(self, batch: Any, load: Any) -> None:
        for i, rid in enumerate(batch.rids):
            assert rid not in self.ends
            mine = self.told.setdefault(rid, {})
            for name in ("decode_ids", *(f for f in batch.__struct_fields__ if "logprobs" in f)):
                column = getattr(batch, name)
                if column is not None and i < len(column) and column[i] is not None:
                    mine.setdefault(name, []).append(column[i])
            mine.setdefault("generated", []).append(batch.completion_tokens[i])
            reason = batch.finished_reasons[i] if batch.finished_reasons else None
            if reason is not None:
                self.ends[rid] = (reason.type, reason.matched)


def request(rid: int, prompt: list[int], fields: dict[str, Any] | None = None, **params: Any) -> tuple[Envelope, Any]:
    sampling = SamplingParams(**{"max_new_tokens": 12, "seed": rid, **params})
    body = TokenizedGenerateReqInput(rid, np.array(prompt, "<u4").tobytes(), sampling, **(fields or {}))
    return Envelope(Kind.GENERATE, rid, dispatch=rid), body


def serve(deliveries: list[Delivery], ahead: int, **sizes: Any) -> tuple[Link, Scheduler, LateDevice]:
    settings, link = config(**sizes), Link(deliveries)
    model = HashModel(settings.pages, settings.page, VOCAB)
    device = LateDevice(model, ahead, lambda: check_pages(rank._scheduler))
    rank = TorchRank(device, settings, rank=0, epoch=1)
    rank.run(link, link.stop.is_set)  # type: ignore[arg-type]
    check_pages(rank._scheduler)
    state = rank._scheduler.state()
    assert (state["live"], state["running"], state["pages_held"]) == (0, 0, 0)
    return link, rank._scheduler, device


SITUATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a pool that is too small": {"pages": 18},
    "one slot": {"max_running": 1},
    "small chunks": {"chunked_prefill_size": 3, "max_prefill_tokens": 7},
    "urgency": {"policy": "priority", "pages": 30, "max_running": 3},
    "no cache": {"prefix_cache": False, "pages": 30},
}


def crowd(seed: int, *, penalties: bool) -> list[Delivery]:
    """Requests of every kind, some alike, that come in bursts."""
    rng = np.random.default_rng(seed)
    deliveries: list[Delivery] = []
    common = rng.integers(6, VOCAB, 20).tolist()
    for rid in range(1, 25):
        prompt = common[: int(rng.integers(0, 20))] + rng.integers(6, VOCAB, int(rng.integers(1, 20))).tolist()
        params: dict[str, Any] = {"temperature": float(rng.choice([0.0, 0.7, 1.5]))}
        params["max_new_tokens"] = int(rng.choice([1, 2, 9, 30]))
        params["ignore_eos"] = bool(rng.integers(2))
        if rng.integers(3) == 0:
            params["stop_token_ids"] = rng.integers(0, VOCAB, 8).tolist()
            params["min_new_tokens"] = int(rng.integers(0, 2) and params["max_new_tokens"] // 2)
        if rng.integers(4) == 0:
            params |= {"top_p": 0.8, "top_k": 20, "min_p": 0.01}
        if rng.integers(4) == 0:
            params["logit_bias"] = {int(rng.integers(VOCAB)): 4.0}
        if penalties and rng.integers(2):
            params |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4}
        fields: dict[str, Any] = {"priority": int(rng.integers(3))}
        if rng.integers(3) == 0:
            fields |= {"return_logprob": True, "top_logprobs_num": 3, "logprob_start_len": int(rng.integers(-1, 1))}
        if rng.integers(6) == 0:
            fields["resume_output_ids"] = np.array([7, 8], "<u4").tobytes()
        if rng.integers(2) or not deliveries:
            deliveries.append([])
        deliveries[-1].append(request(rid, prompt, fields, **params))
        deliveries += [[] for _ in range(int(rng.integers(3)))]
    return deliveries


@pytest.mark.parametrize("penalties", [False, True])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_tokens_are_those_of_steps_that_wait(situation: str, penalties: bool) -> None:
    for seed in range(2):
        waiting, _, device = serve(crowd(seed, penalties=penalties), 0, **SITUATIONS[situation])
        assert device.most == 1
        late, scheduler, device = serve(crowd(seed, penalties=penalties), 1, **SITUATIONS[situation])
        assert device.most == 2
        assert late.told == waiting.told
        assert late.ends == waiting.ends
        assert len(late.ends) == 24
        if situation == "a pool that is too small":
            assert scheduler.retractions


@pytest.mark.parametrize("ahead", [1, 2])
def test_who_is_aborted_has_the_first_of_its_tokens_and_the_others_have_all(ahead: int) -> None:
    rng = np.random.default_rng(7)
    for seed in range(3):
        deliveries = crowd(seed, penalties=seed % 2 == 1)
        gone = set(rng.choice(np.arange(1, 25), 8, replace=False).tolist())
        waiting, *_ = serve(deliveries, 0, pages=30)
        came = {envelope.id: turn for turn, delivery in enumerate(deliveries) for envelope, _ in delivery}
        longer = [[*delivery] for delivery in deliveries] + [[] for _ in range(12)]
        for rid in gone:
            abort = Envelope(Kind.ABORT, rid), AbortReq(rid)
            longer[came[rid] + int(rng.integers(0, 12))].append(abort)
        late, *_ = serve(longer, ahead, pages=30)
        assert len(late.ends) == 24
        for rid, told in waiting.told.items():
            mine = b"".join(late.told[rid]["decode_ids"])
            assert b"".join(told["decode_ids"]).startswith(mine)
            if late.ends[rid][0] != "abort":
                assert (late.told[rid], late.ends[rid]) == (told, waiting.ends[rid])
            else:
                assert rid in gone


def test_a_step_that_needs_a_token_is_not_planned_before_it_is_known() -> None:
    deliveries = [[request(1, [6, 7, 8], frequency_penalty=0.5, ignore_eos=True), request(2, [9], ignore_eos=True)]]
    assert serve(deliveries, 1)[2].most == 1


@pytest.mark.parametrize(("ahead", "phases"), [(0, "1w2w3w"), (1, "12w3ww")])
def test_who_watches_sees_which_step_is_computed(ahead: int, phases: str) -> None:
    link, *_ = serve([[request(1, [6, 7, 8], max_new_tokens=3, ignore_eos=True)]], ahead)
    assert "".join("w" if step is None else str(step) for _, step in link.phases) == phases
    assert {phase for phase, step in link.phases if step is not None} == {"computing"}
