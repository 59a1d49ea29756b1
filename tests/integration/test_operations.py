"""What operators rely on, with real processes: metrics of the whole server, commands, keys, TLS and a Unix socket."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import stat
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

TLS = Path(__file__).parents[1] / "data" / "tls"


def metrics_of(client: httpx.Client) -> dict[tuple[str, ...], float]:
    """Values by name and labels."""
    found = {}
    for family in text_string_to_metric_families(client.get("/metrics").raise_for_status().text):
        for sample in family.samples:
            found[(sample.name, *sample.labels.values())] = sample.value
    return found


def grown(now: dict, before: dict, name: str, *labels: str) -> float:
    return now[(name, *labels)] - before[(name, *labels)]


def test_metrics_are_the_whole_servers_and_grow_by_exactly_the_tokens(start, until):
    server = start("--tokenizer-workers", "2", "--data-parallel-size", "2", "--mock-step-ms", "2")
    answers = []

    def ask(connection: httpx.Client, **fields: object) -> dict:
        body = {"model": "x", "prompt": "The capital of France is", "max_tokens": 7, "ignore_eos": True, **fields}
        return connection.post("/v1/completions", json=body).raise_for_status().json()

    # Each connection is one worker's; some of eight are of either.
    clients = [httpx.Client(base_url=server.url, timeout=30) for _ in range(8)]
    try:
        workers = {c.get("/server_info").json()["worker"]["index"] for c in clients}
        before = metrics_of(clients[0])
        answers = [ask(client, n=n) for client in clients for n in (1, 2)]
        streamed = clients[0].post(
            "/v1/completions", json={"model": "x", "prompt": "a b c", "max_tokens": 20, "stream": True,
                                     "stream_options": {"include_usage": True}},
        ).text  # fmt: skip
        assert streamed.count('"text":') >= 15 and streamed.rstrip().endswith("[DONE]")
        prompt = sum(answer["usage"]["prompt_tokens"] for answer in answers) + 3
        generated = sum(answer["usage"]["completion_tokens"] for answer in answers) + 20
        assert generated == 7 * 24 + 20
        for client in clients:
            now = metrics_of(client)
            by_rank = [grown(now, before, "servekit_generation_tokens_total", rank) for rank in "01"]
            assert sum(by_rank) == generated and all(by_rank)
            assert sum(grown(now, before, "servekit_prompt_tokens_total", rank) for rank in "01") == prompt
            assert grown(now, before, "servekit_requests_finished_total", "length") == 25
            assert grown(now, before, "servekit_requests_started_total") == 25
            assert grown(now, before, "servekit_request_seconds_count") == 17
            assert grown(now, before, "servekit_queue_seconds_count") == 25
            assert grown(now, before, "servekit_time_to_first_token_seconds_count") == 1
            assert grown(now, before, "servekit_inter_token_seconds_count") == 19
            assert now["servekit_ready",] == now["servekit_rank_active", "0"] == 1
            assert now["servekit_process_cpu_seconds_total", "control"] >= 0
        assert len(workers) == 2 or len(clients) < 8

        def idle() -> bool:
            now = metrics_of(clients[0])
            names = ("servekit_num_requests_running", "servekit_num_requests_waiting", "servekit_requests_open")
            return not any(now[name, label] for name in names for label in "01")

        until(idle, 10)
    finally:
        for client in clients:
            client.close()


def test_a_pause_an_abort_and_a_log_level_reach_everybody(start, stream, until):
    server = start("--tokenizer-workers", "2", "--data-parallel-size", "2", "--mock-step-ms", "5")
    with httpx.Client(base_url=server.url, timeout=30) as http:
        paused = http.post("/pause_generation").json()
        assert paused["status"] == "ok" and set(paused["answers"]) == {"scheduler[dp=0]", "scheduler[dp=1]"}
        waiting = [stream(server, max_tokens=5) for _ in range(4)]
        until(lambda: sum(rank["live"] for rank in server.state()["ranks"].values()) == 4, 10)
        assert not any(each.events for each in waiting)
        assert http.post("/continue_generation").json()["no_answer"] == []
        assert all(each.join(10) and each.events[-1] == "[DONE]" and each.errors == 0 for each in waiting)

        level = http.post("/set_log_level", json={"level": "debug"}).json()
        assert {"http[0]", "http[1]", "scheduler[dp=0]", "scheduler[dp=1]"} == set(level["answers"])
        assert http.post("/set_log_level", json={"level": "loud"}).status_code == 400
        assert http.post("/flush_cache").status_code == 200
        refused = http.post("/start_profile")
        assert refused.status_code == 409 and "mock" in refused.json()["error"]["message"]
        assert set(refused.json()["answers"]) == {"scheduler[dp=0]", "scheduler[dp=1]"}

        running = [stream(server) for _ in range(6)]
        until(lambda: all(each.running() for each in running), 10)
        name = running[0].events[0].partition('"id":"')[2].partition('"')[0]
        assert http.post("/abort_request", json={"rid": name[:-1]}).json()["aborted"] == 0
        assert http.post("/abort_request", json={"rid": name}).json()["aborted"] == 1
        assert running[0].join(10) and running[0].ended_with_one_error()
        assert http.post("/abort_request", json={"abort_all": True}).json()["aborted"] == 5
        assert all(each.join(10) and each.ended_with_one_error() for each in running)
        assert http.post("/abort_request", json={}).status_code == 400
        until(lambda: not any(rank["live"] for rank in server.state()["ranks"].values()), 10)


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_in_time(start):
    server = start("--data-parallel-size", "2")
    hung = next(process for title, process in server.processes().items() if "dp=1" in title)
    hung.suspend()
    try:
        answer = httpx.post(server.url + "/pause_generation", timeout=30)
    finally:
        hung.resume()
    assert answer.status_code == 504
    assert answer.json()["no_answer"] == ["scheduler[dp=1]"]
    assert answer.json()["answers"]["scheduler[dp=0]"]["ok"]
    assert httpx.post(server.url + "/continue_generation", timeout=30).status_code == 200, "a late reply is nobody's"


def test_keys_are_in_no_title_no_log_no_segment_and_no_child(start, tmp_path):
    file = tmp_path / "keys"
    file.write_text("sk-file-4711\n")
    server = start(
        "--api-key", "sk-flag-4711", "--api-key-file", str(file), "--log-level", "debug",
        env={"SERVEKIT_ADMIN_API_KEY": "sk-admin-4711"},
    )  # fmt: skip
    for key, path, status in (
        ("sk-flag-4711", "/v1/models", 200),
        ("sk-file-4711", "/v1/models", 200),
        ("sk-admin-4711", "/v1/models", 401),
        ("sk-admin-4711", "/debug/state", 200),
        ("sk-flag-4711", "/debug/state", 401),
    ):
        answer = httpx.get(server.url + path, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == status, (key, path)
    info = httpx.get(server.url + "/server_info", headers={"authorization": "Bearer sk-flag-4711"})
    assert info.status_code == 200 and "4711" not in info.text.replace(str(file), "")
    assert not [title for title in server.processes() if "4711" in title]
    assert "4711" not in server.text() + server.output.read_text()
    for segment in Path("/dev/shm").glob(f"servekit-{server.pid}-*"):
        assert b"4711" not in segment.read_bytes()
    children = [process for process in server.processes().values() if process.pid != server.pid]
    assert children and not [child for child in children if "4711" in str(child.environ())]


def test_https(start):
    server = start("--ssl-certfile", str(TLS / "cert.pem"), "--ssl-keyfile", str(TLS / "key.pem"), wait=False)
    wait_for(server)
    assert server.output.read_text().startswith("curl https://127.0.0.1:")
    trust = ssl.create_default_context(cafile=str(TLS / "cert.pem"))
    with httpx.Client(base_url=f"https://127.0.0.1:{port_of(server)}", verify=trust, timeout=10) as http:
        assert http.get("/v1/models").status_code == 200
        body = {"model": "x", "prompt": "hi", "max_tokens": 8, "stream": True}
        assert http.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")


def test_a_certificate_that_does_not_fit_is_one_line(start, until):
    server = start("--ssl-certfile", str(TLS / "key.pem"), wait=False)
    until(lambda: server.process.poll() is not None, 30, server.text)
    assert server.process.poll() == 1
    (line,) = [line for line in server.text().splitlines() if "error" in line]
    assert "--ssl-certfile" in line and "Traceback" not in server.text()


def test_a_unix_socket(start, until):
    path = Path(f"/tmp/sk-test-{os.getpid()}.sock")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    try:
        server = start("--uds", str(path), "--uds-mode", "600", "--tokenizer-workers", "2", wait=False)
        wait_for(server)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert server.output.read_text().startswith(f"curl http://localhost/v1/chat/completions --unix-socket {path} ")
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(base_url="http://localhost", transport=transport, timeout=10) as http:
            assert http.get("/v1/models").status_code == 200
            body = {"model": "x", "prompt": "hi", "max_tokens": 8, "stream": True}
            assert http.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
            assert http.get("/debug/state").status_code == 200, "who can connect is on this machine"
        second = start("--uds", str(path), wait=False)
        until(lambda: second.process.poll() is not None, 30)
        assert second.process.poll() == 1 and "in use" in second.text()
        assert server.stop() == 0
        assert not path.exists()

        killed = start("--uds", str(path), wait=False)
        wait_for(killed)
        killed.process.send_signal(signal.SIGKILL)
        until(lambda: not path.exists(), 10)
        path.write_text("mine")
        third = start("--uds", str(path), wait=False)
        until(lambda: third.process.poll() is not None, 30)
        assert "no socket" in third.text() and path.read_text() == "mine"
    finally:
        path.unlink(missing_ok=True)


def test_draining_refuses_new_requests_and_lets_running_ones_finish(start, stream, until):
    server = start("--drain-timeout", "20", "--mock-step-ms", "10")
    running = stream(server, max_tokens=150)
    until(running.running, 10)
    # A connection that was there before, for the listener is still open while it drains.
    with httpx.Client(base_url=server.url, timeout=10) as http:
        assert http.get("/ready").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        until(lambda: http.get("/ready").status_code == 503, 5)
        assert http.get("/health").status_code == 200
        refused = http.post("/v1/completions", json={"model": "x", "prompt": "a"})
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert metrics_of(http)["servekit_ready",] == 0
    assert running.join(20) and running.errors == 0 and running.events[-1] == "[DONE]"
    assert server.process.wait(20) == 0


def test_the_limit_of_descriptors_is_raised(start):
    server = start()
    soft, hard = server.processes()["servekit::http[0]"].rlimit(7)
    assert soft >= min(hard, 1 << 18)


def wait_for(server) -> None:
    from tests.integration.conftest import START_S, until

    until(lambda: server.process.poll() is not None or "\n" in server.output.read_text(), START_S, server.text)
    assert server.process.poll() is None, server.text()
    server.processes()


def port_of(server) -> int:
    return int(server.output.read_text().split("https://127.0.0.1:")[1].split("/")[0])
