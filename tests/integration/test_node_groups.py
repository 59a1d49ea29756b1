"""Groups of ranks that lie on two nodes give the tokens of one process, and die as one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer, models

from tests.unit.tiny_models import VOCABULARY, save_case

pytestmark = pytest.mark.timeout(300)
PROMPTS = [[5], [1, 2, 3], list(range(40))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_case(tmp_path_factory.mktemp("model") / "m", "qwen3")
    words = {f"t{i}": i for i in range(VOCABULARY)}
    Tokenizer(models.WordLevel(words, unk_token="t0")).save(str(folder / "tokenizer.json"))
    return folder


def ids(server, prompt: list[int], **params: object) -> list[int]:
    sampling = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True, **params}
    answer = httpx.post(f"{server.url}/generate", json={"input_ids": prompt, "sampling_params": sampling}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["output_ids"]


@pytest.fixture(scope="module")
def expected() -> dict:
    return {}


LAYOUTS = [
    "--tp 2",
    pytest.param("--pp 2", marks=pytest.mark.slow),
    pytest.param("--tp 2 --pp 2", marks=pytest.mark.slow),
    pytest.param("--tp 4 --dp 2 --enable-dp-attention", marks=pytest.mark.slow),
    pytest.param("--tp 2 --pp 2 --dp 2", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_group_over_two_nodes_gives_the_tokens_of_one_process(start, nodes, model, expected, layout):
    flags = [str(model), "--skip-tokenizer-init"]
    if not expected:
        alone = start(*flags, engine="torch")
        expected["greedy"] = [ids(alone, prompt) for prompt in PROMPTS]
        expected["seeded"] = ids(alone, [7, 8], temperature=0.9, sampling_seed=3)
        alone.close()
    two = nodes()
    head, other = two.both(*flags, *layout.split(), engine="torch", replicas=False)
    assert [ids(head, prompt) for prompt in PROMPTS] == expected["greedy"]
    assert ids(head, [7, 8], temperature=0.9, sampling_seed=3) == expected["seeded"]
    assert head.stop() == 0
    assert other.process.wait(10) == 0
    two.left(head, other)


@pytest.mark.slow
@pytest.mark.parametrize("node", [0, 1])
def test_the_only_group_dies_with_a_rank_on_either_node(nodes, until, stream, model, node):
    two = nodes()
    both = two.both(str(model), "--skip-tokenizer-init", "--tp", "2", engine="torch", replicas=False)
    title = f"servekit::scheduler[dp=0,pp=0,tp={node}]"
    os.kill(both[node].processes()[title].pid, signal.SIGKILL)
    for each in both:
        assert each.process.wait(15) == 1
    assert "the server ends" in both[0].text()
    two.left(*both)
