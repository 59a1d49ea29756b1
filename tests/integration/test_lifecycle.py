"""From start to end: what a server says, what it costs, how it dies, and that nothing of it is left."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest

CONTROL, HTTP, RANK = "servekit::control", "servekit::http[0]", "servekit::scheduler[dp=0]"
CONTEXT = 8192
GONE_S = 5.0
"""How long anything may take to be gone. `benches/python/processes.py` measures how long it does take."""
STOP_S = 10.0
"""How long a server that is told to end at once may take, far below the 30 s of a drain."""


def test_start_answers_and_goes_without_a_trace(start, until):
    server = start()
    assert httpx.get(f"{server.url}/ready", timeout=5).status_code == 200
    assert set(server.processes()) == {"servekit::main", CONTROL, HTTP, RANK}
    answer = server.complete()
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 8
    for title in (CONTROL, HTTP, RANK):
        assert f"{title} ready in " in server.text()
    assert f"context {CONTEXT} tokens, KV pool {4096 * CONTEXT} tokens, at most 4096 requests at once" in server.text()
    assert server.stop() == 0
    until(server.gone, GONE_S)
    assert server.traces() == []


def test_the_printed_command_works(start):
    server = start()
    line = server.output.read_text().strip()
    assert line.startswith("curl ")
    done = subprocess.run(["/bin/sh", "-c", line + " -s"], capture_output=True, text=True, timeout=30)
    assert '"chat.completion"' in done.stdout, done.stdout + done.stderr


def test_segments_and_run_directory_are_private(start):
    server = start()
    segments = list(Path("/dev/shm").glob(f"servekit-{server.pid}-*"))
    assert {path.name.rpartition("-")[2] for path in segments} == {"config", "state", "info"}
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in segments)
    (run_dir,) = server.runtime.iterdir()
    assert run_dir.stat().st_mode & 0o777 == 0o700


def test_a_secret_is_in_no_title_and_no_log(start):
    server = start("--admin-api-key", "sesame-4711")
    assert not [title for title in server.processes() if "4711" in title]
    assert "4711" not in server.text() + server.output.read_text()


def test_a_key_in_a_url_is_not_logged(start, until):
    server = start("--access-log")
    httpx.get(f"{server.url}/v1/models?api_key=sesame-4711", timeout=5)
    until(lambda: '"GET /v1/models HTTP/1.1" 200' in server.text(), 5, server.text)
    assert "4711" not in server.text()


@pytest.mark.parametrize("full", ["stdout", "stderr"])
def test_output_that_its_disk_does_not_take_ends_nothing(until, full):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def ready() -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/ready", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    command = [
        sys.executable,
        "-P",
        "-m",
        "servekit.cli.serve",
        "--engine",
        "mock",
        "--access-log",
        "--port",
        str(port),
    ]
    with Path("/dev/full").open("wb") as sink, subprocess.Popen(command, **{full: sink}) as process:
        try:
            until(ready, 60)
            before = cpu_s(process.pid)
            time.sleep(1)
            assert cpu_s(process.pid) - before < 0.5, "nobody turns in circles"
        finally:
            process.terminate()
            assert process.wait(20) == 0


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and its children so far."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return sum(sum(each.cpu_times()[:2]) for each in family)


def test_logs_as_json(start):
    server = start("--log-format", "json", wait=False)
    wait_ready(server)
    lines = [json.loads(line) for line in server.text().splitlines()]
    assert {"time", "level", "title", "epoch", "pid", "message"} <= set(lines[0])
    assert any("served on" in line["message"] for line in lines)


def wait_ready(server) -> None:
    deadline = time.monotonic() + 30
    while "served on" not in server.text():
        assert server.process.poll() is None and time.monotonic() < deadline, server.text()
        time.sleep(0.01)
    server.processes()


# Start-up failures


def fails(server, status: int, complaint: str) -> None:
    assert server.process.wait(30) == status, server.text()
    lines = [line for line in server.text().splitlines() if line.startswith("servekit-serve: error: ")]
    assert len(lines) == 1 and complaint in lines[0], server.text()
    assert server.gone() and server.traces() == []


def test_a_bad_flag(start):
    fails(start("--prot", "1", wait=False), 2, "did you mean --port?")


def test_a_model_that_is_not_there(start):
    fails(start("/nowhere/at-all", wait=False), 1, "/nowhere/at-all")


def test_a_port_in_use(start):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        fails(
            start("--port", str(port), wait=False), 1, f"can't listen on 127.0.0.1 port {port}: Address already in use"
        )


def test_a_port_that_another_server_has(start):
    first = start("--tokenizer-workers", "2")
    fails(start("--port", str(first.port), wait=False), 1, "Address already in use")
    assert first.complete().status_code == 200


def test_a_host_that_is_none(start):
    fails(start("--host", "no.such.host.invalid", wait=False), 1, "no.such.host.invalid")


def test_an_engine_that_is_not_there(start):
    fails(start("--engine", "warp", wait=False), 1, "--engine 'warp' is unknown; installed are mock, torch")


def test_a_script_that_can_not_be_read(start, tmp_path):
    script = tmp_path / "script.json"
    script.write_text('{"rules": [{"ranks": 1}]}')
    fails(start("--mock-script", str(script), wait=False), 1, "unknown field `ranks`")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_starting(start, number, until):
    server = start(wait=False)
    time.sleep(random.Random(number).uniform(0.2, 0.6))
    assert server.stop(number) in {signal.SIGINT: (130, 0, -2), signal.SIGTERM: (0, -15)}[number]
    until(server.gone, GONE_S)
    assert server.traces() == []


# Deaths


def streams_running(server, stream, until, count: int = 16) -> list:
    running = [stream(server) for _ in range(count)]
    until(lambda: all(each.running() for each in running), 20, server.text)
    return running


def test_kill_of_main_leaves_nothing(start, stream, until):
    server = start("--tokenizer-workers", "2", "--data-parallel-size", "2", "--detokenizer-workers", "2")
    streams_running(server, stream, until)
    server.processes()
    server.process.kill()
    server.process.wait(5)
    until(lambda: server.gone() and not server.traces(), GONE_S, lambda: str(server.processes()))
    again = start("--port", str(server.port))
    assert again.complete().status_code == 200


@pytest.mark.parametrize(("title", "ranks"), [(CONTROL, 2), (HTTP, 2), (RANK, 1), ("servekit::http[1]", 2)])
def test_kill_of_a_child_ends_the_server_with_one_error_event_each(start, stream, until, title, ranks):
    server = start("--tokenizer-workers", "2", "--data-parallel-size", str(ranks), "--mock-step-ms", "5")
    running = streams_running(server, stream, until)
    server.processes()[title].kill()
    assert server.process.wait(STOP_S) == 1, server.text()
    until(server.gone, GONE_S)
    assert all(each.join(5) for each in running)
    reached = [each for each in running if not each.cut]
    assert all(each.ended_with_one_error() for each in reached), [each.events[-3:] for each in reached]
    if "http" not in title:
        assert len(reached) == len(running)
    deaths = [line for line in server.text().splitlines() if title in line and "was killed by SIGKILL" in line]
    assert len(deaths) == 1 and "(pid " in deaths[0], server.text()
    assert server.traces() == []


def test_a_rank_that_dies_on_its_own_is_logged_with_its_status(start, stream, until, tmp_path):
    script = tmp_path / "script.toml"
    script.write_text('[[rules]]\nfaults = [{ kind = "die", at = 5, status = 7 }]\n')
    server = start("--mock-script", str(script))
    one = stream(server)
    assert server.process.wait(10) == 1
    assert one.join(5) and one.ended_with_one_error(), one.events
    assert f"{RANK} (pid " in server.text() and "ended with status 7" in server.text()
    until(server.gone, GONE_S)
    assert server.traces() == []


def test_a_rank_that_hangs_ends_as_one_that_died(start, stream, until):
    server = start("--watchdog-timeout", "2")
    running = streams_running(server, stream, until, 4)
    server.processes()[RANK].suspend()
    assert server.process.wait(2 + STOP_S) == 1
    assert all(each.join(5) and each.ended_with_one_error() for each in running)
    assert f"{RANK} (pid " in server.text() and "has got no further for 2 s (its process " in server.text()
    until(server.gone, GONE_S)
    assert server.traces() == []


def test_a_rank_that_is_busy_with_one_thing_writes_its_stacks_before_its_end(start, stream, until, tmp_path):
    script = tmp_path / "script.toml"
    script.write_text('[[rules]]\nfaults = [{ kind = "hang", at = 5, for_ms = 60000 }]\n')
    server = start("--mock-script", str(script), "--watchdog-timeout", "2")
    stream(server)
    assert server.process.wait(2 + STOP_S) == 1
    assert "_strike" in server.text(), "the stack tells where it hung"


def test_waiting_is_no_hanging(start, stream, until):
    server = start("--watchdog-timeout", "2")
    assert httpx.post(f"{server.url}/pause_generation", timeout=10).status_code == 200
    one = stream(server, max_tokens=20)
    until(lambda: server.state()["ranks"]["0"]["waiting"] == 1, 10, server.text)
    began = server.state()["control"]["counters"]["batches"]
    time.sleep(3)
    assert httpx.post(f"{server.url}/continue_generation", timeout=10).status_code == 200
    assert one.join(10) and one.errors == 0 and began == 0
    # Stopped for less than the timeout is no failure either.
    rank = server.processes()[RANK]
    rank.suspend()
    time.sleep(0.5)
    rank.resume()
    assert server.complete().status_code == 200


def test_a_hanging_child_does_not_keep_the_server(start, stream, until):
    server = start()
    running = streams_running(server, stream, until, 4)
    children = server.processes()
    children[RANK].suspend()
    children[HTTP].kill()
    assert server.process.wait(STOP_S) == 1
    until(server.gone, GONE_S)
    assert all(each.join(5) for each in running)
    assert server.traces() == []


def test_what_a_killed_server_of_before_left_is_swept(start, until):
    server = start()
    processes = server.processes()
    # With control killed first, nobody is left to clean up behind main.
    processes[CONTROL].suspend()
    server.process.kill()
    processes[CONTROL].kill()
    server.process.wait(5)
    until(server.gone, GONE_S)
    assert server.traces() != []
    again = start(env={"XDG_RUNTIME_DIR": str(server.runtime)})
    left = [path for path in server.traces() if str(again.pid) not in path]
    assert left == []
    again.stop()


# Shutdown


def test_sigterm_lets_streams_finish(start, stream, until):
    server = start("--mock-step-ms", "10")
    long, short = stream(server, 150), stream(server, 50)
    until(lambda: long.running() and short.running(), 10)
    server.process.send_signal(signal.SIGTERM)
    until(lambda: httpx.get(f"{server.url}/ready", timeout=5).status_code == 503, 1)
    refused = server.complete()
    assert refused.status_code == 503 and "retry-after" in refused.headers
    assert server.process.wait(20) == 0
    for each in (long, short):
        assert each.join(5) and not each.cut and each.errors == 0 and each.events[-1] == "[DONE]"
    assert server.traces() == []


def test_the_drain_timeout_ends_streams_with_an_error_event(start, stream, until):
    server = start("--drain-timeout", "0.5", "--mock-step-ms", "5")
    running = streams_running(server, stream, until, 8)
    began = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - began >= 0.5
    assert all(each.join(5) and each.ended_with_one_error() for each in running), [each.events[-3:] for each in running]
    assert server.traces() == []


def test_ctrl_c_ends_at_once_with_error_events(start, stream, until):
    server = start("--tokenizer-workers", "2", "--mock-step-ms", "5")
    running = streams_running(server, stream, until)
    # As a terminal does it: the whole group is told.
    os.killpg(server.pid, signal.SIGINT)
    assert server.process.wait(STOP_S) == 130
    assert all(each.join(5) and each.ended_with_one_error() for each in running), [each.events[-3:] for each in running]
    until(server.gone, GONE_S)
    assert server.traces() == []


@pytest.mark.parametrize(("second", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_second_signal_cuts_the_drain_short(start, stream, until, second, status):
    server = start("--mock-step-ms", "5")
    running = streams_running(server, stream, until, 4)
    server.process.send_signal(signal.SIGTERM)
    until(lambda: "draining" in server.text(), 2)
    assert server.stop(second, STOP_S) == status
    assert all(each.join(5) and each.ended_with_one_error() for each in running)
    assert server.traces() == []


# Aborts and cost


def empty(state: dict) -> bool:
    """No process holds anything of a request."""
    control, page = state["control"], state["state_page"]
    held = [control[name] for name in ("in_flight", "open_groups", "waiting_for_rank", "fanout_queued")]
    held += [shard["live"] + shard["queued"] for shard in control["shards"]]
    for rank in control["ranks"]:
        held += [rank[name] for name in ("in_flight", "backlog", "requests", "tokens", "unseen_tokens")]
    for rank in state["ranks"].values():
        held += [rank["running"], rank["waiting"], rank["held_tokens"], rank["pages_held"], rank["live"]]
    held += [worker["open_streams"] + worker["reserved_tokens"] for worker in page["workers"]]
    return not any(held) and not state["worker"]["requests"] and not state["no_answer"]


@pytest.mark.parametrize("engine", ["mock", pytest.param("torch", marks=pytest.mark.slow)])
def test_clients_that_leave_at_any_moment_leave_nothing(start, until, engine):
    ranks = 2 if engine == "mock" else 1
    settings = f"--tokenizer-workers 2 --data-parallel-size {ranks} --max-running-requests 8 --mock-step-ms 3"
    server = start(*settings.split(), engine=engine)
    source = random.Random(4)

    def leave(after_s: float, streamed: bool) -> None:
        body = {"model": "x", "prompt": "Count:", "max_tokens": 500, "stream": streamed}
        sock = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        sock.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        time.sleep(after_s)
        sock.close()

    threads = [
        threading.Thread(target=leave, args=(source.uniform(0.0, 0.5), source.random() < 0.7)) for _ in range(200)
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.002)
    for thread in threads:
        thread.join()
    until(lambda: empty(server.state()), 20, lambda: str(server.state()))
    assert server.complete().status_code == 200


def test_an_idle_server_sleeps(start, until):
    """Everything blocks until there is something to do. Counted in wake-ups: what one costs is the machine's affair."""
    server = start("--tokenizer-workers", "2", "--data-parallel-size", "2", "--detokenizer-workers", "2")
    server.complete()

    def wake_ups() -> int:
        lines = [
            line
            for process in server.processes().values()
            for status in Path(f"/proc/{process.pid}/task").glob("*/status")
            for line in status.read_text().splitlines()
        ]
        return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))

    def rate() -> float:
        before, began = wake_ups(), time.monotonic()
        time.sleep(3)
        return (wake_ups() - before) / (time.monotonic() - began)

    # The last work of a start may come late.
    until(lambda: rate() < 60, 30)


