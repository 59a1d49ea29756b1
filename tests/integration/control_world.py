"""A control plane alone, with bare sockets as its HTTP workers and ranks; what its tests share."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from servekit import _core
from servekit.messages import requests as r
from servekit.messages.batches import BatchStrOutput, BatchTokenIDOutput, FinishReason
from servekit.messages.columns import schema_hash
from servekit.messages.envelope import (
    FLAG_STREAM,
    Envelope,
    Kind,
    Load,
    TextOptions,
    decode_envelope,
    encode_envelope,
    http_worker_ipc,
    mint_rid,
    name_exts,
    text_ext,
)
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

WAIT_S = 10.0
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCABULARY = {character: i for i, character in enumerate(ALPHABET)}

encode = msgspec.msgpack.encode


def ids_of(text: str) -> bytes:
    """Little-endian ids of ASCII text, one a character."""
    return b"".join(VOCABULARY[" Ġ"[1] if c == " " else c].to_bytes(4, "little") for c in text)


def until(condition: Callable[[], Any], what: object = "") -> Any:
    deadline = time.monotonic() + WAIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline, what() if callable(what) else what
        time.sleep(0.002)
    return value


class Peer:
    """A link to the control process: sends with numbers and epochs, receives with a deadline."""

    def __init__(self, run_dir: Path, number: int, epoch: int, inbox: str, outbox: str, bind: bool) -> None:
        self.number, self.epoch, self.seq = number, epoch, 0
        self.context = zmq.Context()
        self.pull, self.push = self.context.socket(zmq.PULL), self.context.socket(zmq.PUSH)
        self.pull.setsockopt(zmq.RCVHWM, 8)
        for socket in (self.pull, self.push):
            socket.setsockopt(zmq.LINGER, 0)
        (self.pull.bind if bind else self.pull.connect)(f"ipc://{run_dir}/{inbox}")
        self.push.connect(f"ipc://{run_dir}/{outbox}")

    def send(self, envelope: Envelope, body: object = None, *attachments: bytes, **stamp: int) -> None:
        self.seq += 1
        envelope.sender, envelope.sender_epoch, envelope.receiver_epoch = self.number, self.epoch, 1
        envelope.seq = self.seq
        for field, value in stamp.items():
            setattr(envelope, field, value)
        self.push.send_multipart([encode_envelope(envelope), encode(body), *attachments])

    def hello(self, schema: int | None = None) -> None:
        schema = schema_hash() if schema is None else schema
        self.send(Envelope(Kind.HELLO, schema=schema, exts=name_exts("test", "1")), receiver_epoch=0)

    def receive(self, timeout_s: float = WAIT_S) -> tuple[Envelope, list[bytes]]:
        assert self.pull.poll(timeout_s * 1000), "nothing came"
        head, *rest = self.pull.recv_multipart()
        return decode_envelope(head), rest

    def expect(self, kind: Kind) -> tuple[Envelope, list[bytes]]:
        envelope, rest = self.receive()
        assert envelope.kind == kind
        assert (envelope.sender_epoch, envelope.receiver_epoch) == (1, self.epoch)
        return envelope, rest

    def silent(self, timeout_s: float = 0.2) -> bool:
        return not self.pull.poll(timeout_s * 1000)

    def close(self) -> None:
        self.context.destroy(linger=0)


class Worker(Peer):
    """An HTTP worker's sockets."""

    def __init__(self, run_dir: Path, number: int = 0, epoch: int = 1) -> None:
        super().__init__(run_dir, number, epoch, http_worker_ipc(number, epoch), "ingress.ipc", bind=True)
        self.minted = 0
        self.hello()
        envelope, _ = self.expect(Kind.HELLO)
        assert envelope.seq == 1 and envelope.schema == schema_hash()

    def mint(self) -> int:
        self.minted += 1
        return mint_rid(self.number, self.epoch, self.minted)

    def generate(self, *exts: tuple[int, bytes], text: TextOptions | None = None, **fields: Any) -> int:
        rid = fields.pop("id", None) or self.mint()
        fields.setdefault("flags", FLAG_STREAM)
        fields.setdefault("tokens", 3)
        envelope = Envelope(Kind.GENERATE, rid, exts=[text_ext(text or TextOptions()), *exts], **fields)
        self.send(envelope, r.TokenizedGenerateReqInput(rid, ids_of("abc"), r.SamplingParams(8)))
        return rid

    def abort(self, rid: int) -> None:
        self.send(Envelope(Kind.ABORT, rid), r.AbortReq(rid))

    def rows(self) -> list[tuple[int, str, FinishReason | None]]:
        """Rows of the next batch, which must be text."""
        envelope, (body,) = self.expect(Kind.BATCH_STR)
        batch = msgspec.msgpack.decode(body, type=BatchStrOutput)
        assert len(batch.rids) == envelope.rows
        texts, reasons = batch.output_strs or [], batch.finished_reasons or [None] * len(batch.rids)
        return list(zip(batch.rids, texts, reasons, strict=True))

    def end(self, rid: int) -> tuple[str, FinishReason]:
        """All text of the only live request, and how it ended."""
        text = ""
        while True:
            for row, piece, reason in self.rows():
                assert row == rid
                text += piece
                if reason is not None:
                    return text, reason


