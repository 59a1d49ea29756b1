"""A worker for each module, its control process reset for each test."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.fakes import FakePage, FakeServer


@pytest.fixture(scope="module")
def module_server() -> Iterator[FakeServer]:
    with tempfile.TemporaryDirectory(prefix="svk") as folder:
        server = FakeServer(Path(folder))
        yield server
        server.close()


@pytest.fixture
def server(module_server: FakeServer) -> Iterator[FakeServer]:
    module_server.control.reset()
    module_server.page.__dict__.update(FakePage().__dict__)
    yield module_server


@pytest.fixture(scope="module")
def module_http(module_server: FakeServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=module_server.url, timeout=10) as client:
        yield client


@pytest.fixture
def http(server: FakeServer, module_http: httpx.Client) -> httpx.Client:
    return module_http


@pytest.fixture
def own_server() -> Iterator[Callable[..., FakeServer]]:
    """Starts servers with flags or a model of their own."""
    started = []
    with tempfile.TemporaryDirectory(prefix="svk") as folder:

        def start(args: dict[str, Any] | None = None, model: dict[str, Any] | None = None) -> FakeServer:
            place = Path(folder) / str(len(started))
            place.mkdir()
            started.append(FakeServer(place, args, model))
            return started[-1]

        yield start
        for each in started:
            each.close()
