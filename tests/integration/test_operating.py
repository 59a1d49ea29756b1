"""Operators' commands to a whole server of several workers and ranks, and load methods that it is started with."""

from __future__ import annotations

import httpx


def test_commands_reach_every_process(start, stream, until):
    server = start("--dp", "2", "--tokenizer-workers", "2", "--load-balance-method", "cache_aware")

    def post(route: str, status: int = 200, **body: object) -> dict:
        answer = httpx.post(f"{server.url}/{route}", json=body, timeout=20)
        assert answer.status_code == status, answer.text
        return answer.json()

    post("flush_cache")
    post("pause_generation")
    streams = [stream(server, max_tokens=20) for _ in range(4)]
    until(lambda: sum(rank["waiting"] for rank in server.state()["ranks"].values()) == 4, 20, server.text)
    assert all(rank["paused"] and not rank["running"] for rank in server.state()["ranks"].values())
    assert [each.events for each in streams] == [[]] * 4
    refused = post("flush_cache", 409)
    assert "requests are live" in str(refused)
    post("continue_generation")
    assert all(each.join(20) for each in streams)
    assert {each.events[-1] for each in streams} == {"[DONE]"}
    assert "scheduler[dp=1]" in str(post("start_profile", 409))
    post("set_log_level", level="debug")
    until(lambda: "the log level is debug" in server.text(), 10, server.text)
    # A prompt of many chunks comes back to the rank that has its beginning.
    ranks = [server.complete([7] * 640, n=1).status_code for _ in range(4)]
    assert ranks == [200] * 4
    dispatched = [rank["dispatched"] for rank in server.state()["control"]["ranks"]]
    assert abs(dispatched[0] - dispatched[1]) >= 3, dispatched
