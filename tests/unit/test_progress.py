"""Progress of a long start: a bar on a terminal, a few lines elsewhere."""

from __future__ import annotations

import io
import sys

from servekit.runtime.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(progress: Progress) -> None:
    for done in range(101):
        progress.show("servekit::scheduler[dp=0]", done, 100, "weights")
    progress.close()


def test_a_terminal_gets_a_bar_that_vanishes(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    show(Progress())
    assert "servekit::scheduler[dp=0] weights:" in terminal.getvalue() and "%" in terminal.getvalue()
    assert terminal.getvalue().split("\r")[-1].strip() == ""


def test_a_file_gets_a_few_lines(monkeypatch, caplog):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    caplog.set_level("INFO")
    show(Progress())
    assert 1 <= len(caplog.messages) <= 3
    assert caplog.messages[-1] == "servekit::scheduler[dp=0] weights: 100 %"
