"""A child ends with its parent and removes what it was told to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from servekit import _core


def test_the_end_of_the_pipe_ends_the_process_and_removes_its_files(tmp_path: Path) -> None:
    folder, file = tmp_path / "run", tmp_path / "segment"
    folder.mkdir()
    (folder / "x.ipc").touch()
    file.touch()
    reader, writer = os.pipe()
    # The process is busy in Python and must end all the same.
    program = (
        "import sys; from servekit import _core; _core.watch_death_pipe(int(sys.argv[1]), sys.argv[2:]);"
        "print('up', flush=True)\nwhile True: pass"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(reader), str(folder), str(tmp_path / "gone"), str(file)],
        pass_fds=[reader],
        stdout=subprocess.PIPE,
    )
    os.close(reader)
    assert child.stdout is not None and child.stdout.readline() == b"up\n"
    os.write(writer, b"not the end")
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.3)
    began = time.monotonic()
    os.close(writer)
    assert child.wait(5) == 1
    assert time.monotonic() - began < 0.5
    assert not list(tmp_path.iterdir())
    child.stdout.close()


def test_the_kernel_ends_a_child_whose_parent_is_gone() -> None:
    grandchild = (
        "import os, signal, time; from servekit import _core;"
        "_core.set_parent_death_signal(signal.SIGKILL); print(os.getpid(), flush=True); time.sleep(60)"
    )
    child = (
        "import subprocess, sys, time\n"
        f"p = subprocess.Popen([sys.executable, '-c', {grandchild!r}], stdout=subprocess.PIPE)\n"
        "print(p.stdout.readline().decode(), flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 5
    while running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def running(pid: int) -> bool:
    """Whether it runs; one that only nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_wrong_arguments_raise() -> None:
    with pytest.raises(_core.SettingError):
        _core.watch_death_pipe(-1)
    for wrong in (-1, 1000):
        with pytest.raises(_core.SettingError):
            _core.set_parent_death_signal(wrong)


def test_a_build_says_what_it_is() -> None:
    info = _core.build_info()
    assert set(info) == {"version", "commit", "profile", "target", "schema", "libzmq"}
    assert info["libzmq"].startswith("4.3.") and info["profile"] == "release"
