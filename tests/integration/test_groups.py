"""Groups of ranks as one server: start, serve, die, leave nothing behind."""

from __future__ import annotations

import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.integration.layouts import save_tiny
from tests.unit.tiny_models import VOCABULARY

pytestmark = pytest.mark.timeout(300)
LEADER, FOLLOWER = "servekit::scheduler[dp=0,pp=0,tp=0]", "servekit::scheduler[dp=0,pp=0,tp=1]"
GONE_S = 5.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "m", "qwen3")


def ids(server, prompt: list[int], rank: int | None = None, **params: object) -> list[int]:
    sampling = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True, **params}
    body = {"input_ids": prompt, "sampling_params": sampling, "data_parallel_rank": rank}
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["output_ids"]


def test_eight_mock_ranks_start_idle_and_go(start, until):
    server = start("--tp", "2", "--pp", "2", "--dp", "2")
    titles = {f"servekit::scheduler[dp={d},pp={p},tp={t}]" for d in range(2) for p in range(2) for t in range(2)}
    ranks = {title: each for title, each in server.processes().items() if title in titles}
    assert set(ranks) == titles
    assert server.complete().json()["usage"]["completion_tokens"] == 8
    assert httpx.get(f"{server.url}/ready", timeout=5).status_code == 200
    before, began = sum(sum(each.cpu_times()[:2]) for each in ranks.values()), time.monotonic()
    time.sleep(2.0)
    used = sum(sum(each.cpu_times()[:2]) for each in ranks.values()) - before
    assert used / (time.monotonic() - began) < 0.03
    assert server.stop() == 0
    until(server.gone, GONE_S)
    assert server.traces() == []


def test_a_group_gives_the_tokens_of_one_process_and_ends_in_order(start, until, model):
    prompts = [[5], [1, 2, 3], list(range(40))]
    alone = start(str(model), "--skip-tokenizer-init", engine="torch")
    expected = [ids(alone, prompt) for prompt in prompts]
    seeded = ids(alone, [7, 8], temperature=0.9, sampling_seed=3)
    alone.close()
    server = start(str(model), "--skip-tokenizer-init", "--tp", "2", "--pp", "2", engine="torch")
    assert [ids(server, prompt) for prompt in prompts] == expected
    assert ids(server, [7, 8], temperature=0.9, sampling_seed=3) == seeded
    assert server.stop() == 0
    until(server.gone, GONE_S)
    assert server.traces() == []


@pytest.mark.parametrize("layout", ["--tp 2 --dp 2", "--tp 4 --dp 2", "--tp 2 --pp 2 --dp 2"])
def test_attention_shared_out_by_sequences_gives_the_tokens_of_one_process(start, until, model, layout):
    source = random.Random(5)
    prompts = [[source.randrange(VOCABULARY) for _ in range(source.randint(1, 45))] for _ in range(24)]
    alone = start(str(model), "--skip-tokenizer-init", engine="torch")
    expected = [ids(alone, prompt) for prompt in prompts]
    alone.close()
    server = start(str(model), "--skip-tokenizer-init", "--enable-dp-attention", *layout.split(), engine="torch")
    # One rank alone with a request, then both, with requests of all sizes.
    assert [ids(server, prompt, rank=i % 2) for i, prompt in enumerate(prompts[:4])] == expected[:4]
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(lambda prompt: ids(server, prompt), prompts)) == expected
    ranks = server.state()["ranks"].values()
    assert len(ranks) == 2 and not any(rank["live"] or rank["pages_held"] for rank in ranks)
    assert all(rank["steps"] for rank in ranks)
    assert server.stop() == 0
    until(server.gone, GONE_S)
    assert server.traces() == []


@pytest.mark.parametrize("victim", [LEADER, FOLLOWER])
def test_a_group_does_not_outlive_any_of_its_ranks(start, stream, until, model, victim):
    server = start(str(model), "--tp", "2", engine="torch")
    streams = [stream(server, max_tokens=60, prompt="t1 t2", ignore_eos=True) for _ in range(2)]
    until(lambda: any(each.events for each in streams) or not all(each._thread.is_alive() for each in streams), 30)
    server.processes()[victim].send_signal(signal.SIGKILL)
    until(lambda: server.process.poll() is not None, GONE_S)
    assert server.process.returncode == 1
    until(server.gone, GONE_S)
    deaths = [line for line in server.text().splitlines() if "the server ends" in line]
    assert len(deaths) == 1 and victim in deaths[0] and "SIGKILL" in deaths[0]
    for each in streams:
        assert each.join(5.0)
        # It had ended before, or ends with the one event that says why.
        assert each.errors == 0 or each.ended_with_one_error()
    assert server.traces() == []


@pytest.mark.parametrize(
    ("layout", "victim"),
    [((), "servekit::scheduler[dp=1]"), (("--tp", "2"), "servekit::scheduler[dp=1,pp=0,tp=1]")],
)
def test_a_replica_dies_alone(start, stream, until, layout, victim):
    server = start("--dp", "2", "--mock-step-ms", "5", "--load-balance-method", "round_robin", *layout)
    streams = [stream(server, max_tokens=600, data_parallel_rank=i % 2) for i in range(16)]
    until(lambda: all(each.running() for each in streams), 30, server.text)
    killed = time.monotonic()
    server.processes()[victim].kill()
    theirs, others = streams[1::2], streams[::2]
    assert all(each.join(2.0 - (time.monotonic() - killed)) for each in theirs), server.text()
    assert all(each.ended_with_one_error() for each in theirs), [each.events[-3:] for each in theirs]
    until(lambda: not [title for title in server.processes() if "dp=1" in title], 2.0)
    # Nobody goes where the dead one was, and who names it is told.
    assert {server.complete().status_code for _ in range(4)} == {200}
    refused = server.complete(data_parallel_rank=1)
    assert refused.status_code == 503 and "rank 1 is not active" in refused.text
    assert httpx.get(f"{server.url}/ready", timeout=5).status_code == 200
    assert [rank["active"] for rank in server.state()["control"]["ranks"]] == [True, False]
    assert all(each.join(30) for each in others)
    assert all(each.events[-1] == "[DONE]" and '"finish_reason":"length"' in each.events[-2] for each in others)
    assert not any(each.errors for each in others)
    deaths = [line for line in server.text().splitlines() if " ERROR " in line]
    assert len(deaths) == 1 and victim in deaths[0] and "1 of 2 go on" in deaths[0]
    last = stream(server)
    until(last.running, 10)
    server.processes()[victim.replace("dp=1", "dp=0")].kill()
    until(lambda: server.process.poll() is not None, GONE_S)
    assert server.process.returncode == 1
    assert last.join(5.0) and last.ended_with_one_error()
    until(server.gone, GONE_S)
    assert server.traces() == []


def test_sizes_that_do_not_fit_the_model_end_the_start_with_those_that_do(start, until, model):
    server = start(str(model), "--tp", "3", engine="torch", wait=False)
    until(lambda: server.process.poll() is not None, 60)
    assert server.process.returncode == 1
    assert (
        "error: --tensor-parallel-size 3 does not fit the model, whose 4 attention heads are split 3 ways: "
        "it can be 1 or 2 or 4"
    ) in server.text()
    until(server.gone, GONE_S)
