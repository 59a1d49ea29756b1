"""The mock rank on a real link: its pace, its ends, its reports, its scripts and its faults."""

from __future__ import annotations

import json
import os
import struct
import threading
import time
from pathlib import Path

import pytest
from servekit.messages import requests as r
from servekit.messages.envelope import Envelope, Kind, Load
from servekit.scheduler.mock import CYCLE, MockRank
from servekit.scheduler.mock_script import Rules, Script, ScriptError, load_script

POOL = 10_000


@pytest.fixture
def stop():
    return threading.Event()


@pytest.fixture
def start(control, link, stop):
    """Starts a rank with a script; it ends with the test."""
    threads = []

    def start(*rules: dict, step_ms: float = 1.0, most: int = 64, max_len: int = 100) -> MockRank:
        script = load_script_from({"rules": list(rules)})
        rules_of_rank = Rules(script, 0, "")
        rank = MockRank(
            rank=0,
            epoch=5,
            step_s=step_ms / 1000,
            max_len=max_len,
            most=most,
            pool=POOL,
            vocab_size=100,
            rules=rules_of_rank,
        )
        threads.append(threading.Thread(target=rank.run, args=(link, stop.is_set)))
        threads[-1].start()
        assert control.receive()[0].kind == Kind.HELLO
        return rank

    yield start
    stop.set()
    link.wake()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def load_script_from(plain: dict) -> Script:
    import msgspec

    return msgspec.convert(plain, type=Script)


class Reader:
    """Collects rows until every named request has ended."""

    def __init__(self, control) -> None:
        self.control = control
        self.ids: dict[int, list[int]] = {}
        self.rows: dict[int, int] = {}
        self.ends: dict[int, list] = {}
        self.load: Load | None = None
        self.seen = 0

    def step(self, timeout_s: float = 5.0) -> Envelope | None:
        message = self.control.receive(timeout_s)
        if message is None:
            return None
        envelope, batch = message
        self.seen, self.load = envelope.last_dispatch, envelope.load
        for i, rid in enumerate(batch.rids):
            data = batch.decode_ids[i]
            self.ids.setdefault(rid, []).extend(struct.unpack(f"<{len(data) // 4}I", data))
            self.rows[rid] = self.rows.get(rid, 0) + 1
            end = batch.finished_reasons[i] if batch.finished_reasons else None
            if end is not None:
                self.ends.setdefault(rid, []).append(end)
        return envelope

    def until(self, *rids: int) -> None:
        while not all(rid in self.ends for rid in rids):
            assert self.step() is not None, f"no end of {[rid for rid in rids if rid not in self.ends]}"

    def until_load(self, load: Load) -> None:
        deadline = time.monotonic() + 5
        while self.load != load:
            assert time.monotonic() < deadline and self.step() is not None, self.load


IDLE = Load(pool_tokens=POOL)


def test_tokens_cycle_up_to_the_limit(control, start):
    start()
    control.generate(7, 15)
    control.generate(8, 1)
    reader = Reader(control)
    reader.until(7, 8)
    assert reader.ids == {7: [*CYCLE, *CYCLE[:3]], 8: [CYCLE[0]]}
    assert {rid: [end.type for end in ends] for rid, ends in reader.ends.items()} == {7: ["length"], 8: ["length"]}
    assert reader.rows[7] == 15
    reader.until_load(IDLE)


def test_requests_that_come_and_go_keep_their_own_place_in_the_cycle(control, start):
    start(step_ms=2)
    reader = Reader(control)
    limits = {rid: 5 + 7 * rid % 23 for rid in range(1, 40)}
    for rid, limit in limits.items():
        control.generate(rid, limit)
        if rid % 5 == 0:
            reader.step()
    reader.until(*limits)
    for rid, limit in limits.items():
        assert reader.ids[rid] == [CYCLE[i % len(CYCLE)] for i in range(limit)], rid
    reader.until_load(IDLE)


def test_the_pace_is_the_step(control, start):
    start(step_ms=20)
    control.generate(7, 11)
    reader = Reader(control)
    while 7 not in reader.ids:
        reader.step()
    began = time.monotonic()
    reader.until(7)
    assert 0.19 <= time.monotonic() - began < 0.4


