"""Each accepted stream has exactly one terminal event, whatever dies, hangs or talks nonsense on the way to it.

Deaths of each process are in `test_lifecycle.py`. The one fault without an end is `lost_finish`: a rank that never
closes a request which it has accepted breaks its promise, and nobody else can know.
"""

from __future__ import annotations

import json

import pytest

TWO_OF_EACH = ["--tokenizer-workers", "2", "--detokenizer-workers", "2", "--data-parallel-size", "2"]
ENDS_SOME = {"die", "hang", "malformed"}
"""All that the rank had end with an error: it is gone, or nobody can say whose tokens were lost."""


def ends_with_error(one) -> bool:
    """Whether a stream ended with an error; it ended once."""
    assert not one.cut, one.events[-3:]
    if one.status != 200:
        # The error came before the first token: it is the whole answer.
        assert one.status in (500, 503) and one.events == []
        return True
    *events, last = one.events
    assert last == "[DONE]" and "[DONE]" not in events
    ends = [event for event in events if '"error"' in event or json.loads(event)["choices"][0]["finish_reason"]]
    assert ends == events[-1:], "one, and nothing behind it"
    return one.errors == 1


@pytest.mark.parametrize(
    "kind", ["die", "hang", "slow", "malformed", "bad_utf8", "double_finish", "stale_report", "missing_report"]
)
def test_what_a_rank_does_wrong_ends_each_stream_once(start, stream, until, tmp_path, kind):
    fault = {"kind": kind, "at": 50, **({"for_ms": 500} if kind in ("slow", "stale_report", "missing_report") else {})}
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"rules": [{"rank": 1, "nth": [2, 5], "faults": [fault]}]}))
    server = start(*TWO_OF_EACH, "--mock-script", str(script), "--watchdog-timeout", "2", "--mock-step-ms", "10")
    streams = [stream(server, max_tokens=200) for _ in range(12)]
    until(lambda: all(each.events or each.status for each in streams), 20, server.text)
    assert all(each.join(40) for each in streams), server.text()
    errors = sum(map(ends_with_error, streams))
    assert bool(errors) == (kind in ENDS_SOME) and errors <= 6
    # The other rank serves on.
    assert server.complete().status_code == 200


def test_a_control_process_that_hangs_ends_each_stream_once(start, stream, until):
    server = start(*TWO_OF_EACH)
    streams = [stream(server) for _ in range(12)]
    until(lambda: all(each.running() for each in streams), 20, server.text)
    control = server.processes()["servekit::control"]
    control.suspend()
    assert all(each.join(10) for each in streams)
    assert all(map(ends_with_error, streams))
    control.resume()
    until(lambda: server.complete().status_code == 200, 20, server.text)
