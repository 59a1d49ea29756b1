"""Nodes as network namespaces of this machine, joined by a bridge: what a real network does to them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer, models

from tests.unit.tiny_models import VOCABULARY, save_case

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
NOTICED_S = 10.0
SECRET = "an example of a secret, long enough"
PORT = 5000
TAG, COUNT = f"sk{os.getpid() % 100000}", count()


def ip(*words: str, namespace: str | None = None) -> str:
    inside = ["-n", namespace] if namespace else []
    done = subprocess.run(["ip", *inside, *words], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done.stdout


def reason_not_to() -> str | None:
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("ss") is None:
        return "network namespaces need root, and the commands ip and ss"
    made = subprocess.run(["ip", "netns", "add", f"{TAG}probe"], capture_output=True, text=True)
    if made.returncode:
        return f"this machine makes no network namespaces: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", f"{TAG}probe"], check=False)
    return None


class Network:
    """Namespaces with an interface each on one bridge, which has an address for the test itself."""

    def __init__(self, start: Callable, folder: Path, nodes: int, ipv6: bool = False) -> None:
        self._start, self.nodes, self._tag = start, nodes, f"{TAG}{next(COUNT)}"
        self.addresses = [f"fd77::{n + 1}" if ipv6 else f"10.177.0.{n + 1}" for n in range(nodes)]
        self.head = f"[{self.addresses[0]}]:{PORT}" if ipv6 else f"{self.addresses[0]}:{PORT}"
        self._host, self._bits, self._options = self.addresses[0], "/64" if ipv6 else "/24", ["nodad"] if ipv6 else []
        self._names = [f"{self._tag}n{n}" for n in range(nodes)]
        self.secret = folder / "secret"
        self.secret.write_text(SECRET)
        self.secret.chmod(0o600)
        try:
            self._make("fd77::ff" if ipv6 else "10.177.0.254")
        except BaseException:
            self.close()
            raise

    def _make(self, bridge: str) -> None:
        ip("link", "add", f"{self._tag}br", "type", "bridge")
        ip("addr", "add", bridge + self._bits, "dev", f"{self._tag}br", *self._options)
        ip("link", "set", f"{self._tag}br", "up")
        for number, name in enumerate(self._names):
            ip("netns", "add", name)
            ip("link", "add", f"{self._tag}v{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"{self._tag}v{number}", "master", f"{self._tag}br", "up")
            ip("addr", "add", self.addresses[number] + self._bits, "dev", "eth0", *self._options, namespace=name)
            ip("link", "set", "lo", "up", namespace=name)
            ip("link", "set", "eth0", "up", namespace=name)

    def hosts(self, number: int, text: str) -> None:
        """What names mean on a node."""
        folder = Path("/etc/netns") / self._names[number]
        folder.mkdir(parents=True)
        (folder / "hosts").write_text(text)

    def stray_default_route(self, number: int) -> None:
        """Another interface of a node, with the default route, that leads nowhere."""
        name = self._names[number]
        ip("link", "add", "stray0", "type", "veth", "peer", "name", "stray1", namespace=name)
        ip("link", "set", "stray1", "up", namespace=name)
        ip("addr", "add", "172.31.9.9/24", "dev", "stray0", namespace=name)
        ip("link", "set", "stray0", "up", namespace=name)
        ip("route", "add", "default", "via", "172.31.9.1", namespace=name)

    def cut(self, number: int) -> None:
        ip("link", "set", f"{self._tag}v{number}", "down")

    def mend(self, number: int) -> None:
        ip("link", "set", f"{self._tag}v{number}", "up")

    def node(self, number: int, *flags: str, replicas: bool = True, secret: bool = True, **options):
        layout = ["--data-parallel-size", str(self.nodes)] if replicas else []
        layout += ["--nnodes", str(self.nodes), "--node-rank", str(number), "--host", self._host]
        layout += ["--dist-init-addr", self.head]
        if secret:
            layout += ["--cluster-secret-file", str(self.secret)]
        prefix = ["ip", "netns", "exec", self._names[number]]
        return self._start(*layout, *flags, wait=False, prefix=prefix, **options)

    def all(self, *flags: str, **options) -> list:
        found = [self.node(number, *flags, **options) for number in range(self.nodes)]
        found[0].wait()
        for each in found:
            each.processes()
        return found

    def listening(self, number: int) -> set[tuple[str, int]]:
        """Address and port of every TCP socket of a node that listens."""
        done = subprocess.run(
            ["ip", "netns", "exec", self._names[number], "ss", "-Hltn"], capture_output=True, text=True, check=True
        )
        found = [line.split()[3].rpartition(":") for line in done.stdout.splitlines()]
        return {(address.strip("[]"), int(port)) for address, _, port in found}

    def close(self) -> None:
        for number, name in enumerate(self._names):
            # A namespace goes when its last process does, and with it what is in it.
            subprocess.run(["ip", "link", "del", f"{self._tag}v{number}"], capture_output=True, check=False)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)
        subprocess.run(["ip", "link", "del", f"{self._tag}br"], capture_output=True, check=False)


@pytest.fixture
def network(start, tmp_path) -> Iterator[Callable[..., Network]]:
    why = reason_not_to()
    if why is not None:
        pytest.skip(why)
    made: list[Network] = []

    def make(nodes: int = 2, **options) -> Network:
        made.append(Network(start, tmp_path, nodes, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_case(tmp_path_factory.mktemp("model") / "m", "qwen3")
    words = {f"t{i}": i for i in range(VOCABULARY)}
    Tokenizer(models.WordLevel(words, unk_token="t0")).save(str(folder / "tokenizer.json"))
    return folder


def rank_of(server, rank: int | None = None) -> int:
    body = {"text": "hello", "data_parallel_rank": rank, "sampling_params": {"max_new_tokens": 4}}
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()["meta_info"]["dp_rank"]


def ids(server, prompt: list[int]) -> list[int]:
    sampling = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/generate", json={"input_ids": prompt, "sampling_params": sampling}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["output_ids"]


def ended_well(head, *others) -> None:
    assert head.stop() == 0
    for each in others:
        assert each.process.wait(15) == 0


def test_three_nodes_start_in_any_order_and_listen_where_they_said_alone(network, until):
    three = network(3)
    late = [three.node(number) for number in (2, 1)]
    until(lambda: all("asking node 0" in each.text() for each in late), 60)
    head = three.node(0)
    head.wait()
    assert [rank_of(head, rank) for rank in range(3)] == [0, 1, 2]
    places = three.listening(0)
    assert {address for address, _ in places} == {three.addresses[0]}
    # HTTP, where nodes meet, what ranks send to, and one for each rank elsewhere.
    assert len(places) == 5
    assert all(str(PORT) in str(sorted(places)) or port in (head.port, PORT) for _, port in places)
    assert three.listening(1) == three.listening(2) == set()
    ended_well(head, *late)


def test_a_missing_node_is_named_on_all_others(network):
    three = network(3)
    found = [three.node(number, "--dist-timeout", "4") for number in (0, 1)]
    for each in found:
        assert each.process.wait(40) == 1
        line = f"servekit-serve: error: node 2 of --nnodes 3 did not come to {three.head} within 4 s (--dist-timeout)"
        assert each.text().splitlines()[-1] == line


def test_ipv6_alone_is_enough(network):
    two = network(ipv6=True)
    head, other = two.all()
    assert [rank_of(head, rank) for rank in (0, 1)] == [0, 1]
    ended_well(head, other)


def test_off_loopback_there_is_no_way_without_the_secret(network, tmp_path):
    two = network()
    bare = two.node(0, secret=False)
    assert bare.process.wait(30) == 1
    line = "servekit-serve: error: --dist-init-addr 10.177.0.1 is not on this machine alone, so nodes need a secret:"
    assert bare.text().splitlines()[-1].startswith(line)
    wrong = tmp_path / "wrong"
    wrong.write_text("quite another secret, long enough")
    wrong.chmod(0o600)
    head, stranger = two.node(0), two.node(1, "--cluster-secret-file", str(wrong))
    assert stranger.process.wait(40) == 1
    assert "it has another secret (--cluster-secret-file)" in stranger.text().splitlines()[-1]
    other = two.node(1)
    head.wait()
    assert "come without the cluster's secret" in head.text()
    assert rank_of(head, 1) == 1
    ended_well(head, other)


def test_a_name_that_means_loopback_on_node_0_is_told(network):
    two = network()
    two.head = f"headnode:{PORT}"
    two.hosts(0, "127.0.0.1 localhost\n127.0.1.1 headnode\n")
    two.hosts(1, "127.0.0.1 localhost\n10.177.0.1 headnode\n")
    # What node 0 has of its own lies on loopback as well, for it knows no other address.
    head, other = two.node(0, "--dist-timeout", "4"), two.node(1, "--dist-timeout", "4")
    assert head.process.wait(40) == 1
    assert "means an address here that only this machine reaches" in head.text().splitlines()[-1]
    assert other.process.wait(40) == 1
    assert "node 0 at 10.177.0.1:5000 did not answer within 4 s" in other.text().splitlines()[-1]


def test_names_that_mean_loopback_and_a_stray_default_route_do_not_mislead_a_group(network, start, model):
    flags = [str(model), "--skip-tokenizer-init"]
    prompts = [[5], [1, 2, 3], list(range(40))]
    alone = start(*flags, engine="torch")
    expected = [ids(alone, prompt) for prompt in prompts]
    alone.close()
    two = network()
    for number in (0, 1):
        two.stray_default_route(number)
        # The own name, by which libraries like to look for an own address.
        two.hosts(number, f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n")
    head, other = two.all(*flags, "--tp", "2", engine="torch", replicas=False)
    assert [ids(head, prompt) for prompt in prompts] == expected
    for number in (0, 1):
        assert {address for address, _ in two.listening(number)} == {two.addresses[number]}
    ended_well(head, other)


def test_a_link_that_goes_down_under_load_is_noticed_in_time_on_both_sides(network, until, stream):
    two = network()
    head, other = two.all("--mock-step-ms", "20")
    doomed = [stream(head, data_parallel_rank=1) for _ in range(8)]
    survivors = [stream(head, max_tokens=1500, data_parallel_rank=0) for _ in range(8)]
    until(lambda: all(each.running() for each in (*doomed, *survivors)), 20)
    two.cut(1)
    cut = time.monotonic()
    until(lambda: all(each.join(0) for each in doomed), NOTICED_S + 2, head.text)
    assert time.monotonic() - cut < NOTICED_S
    assert all(each.ended_with_one_error() for each in doomed)
    assert other.process.wait(NOTICED_S) == 1
    assert time.monotonic() - cut < NOTICED_S + 2
    assert "node 0 at 10.177.0.1:5000 was not heard of for 8 s" in other.text()
    until(other.gone, 5)
    assert other.traces() == []
    # Back again, in a new life: not into this run.
    two.mend(1)
    again = two.node(1, "--mock-step-ms", "20")
    assert again.process.wait(30) == 1
    assert "node 1 has taken part in this run before" in again.text()
    assert all(each.join(60) and not each.errors for each in survivors)
    assert rank_of(head) == 0
    ended_well(head)


def test_a_link_that_is_down_for_a_moment_harms_nothing(network, until, stream):
    two = network()
    head, other = two.all("--mock-step-ms", "20")
    streams = [stream(head, max_tokens=400, data_parallel_rank=rank) for rank in (0, 1) for _ in range(4)]
    until(lambda: all(each.running() for each in streams), 20)
    two.cut(1)
    # The length of the moment is what this is about.
    time.sleep(3.0)
    two.mend(1)
    assert all(each.join(60) and not each.errors and not each.cut for each in streams)
    assert "not heard of" not in head.text() + other.text()
    ended_well(head, other)


def test_a_link_that_goes_down_under_the_only_group_ends_the_server(network, until, stream, model):
    two = network()
    head, other = two.all(str(model), "--tp", "2", engine="torch", replicas=False)
    assert ids(head, [1, 2, 3])
    two.cut(1)
    cut = time.monotonic()
    assert head.process.wait(NOTICED_S + 3) == 1
    assert other.process.wait(NOTICED_S + 3) == 1
    assert time.monotonic() - cut < NOTICED_S + 3
    for each in (head, other):
        until(each.gone, 5)
        assert each.traces() == []


GARBAGE = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    bytes.fromhex("16030100c8010000c40303") + bytes(range(200)),
    b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48) + b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\4PUSH",
    b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(47) + b"\x04\xc8\x05HELLO" + bytes(194),
    b"",
]


def test_garbage_at_every_port_of_a_group_during_start_and_load_harms_nothing(network, start, until, model):
    flags = [str(model), "--skip-tokenizer-init"]
    prompts = [[n, n + 1] for n in range(12)]
    alone = start(*flags, engine="torch")
    expected = [ids(alone, prompt) for prompt in prompts]
    alone.close()
    two = network()
    found = [two.node(number, *flags, "--tp", "2", engine="torch", replicas=False) for number in (0, 1)]
    open_ones: list[socket.socket] = []

    def disturb() -> None:
        for number in (0, 1):
            for address, port in two.listening(number):
                for garbage in (*GARBAGE, os.urandom(3000)):
                    try:
                        open_ones.append(socket.create_connection((address, port), timeout=5))
                        open_ones[-1].sendall(garbage)
                    except OSError:
                        # It hung up, which is its right.
                        continue

    until(lambda: disturb() or "\n" in found[0].output.read_text() or found[0].process.poll() is not None, 90)
    found[0].wait()
    with ThreadPoolExecutor(6) as pool:
        answers = pool.map(lambda prompt: ids(found[0], prompt), prompts)
        disturb()
        assert list(answers) == expected
    assert len(open_ones) > 30
    for each in open_ones:
        each.close()
    ended_well(*found)
    for each in found:
        assert not re.search(r"Traceback|panicked", each.text())
        assert each.process.returncode != -signal.SIGABRT
