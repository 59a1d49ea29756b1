"""Kill matrices: processes of all layouts killed or stopped under load; who could live on does, nothing is left.

Tiny checkpoints in all layouts, the demo model as tp 3 and as two replicas.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.integration.layouts import LAYOUTS, rank, save_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STREAMS = 16
ERRORS_S = 2.0
"""How soon the streams of a dead group end."""
WATCHDOG_S = 4
STOPPED_S = WATCHDOG_S + 6.0
"""How soon a rank that was stopped is ended, with a second for its stacks and the rest for a busy machine."""
SILENT_S = 10.0
"""How soon a control process that was stopped is given up."""
GONE_S = 5.0

LAYOUTS_OF_THE_MODEL = {
    "tp3": (["--tp", "3"], (rank(0, 0, 0), rank(0, 0, 1))),
    "replicas2": (["--dp", "2"], ("servekit::scheduler[dp=0]", "servekit::scheduler[dp=1]")),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {case: save_tiny(folder / case, case, 4096) for case in {layout.case for layout in LAYOUTS.values()}}


@pytest.fixture
def load(stream, until):
    """Begins `STREAMS` streams, of ranks in turn where there are several, and waits until all are in the middle."""

    def load(server, ranks: int, max_tokens: int, words: str = "t{}") -> list:
        streams = [
            stream(
                server,
                max_tokens,
                prompt=words.format(i),
                ignore_eos=True,
                temperature=0,
                data_parallel_rank=i % ranks if ranks > 1 else None,
            )
            for i in range(STREAMS)
        ]
        until(lambda: all(each.events for each in streams), 60, server.text)
        return streams

    return load


def ended_well(streams) -> bool:
    return all(not each.cut and each.errors == 0 and each.events[-1] == "[DONE]" for each in streams)


def all_end_with_one_error(streams, seconds: float, server) -> None:
    deadline = time.monotonic() + seconds
    assert all(each.join(max(0.0, deadline - time.monotonic())) for each in streams), server.text()
    assert all(each.ended_with_one_error() for each in streams), [each.events[-3:] for each in streams]


def is_over(server, until, status: int = 1) -> None:
    until(lambda: server.process.poll() is not None, GONE_S, server.text)
    assert server.process.returncode == status
    until(server.gone, GONE_S)
    assert server.traces() == []


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "tp2"])
def test_a_killed_rank_takes_its_group_and_nobody_else(start, load, until, beside, models, name, which):
    layout = LAYOUTS[name]
    server = start(str(models[layout.case]), *layout.arguments, engine="torch")
    ranks = 2 if "--dp" in layout.flags else 1
    undisturbed = load(server, ranks, 150) if layout.replicas > 1 else []
    assert all(each.join(120) for each in undisturbed) and ended_well(undisturbed)
    streams = load(server, ranks, 150 if layout.replicas > 1 else 4000)
    killed = time.monotonic()
    server.processes()[layout.victims[which]].kill()
    theirs = streams[1::2] if layout.replicas > 1 else streams
    all_end_with_one_error(theirs, ERRORS_S - (time.monotonic() - killed), server)
    if layout.replicas > 1:
        others = streams[::2]
        assert all(each.join(120) for each in others) and ended_well(others)
        assert [each.text for each in others] == [each.text for each in undisturbed[::2]]
        assert httpx.get(f"{server.url}/ready", timeout=5).status_code == 200
        assert server.stop() == 0
    is_over(server, until, 0 if layout.replicas > 1 else 1)
    deaths = [line for line in server.text().splitlines() if " ERROR " in line]
    assert len(deaths) == 1 and layout.victims[which] in deaths[0] and "SIGKILL" in deaths[0], server.text()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("name", LAYOUTS_OF_THE_MODEL)
def test_the_model_loses_a_rank(start, load, until, beside, name, which, number):
    flags, victims = LAYOUTS_OF_THE_MODEL[name]
    replicas = 2 if "--dp" in flags else 1
    server = start(*flags, "--dtype", "float32", "--watchdog-timeout", str(WATCHDOG_S), engine="torch")
    undisturbed = load(server, replicas, 24, "Count from {}:") if replicas > 1 else []
    assert all(each.join(200) for each in undisturbed) and ended_well(undisturbed)
    streams = load(server, replicas, 24 if replicas > 1 else 2000, "Count from {}:")
    struck = time.monotonic()
    server.processes()[victims[which]].send_signal(number)
    theirs = streams[which::2] if replicas > 1 else streams
    limit = ERRORS_S if number == signal.SIGKILL else STOPPED_S
    all_end_with_one_error(theirs, limit - (time.monotonic() - struck), server)
    if replicas > 1:
        others = streams[1 - which :: 2]
        assert all(each.join(200) for each in others) and ended_well(others)
        assert [each.text for each in others] == [each.text for each in undisturbed[1 - which :: 2]]
        assert server.stop() == 0
    is_over(server, until, 0 if replicas > 1 else 1)


@pytest.mark.parametrize("name", LAYOUTS_OF_THE_MODEL)
def test_the_model_with_a_stopped_control_process(start, load, until, beside, name):
    flags, _ = LAYOUTS_OF_THE_MODEL[name]
    server = start(*flags, engine="torch")
    streams = load(server, 1, 2000, "Count from {}:")
    struck = time.monotonic()
    server.processes()["servekit::control"].suspend()
    until(lambda: httpx.get(f"{server.url}/health", timeout=5).status_code == 503, SILENT_S, server.text)
    all_end_with_one_error(streams, SILENT_S - (time.monotonic() - struck), server)
    assert server.stop(signal.SIGINT) == 130
    is_over(server, until, 130)


@pytest.mark.parametrize("name", LAYOUTS_OF_THE_MODEL)
def test_the_model_with_a_stopped_worker_and_a_stopped_main(start, load, until, beside, name):
    flags, _ = LAYOUTS_OF_THE_MODEL[name]
    server = start(*flags, "--tokenizer-workers", "2", engine="torch")
    streams = load(server, 1, 24, "Count from {}:")
    served = [worker["open_streams"] for worker in server.state()["state_page"]["workers"]]
    assert sum(served) == STREAMS
    processes = server.processes()
    processes["servekit::http[1]"].suspend()
    until(lambda: sum(not each._thread.is_alive() for each in streams) >= served[0], 200, server.text)
    finished = [each for each in streams if not each._thread.is_alive()]
    assert ended_well(finished)
    processes["servekit::http[1]"].resume()
    assert all(each.join(60) for each in streams) and ended_well(streams)
    processes["servekit::main"].suspend()
    streams = load(server, 1, 20, "Count from {}:")
    assert all(each.join(200) for each in streams) and ended_well(streams)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(1.0)
    assert server.complete().status_code == 200, "it has not heard it yet"
    processes["servekit::main"].resume()
    assert server.process.wait(40) == 0
    is_over(server, until, 0)