def test_the_context_bounds_the_output(control, start):
    start(max_len=10)
    control.generate(7, 50)
    control.generate(8, 50, ids=b"\1\0\0\0" * 10)
    reader = Reader(control)
    reader.until(7, 8)
    assert len(reader.ids[7]) == 8
    assert (reader.ends[8][0].type, reader.ends[8][0].status) == ("error", 400)


def test_load_counts_running_and_waiting(control, start):
    start(step_ms=1000, most=2)
    for rid in (1, 2, 3):
        control.generate(rid, 5)
    reader = Reader(control)
    reader.until_load(Load(2, 1, 4, 2, POOL))
    assert reader.seen == 3


def test_waiting_requests_run_when_there_is_room(control, start):
    start(most=2)
    for rid in range(1, 8):
        control.generate(rid, 3)
    reader = Reader(control)
    reader.until(*range(1, 8))
    assert all(ids == list(CYCLE[:3]) for ids in reader.ids.values())
    reader.until_load(IDLE)
    assert reader.seen == 7


def test_an_abort_closes_at_once_wherever_the_request_is(control, start):
    start(step_ms=60_000, most=1)
    control.generate(1, 5)
    control.generate(2, 5)
    control.abort(2)
    control.abort(1)
    control.abort(1)
    control.abort(99)
    reader = Reader(control)
    reader.until(1, 2)
    assert [end.type for end in reader.ends[1] + reader.ends[2]] == ["abort", "abort"]
    reader.until_load(IDLE)


def test_a_stop_token_ends_the_request(control, start):
    start()
    control.generate(7, 50, stop_token_ids=[CYCLE[2]])
    reader = Reader(control)
    reader.until(7)
    assert reader.ids[7] == list(CYCLE[:3])
    assert (reader.ends[7][0].type, reader.ends[7][0].matched) == ("stop", CYCLE[2])


def test_state_is_told(control, start):
    start(step_ms=60_000)
    control.generate(7, 5)
    control.send(Envelope(Kind.GET_STATE, 99), r.GetStateReq())
    envelope, reply = next(message for message in iter(control.receive, None) if message[0].kind == Kind.CONTROL_REPLY)
    state = json.loads(reply.data)
    assert (envelope.id, envelope.rank, reply.ok) == (99, 0, True)
    assert (state["running"], state["held_tokens"], state["requests"], state["epoch"]) == (1, 2, ["7"], 5)


def answer(control, kind, body):
    """The reply to a control message; batches before it are passed over."""
    control.send(Envelope(kind, 99), body)
    return next(reply for envelope, reply in iter(control.receive, None) if envelope.kind == Kind.CONTROL_REPLY)


def test_messages_it_can_not_obey_are_refused(control, start):
    start(step_ms=60_000)
    reply = answer(control, Kind.ACTIVE_RANKS, r.ActiveRanksOutput([True]))
    assert (reply.ok, reply.message) == (False, "the mock rank does not know ACTIVE_RANKS")
    assert not answer(control, Kind.PROFILE, r.ProfileReq(True)).ok
    assert not answer(control, Kind.SET_LOG_LEVEL, r.SetLogLevelReq("loud")).ok
    assert answer(control, Kind.FLUSH_CACHE, r.FlushCacheReq()).ok
    control.generate(7, 5)
    reply = answer(control, Kind.FLUSH_CACHE, r.FlushCacheReq())
    assert (reply.ok, reply.message) == (False, "1 requests are live")


def test_a_paused_rank_makes_no_step_until_it_goes_on(control, start):
    start()
    assert answer(control, Kind.PAUSE, r.PauseReq()).ok
    control.generate(7, 5)
    control.generate(8, 5)
    control.abort(8)
    reader = Reader(control)
    reader.until(8)
    state = json.loads(answer(control, Kind.GET_STATE, r.GetStateReq()).data)
    assert (state["paused"], state["running"], state["waiting"]) == (True, 0, 1)
    assert 7 not in reader.ids
    assert answer(control, Kind.CONTINUE, r.ContinueReq()).ok
    reader.until(7)
    assert reader.ids[7] == list(CYCLE[:5])


