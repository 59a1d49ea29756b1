"""A worker with everything around it played by the test: control process, state page, main."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvloop
import zmq
from servekit.config import Config, ModelInfo, PortArgs, SchedulerInfo, ServerArgs
from servekit.config.secrets import take_secrets
from servekit.http.worker import TokenizerWorker
from servekit.messages.batches import BatchEmbeddingOutput, BatchStrOutput, FinishReason
from servekit.messages.columns import schema_hash
from servekit.messages.envelope import (
    FLAG_STREAM,
    Envelope,
    Kind,
    decode_envelope,
    encode_envelope,
    http_worker_ipc,
    name_exts,
    route_of,
)
from servekit.messages.requests import ControlReply, TokenizedEmbeddingReqInput, TokenizedGenerateReqInput
from servekit.runtime.channel import Channel
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BOS, START, END = "<s>", "<|im_start|>", "<|im_end|>"
CONTROL_EPOCH = 3
CONTEXT = 1000


def byte_tokenizer(folder: Path) -> Path:
    """A tokenizer with one token a byte, and three special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (BOS, START, END)])
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def make_config(folder: Path, args: dict[str, Any] | None = None, model: dict[str, Any] | None = None) -> Config:
    """What main would tell: the run directory and the tokenizer are in `folder`."""
    tokenizer_file = str(byte_tokenizer(folder))
    info: dict[str, Any] = {
        "path": str(folder), "format": "folder", "name": "tiny", "architecture": "LlamaForCausalLM",
        "max_model_len": CONTEXT, "vocab_size": 259, "tokenizer_file": tokenizer_file, "chat_template": CHATML,
        "bos_token": BOS, "eos_token": END, "bos_id": 256, "add_bos": False, "end_ids": [258], "default_sampling": {},
    }  # fmt: skip
    ports = PortArgs(
        run_dir=str(folder), main_pid=1, host="127.0.0.1", port=0, state_page="", info="", control_epoch=CONTROL_EPOCH,
        worker_epochs=[1], rank_epochs=[1], tokenizer_file=tokenizer_file,
    )  # fmt: skip
    return Config(ServerArgs(**(args or {})), ports, ModelInfo(**{**info, **(model or {})}))


class FakePage:
    """The state page as plain attributes."""

    def __init__(self) -> None:
        self.phase = 1
        self.ready_once = True
        self.age = 0.0
        self.active = [True]
        self.full = False
        self.queued = 0
        self.requests = 0
        self.tokens = 0
        self.counters: dict[str, int] = {}
        self.prompt_tokens = self.cached_tokens = self.generation_tokens = 0
        self.observed: dict[str, list[float]] = {}

    def reserve(self, index: int, requests: int, tokens: int, max_requests: int) -> bool:
        if self.full or self.requests + requests > max_requests:
            return False
        self.requests += requests
        self.tokens += tokens
        return True

    def release(self, index: int, requests: int, tokens: int) -> None:
        self.requests -= requests
        self.tokens -= tokens

    def worker_add(self, index: int, field: str, delta: int) -> None:
        self.counters[field] = self.counters.get(field, 0) + delta

    def count_tokens(self, index: int, rank: int, prompt: int, cached: int, generated: int) -> None:
        assert (index, rank) == (0, 0)
        self.prompt_tokens += prompt
        self.cached_tokens += cached
        self.generation_tokens += generated

    def observe(self, index: int, histogram: str, seconds: float, times: int = 1) -> None:
        self.observed.setdefault(histogram, []).extend([seconds] * times)

    def control_age(self) -> float:
        return self.age

    def queued_tokens(self) -> int:
        return self.queued

    def active_ranks(self) -> list[bool]:
        return self.active

    def snapshot(self) -> dict[str, Any]:
        return {"phase": self.phase, "ready_once": self.ready_once}


