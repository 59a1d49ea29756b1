"""The black-box suite in `tests/acceptance/` against the demo model, with one and with two of everything."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.integration.conftest import Server

SUITE = Path(__file__).parents[1] / "acceptance"
REQUIRED = "tokenize,echo,ignore_eos,metrics,max_model_len,stop_token_ids,token counter,special tokens in tokenize"
WORKERS = ["--tokenizer-workers", "2"]
RANKS = ["--data-parallel-size", "2"]
SETTINGS = {
    "one of each": [],
    "2 workers and detokenizers": [*WORKERS, "--detokenizer-workers", "2"],
    "2 ranks": RANKS,
    "2 workers and ranks": [*WORKERS, *RANKS],
}
FILES = ["open_api.py", "open_errors.py", "open_sampling.py", "open_features.py", "open_issues.py", "open_load.py"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3900)]


def run_suite(report: Path, files: list[str], seconds: float, **settings: str) -> dict[str, str]:
    """How each case ended: passed or skipped. Fails where one failed."""
    command = [sys.executable, "-m", "pytest", f"--junitxml={report}", *files]
    environment = {**os.environ, **{f"SERVEKIT_{name.upper()}": value for name, value in settings.items()}}
    done = subprocess.run(command, cwd=SUITE, env=environment, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    cases = ElementTree.parse(report).iter("testcase")
    return {str(case.get("name")): "passed" if case.find("skipped") is None else "skipped" for case in cases}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, str]]:
    """How the cases ended in each setting that has run."""
    return {}


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_case(
    start: Callable[..., Server], tmp_path: Path, outcomes: dict[str, dict[str, str]], setting: str
) -> None:
    """Every case passes, and those that find no ground to test on are the same in each setting."""
    server = start(*SETTINGS[setting], engine="torch")
    outcomes[setting] = run_suite(tmp_path / "report.xml", FILES, 3600, url=server.url, require=REQUIRED)
    assert outcomes[setting] == next(iter(outcomes.values()))


def test_processes(tmp_path: Path) -> None:
    command = f"{sys.executable} -P -m servekit.cli.serve --port {{port}}"
    found = run_suite(
        tmp_path / "report.xml",
        ["open_process.py"],
        1400,
        cmd=f"{command} --engine mock",
        cmd_badmodel=f"{command} /nowhere/at-all",
        args_key="--api-key {key}",
        args_workers="--tokenizer-workers 2",
        args_dp="--data-parallel-size 2",
        require="SERVEKIT_CMD,SERVEKIT_ARGS_KEY,SERVEKIT_ARGS_DP,SERVEKIT_CMD_BADMODEL,child processes",
    )
    assert set(found.values()) == {"passed"}
