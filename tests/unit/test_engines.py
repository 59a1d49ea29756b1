"""Engines by name: built in, or from another package's entry point."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from servekit.scheduler.mock import create_mock_rank
from servekit.scheduler.process import EngineError, find_engine


def test_the_mock_is_built_in():
    assert find_engine("mock") is create_mock_rank


def test_an_unknown_engine_is_named_with_those_that_exist():
    with pytest.raises(EngineError, match="--engine 'warp' is unknown; installed are mock, torch"):
        find_engine("warp")


@pytest.fixture
def other_package(tmp_path: Path, monkeypatch):
    (tmp_path / "other_engine.py").write_text("def make(ctx):\n    return 'rank'\n")
    info = tmp_path / "other_engine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[servekit.engines]\nother = other_engine:make\nbroken = no_such_module:make\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("other_engine", None)


def test_other_packages_bring_engines(other_package):
    assert find_engine("other")(None) == "rank"
    with pytest.raises(EngineError, match="--engine broken: its package can't be imported"):
        find_engine("broken")
