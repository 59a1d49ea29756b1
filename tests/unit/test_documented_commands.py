"""Every command line that the documents show is one that servekit takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from servekit.cli.serve import parse

ROOT = Path(__file__).parents[2]
TEXTS = [*(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "SECURITY.md")), *sorted(ROOT.glob("docs/*.md"))]
MANIFESTS = sorted(ROOT.glob("docs/kubernetes/*.yaml"))
GROUP = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "127.0.0.1", "POD_IP": "127.0.0.2"}
"""What a LeaderWorkerSet puts into a container's environment."""


def shown(text: str) -> Iterator[str]:
    """Commands in a document: after `servekit-serve`, to the end of the code span, of the cell or of the line."""
    for command in re.findall(r"(?<![\w/-])servekit-serve( [^`|\n]*)", text.replace("\\\n", " ")):
        if "..." not in command:
            yield command.partition("#")[0].strip(" &")


def containers(document: Any) -> Iterator[dict[str, Any]]:
    """Every container of a Kubernetes object."""
    if isinstance(document, dict):
        yield from document.get("containers", [])
        document = list(document.values())
    if isinstance(document, list):
        for each in document:
            yield from containers(each)


COMMANDS = [(path.name, each) for path in TEXTS for each in shown(path.read_text())]


@pytest.mark.parametrize(("document", "command"), COMMANDS)
def test_a_document(document: str, command: str) -> None:
    arguments = shlex.split(command)
    try:
        assert parse(arguments).model in (None, *arguments)
    except click.exceptions.Exit as leave:
        assert leave.exit_code == 0


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest(path: Path) -> None:
    found = [each for document in yaml.safe_load_all(path.read_text()) for each in containers(document)]
    assert found
    for container in found:
        program, *arguments = (re.sub(r"\$\((\w+)\)", lambda m: GROUP[m[1]], each) for each in container["command"])
        assert program == "servekit-serve"
        args = parse(arguments)
        # Whom a probe asks is somebody that this process answers.
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert ports[container[probe]["httpGet"]["port"]] in (args.port, args.health_port)


def test_documents_show_commands() -> None:
    assert len(COMMANDS) > 10 and MANIFESTS
