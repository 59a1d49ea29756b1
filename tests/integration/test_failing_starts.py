"""Starts that fail: whoever knows why is heard first and alone, and nothing is left, whichever rank it is."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.integration.layouts import LAYOUTS, save_tiny

pytestmark = pytest.mark.timeout(300)
# Loading torch in several processes takes long where other work shares the machine.
FAIL_S = 60.0
GONE_S = 5.0
QUICK = ("tp2", 1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {case: save_tiny(folder / case, case) for case in {layout.case for layout in LAYOUTS.values()}}


def ends_with_one_line(server, until) -> str:
    until(lambda: server.process.poll() is not None, FAIL_S, server.text)
    assert server.process.returncode == 1, server.text()
    errors = [line for line in server.text().splitlines() if "error" in line.lower()]
    assert len(errors) == 1 and errors[0].startswith("servekit-serve: error: "), server.text()
    until(server.gone, GONE_S)
    assert server.traces() == []
    return errors[0].removeprefix("servekit-serve: error: ")


def victims(*names: str) -> list:
    return [
        pytest.param(name, which, marks=[] if (name, which) == QUICK else pytest.mark.slow)
        for name in names
        for which in (0, 1)
    ]


@pytest.mark.parametrize(("name", "which"), victims(*LAYOUTS))
@pytest.mark.parametrize("entry", ["gives_up", "is_killed"])
def test_the_rank_that_fails_is_heard_first_and_ends_the_start(start, until, beside, models, name, which, entry):
    layout = LAYOUTS[name]
    victim = layout.victims[which]
    server = start(
        str(models[layout.case]), *layout.arguments, engine="torch", entry=entry, env={"VICTIM": victim}, wait=False
    )
    line = ends_with_one_line(server, until)
    if entry == "gives_up":
        assert line == f"the weights of {victim} are not there"
    else:
        assert line.startswith(f"{victim} (pid ") and line.endswith(") was killed by SIGKILL before it was ready")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "which"), victims("tp2", "pp2", "dp-attention2-in-tp4"))
def test_a_rank_that_does_not_load_in_time_ends_the_start_with_where_it_stood(start, until, models, name, which):
    layout = LAYOUTS[name]
    victim = layout.victims[which]
    arguments = [str(models[layout.case]), *layout.arguments, "--load-timeout", "30"]
    server = start(*arguments, engine="torch", entry="never_loads", env={"VICTIM": victim}, wait=False)
    line = ends_with_one_line(server, until)
    assert line.startswith(f"{victim} (pid "), line
    assert "has not loaded within 30 s (--load-timeout): it is at weights, 25 % (its process runs; loading for" in line


def test_a_rank_that_is_stopped_while_it_loads_is_named_as_one_that_does_not_run(start, until, models):
    victim = LAYOUTS["tp2"].victims[1]
    arguments = [str(models["qwen3"]), "--tp", "2", "--load-timeout", "10"]
    server = start(*arguments, engine="torch", entry="never_loads", env={"VICTIM": victim}, wait=False)
    until(lambda: victim in server.processes(), FAIL_S, server.text)
    server.processes()[victim].send_signal(signal.SIGSTOP)
    line = ends_with_one_line(server, until)
    assert line.startswith(f"{victim} (pid ") and "has not loaded within 10 s" in line, line