class FakeContext:
    """What main hands to a child."""

    def __init__(self, config: Config) -> None:
        self.role, self.index, self.epoch = "http", 0, 1
        server_args, self.secrets = take_secrets(config.server_args)
        self.config = msgspec.structs.replace(config, server_args=server_args)
        self.state_page = FakePage()
        ours, theirs = socket.socketpair()
        self.main, self._channel = Channel(ours), Channel(theirs)
        self.started = threading.Event()

    def ready(self, info: dict[str, Any]) -> None:
        self.started.set()

    def fileno(self) -> int:
        return self._channel.fileno()

    def take_commands(self) -> list[dict[str, Any]]:
        return self._channel.receive()

    def close(self) -> None:
        self.main.close()
        self._channel.close()

    def scheduler_info(self) -> SchedulerInfo:
        return SchedulerInfo([{"max_running_requests": 8, "device": "none"}])


Script = Callable[["FakeControl", Envelope, TokenizedGenerateReqInput], None]


def says(*pieces: str, pause: float = 0) -> Script:
    """A rank that says these pieces, one token each, as far as `max_new_tokens` allows, `pause` seconds apart."""

    def script(control: FakeControl, envelope: Envelope, body: TokenizedGenerateReqInput) -> None:
        limit = body.sampling_params.max_new_tokens
        said = pieces[:limit]
        end = FinishReason("length") if len(said) < len(pieces) else FinishReason("stop")
        if not envelope.flags & FLAG_STREAM:
            control.row(envelope.id, "".join(said), end, prompt=envelope.tokens, done=len(said))
            return
        for i, piece in enumerate(said):
            last = i == len(said) - 1
            control.row(envelope.id, piece, end if last else None, prompt=envelope.tokens, done=i + 1)
            time.sleep(pause)

    return script


def says_nothing(control: FakeControl, envelope: Envelope, body: TokenizedGenerateReqInput) -> None:
    """A rank that never answers."""


Embed = Callable[["FakeControl", Envelope, TokenizedEmbeddingReqInput], None]


def embeds_lengths(control: FakeControl, envelope: Envelope, body: TokenizedEmbeddingReqInput) -> None:
    """A rank whose vectors are (prompt tokens, 0.5, 0, ...), of 4 numbers unless told otherwise."""
    size = body.dimensions or 4
    vector = struct.pack(f"<{size}f", envelope.tokens, *([0.5, *[0.0] * size][: size - 1]))
    batch = BatchEmbeddingOutput(
        [envelope.id], finished_reasons=[FinishReason("stop")], prompt_tokens=[envelope.tokens], embeddings=[vector],
        dp_ranks=[0],
    )  # fmt: skip
    control.send(Envelope(Kind.BATCH_EMBEDDING, rows=1, rank=0), batch, envelope.id)


