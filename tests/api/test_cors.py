"""Browsers read answers of this server only for the pages that it was told of."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from tests.api.fakes import FakeServer

PAGE = "https://app.example"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}
BODY = {"model": "tiny", "prompt": "hi", "max_tokens": 3}


def test_without_the_flag_no_page_may_read(http: httpx.Client) -> None:
    for response in (
        http.options("/v1/completions", headers=PREFLIGHT),
        http.post("/v1/completions", json=BODY, headers={"origin": PAGE}),
    ):
        assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize("allowed", [(PAGE,), ("*",)])
def test_a_page_that_is_allowed(own_server: Callable[..., FakeServer], allowed: tuple[str, ...]) -> None:
    server = own_server({"allowed_origins": allowed, "api_key": ("sk-1",)})
    with httpx.Client(base_url=server.url, timeout=10) as http:
        preflight = http.options("/v1/completions", headers=PREFLIGHT)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] in (PAGE, "*")
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
        headers = {"origin": PAGE, "authorization": "Bearer sk-1"}
        for stream in (False, True):
            answer = http.post("/v1/completions", json={**BODY, "stream": stream}, headers=headers)
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] in (PAGE, "*")
            assert "access-control-allow-credentials" not in answer.headers
        assert answer.text.endswith("data: [DONE]\n\n")
        refused = http.post("/v1/completions", json=BODY, headers={"origin": PAGE})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] in (PAGE, "*"), "a page may read why"


def test_another_page(own_server: Callable[..., FakeServer]) -> None:
    server = own_server({"allowed_origins": (PAGE,)})
    other = {**PREFLIGHT, "origin": "https://evil.example"}
    preflight = httpx.options(server.url + "/v1/completions", headers=other)
    assert preflight.status_code == 400
    assert "access-control-allow-origin" not in preflight.headers
