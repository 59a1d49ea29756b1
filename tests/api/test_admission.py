"""What a worker does for the router before it sends: look at the queue, and name a prompt's prefixes."""

from __future__ import annotations

import httpx
from servekit import _core
from servekit.messages.envelope import Ext

PROMPT = list(range(100)) * 2


def ask(http: httpx.Client, **fields: object) -> httpx.Response:
    return http.post("/v1/completions", json={"model": "tiny", "prompt": PROMPT, **fields})


def test_a_queue_full_of_tokens_refuses_before_any_work(own_server) -> None:
    server = own_server({"max_queued_tokens": 500})
    with httpx.Client(base_url=server.url) as http:
        server.page.queued = 499
        assert ask(http).status_code == 200
        server.page.queued = 500
        refused = ask(http)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "prompt tokens wait" in refused.json()["error"]["message"]
        assert len(server.control.generated) == 1
        assert server.page.requests == server.page.tokens == 0
        server.page.queued = 0
        assert ask(http).status_code == 200


def test_prefixes_are_named_only_where_dispatch_asks_for_them(own_server) -> None:
    salts = [None, "mine", "mine", "yours"]
    for method in ("cache_aware", "round_robin"):
        server = own_server({"load_balance_method": method})
        with httpx.Client(base_url=server.url) as http:
            for salt in salts:
                assert ask(http, **({} if salt is None else {"cache_salt": salt})).status_code == 200
            assert ask(http, prompt=PROMPT[:63]).status_code == 200
        named = [envelope.ext(Ext.PREFIX_HASHES) for envelope, _ in server.control.generated]
        if method == "round_robin":
            assert named == [None] * 5
            continue
        ids = b"".join(token.to_bytes(4, "little") for token in PROMPT)
        salted = [None if salt is None else salt.encode() for salt in salts]
        assert named == [*(_core.prefix_hashes(ids, salt) for salt in salted), None]
        assert named[1] == named[2] and len({*named[:4]}) == 3