def test_the_state_shows_that_ranks_live_and_what_they_do(start, until):
    server = start("--data-parallel-size", "2")
    server.complete()

    def ranks() -> list[dict]:
        return server.state()["state_page"]["ranks"]

    until(lambda: [rank["phase"] for rank in ranks()] == ["idle", "idle"], 10)
    before = ranks()
    assert [rank["pulse_epoch"] for rank in before] == [rank["epoch"] for rank in before]
    until(lambda: all(now["pulse_ns"] > then["pulse_ns"] for now, then in zip(ranks(), before, strict=True)), 10)


def test_a_worker_is_small(start):
    server = start()
    server.complete()
    assert server.processes()[HTTP].memory_full_info().pss < 100 << 20


def test_nothing_heavy_is_in_a_worker_or_in_main(start):
    server = start()
    for title in ("servekit::main", HTTP, CONTROL, RANK):
        maps = " ".join(each.path for each in server.processes()[title].memory_maps())
        assert "torch" not in maps, title
        assert title == "servekit::main" or "numpy" not in maps, title


def test_the_installed_command_is_this_module():
    done = subprocess.run(
        [sys.executable, "-P", "-m", "servekit.cli.serve", "--version"], capture_output=True, text=True, timeout=10
    )
    assert done.returncode == 0 and "version" in done.stdout


@pytest.mark.parametrize("descriptors", [12, 16])
def test_too_few_descriptors_end_the_start_with_one_line(tmp_path, descriptors):
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    command = [sys.executable, "-P", "-m", "servekit.cli.serve", "--engine", "mock", "--port", "0"]
    env = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(command, env=env, preexec_fn=limit, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line == "servekit-serve: error: the system does not give what a server needs: Too many open files"
    assert list(tmp_path.iterdir()) == []