class Rank(Peer):
    """A rank's sockets."""

    def __init__(self, run_dir: Path, number: int = 0, epoch: int = 1) -> None:
        super().__init__(run_dir, number, epoch, f"rank{number}.ipc", "egress.ipc", bind=False)
        self.last_dispatch = 0
        self.hello()
        envelope, _ = self.expect(Kind.HELLO)
        assert envelope.seq == 1 and envelope.schema == schema_hash()

    def take(self) -> Envelope:
        """The next request, as it must look."""
        envelope, (body,) = self.expect(Kind.GENERATE)
        assert (envelope.rank, envelope.attempt, envelope.sender) == (self.number, 1, 0)
        assert envelope.dispatch > self.last_dispatch
        assert msgspec.msgpack.decode(body, type=r.TokenizedGenerateReqInput).rid == envelope.id
        self.last_dispatch = envelope.dispatch
        return envelope

    def step(self, rows: dict[int, str], ends: dict[int, FinishReason] | None = None, load: Load | None = None) -> None:
        ends = ends or {}
        batch = BatchTokenIDOutput(
            rids=list(rows),
            finished_reasons=[ends.get(rid) for rid in rows],
            prompt_tokens=[3] * len(rows),
            completion_tokens=[1] * len(rows),
            decode_ids=[ids_of(text) for text in rows.values()],
        )
        envelope = Envelope(Kind.BATCH_TOKEN_ID, rank=self.number, rows=len(rows), load=load or Load())
        envelope.last_dispatch = self.last_dispatch
        self.send(envelope, batch)

    def finish(self, *rids: int, text: str = "") -> None:
        self.step(dict.fromkeys(rids, text), dict.fromkeys(rids, FinishReason("length")))


class World:
    """A control plane in a run directory of its own, with its peers."""

    def __init__(self, workers: int = 1, ranks: int = 1, up: bool = True, **settings: Any) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="sk-cp-")
        self.run_dir = Path(self.folder.name)
        tokenizer = Tokenizer(BPE(VOCABULARY, []))
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.save(str(self.run_dir / "tokenizer.json"))
        self.page = _core.StatePage.create(f"servekit-test-{os.getpid()}-{time.monotonic_ns()}", workers, ranks)
        self.plane = _core.ControlPlane(
            run_dir=str(self.run_dir),
            epoch=1,
            rank_epochs=[1] * ranks,
            worker_epochs=[1] * workers,
            tokenizer_file=str(self.run_dir / "tokenizer.json"),
            state_page=self.page.name,
            **settings,
        )
        self.plane.start()
        self.workers = [Worker(self.run_dir, i) for i in range(workers)]
        self.ranks: list[Rank] = []
        for i in range(ranks if up else 0):
            self.bring_up(i)

    def bring_up(self, rank: int) -> None:
        self.ranks.append(Rank(self.run_dir, rank))
        self.plane.set_rank(rank, True, "", 64)
        until(lambda: self.page.active_ranks()[rank])

    def state(self) -> dict[str, Any]:
        return json.loads(self.plane.state())

    def assert_empty(self) -> None:
        """Nothing is remembered, nothing charged, and all of it is told once."""
        until(lambda: self.state()["in_flight"] == 0, self.state)
        until(lambda: all(shard["live"] == shard["queued"] == 0 for shard in self.state()["shards"]), self.state)
        state = self.state()
        assert all(rank["requests"] == rank["tokens"] == rank["in_flight"] == 0 for rank in state["ranks"]), state
        assert state["waiting_for_rank"] == state["open_groups"] == state["fanout_queued"] == 0, state
        until(lambda: self.page.snapshot()["control"]["in_flight"] == 0)

    def close(self) -> None:
        assert self.plane.stop(2.0)
        for peer in [*self.workers, *self.ranks]:
            peer.close()
        self.page.unlink()
        self.folder.cleanup()


@pytest.fixture
def make() -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def build(*args: Any, **settings: Any) -> World:
        worlds.append(World(*args, **settings))
        return worlds[-1]

    yield build
    for world in worlds:
        world.close()
