"""The control process's end of a rank's link, for tests of ranks."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from typing import Any

import msgspec
import pytest
import zmq
from servekit.config.port_args import PortArgs
from servekit.messages import requests as r
from servekit.messages.columns import BATCHES, schema_hash
from servekit.messages.envelope import Envelope, Kind, decode_envelope, encode_envelope, name_exts
from servekit.transport.rank_link import RankLink

CONTROL_EPOCH, RANK_EPOCH = 3, 5


class Control:
    """Binds both sockets; sends what a test asks for and decodes what comes back."""

    epoch, rank_epoch = CONTROL_EPOCH, RANK_EPOCH

    def __init__(self) -> None:
        # Not pytest's folder: its paths are too long for sockets.
        self.folder = tempfile.mkdtemp(prefix="sk-", dir="/tmp")
        self.ports = PortArgs(
            run_dir=self.folder,
            main_pid=1,
            host="127.0.0.1",
            port=1,
            state_page="servekit-1-state",
            info="servekit-1-info",
            control_epoch=CONTROL_EPOCH,
            worker_epochs=[1],
            rank_epochs=[RANK_EPOCH],
            tokenizer_file="",
        )
        self._context = zmq.Context()
        self._push, self._pull = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        self._push.bind(self.ports.address("rank0.ipc"))
        self._pull.bind(self.ports.address("egress.ipc"))
        self._seq, self._dispatch = itertools.count(1), itertools.count(1)

    def send(self, envelope: Envelope, body: Any = None, raw: bytes | None = None, *attachments: bytes) -> None:
        envelope.sender_epoch = envelope.sender_epoch or CONTROL_EPOCH
        envelope.receiver_epoch = envelope.receiver_epoch or RANK_EPOCH
        envelope.seq = next(self._seq)
        packed = msgspec.msgpack.encode(body) if raw is None else raw
        self._push.send_multipart([encode_envelope(envelope), packed, *attachments])

    def send_frames(self, *frames: bytes) -> None:
        self._push.send_multipart(frames)

    def hello(self, epoch: int = CONTROL_EPOCH, schema: int | None = None) -> None:
        exts = name_exts("servekit::control", "test")
        envelope = Envelope(
            Kind.HELLO, sender_epoch=epoch, schema=schema_hash() if schema is None else schema, exts=exts
        )
        self.send(envelope)

    def generate(self, rid: int, max_new_tokens: int = 4, ids: bytes = b"\1\0\0\0\2\0\0\0", **sampling: Any) -> int:
        """Dispatch a request; its dispatch number."""
        dispatch = next(self._dispatch)
        body = r.TokenizedGenerateReqInput(rid, ids, r.SamplingParams(max_new_tokens, **sampling))
        self.send(Envelope(Kind.GENERATE, rid, rank=0, tokens=len(ids) // 4, attempt=1, dispatch=dispatch), body)
        return dispatch

    def abort(self, rid: int) -> None:
        self.send(Envelope(Kind.ABORT, rid), r.AbortReq(rid))

    def receive(self, timeout_s: float = 5.0) -> tuple[Envelope, Any] | None:
        """Next message with its decoded body, None when the time has passed."""
        if not self._pull.poll(int(timeout_s * 1000)):
            return None
        frames = self._pull.recv_multipart()
        envelope = decode_envelope(frames[0])
        if envelope.kind == Kind.HELLO:
            return envelope, msgspec.msgpack.decode(frames[1])
        kind = r.ControlReply if envelope.kind == Kind.CONTROL_REPLY else BATCHES[envelope.kind]
        return envelope, msgspec.msgpack.decode(frames[1], type=kind)

    def close(self) -> None:
        self._push.close(0)
        self._pull.close(0)
        self._context.term()
        shutil.rmtree(self.folder)


@pytest.fixture
def control():
    control = Control()
    yield control
    control.close()


@pytest.fixture
def link(control):
    link = RankLink(control.ports, 0, RANK_EPOCH, "servekit::scheduler[dp=0]", "test")
    yield link
    link.close()
