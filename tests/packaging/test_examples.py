"""Every example runs and shows something: some against a server, those of the library alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.packaging.conftest import REPOSITORY

pytestmark = pytest.mark.timeout(1300)

EXAMPLES = REPOSITORY / "examples"


@pytest.fixture(scope="module")
def url(start: Callable[..., Any], demo_model: None) -> Iterator[str]:
    with start("--engine", "mock", "--data-parallel-size", "2") as server:
        yield server.url


def show(name: str, *arguments: str) -> str:
    file = EXAMPLES / name
    command = ["sh", str(file)] if file.suffix == ".sh" else [sys.executable, str(file)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_openai_client(output: str) -> None:
    assert "32 out)" in output


def check_many_streams(output: str) -> None:
    lines = output.splitlines()
    assert len(lines) == 16
    assert all(": 24 tokens in " in line for line in lines)


def check_curl_stream(output: str) -> None:
    events = [line.removeprefix("data: ") for line in output.splitlines() if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["usage"]["completion_tokens"] == 32


def check_token_ids(output: str) -> None:
    assert output.startswith("[504, 808, 3772, 9552, 2966, 359]")


def check_balance_requests(output: str) -> None:
    # The long prompts go to three ranks, and the short ones to those with less to do.
    chosen, done, answers = output.splitlines()
    assert chosen == "chosen [0, 1, 2, 1, 2, 1, 1, 2, 2, 2, 2, 2] tokens [900, 560, 420]"
    assert done == "rank 0 is done, tokens [0, 560, 420]"
    assert answers == "answers of each rank [4, 4, 4]"


def check_split_batch(output: str) -> None:
    assert output.splitlines() == [
        "one row ['piece 4']",
        "one field [4]",
        "worker 0 ['piece 0', 'piece 3', 'piece 6']",
        "worker 1 ['piece 1', 'piece 4', 'piece 7']",
        "worker 2 ['piece 2', 'piece 5']",
    ]


def check_detokenize_stream(output: str) -> None:
    lines = output.splitlines()
    assert lines[-1] == "Grüße, 日本 😀! "
    assert "\ufffd" not in output and "type='stop', matched='END'" in lines[-2]


SERVED = {
    "openai_client.py": check_openai_client,
    "many_streams.py": check_many_streams,
    "curl_stream.sh": check_curl_stream,
    "token_ids.py": check_token_ids,
}


ALONE = {
    "balance_requests.py": check_balance_requests,
    "split_batch.py": check_split_batch,
    "detokenize_stream.py": check_detokenize_stream,
}


def test_every_example_is_checked() -> None:
    assert SERVED.keys() | ALONE.keys() == {file.name for file in Path(EXAMPLES).iterdir() if file.is_file()}


@pytest.mark.parametrize("name", SERVED)
def test_example(url: str, name: str) -> None:
    SERVED[name](show(name, url))


@pytest.mark.parametrize("name", ALONE)
def test_example_of_the_library(name: str) -> None:
    ALONE[name](show(name))
