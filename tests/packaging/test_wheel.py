"""What a user gets from `pip install servekit`: the right files, a quick `--help`, and a server that answers."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.packaging.conftest import REPOSITORY, Installed

# The first test of this folder waits for the wheel, which takes minutes if nothing is built yet.
pytestmark = pytest.mark.timeout(1300)

SHOW_HEAVY_IMPORTS = (
    "import sys\n"
    "from servekit.cli.serve import main\n"
    "try:\n    main(['--help'])\nexcept SystemExit as leave:\n    assert leave.code == 0\n"
    "heavy = {'torch', 'numpy', 'transformers', 'fastapi', 'tokenizers', 'huggingface_hub', 'uvicorn'}\n"
    "print('imported:', sorted(heavy & set(sys.modules)))\n"
)


def test_wheel_is_for_every_python_from_3_11(wheel: Path) -> None:
    assert wheel.name.startswith("servekit-")
    assert "-cp311-abi3-" in wheel.name


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tracked = subprocess.run(
        ["git", "ls-files", "python"], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=30
    ).stdout.split()
    assert {name.removeprefix("python/") for name in tracked} <= names
    code = {name for name in names if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in code} == {"servekit"}
    assert [name for name in code if name.endswith(".so")] == ["servekit/_core.abi3.so"]
    assert "servekit/py.typed" in code
    assert "servekit/_core.pyi" in code
    assert not [name for name in code if "__pycache__" in name or name.endswith((".rs", ".pyc"))]


def test_wheel_carries_the_licences_of_what_it_links(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        texts = {
            name.partition(".dist-info/licenses/")[2]: archive.read(name).decode()
            for name in archive.namelist()
            if ".dist-info/licenses/" in name
        }
    expected = {"LICENSE", "NOTICE"} | {f"licenses/{file.name}" for file in (REPOSITORY / "licenses").iterdir()}
    assert set(texts) == expected
    for name in expected - {"LICENSE", "NOTICE"}:
        assert name in texts["NOTICE"]
    assert "Mozilla Public License Version 2.0" in texts["licenses/libzmq-MPL-2.0.txt"]


def test_help_is_quick_and_loads_nothing_heavy(installed: Installed) -> None:
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        done = installed.run(installed.serve, "--help")
        best = min(best, time.perf_counter() - started)
        assert done.returncode == 0, done.stderr
        assert "--tokenizer-workers" in done.stdout
    assert best < 1
    done = installed.run(installed.python, "-c", SHOW_HEAVY_IMPORTS)
    assert done.stdout.splitlines()[-1] == "imported: []", done.stderr


def test_the_installed_package_is_the_one_that_runs(installed: Installed) -> None:
    done = installed.run(
        installed.python, "-c", "import servekit, servekit._core as c; print(servekit.__file__, c.__file__, sep='\\n')"
    )
    places = done.stdout.splitlines()
    assert len(places) == 2, done.stderr
    assert all(Path(place).is_relative_to(installed.python.parents[1]) for place in places)


def test_mock_engine_serves_without_torch(
    installed: Installed, start: Callable[..., Any], without_torch: Path, demo_model: None
) -> None:
    with start("--engine", "mock", PYTHONPATH=str(without_torch)) as server:
        assert httpx.get(f"{server.url}/ready", timeout=10).status_code == 200
        model = httpx.get(f"{server.url}/v1/models", timeout=10).json()["data"][0]["id"]
        answer = httpx.post(
            f"{server.url}/v1/completions", json={"model": model, "prompt": "Hello", "max_tokens": 5}, timeout=30
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 5
        assert server.stop(signal.SIGTERM) == 0, "".join(server.lines)


def test_without_torch_the_torch_engine_says_so_in_one_line(
    installed: Installed, without_torch: Path, demo_model: None
) -> None:
    done = installed.run(installed.serve, "--port", "0", PYTHONPATH=str(without_torch))
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1] == (
        "servekit-serve: error: --engine torch needs the package torch, which is not installed"
    )
    assert "Traceback" not in done.stderr


def test_demo_model_answers(start: Callable[..., Any], demo_model: None) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    with start(seconds=120) as server:
        model = httpx.get(f"{server.url}/v1/models", timeout=10).json()["data"][0]["id"]
        answer = httpx.post(
            f"{server.url}/v1/completions",
            json={"model": model, "prompt": "1, 2, 3, 4, 5,", "max_tokens": 8, "temperature": 0},
            timeout=60,
        )
        assert answer.json()["choices"][0]["text"] == " 6, 7, 8", answer.text
        assert server.stop(signal.SIGINT) == 130, "".join(server.lines)
