"""Every number of workers, detokenizers and ranks serves the same, and the work really spreads."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

PROMPTS = ["The capital of France is", "Zähle bis drei: ", "日本語の文章", "x" * 300]


def answers(server, count: int = 64) -> list[tuple]:
    """Text and usage of many requests at once, in order; every third is not streamed."""
    import json

    def ask(i: int) -> tuple:
        body = {"model": "x", "prompt": PROMPTS[i % len(PROMPTS)], "max_tokens": 20 + i % 30, "stop": None}
        if i % 3 == 0:
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
            return answer["choices"][0]["text"], answer["choices"][0]["finish_reason"], answer["usage"]
        text, reason, usage = "", None, None
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                for choice in event["choices"]:
                    text += choice["text"]
                    reason = choice["finish_reason"] or reason
                usage = event.get("usage") or usage
        return text, reason, usage

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(ask, range(count)))


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> dict:
    """Filled by the first setting that runs; all others must agree."""
    return {}


@pytest.mark.parametrize(
    ("workers", "detokenizers", "ranks"),
    [
        (1, 1, 1),
        (2, 2, 2),
        (1, 3, 2),
        pytest.param(3, 1, 1, marks=pytest.mark.slow),
        pytest.param(1, 1, 3, marks=pytest.mark.slow),
        pytest.param(4, 4, 4, marks=pytest.mark.slow),
    ],
)
def test_every_topology_answers_the_same(start, expected, workers, detokenizers, ranks):
    server = start(
        "--tokenizer-workers",
        str(workers),
        "--detokenizer-workers",
        str(detokenizers),
        "--data-parallel-size",
        str(ranks),
    )
    titles = {"servekit::main", "servekit::control"}
    titles |= {f"servekit::http[{i}]" for i in range(workers)} | {f"servekit::scheduler[dp={i}]" for i in range(ranks)}
    assert set(server.processes()) == titles
    threads = thread_names(server.processes()["servekit::control"].pid)
    assert threads["router"] == threads["fanout"] == 1
    assert sum(count for name, count in threads.items() if name.startswith("detok-")) == detokenizers - 1
    got = answers(server)
    assert expected.setdefault("answers", got) == got
    page = server.state()["state_page"]
    served = [worker["requests"] for worker in page["workers"]]
    dispatched = [rank["dispatched"] for rank in page["ranks"]]
    assert sum(served) >= 64 and min(served) > 0, served
    assert sum(dispatched) == sum(served) and max(dispatched) - min(dispatched) <= 1, dispatched
    assert server.stop() == 0
    assert server.traces() == []


def thread_names(pid: int) -> Counter:
    """Names of a process's threads, as `top -H` shows them."""
    from pathlib import Path

    return Counter(path.read_text().strip() for path in Path(f"/proc/{pid}/task").glob("*/comm"))


def test_a_rank_can_be_chosen(start):
    server = start("--data-parallel-size", "3")
    for rank in (2, 2, 0):
        assert server.complete(data_parallel_rank=rank).status_code == 200
    header = {"x-data-parallel-rank": "1"}
    body = {"model": "x", "prompt": "x", "max_tokens": 2}
    assert httpx.post(f"{server.url}/v1/completions", json=body, headers=header, timeout=10).status_code == 200
    assert [rank["dispatched"] for rank in server.state()["state_page"]["ranks"]] == [1, 1, 2]
    assert server.complete(data_parallel_rank=3).status_code == 400


@pytest.mark.parametrize("method", ["total_requests", "total_tokens"])
def test_load_balancing_spreads_a_burst(start, method):
    server = start("--data-parallel-size", "2", "--load-balance-method", method, "--mock-step-ms", "5")
    with ThreadPoolExecutor(40) as pool:
        done = list(pool.map(lambda i: server.complete(max_tokens=40).status_code, range(40)))
    assert set(done) == {200}
    dispatched = [rank["dispatched"] for rank in server.state()["state_page"]["ranks"]]
    assert sum(dispatched) == 40 and min(dispatched) >= 15, dispatched


def test_two_servers_live_side_by_side(start):
    one, two = start(), start()
    assert one.complete().status_code == two.complete().status_code == 200
    assert one.stop() == 0
    assert two.complete().status_code == 200


def test_ipv6(start):
    server = start("--host", "::1", wait=False)
    import re
    import time

    deadline = time.monotonic() + 20
    while (found := re.search(r"http://\[::1\]:(\d+)/", server.output.read_text())) is None:
        assert time.monotonic() < deadline and server.process.poll() is None, server.text()
        time.sleep(0.01)
    assert httpx.get(f"http://[::1]:{found[1]}/health", timeout=5).status_code == 200
