"""Every example runs against a server and shows something."""

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


def show(url: str, name: str) -> str:
    file = EXAMPLES / name
    command = ["sh", str(file)] if file.suffix == ".sh" else [sys.executable, str(file)]
    done = subprocess.run([*command, url], capture_output=True, text=True, timeout=60)
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


CHECKS = {
    "openai_client.py": check_openai_client,
    "many_streams.py": check_many_streams,
    "curl_stream.sh": check_curl_stream,
    "token_ids.py": check_token_ids,
}


def test_every_example_is_checked() -> None:
    assert set(CHECKS) == {file.name for file in Path(EXAMPLES).iterdir() if file.is_file()}


@pytest.mark.parametrize("name", CHECKS)
def test_example(url: str, name: str) -> None:
    CHECKS[name](show(url, name))