class FakeControl:
    """The control process: takes what workers send, answers by a script.

    Attributes:
        script: called for each GENERATE, on this fake's thread.
        generated: envelopes and bodies that came.
        embed, embedded: the same for each EMBEDDING.
        aborted: ids that were aborted.
        hellos: envelopes of HELLOs.
    """

    def __init__(self, run_dir: Path) -> None:
        self.script: Script = says("Hello", " world", "!")
        self.generated: list[tuple[Envelope, TokenizedGenerateReqInput]] = []
        self.embed: Embed = embeds_lengths
        self.embedded: list[tuple[Envelope, TokenizedEmbeddingReqInput]] = []
        self.aborted: list[int] = []
        self.hellos: list[Envelope] = []
        self.states: dict[int, Any] = {-1: {"in_flight": 0}, 0: {"running": 0}}
        self._run_dir = run_dir
        self._seq = 0
        self._lock = threading.Lock()
        self._context = zmq.Context()
        self._ingress = self._context.socket(zmq.PULL)
        self._ingress.bind(f"ipc://{run_dir}/ingress.ipc")
        self._worker: zmq.Socket[bytes] | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def reset(self) -> None:
        """Forget what came, and answer as in the beginning."""
        self.script = says("Hello", " world", "!")
        self.generated.clear()
        self.embed = embeds_lengths
        self.embedded.clear()
        self.aborted.clear()

    def row(
        self, rid: int, text: str = "", finish: FinishReason | None = None, *, prompt: int = 0, done: int = 0,
        ids: bytes | None = None, **columns: Any,
    ) -> None:  # fmt: skip
        """Send one row to the worker; `columns` are further ones, of this row."""
        batch = BatchStrOutput(
            [rid], finished_reasons=[finish], prompt_tokens=[prompt], completion_tokens=[done], cached_tokens=[0],
            dp_ranks=[0], output_strs=[text], output_ids=None if ids is None else [ids],
            **{name: [value] for name, value in columns.items()},
        )  # fmt: skip
        self.send(Envelope(Kind.BATCH_STR, rows=1, rank=0), batch, rid)

    def send(self, envelope: Envelope, body: Any, rid: int, *, skip: int = 0, **fields: int) -> None:
        """Stamp and send a message; `skip` leaves out numbers, `fields` replace what is stamped."""
        with self._lock:
            if self._worker is None:
                self._worker = self._context.socket(zmq.PUSH)
                self._worker.connect(f"ipc://{self._run_dir}/{http_worker_ipc(*route_of(rid))}")
                self._send(Envelope(Kind.HELLO, schema=schema_hash(), exts=name_exts("control", "test")), None)
            self._seq += skip
            self._send(envelope, body, **fields)

    def _send(self, envelope: Envelope, body: Any, **fields: int) -> None:
        self._seq += 1
        envelope.sender_epoch, envelope.receiver_epoch, envelope.seq = CONTROL_EPOCH, 1, self._seq
        for name, value in fields.items():
            setattr(envelope, name, value)
        assert self._worker is not None
        self._worker.send_multipart([encode_envelope(envelope), msgspec.msgpack.encode(body)])

    def _run(self) -> None:
        while not self._stopped:
            if not self._ingress.poll(20):
                continue
            head, body = self._ingress.recv_multipart()
            envelope = decode_envelope(head)
            if envelope.kind == Kind.HELLO:
                self.hellos.append(envelope)
            elif envelope.kind == Kind.GENERATE:
                request = msgspec.msgpack.decode(body, type=TokenizedGenerateReqInput)
                self.generated.append((envelope, request))
                self.script(self, envelope, request)
            elif envelope.kind == Kind.EMBEDDING:
                text = msgspec.msgpack.decode(body, type=TokenizedEmbeddingReqInput)
                self.embedded.append((envelope, text))
                self.embed(self, envelope, text)
            elif envelope.kind == Kind.ABORT:
                self.aborted.append(envelope.id)
            elif envelope.kind == Kind.GET_STATE:
                for rank, state in self.states.items():
                    asked = [r for r in (0, 1) if rank == -1]
                    reply = ControlReply(True, data=msgspec.json.encode(state), asked=asked)
                    self.send(Envelope(Kind.CONTROL_REPLY, envelope.id, rank=rank), reply, envelope.id)

    def close(self) -> None:
        """Stop the thread and close the sockets."""
        self._stopped = True
        self._thread.join(5)
        if self._worker is not None:
            self._worker.close(0)
        self._ingress.close(0)
        self._context.term()


class FakeServer:
    """A worker on a thread, and the control process it talks to.

    Attributes:
        url: where it listens.
    """

    def __init__(self, folder: Path, args: dict[str, Any] | None = None, model: dict[str, Any] | None = None) -> None:
        self.context = FakeContext(make_config(folder, args, model))
        self.page = self.context.state_page
        self.control = FakeControl(folder)
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.address = listener.getsockname()
        self.thread = threading.Thread(target=self._run, args=(listener,))
        self.thread.start()
        if not self.context.started.wait(20):
            raise RuntimeError("the worker did not start")

    def _run(self, listener: socket.socket) -> None:
        async def serve() -> None:
            self.worker = TokenizerWorker(self.context)  # type: ignore[arg-type]
            await self.worker.serve(listener)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve())

    def command(self, **command: Any) -> None:
        """Send a command as main would."""
        self.context.main.send(command)

    def close(self) -> None:
        """Stop the worker."""
        self.command(command="stop")
        self.thread.join(10)
        self.control.close()
        self.context.close()


def until(condition: Callable[[], Any], seconds: float = 5.0) -> bool:
    """Wait for a condition; False if it does not come true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.005)
    return bool(condition())


def events(raw: bytes) -> Sequence[Any]:
    """The events of a stream: decoded JSON, and "[DONE]"."""
    found = []
    for part in raw.decode().split("\n\n"):
        if part:
            assert part.startswith("data: "), part
            data = part[6:]
            found.append(data if data == "[DONE]" else msgspec.json.decode(data))
    return found
