"""Who may ask what: keys on every route but the probes, and the rules of operators' routes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from servekit.config import ConfigError, ServerArgs
from servekit.config.secrets import HIDDEN, Secrets, digest, take_secrets
from servekit.http.keys import KeyGuard
from servekit.http.routes import OPERATOR_ROUTERS

from tests.api.fakes import FakeServer

KEY, OTHER, ADMIN = "sk-one", "sk-two", "sk-admin"
OPERATORS = sorted(route.path for router in OPERATOR_ROUTERS for route in router.routes)
LOCAL, REMOTE = ("127.0.0.1", 9), ("10.0.0.1", 9)


def bearer(key: str | bytes) -> dict[str, str | bytes]:
    return {"authorization": key if isinstance(key, bytes) else f"Bearer {key}"}


def status_of(
    path: str,
    secrets: Secrets,
    key: str | None = None,
    client: tuple[str, int] | None = LOCAL,
    headers: list[tuple[bytes, bytes]] | None = None,
    method: str = "POST",
    root: str = "",
) -> int:
    """What the guard makes of a request; 200 if it lets it pass."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        sent.append(message)

    headers = list(headers or [])
    if key is not None:
        headers.append((b"authorization", f"Bearer {key}".encode()))
    scope = {
        "type": "http", "method": method, "path": path, "headers": headers, "client": client, "root_path": root,
    }  # fmt: skip
    asyncio.run(KeyGuard(app, secrets, OPERATORS, lambda: None)(scope, None, send))  # type: ignore[arg-type]
    return sent[0]["status"]


KEYS = Secrets(api_keys=[digest(KEY), digest(OTHER)])
BOTH = Secrets(api_keys=[digest(KEY)], admin_api_key=digest(ADMIN))


def test_operators_routes_are_those_that_can_do_harm() -> None:
    assert sorted(
        ["/abort_request", "/continue_generation", "/debug/state", "/flush_cache", "/pause_generation",
         "/set_log_level", "/start_profile", "/stop_profile"]
    ) == OPERATORS  # fmt: skip


@pytest.mark.parametrize(
    "path", ["/v1/models", "/metrics", "/openapi.json", "/docs", "/nowhere", "/health/", "//health"]
)
def test_every_route_wants_a_key(path: str) -> None:
    for key in (None, "", "sk", KEY + "x", KEY[:-1], ADMIN):
        assert status_of(path, KEYS, key) == 401, key
    for key in (KEY, OTHER):
        assert status_of(path, KEYS, key) == 200
    assert status_of(path, Secrets()) == 200


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping"])
def test_probes_want_none(path: str) -> None:
    assert status_of(path, KEYS, None, REMOTE) == 200
    assert status_of("/llm" + path, KEYS, None, REMOTE, root="/llm") == 200
    assert status_of("/x" + path, KEYS, None, REMOTE, root="/llm") == 401


def test_a_preflight_brings_no_key() -> None:
    assert status_of("/v1/models", KEYS, None, REMOTE, method="OPTIONS") == 200


@pytest.mark.parametrize("path", OPERATORS)
def test_with_an_admin_key_operators_need_it_from_everywhere(path: str) -> None:
    for client in (LOCAL, REMOTE, None):
        assert status_of(path, BOTH, None, client) == 401
        assert status_of(path, BOTH, KEY, client) == 401, "the API key does not do"
        assert status_of(path, BOTH, ADMIN, client) == 200, "in place of the API key"
        assert status_of("/llm" + path, BOTH, KEY, client, root="/llm") == 401
    assert status_of("/v1/models", BOTH, ADMIN) == 401, "it opens nothing else"


@pytest.mark.parametrize("path", OPERATORS)
def test_without_an_admin_key_operators_are_on_loopback(path: str) -> None:
    assert status_of(path, Secrets(), None, LOCAL) == 200
    assert status_of(path, Secrets(), None, None) == 200, "a Unix socket"
    assert status_of(path, Secrets(), None, REMOTE) == 403
    assert status_of(path, KEYS, KEY, REMOTE) == 403
    assert status_of(path, KEYS, None, LOCAL) == 401
    assert status_of(path, KEYS, KEY, LOCAL) == 200


