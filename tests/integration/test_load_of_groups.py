"""Every layout under load: the tokens of one process, clients that leave at any moment, and no page lost."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.integration.layouts import LAYOUTS, save_tiny
from tests.unit.tiny_models import VOCABULARY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
CONTEXT = 64
STREAMS = 32


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {case: save_tiny(folder / case, case, CONTEXT) for case in {layout.case for layout in LAYOUTS.values()}}


@pytest.fixture(scope="module")
def expected() -> dict[str, list[list[int]]]:
    """What one process makes of the prompts of each model, filled by the first test that asks."""
    return {}


def prompts() -> list[list[int]]:
    source = random.Random(11)
    # One token, and all but one that the context holds.
    lengths = [1, CONTEXT - 1, *(source.randint(1, CONTEXT - 10) for _ in range(STREAMS - 2))]
    return [[source.randrange(VOCABULARY) for _ in range(length)] for length in lengths]


def generate(server, seed: int) -> list[int]:
    """Ids of one of the prompts; every third is sampled."""
    prompt = prompts()[seed]
    sampling = {"max_new_tokens": 12, "temperature": 0.8 if seed % 3 == 2 else 0, "sampling_seed": seed}
    body = {"input_ids": prompt, "sampling_params": {**sampling, "ignore_eos": True}}
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()["output_ids"]


def all_at_once(server) -> list[list[int]]:
    with ThreadPoolExecutor(STREAMS) as pool:
        return list(pool.map(lambda seed: generate(server, seed), range(STREAMS)))


def leave(server, seed: int) -> None:
    """Ask for a stream, read for a moment, and go."""
    source = random.Random(seed)
    sampling = {"max_new_tokens": 40, "ignore_eos": True}
    body = {"input_ids": prompts()[seed][:20], "sampling_params": sampling, "stream": True}
    until_s = time.monotonic() + source.uniform(0.0, 0.3)
    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=60) as answer:
        for _ in answer.iter_lines():
            if time.monotonic() > until_s:
                return


def free(server) -> dict[str, int]:
    """Free pages by data-parallel rank, once nothing is cached; its ranks all use the pages that its leader names."""
    assert httpx.post(f"{server.url}/flush_cache", timeout=30).status_code == 200
    return {name: rank["pages_free"] for name, rank in server.state()["ranks"].items()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_tokens_and_pages(start, until, models, expected, name):
    layout = LAYOUTS[name]
    model = str(models[layout.case])
    if layout.case not in expected:
        alone = start(model, "--skip-tokenizer-init", engine="torch")
        expected[layout.case] = all_at_once(alone)
        alone.close()
    server = start(model, "--skip-tokenizer-init", *layout.arguments, engine="torch")
    before = free(server)
    assert all_at_once(server) == expected[layout.case]
    clients = [threading.Thread(target=leave, args=(server, seed)) for seed in range(STREAMS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    until(lambda: not any(rank["live"] for rank in server.state()["ranks"].values()), 30)
    assert free(server) == before
    assert server.stop() == 0
    assert server.traces() == []
