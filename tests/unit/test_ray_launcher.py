"""What Ray is told of a node, and what is refused before Ray is asked."""

from __future__ import annotations

import sys

import pytest
from servekit.cli.serve import parse
from servekit.config import ConfigError
from servekit.runtime.ray_launcher import arguments_of, serve_on_ray

MEETING = ["--nnodes", "2", "--dist-init-addr", "10.0.0.1:5000"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["MODEL", "--tp", "2", "--enable-dp-attention", "--dp", "2", "--no-prefix-caching", "--dist-timeout", "60"],
        ["--dp", "4", "--engine", "mock", "--mock-step-ms", "2.5", "--load-format", "dummy", "--log-level", "debug"],
    ],
)
def test_a_node_gets_what_concerns_it(arguments: list[str]) -> None:
    secrets = ["--api-key", "secret", "--admin-api-key", "secret", "--host", "0.0.0.0", "--port", "80"]
    args = parse([*arguments, *MEETING, "--launcher", "ray", *secrets])
    told = arguments_of(args, 1)
    assert not any("secret" in each for each in told)
    # The same settings but for what is node 0's, read back from the command line.
    found, expected = parse(told), parse([*arguments, *MEETING, "--node-rank", "1"])
    assert found == expected


@pytest.mark.parametrize("spelling", [["--launcher", "ray"], ["--use-ray"], ["--distributed-executor-backend", "ray"]])
def test_spellings(spelling: list[str]) -> None:
    assert parse([*spelling, *MEETING, "--dp", "2"]).launcher == "ray"
    assert parse([*MEETING, "--dp", "2", "--distributed-executor-backend", "mp"]).launcher == "local"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--launcher", "ray"], "--nnodes is 1"),
        (["--launcher", "ray", "--dp", "2", *MEETING, "--node-rank", "1"], "starts the other nodes itself"),
    ],
)
def test_what_can_not_be(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(arguments)


def test_ray_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr("servekit.runtime.ray_launcher.setproctitle", lambda title: None)
    monkeypatch.setattr("servekit.runtime.logs.configure", lambda *given: None)
    arguments = ["--launcher", "ray", "--dp", "2", *MEETING]
    assert serve_on_ray(parse(arguments), arguments) == 1
    assert capsys.readouterr().err == (
        "servekit-serve: error: --launcher ray needs Ray, which is not installed: pip install 'servekit[ray]'\n"
    )
