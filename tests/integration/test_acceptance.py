"""The black-box suite in `tests/acceptance/` against the demo model, with one and with two of everything."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.conftest import Server

SUITE = Path(__file__).parents[1] / "acceptance"
TWO = ["--tokenizer-workers", "2", "--detokenizer-workers", "2", "--data-parallel-size", "2"]
REQUIRED = "tokenize,echo,ignore_eos,metrics,max_model_len,stop_token_ids,token counter,special tokens in tokenize"

pytestmark = pytest.mark.slow


def run_suite(files: list[str], seconds: float, **settings: str) -> None:
    command = [sys.executable, "-m", "pytest", *files]
    environment = {**os.environ, **{f"SERVEKIT_{name.upper()}": value for name, value in settings.items()}}
    done = subprocess.run(command, cwd=SUITE, env=environment, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("flags", [[], TWO], ids=["one of each", "two of each"])
def test_routes_and_errors(start: Callable[..., Server], flags: list[str]) -> None:
    server = start(*flags, engine="torch")
    run_suite(["open_api.py", "open_errors.py"], 1200, url=server.url, require=REQUIRED)


@pytest.mark.parametrize("flags", [[], TWO], ids=["one of each", "two of each"])
def test_sampling_features_and_load(start: Callable[..., Server], flags: list[str]) -> None:
    server = start(*flags, engine="torch")
    run_suite(
        ["open_sampling.py", "open_features.py", "open_issues.py", "open_load.py"],
        2400,
        url=server.url,
        require=REQUIRED,
    )


def test_processes() -> None:
    command = f"{sys.executable} -P -m servekit.cli.serve --port {{port}}"
    run_suite(
        ["open_process.py"],
        1400,
        cmd=f"{command} --engine mock",
        cmd_badmodel=f"{command} /nowhere/at-all",
        args_workers="--tokenizer-workers 2",
        args_dp="--data-parallel-size 2",
    )