def test_embeddings_are_unit_vectors_that_depend_on_the_prompt(control, start):
    start()
    vectors = []
    for rid, ids in ((1, b"\1\0\0\0"), (2, b"\2\0\0\0"), (3, b"\1\0\0\0")):
        body = r.TokenizedEmbeddingReqInput(rid, ids, dimensions=16)
        control.send(Envelope(Kind.EMBEDDING, rid, rank=0, dispatch=rid), body)
        envelope, batch = control.receive()
        while envelope.kind != Kind.BATCH_EMBEDDING:
            envelope, batch = control.receive()
        assert batch.rids == [rid]
        vectors.append(struct.unpack("<16f", batch.embeddings[0]))
    assert vectors[0] == vectors[2] != vectors[1]
    assert sum(value * value for value in vectors[0]) == pytest.approx(1, abs=1e-5)


def test_a_stopped_rank_closes_what_it_holds(control, start, link, stop):
    start(step_ms=60_000, most=1)
    control.generate(1, 5)
    control.generate(2, 5)
    reader = Reader(control)
    reader.until_load(Load(1, 1, 2, 2, POOL))
    stop.set()
    link.wake()
    reader.until(1, 2)
    assert {end.status for ends in reader.ends.values() for end in ends} == {503}


# Scripts


def test_scripted_tokens_come_0_to_k_a_step(control, start):
    start({"tokens": [5, [], [6, 7, 8], [9]], "finish": {"type": "stop", "matched": "x"}})
    control.generate(7, 50)
    reader = Reader(control)
    reader.until(7)
    assert (reader.ids[7], reader.rows[7]) == ([5, 6, 7, 8, 9], 4)
    assert (reader.ends[7][0].type, reader.ends[7][0].matched) == ("stop", "x")


def test_a_script_is_cut_at_the_limit(control, start):
    start({"tokens": [[1, 2, 3]], "repeat": True})
    control.generate(7, 7)
    reader = Reader(control)
    reader.until(7)
    assert (reader.ids[7], reader.ends[7][0].type) == ([1, 2, 3, 1, 2, 3, 1], "length")


def test_rules_choose_by_rank_number_and_prompt(control, start):
    start(
        {"rank": 1, "tokens": [1]},
        {"nth": [2, 3], "tokens": [2]},
        {"prompt_ids": [1, 2], "tokens": [3]},
        {"tokens": [4]},
    )
    for rid in (1, 2, 3):
        control.generate(rid)
    control.generate(4, ids=b"\2\0\0\0\1\0\0\0")
    reader = Reader(control)
    reader.until(1, 2, 3, 4)
    assert reader.ids == {1: [3], 2: [2], 3: [2], 4: [4]}


def test_timings(control, start):
    start({"first_ms": 100, "step_ms": 50})
    began = time.monotonic()
    control.generate(7, 3)
    reader = Reader(control)
    while 7 not in reader.ids:
        assert reader.step() is not None
    first = time.monotonic() - began
    reader.until(7)
    assert first >= 0.1 and time.monotonic() - began >= 0.199


def test_double_finish(control, start):
    start({"faults": [{"kind": "double_finish"}]})
    control.generate(7, 2)
    reader = Reader(control)
    reader.until(7)
    while len(reader.ends[7]) < 2:
        assert reader.step() is not None
    reader.until_load(IDLE)


def test_lost_finish(control, start):
    start({"faults": [{"kind": "lost_finish"}]})
    control.generate(7, 2)
    reader = Reader(control)
    reader.until_load(IDLE)
    while reader.step(0.1) is not None:
        pass
    assert (reader.ids[7], reader.ends) == (list(CYCLE[:2]), {})


def test_a_missing_report_comes_back(control, start):
    start({"nth": 1, "faults": [{"kind": "missing_report", "for_ms": 200}]})
    control.generate(1, 3)
    reader = Reader(control)
    reader.until(1)
    assert reader.load is None
    time.sleep(0.2)
    control.generate(2, 3)
    reader.until_load(IDLE)


