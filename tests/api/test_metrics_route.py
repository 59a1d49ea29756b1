"""The route of the metrics is there unless it is not wanted."""

from __future__ import annotations

from collections.abc import Callable

import httpx

from tests.api.fakes import FakeServer


def test_no_metrics(own_server: Callable[..., FakeServer]) -> None:
    server = own_server({"metrics": False})
    assert httpx.get(server.url + "/metrics").status_code == 404
    assert "/metrics" not in httpx.get(server.url + "/openapi.json").json()["paths"]
