"""Logprobs through scheduler and runner against log_softmax of a model that knows neither."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from servekit.engine import logprobs as module
from servekit.engine.torch_runner import TorchRunner, load_torch_runner
from servekit.messages.batches import BatchTokenIDOutput
from servekit.messages.requests import SamplingParams, TokenizedGenerateReqInput
from servekit.scheduler.scheduler import Scheduler, SchedulerConfig

from tests.unit.llama_reference import CONFIG, reference, save_folder, tensors

VOCAB, PAGE = CONFIG["vocab_size"], 4
WEIGHTS = tensors(CONFIG)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> TorchRunner:
    folder = save_folder(tmp_path_factory.mktemp("model") / "m", CONFIG, WEIGHTS)
    return load_torch_runner(
        folder,
        device="cpu",
        dtype="float32",
        ranks=1,
        rank=0,
        page=PAGE,
        max_model_len=128,
        max_total_tokens=64 * PAGE,
        progress=lambda done, total: None,
    )


def ask(rid: int, prompt: list[int], logprobs: dict[str, Any] | None = None, **params: Any) -> Any:
    sampling = SamplingParams(**{"max_new_tokens": 5, "temperature": 0.0, "ignore_eos": True, "seed": rid, **params})
    wishes = {} if logprobs is None else {"return_logprob": True, **logprobs}
    return TokenizedGenerateReqInput(rid, np.array(prompt, "<u4").tobytes(), sampling, **wishes)


class Answers:
    """Everything that came out, joined as the detokenizer joins it."""

    def __init__(self) -> None:
        self.ids: dict[int, list[int]] = {}
        self.columns: dict[int, dict[str, Any]] = {}
        self.retractions: dict[int, int] = {}

    def take(self, batch: BatchTokenIDOutput) -> None:
        for row, rid in enumerate(batch.rids):
            new = np.frombuffer((batch.decode_ids or [])[row], "<u4").tolist()
            self.ids.setdefault(rid, []).extend(new)
            if batch.retraction_counts:
                self.retractions[rid] = batch.retraction_counts[row]
            found = self.columns.setdefault(rid, {})
            for name in BatchTokenIDOutput.__struct_fields__:
                column = getattr(batch, name)
                if "logprobs" not in name or column is None or row >= len(column) or column[row] is None:
                    continue
                value = column[row]
                if name.startswith("input"):
                    assert name not in found, "the prompt's logprobs came twice"
                    found[name] = value
                    continue
                assert len(value) == (len(new) if isinstance(value, list) else 4 * len(new))
                found[name] = found[name] + value if name in found else value


def scheduler_of(pages: int = 60, chunk: int = 64) -> Scheduler:
    return Scheduler(SchedulerConfig(8, 64, chunk, chunk, PAGE, pages, 128, VOCAB, ()))


def generate(
    runner: TorchRunner, bodies: list[Any], *, pages: int = 60, chunk: int = 64, scheduler: Scheduler | None = None
) -> Answers:
    scheduler = scheduler or scheduler_of(pages, chunk)
    for body in bodies:
        scheduler.add(body.rid, body)
    answers = Answers()
    while (step := scheduler.plan()) is not None:
        scheduler.complete(step, runner.collect(runner.launch(step.plan)))
        if (batch := scheduler.take_batch()) is not None:
            answers.take(batch)
    assert scheduler.state()["live"] == 0
    return answers


def floats(data: bytes) -> np.ndarray:
    return np.frombuffer(data, "<f4")


def ints(data: bytes) -> list[int]:
    return np.frombuffer(data, "<u4").tolist()


def check(columns: dict[str, Any], side: str, ids: list[int], at: range, top: int, given: list[int]) -> None:
    """Columns of one side tell of the tokens `ids[at]`."""
    logprobs = torch.log_softmax(reference(CONFIG, WEIGHTS, ids), -1)
    values = floats(columns[f"{side}_token_logprobs_val"])
    assert ints(columns[f"{side}_token_logprobs_idx"]) == [ids[i] for i in at]
    assert len(values) == len(at)
    for name, wanted in (("top_logprobs", top), ("token_ids_logprobs", len(given))):
        for kind in ("val", "idx"):
            column = columns.get(f"{side}_{name}_{kind}")
            assert (column is None) == (wanted == 0)
            if column is not None:
                assert [len(item) for item in column] == [4 * wanted if i else 0 for i in at]
    for place, i in enumerate(at):
        if i == 0:
            assert math.isnan(values[place])
            continue
        expected = logprobs[i - 1]
        assert values[place] == pytest.approx(expected[ids[i]].item(), abs=1e-4)
        if top:
            best = expected.topk(top)
            found = floats(columns[f"{side}_top_logprobs_val"][place])
            assert np.allclose(found, best.values.numpy(), atol=1e-4)
            assert ints(columns[f"{side}_top_logprobs_idx"][place]) == best.indices.tolist()
        if given:
            found = floats(columns[f"{side}_token_ids_logprobs_val"][place])
            assert np.allclose(found, expected[given].numpy(), atol=1e-4)
            assert ints(columns[f"{side}_token_ids_logprobs_idx"][place]) == given


def prompt(n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, n).tolist()


CASES = {
    1: (prompt(9, 1), 0, 3, [7, 50]),
    2: (prompt(30, 2), 4, 0, []),
    3: (prompt(1, 3), 0, 20, [0]),
    4: (prompt(17, 4), -1, 2, []),
    5: (prompt(12, 5), 12, 1, []),
    6: (prompt(25, 6), 24, 0, [VOCAB - 1]),
    7: (prompt(25, 7), 1, 5, []),
}


@pytest.mark.parametrize("chunk", [64, 7, 1])
@pytest.mark.parametrize("block", [128, 3])
def test_logprobs_of_prompts_and_outputs(
    runner: TorchRunner, monkeypatch: pytest.MonkeyPatch, chunk: int, block: int
) -> None:
    monkeypatch.setattr(module, "_BLOCK", block)
    bodies = [
        ask(rid, ids, {"logprob_start_len": start, "top_logprobs_num": top, "token_ids_logprob": given or None})
        for rid, (ids, start, top, given) in CASES.items()
    ]
    # One that asks for nothing, in the midst of them.
    bodies.insert(2, ask(99, prompt(20, 8)))
    answers = generate(runner, bodies, chunk=chunk)
    assert answers.columns[99] == {}
    for rid, (ids, start, top, given) in CASES.items():
        everything = ids + answers.ids[rid]
        check(answers.columns[rid], "output", everything, range(len(ids), len(everything)), top, given)
        if 0 <= start < len(ids):
            check(answers.columns[rid], "input", everything, range(start, len(ids)), top, given)
        else:
            assert not any(name.startswith("input") for name in answers.columns[rid])


def test_they_are_of_the_untouched_logits_however_a_token_is_drawn(runner: TorchRunner) -> None:
    ids = prompt(10, 11)
    wish = {"top_logprobs_num": 4}
    body = ask(1, ids, wish, temperature=1.7, top_k=30, presence_penalty=1.5, repetition_penalty=1.4, seed=5)
    other = ask(2, ids, wish, logit_bias={3: 50.0})
    answers = generate(runner, [body, other])
    assert answers.ids[2] == [3] * 5
    for rid in (1, 2):
        everything = ids + answers.ids[rid]
        check(answers.columns[rid], "output", everything, range(len(ids), len(everything)), 4, [])


def test_a_retracted_request_tells_everything_once(runner: TorchRunner) -> None:
    wish = {"logprob_start_len": 0, "top_logprobs_num": 2}
    bodies = [ask(rid, prompt(9, rid), wish, max_new_tokens=20) for rid in range(4)]
    answers = generate(runner, bodies, pages=14, chunk=5)
    assert max(answers.retractions.values()) > 0
    for rid in range(4):
        everything = prompt(9, rid) + answers.ids[rid]
        assert len(answers.ids[rid]) == 20
        check(answers.columns[rid], "input", everything, range(9), 2, [])
        check(answers.columns[rid], "output", everything, range(9, 29), 2, [])


def test_a_resumed_request_goes_on_as_if_nothing_had_happened(runner: TorchRunner) -> None:
    asks: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.1, "top_p": 0.9},
        {"temperature": 0.9, "presence_penalty": 0.8, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
        {"temperature": 0.0, "repetition_penalty": 1.5, "min_new_tokens": 8, "logit_bias": {5: 2.0}},
    ]
    wish = {"logprob_start_len": 0, "top_logprobs_num": 1}
    bodies = [ask(rid, prompt(6 + rid, rid), wish, max_new_tokens=12, **params) for rid, params in enumerate(asks)]
    whole = generate(runner, bodies)
    for done in (1, 5, 11):
        for rid, body in enumerate(bodies):
            body.resume_output_ids = np.array(whole.ids[rid][:done], "<u4").tobytes()
        rest = generate(runner, bodies)
        for rid in range(len(asks)):
            assert rest.ids[rid] == whole.ids[rid][done:], asks[rid]
            columns = rest.columns[rid]
            assert not any(name.startswith("input") for name in columns)
            values = floats(whole.columns[rid]["output_token_logprobs_val"])[done:]
            assert np.allclose(floats(columns["output_token_logprobs_val"]), values, atol=1e-4)


@pytest.mark.parametrize("chunk", [64, 9])
def test_a_cached_prefix_changes_nothing(runner: TorchRunner, chunk: int) -> None:
    """Computed in this very step, by an earlier request, or not cached at all: same tokens, same logprobs."""
    stem, wish = prompt(22, 1), {"top_logprobs_num": 3}
    bodies = [ask(rid, stem[: 22 - rid] + prompt(5, rid), wish, max_new_tokens=8, temperature=0.7) for rid in range(6)]
    bodies.append(ask(6, stem + prompt(5, 0) + prompt(3, 9), {"logprob_start_len": 18, **wish}))
    scheduler = scheduler_of(chunk=chunk)
    once = generate(runner, bodies, scheduler=scheduler)
    assert scheduler.state()["pages_cached"] > 10
    again = generate(runner, bodies, scheduler=scheduler)
    for body in bodies:
        everything = np.frombuffer(body.input_ids, "<u4").tolist() + once.ids[body.rid]
        assert again.ids[body.rid] == once.ids[body.rid] == generate(runner, [body]).ids[body.rid]
        at = range(len(everything) - len(once.ids[body.rid]), len(everything))
        for answers in (once, again):
            check(answers.columns[body.rid], "output", everything, at, 3, [])
    assert "input_token_logprobs_val" in again.columns[6]
    check(again.columns[6], "input", everything, range(18, 30), 3, [])


def test_penalties_count_through_scheduler_and_retraction(runner: TorchRunner) -> None:
    """Greedy with penalties is what a plain loop over the reference gives."""
    asks = {
        1: {"repetition_penalty": 1.3},
        2: {"presence_penalty": 2.0},
        3: {"frequency_penalty": 0.7, "presence_penalty": -0.2},
        4: {"repetition_penalty": 0.8, "frequency_penalty": 1.0, "logit_bias": {9: -2.5, 17: 1.5}},
    }
    bodies = [ask(rid, prompt(9, rid), max_new_tokens=15, **params) for rid, params in asks.items()]
    roomy, tight = generate(runner, bodies), generate(runner, bodies, pages=13, chunk=5)
    assert max(tight.retractions.values()) > 0
    assert tight.ids == roomy.ids
    for rid, params in asks.items():
        ids = prompt(9, rid)
        for token in roomy.ids[rid]:
            logits = reference(CONFIG, WEIGHTS, ids)[-1]
            drawn = torch.bincount(torch.tensor(ids[9:], dtype=torch.int64), minlength=VOCAB).double()
            seen = torch.zeros(VOCAB, dtype=torch.bool)
            seen[ids] = True
            repetition = params.get("repetition_penalty", 1.0)
            logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
            logits -= params.get("frequency_penalty", 0) * drawn + params.get("presence_penalty", 0) * (drawn > 0)
            for biased, value in params.get("logit_bias", {}).items():
                logits[biased] += value
            assert logits[token] >= logits.max() - 1e-4
            ids.append(token)


@pytest.mark.parametrize(
    "broken",
    [
        {"top_logprobs_num": 21},
        {"top_logprobs_num": -1},
        {"logprob_start_len": 4},
        {"logprob_start_len": -2},
        {"token_ids_logprob": [VOCAB]},
        {"token_ids_logprob": [1] * 1025},
    ],
    ids=str,
)
def test_a_wish_that_can_not_be_met_is_refused(broken: dict[str, Any]) -> None:
    scheduler = Scheduler(SchedulerConfig(8, 64, 64, 64, PAGE, 60, 128, VOCAB, ()))
    scheduler.add(1, ask(1, [1, 2, 3], broken))
    batch = scheduler.take_batch()
    assert batch is not None and batch.finished_reasons is not None
    reason = batch.finished_reasons[0]
    assert reason is not None and (reason.type, reason.status) == ("error", 400)
    assert scheduler.plan() is None