def test_a_stale_report_repeats_an_old_dispatch_number(control, start):
    start({"nth": 2, "step_ms": 5, "faults": [{"kind": "stale_report", "for_ms": 60_000}]}, step_ms=30)
    control.generate(1, 3)
    reader = Reader(control)
    reader.until(1)
    control.generate(2, 3)
    reader.until(2)
    control.generate(3, 3)
    reader.until(3)
    assert reader.seen < 3


def test_a_malformed_frame_comes_beside_the_step(control, start):
    import msgspec

    start({"faults": [{"kind": "malformed", "at": 1}]})
    control.generate(7, 3)
    reader, broken = Reader(control), 0
    while 7 not in reader.ends:
        try:
            assert reader.step() is not None
        except msgspec.DecodeError:
            broken += 1
    assert (broken, reader.ids[7]) == (1, list(CYCLE[:3]))


def test_slow_delays_one_step(control, start):
    start({"faults": [{"kind": "slow", "at": 1, "for_ms": 150}]})
    control.generate(7, 3)
    began = time.monotonic()
    reader = Reader(control)
    reader.until(7)
    assert time.monotonic() - began >= 0.15


def test_die_ends_the_process(tmp_path):
    import subprocess
    import sys

    code = (
        "from servekit.scheduler.mock_script import Fault\nfrom servekit.scheduler.mock import MockRank\n"
        "MockRank._strike(None, None, {'die': Fault('die', status=%s)})"
    )
    for status, expected in ((3, 3), (None, -9)):
        assert subprocess.run([sys.executable, "-c", code % status], timeout=30).returncode == expected


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("s.json", "{", "s.json"),
        ("s.toml", "rules = 3", "Expected `array`"),
        ("s.json", '{"rules": [{"ranks": 1}]}', "unknown field `ranks`"),
        ("s.json", '{"rules": [{"faults": [{"kind": "explode"}]}]}', "explode"),
        ("s.json", '{"rules": [{"tokens": [-1]}]}', "no u32"),
        ("s.json", '{"rules": [{"repeat": true}]}', "repeats tokens"),
    ],
)
def test_mistakes_in_a_script_are_one_line(name, text, complaint, tmp_path):
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ScriptError) as error:
        load_script(file)
    assert complaint in str(error.value) and "\n" not in str(error.value)


def test_a_script_that_is_not_there(tmp_path):
    with pytest.raises(ScriptError, match="No such file"):
        load_script(tmp_path / "none.json")


def test_toml_and_json_say_the_same(tmp_path):
    (tmp_path / "s.toml").write_text(
        '[[rules]]\nnth = 2\ntokens = [1, [2, 3]]\n[[rules.faults]]\nkind = "die"\nat = 3\n'
    )
    plain = {"rules": [{"nth": 2, "tokens": [1, [2, 3]], "faults": [{"kind": "die", "at": 3}]}]}
    (tmp_path / "s.json").write_text(json.dumps(plain))
    assert load_script(tmp_path / "s.toml") == load_script(tmp_path / "s.json")


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_rules_choose_by_text_and_bad_bytes_are_no_text(tokenizer_file):
    from tokenizers import Tokenizer

    script = load_script_from({"rules": [{"prompt": "[boom]", "faults": [{"kind": "bad_utf8"}]}]})
    rules = Rules(script, 0, str(tokenizer_file))
    tokenizer = Tokenizer.from_file(str(tokenizer_file))

    def prompt(text: str) -> bytes:
        ids = tokenizer.encode(text).ids
        return struct.pack(f"<{len(ids)}I", *ids)

    assert rules.match(prompt("go [boom] now")) is script.rules[0]
    assert rules.match(prompt("go boom now")) is None
    assert "\ufffd" in tokenizer.decode(rules.bad_ids)


def test_it_costs_nothing_while_idle(start):
    start()
    before = sum(os.times()[:2])
    time.sleep(0.5)
    assert sum(os.times()[:2]) - before < 0.05
