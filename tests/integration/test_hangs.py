"""Processes that hang: which are noticed, when, what is said of them; and what is no hang."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.integration.layouts import LAYOUTS, rank, save_tiny

pytestmark = pytest.mark.timeout(300)
LEADER, FOLLOWER = LAYOUTS["tp2"].victims
FIRST, OTHER = LAYOUTS["dp-attention2-in-tp2"].victims
SOFT = "has work and has got no further for 2 s"
GONE_S = 5.0
DEADLINE_S = 8.0
"""A watchdog of 2 s looks every second, gives a second for the stacks, and leaves the rest to a busy machine."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "m", "qwen3", context=4096)


def said(server) -> list[str]:
    return [line for line in server.text().splitlines() if "has got no further" in line]


@pytest.mark.parametrize("victim", [FOLLOWER, pytest.param(LEADER, marks=pytest.mark.slow)])
def test_a_hang_is_told_once_with_the_stacks_and_work_goes_on_behind_it(start, stream, until, model, tmp_path, victim):
    hang = tmp_path / "hang"
    env = {"VICTIM": victim, "HANG": str(hang)}
    arguments = (str(model), "--tp", "2", "--soft-watchdog-timeout", "2")
    server = start(*arguments, engine="torch", entry="hangs", env=env)
    hang.touch()
    one = stream(server, max_tokens=8, prompt="t1 t2", ignore_eos=True)
    until(lambda: len(said(server)) == 2, DEADLINE_S, server.text)
    assert [line for line in said(server) if victim in line and SOFT in line and "its process runs; computing" in line]
    until(lambda: ", line " in server.text() and " in launch" in server.text(), 5.0, server.text)
    time.sleep(3.0)
    hang.unlink()
    assert one.join(20) and one.errors == 0 and one.events[-1] == "[DONE]"
    assert len(said(server)) == 2, "a hang is told once"
    assert server.stop() == 0


@pytest.mark.parametrize(
    ("layout", "victim", "stopped"),
    [
        ("--tp 2", FOLLOWER, False),
        ("--tp 2", FOLLOWER, True),
        pytest.param("--tp 2", LEADER, False, marks=pytest.mark.slow),
        pytest.param("--pp 2", rank(0, 1, 0), False, marks=pytest.mark.slow),
        pytest.param("--pp 2", rank(0, 1, 0), True, marks=pytest.mark.slow),
        pytest.param("--tp 2 --dp 2 --enable-dp-attention", FIRST, True, marks=pytest.mark.slow),
        pytest.param("--tp 2 --dp 2 --enable-dp-attention", OTHER, True, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_hangs_for_good_is_ended_and_its_group_with_it(
    start, stream, until, beside, model, tmp_path, layout, victim, stopped
):
    hang = tmp_path / "hang"
    arguments = (str(model), *layout.split(), "--watchdog-timeout", "2")
    server = start(*arguments, engine="torch", entry="hangs", env={"VICTIM": victim, "HANG": str(hang)})
    # With DP attention the victim's own rank may have nothing to do.
    target = {"data_parallel_rank": 1} if "--dp" in layout else {}
    streams = [stream(server, max_tokens=4000, prompt=f"t{i}", ignore_eos=True, **target) for i in range(4)]
    until(lambda: all(each.events for each in streams), 30, server.text)
    began = time.monotonic()
    if stopped:
        server.processes()[victim].send_signal(signal.SIGSTOP)
    else:
        hang.touch()
    assert all(each.join(DEADLINE_S + 2 - (time.monotonic() - began)) for each in streams), server.text()
    assert all(each.ended_with_one_error() for each in streams), [each.events[-3:] for each in streams]
    until(lambda: server.process.poll() is not None, GONE_S)
    assert server.process.returncode == 1
    told = said(server)
    assert len(told) == 1 and victim in told[0] and "it ends, and its replica with it" in told[0], server.text()
    assert ("its process has not run for" in told[0]) == stopped
    until(server.gone, GONE_S)
    assert server.traces() == []


@pytest.mark.slow
def test_a_step_that_takes_long_and_a_pause_are_no_hangs(start, stream, until, model):
    flags = ("--tp", "2", "--watchdog-timeout", "2", "--soft-watchdog-timeout", "2")
    server = start(str(model), *flags, engine="torch", entry="is_slow", env={"VICTIM": ""})
    # Three layers of a second each: no step ends within the limit.
    one = stream(server, max_tokens=2, prompt=" ".join(f"t{i}" for i in range(40)), ignore_eos=True)
    assert one.join(30) and one.errors == 0, one.events
    assert httpx.post(f"{server.url}/pause_generation", timeout=10).status_code == 200
    waits = stream(server, max_tokens=1, prompt="t5")
    until(lambda: server.state()["ranks"]["0"]["waiting"] == 1, 10, server.text)
    time.sleep(4.0)
    assert httpx.post(f"{server.url}/continue_generation", timeout=10).status_code == 200
    assert waits.join(20) and waits.errors == 0, waits.events
    assert said(server) == []


@pytest.mark.slow
def test_a_machine_that_stands_still_and_an_idle_rank_that_is_stopped_are_none(start, stream, until):
    server = start("--tp", "2", "--watchdog-timeout", "2", "--soft-watchdog-timeout", "2", "--mock-step-ms", "5")
    running = stream(server, max_tokens=1500)
    until(running.running, 10)
    everyone = list(server.processes().values())
    for each in everyone:
        each.suspend()
    time.sleep(4.0)
    for each in reversed(everyone):
        each.resume()
    assert running.join(30) and running.errors == 0, running.events[-3:]
    server.processes()[FOLLOWER].suspend()
    time.sleep(4.0)
    server.processes()[FOLLOWER].resume()
    assert server.complete().status_code == 200
    assert said(server) == []


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["mock", "torch"])
def test_whoever_stands_still_for_three_seconds_harms_nobody(start, stream, until, model, engine):
    flags = ["--tp", "2", "--dp", "2", "--tokenizer-workers", "2", "--mock-step-ms", "5"]
    tokens = 900
    if engine == "torch":
        flags[-2:], tokens = [str(model)], 300
    server = start(*flags, engine=engine)
    for title, process in server.processes().items():
        streams = [stream(server, max_tokens=tokens, prompt=f"t{i}", ignore_eos=True) for i in range(4)]
        until(lambda waited=streams: all(each.events for each in waited), 30, server.text)
        process.suspend()
        time.sleep(3.0)
        process.resume()
        for each in streams:
            assert each.join(60), title
            assert not each.cut and each.errors == 0 and each.events[-1] == "[DONE]", (title, each.events[-3:])
    assert " ERROR " not in server.text()
