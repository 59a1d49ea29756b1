"""Two nodes on loopback as one server: start, serve, die, end, and what each side says of it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).parents[2]


RANK = "servekit::scheduler[dp={}]"


def rank_of(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    return answer.json()["meta_info"]["dp_rank"]


def generate(server, rank: int | None = None, tokens: int = 4) -> httpx.Response:
    body = {"text": "hello", "data_parallel_rank": rank, "sampling_params": {"max_new_tokens": tokens}}
    return httpx.post(f"{server.url}/generate", json=body, timeout=30)


def test_replicas_on_two_nodes_serve_as_one_and_end_together(nodes, stream):
    two = nodes()
    head, other = two.both("--mock-step-ms", "5")
    assert {RANK.format(0), "servekit::control", "servekit::http[0]"} < set(head.processes())
    assert set(other.processes()) == {"servekit::main", RANK.format(1)}
    assert {rank_of(generate(head)) for _ in range(8)} == {0, 1}
    assert [rank_of(generate(head, rank)) for rank in (0, 1)] == [0, 1]
    # Long prompts and many streams, all over the line between the nodes.
    streams = [stream(head, max_tokens=50, prompt="x" * 20000, data_parallel_rank=1) for _ in range(16)]
    assert all(each.join(30) for each in streams)
    assert all(each.events[-1] == "[DONE]" and not each.errors for each in streams)
    ranks = head.state()["state_page"]["ranks"]
    assert all(rank["pulse_age_s"] < 3 for rank in ranks)
    assert head.stop() == 0
    assert other.process.wait(10) == 0
    two.left(head, other)


def test_nodes_come_in_any_order_and_ready_waits_for_all(nodes, until):
    two = nodes()
    other = two.node(1)
    until(lambda: "asking node 0" in other.text(), 30, other.text)
    head = two.node(0)
    head.wait()
    assert httpx.get(f"{head.url}/ready", timeout=5).status_code == 200
    assert rank_of(generate(head, 1)) == 1
    head.stop(signal.SIGINT)
    assert other.process.wait(10) == 0
    two.left(head, other)


def test_only_told_addresses_are_listened_on(nodes):
    two = nodes()
    first = int(two.address.rpartition(":")[2])
    flags = ["--dist-port-range", f"{first + 1}-{first + 200}" if first < 65000 else "40000-40200"]
    head, other = two.both(*flags)
    listening = set()
    for each in [*head.processes().values(), *other.processes().values()]:
        listening |= {c.laddr for c in each.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert {where.ip for where in listening} == {"127.0.0.1"}
    ports = {where.port for where in listening} - {head.port, first}
    begin, end = map(int, flags[1].split("-"))
    assert len(ports) == 2
    assert all(begin <= port <= end for port in ports)


@pytest.mark.parametrize("victim", ["rank", "main"])
def test_a_node_that_dies_takes_its_replica_alone(nodes, until, stream, victim):
    two = nodes()
    head, other = two.both("--mock-step-ms", "20")
    doomed = [stream(head, data_parallel_rank=1) for _ in range(4)]
    survivors = [stream(head, max_tokens=400, data_parallel_rank=0) for _ in range(4)]
    until(lambda: all(each.running() for each in (*doomed, *survivors)), 20)
    title = RANK.format(1) if victim == "rank" else "servekit::main"
    os.kill(other.processes()[title].pid, signal.SIGKILL)
    until(lambda: all(each.join(0) for each in doomed), 2 if victim == "rank" else 5, head.text)
    assert all(each.ended_with_one_error() for each in doomed)
    assert all(each.join(30) and not each.errors for each in survivors)
    assert rank_of(generate(head)) == 0
    assert httpx.get(f"{head.url}/ready", timeout=5).status_code == 200
    assert head.text().count("its replica ends, 1 of 2 go on") == 1
    assert other.process.wait(15) == (1 if victim == "rank" else -9)
    two.left(other)
    assert head.stop() == 0
    two.left(head)


def test_a_rank_elsewhere_that_is_stopped_is_ended_by_the_watchdog(nodes, until, stream):
    two = nodes()
    head, other = two.both("--mock-step-ms", "20", "--watchdog-timeout", "3")
    doomed = stream(head, data_parallel_rank=1)
    survivor = stream(head, max_tokens=400, data_parallel_rank=0)
    until(lambda: doomed.running() and survivor.running(), 20)
    os.kill(other.processes()[RANK.format(1)].pid, signal.SIGSTOP)
    assert doomed.join(15)
    assert doomed.ended_with_one_error()
    assert f"{RANK.format(1)} on node 1" in head.text()
    assert "its process has not run for" in head.text()
    assert survivor.join(30)
    assert not survivor.errors
    assert other.process.wait(15) == 1
    two.left(other)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_node_without_node_0_ends(nodes, number):
    two = nodes()
    head, other = two.both()
    os.kill(head.pid, number)
    assert other.process.wait(15) == (1 if number == signal.SIGKILL else 0)
    if number == signal.SIGKILL:
        assert "ERROR" in other.text()
        assert f"node 0 at {two.address} is not connected any more" in other.text()
    two.left(head, other)


def test_sigterm_to_all_nodes_lets_streams_end_first(nodes, until, stream):
    two = nodes()
    head, other = two.both("--mock-step-ms", "20")
    streams = [stream(head, max_tokens=150, data_parallel_rank=rank) for rank in (0, 1)]
    until(lambda: all(each.running() for each in streams), 20)
    other.process.send_signal(signal.SIGTERM)
    head.process.send_signal(signal.SIGTERM)
    assert all(each.join(20) and not each.errors and not each.cut for each in streams)
    assert head.process.wait(15) == 0
    assert other.process.wait(15) == 0
    assert "working on until node 0 has drained" in other.text()
    two.left(head, other)


def test_a_rank_that_fails_in_the_start_ends_it_on_all_nodes_with_its_own_line(nodes):
    two = nodes()
    flags = ["--data-parallel-size", "2", "--nnodes", "2", "--dist-init-addr", two.address, "--engine", "mock"]
    command = [sys.executable, "-m", "tests.integration.entries", "lacks_a_file", "--port", "0", *flags]
    running = [
        subprocess.Popen(
            [*command, "--node-rank", str(node)],
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for node in (0, 1)
    ]
    for each in running:
        _, said = each.communicate(timeout=60)
        assert each.returncode == 1, said
        assert said.splitlines()[-1] == "servekit-serve: error: the weights of rank 1 are not there"


def test_a_missing_node_is_named_by_those_who_wait_for_it(nodes):
    three = nodes(3)
    head, other = three.node(0, "--dist-timeout", "3"), three.node(1, "--dist-timeout", "3")
    line = f"node 2 of --nnodes 3 did not come to {three.address} within 3 s (--dist-timeout)"
    for each in (head, other):
        assert each.process.wait(30) == 1
        assert each.text().splitlines()[-1] == f"servekit-serve: error: {line}"
    three.left(head, other)


def test_a_missing_node_0_is_named(nodes):
    two = nodes()
    other = two.node(1, "--dist-timeout", "2")
    assert other.process.wait(30) == 1
    line = f"node 0 at {two.address} did not answer within 2 s (--dist-timeout)"
    assert other.text().splitlines()[-1] == f"servekit-serve: error: {line}"
    two.left(other)


def test_a_differing_flag_and_a_wrong_secret_are_refused_and_the_right_node_is_taken(nodes, tmp_path):
    two = nodes()
    head = two.node(0)
    differing = two.node(1, "--max-model-len", "1024")
    assert differing.process.wait(30) == 1
    assert "its --max-model-len is 1024 and that of node 0 is not given" in differing.text()
    wrong = tmp_path / "wrong"
    wrong.write_text("quite another secret, long enough")
    wrong.chmod(0o600)
    stranger = two.node(1, "--cluster-secret-file", str(wrong))
    assert stranger.process.wait(30) == 1
    assert "it has another secret (--cluster-secret-file)" in stranger.text()
    other = two.node(1)
    head.wait()
    assert "its --max-model-len is 1024" in head.text()
    assert rank_of(generate(head, 1)) == 1
    # A second life of a node that takes part.
    again = two.node(1)
    assert again.process.wait(30) == 1
    assert "node 1 has taken part in this run before" in again.text()
    assert rank_of(generate(head, 1)) == 1
    two.left(differing, stranger, again)
    head.stop()
    two.left(head, other)


def test_the_secret_is_seen_nowhere(nodes):
    two = nodes()
    flags = ["--log-level", "debug"]
    secret = two.secret.read_text()
    env = {"SERVEKIT_CLUSTER_SECRET": secret}

    def node(number: int):
        layout = ["--data-parallel-size", "2", "--nnodes", "2", "--node-rank", str(number)]
        return two._start(*layout, "--dist-init-addr", two.address, *flags, wait=False, env=env)

    head, other = node(0), node(1)
    head.wait()
    for title, each in {**head.processes(), **other.processes()}.items():
        assert secret not in title
        if title != "servekit::main":
            assert "SERVEKIT_CLUSTER_SECRET" not in each.environ()
    for each in (head, other):
        assert secret not in each.text()
        for segment in Path("/dev/shm").glob(f"servekit-{each.pid}-*"):
            assert secret.encode() not in segment.read_bytes()
        arguments = subprocess.run(["ps", "-o", "args=", "-p", str(each.pid)], capture_output=True, text=True)
        assert secret not in arguments.stdout


def test_a_node_tells_probes_how_it_is(nodes, until):
    two = nodes()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    other = two.node(1, "--health-port", str(port))
    url = f"http://127.0.0.1:{port}"
    until(lambda: "health is told" in other.text(), 20, other.text)
    assert httpx.get(f"{url}/health", timeout=5).status_code == 200
    assert httpx.get(f"{url}/ready", timeout=5).status_code == 503
    head = two.node(0)
    head.wait()
    until(lambda: httpx.get(f"{url}/ready", timeout=5).status_code == 200, 10)
    told = httpx.get(f"{url}/health", timeout=5).json()
    assert (told["node"], told["node_0"], told["taking_part"]) == (1, two.address, True)
    assert [(rank["title"], rank["state"]) for rank in told["ranks"]] == [(RANK.format(1), "ready")]
    head.stop()
    two.left(head, other)


@pytest.mark.slow
def test_a_node_that_alone_is_told_to_stop_works_on_for_its_drain_timeout_and_then_says_why_it_ends(
    nodes, until, stream
):
    two = nodes()
    head, other = two.both("--mock-step-ms", "20", "--drain-timeout", "1")
    short = stream(head, max_tokens=200, data_parallel_rank=1)
    endless = stream(head, data_parallel_rank=1)
    until(lambda: short.running() and endless.running(), 20)
    other.process.send_signal(signal.SIGTERM)
    assert short.join(20)
    assert not short.errors
    assert endless.join(20)
    assert endless.ended_with_one_error()
    assert other.process.wait(15) == 0
    assert "which ended: its drain timeout has passed; its replica ends, 1 of 2 go on" in head.text()
    assert rank_of(generate(head)) == 0
    two.left(other)
