"""The compiled module alone: what it loads, that others run while it works, and that its errors are of one family."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from servekit import _core
from servekit.messages.batches import BatchTokenIDOutput
from servekit.messages.envelope import TextOptions, mint_rid, text_ext
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

ROWS = 20_000
FRAME = msgspec.msgpack.encode(
    BatchTokenIDOutput(
        rids=[mint_rid(i % 7, 1, i) for i in range(ROWS)],
        prompt_tokens=[9] * ROWS,
        completion_tokens=[1] * ROWS,
        decode_ids=[bytes(4)] * ROWS,
        http_worker_ipcs=[f"w{i % 7}" for i in range(ROWS)],
    )
)


def test_importing_it_loads_neither_torch_nor_fastapi() -> None:
    program = "import sys, servekit._core; print(sorted({m.split('.')[0] for m in sys.modules}))"
    command = [sys.executable, "-c", program]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    for name in ("torch", "numpy", "fastapi", "uvicorn", "msgspec", "zmq", "tokenizers"):
        assert f"'{name}'" not in loaded


@pytest.fixture
def only_released() -> Iterator[None]:
    """A thread that runs Python gives the GIL away only when it says so itself."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    Tokenizer(WordLevel({f"token{i}": i for i in range(20_000)}, "token0")).save(str(path))
    return path


def detokenizer(tokenizer_file: Path) -> _core.Detokenizer:
    target = _core.Detokenizer(tokenizer_file)
    for i in range(ROWS):
        target.open(mint_rid(i % 7, 1, i))
    return target


def plane(folder: Path) -> _core.ControlPlane:
    return _core.ControlPlane(run_dir=folder, epoch=1, rank_epochs=[1], worker_epochs=[1])


CALLS: dict[str, Callable[[Path, Path], Callable[[], object]]] = {
    "split_batch": lambda *_: lambda: _core.split_batch(FRAME),
    "split_batch_by_name": lambda *_: lambda: _core.split_batch_by_name(FRAME),
    "handle_output_by_index": lambda *_: lambda: _core.handle_output_by_index(FRAME, 5),
    "extract_field_by_index": lambda *_: lambda: _core.extract_field_by_index(FRAME, "rids", 5),
    "merge_batches": lambda *_: lambda: _core.merge_batches([FRAME], [list(range(ROWS))]),
    "Detokenizer": lambda file, _: lambda: _core.Detokenizer(file),
    "Detokenizer.step": lambda file, _: (lambda target: lambda: target.step(FRAME))(detokenizer(file)),
    "ControlPlane.wait": lambda _, folder: (lambda target: lambda: target.wait(0.05))(plane(folder)),
    "ControlPlane.next_log": lambda _, folder: (lambda target: lambda: target.next_log(0.05))(plane(folder)),
}


@pytest.mark.parametrize("name", CALLS)
def test_another_thread_runs_meanwhile(name: str, tokenizer_file: Path, tmp_path: Path, only_released: None) -> None:
    call = CALLS[name](tokenizer_file, tmp_path)
    ticks, stop, started = 0, False, threading.Event()

    def tick() -> None:
        nonlocal ticks
        started.set()
        while not stop:
            ticks += 1
            time.sleep(0.0001)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        started.wait(10)
        seen, deadline = 0, time.monotonic() + 20
        while not seen and time.monotonic() < deadline:
            before = ticks
            call()
            seen = ticks - before
    finally:
        stop = True
        thread.join(10)
    assert seen > 0, "the call held the GIL from its start to its end"


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (_core.MalformedError, lambda: _core.split_batch(b"\xff")),
        (_core.MalformedError, lambda: _core.split_batch_by_name(b"")),
        (_core.MalformedError, lambda: _core.handle_output_by_index(b"\x92", 0)),
        (_core.MalformedError, lambda: _core.merge_batches([b"\x90"], [[]])),
        (_core.MalformedError, lambda: _core.merge_batches([], [])),
        (_core.MalformedError, lambda: _core.Detokenizer().step(b"\x91\xa0")),
        (_core.MalformedError, lambda: _core.parse_envelope(b"SVK1")),
        (_core.MalformedError, lambda: _core.parse_text_options(text_ext(TextOptions(["a"]))[1][:-1])),
        (_core.MalformedError, lambda: _core.parse_group(b"")),
        (_core.MalformedError, lambda: _core.RankReport.from_envelope(b"")),
        (_core.RowError, lambda: _core.handle_output_by_index(FRAME, ROWS)),
        (_core.RowError, lambda: _core.extract_field_by_index(FRAME, "rids", ROWS)),
        (_core.ColumnError, lambda: _core.extract_field_by_index(FRAME, "nothing", 0)),
        (_core.SettingError, lambda: _core.DPBudget(0)),
        (_core.SettingError, lambda: _core.LoadBalanceMethod.from_name("best")),
        (_core.SettingError, lambda: _core.StatePage.create("a/b", 1, 1)),
        (_core.SettingError, lambda: _core.DataParallelController(ingress="ipc://a", egress="tcp://*:1", ranks=["b"])),
        (_core.SettingError, lambda: _core.DataParallelController(ingress="ipc://a", egress="ipc://b", ranks=[])),
        (_core.SettingError, lambda: _core.SocketMapping("/tmp", [])),
        (_core.ResourceError, lambda: _core.Detokenizer("/nonexistent")),
        (_core.ResourceError, lambda: _core.StatePage.open("servekit-none")),
        (_core.DispatchError, lambda: _core.DPBudget(1).credit(1, 0)),
    ],
)
def test_errors_are_of_one_family(error: type[Exception], call: Callable[[], Any]) -> None:
    with pytest.raises(_core.ServekitError) as raised:
        call()
    assert type(raised.value) is error and str(raised.value)