@pytest.mark.parametrize("name", [b"x-forwarded-for", b"forwarded", b"x-real-ip", b"origin"])
def test_who_speaks_for_others_is_not_on_loopback(name: bytes) -> None:
    assert status_of("/flush_cache", Secrets(), None, LOCAL, [(name, b"127.0.0.1")]) == 403
    assert status_of("/flush_cache", BOTH, ADMIN, LOCAL, [(name, b"127.0.0.1")]) == 200


@pytest.mark.parametrize(
    ("host", "taken"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("::ffff:127.0.0.1", True), ("10.0.0.1", False),
     ("::ffff:10.0.0.1", False), ("2001:db8::1", False), ("", False), ("localhost.example", False)],
)  # fmt: skip
def test_what_loopback_is(host: str, taken: bool) -> None:
    assert (status_of("/flush_cache", Secrets(), None, (host, 1)) == 200) is taken


def test_a_server_with_keys(own_server: Callable[..., FakeServer]) -> None:
    server = own_server({"api_key": (KEY,), "admin_api_key": ADMIN, "root_path": "/llm"})
    with httpx.Client(base_url=server.url, timeout=10) as http:
        for headers in ({}, bearer("wrong"), bearer(b"sk-one"), bearer(b"Bearer s\xc3\xa9same")):
            refused = http.get("/v1/models", headers=headers)
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
            assert refused.json()["error"]["type"] == "authentication_error"
        for path in ("/v1/models", "/llm/v1/models"):
            assert http.get(path, headers=bearer(KEY)).status_code == 200
        assert http.get("/health").status_code == http.head("/health").status_code == 200
        assert http.get("/debug/state", headers=bearer(ADMIN)).status_code == 200
        info = http.get("/server_info", headers=bearer(KEY)).text
        assert KEY not in info and ADMIN not in info and digest(KEY) not in info
        assert http.post("/v1/completions", content=b"x" * 300_000).status_code == 401, "whatever the body is"
    assert server.page.counters["unauthorized"] == 5


def test_an_operators_route_trusts_only_the_guard(own_server: Callable[..., FakeServer]) -> None:
    server = own_server()
    guard = server.worker._server.config.app.user_middleware.pop()
    assert guard.cls is KeyGuard
    assert httpx.get(server.url + "/debug/state").status_code == 403


def test_keys_come_from_flags_and_file_and_stay_in_no_flag(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# of the team\n\n  {OTHER}  \r\n")
    args = ServerArgs(api_key=(KEY,), api_key_file=str(file), admin_api_key=ADMIN, ssl_keyfile_password="pw 1")
    opened, secrets = take_secrets(args)
    assert secrets == Secrets(
        api_keys=[digest(KEY), digest(OTHER)], admin_api_key=digest(ADMIN), ssl_keyfile_password="pw 1"
    )
    assert (opened.api_key, opened.admin_api_key, opened.ssl_keyfile_password) == ((HIDDEN,), HIDDEN, HIDDEN)
    assert take_secrets(ServerArgs()) == (ServerArgs(), Secrets())


@pytest.mark.parametrize("args", [{"api_key": ("s p",)}, {"api_key": ("",)}, {"admin_api_key": "s\u00e9same"}])
def test_a_key_that_no_header_carries_is_refused_and_not_shown(args: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="a key must be") as error:
        take_secrets(ServerArgs(**args))
    assert "same" not in str(error.value) and "s p" not in str(error.value)


@pytest.mark.parametrize("content", [None, b"", b"# nothing\n", b"\xff\n", b"two words\n"])
def test_a_file_without_keys_is_refused(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match="--api-key-file"):
        take_secrets(ServerArgs(api_key_file=str(file)))
