"""The work of the Rust benches in plain Python: `servekit.reference`, msgspec and pyzmq, on the same frames.

Each function returns the figure that the Rust bench of the same name has, in the same unit.
"""

from __future__ import annotations

import itertools
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import zmq
from servekit.messages.envelope import (
    Envelope,
    Kind,
    TextOptions,
    decode_envelope,
    encode_envelope,
    http_worker_ipc,
    mint_rid,
)
from servekit.reference import Detokenizer, DPBudget, LoadBalanceMethod, split_batch
from tokenizers import Tokenizer

EPOCH = 1


def _median_us(work: Callable[[], object], runs: int = 9) -> float:
    """Microseconds of CPU time that one call takes, in the median of some calls."""
    work()
    times = []
    for _ in range(runs):
        began = time.process_time_ns()
        work()
        times.append(time.process_time_ns() - began)
    return sorted(times)[len(times) // 2] / 1000


def split(kind: Kind, body: bytes, rows: int) -> float:
    """Microseconds a request."""
    return _median_us(lambda: split_batch(kind, body)) / rows


def dispatch(method: LoadBalanceMethod, ranks: int) -> float:
    """Nanoseconds a request: of 128 tokens, or of 2048 whose prefixes are known, of which a rank has half."""
    budget = DPBudget(ranks)
    tokens, prompts = 128, [[]]
    if method == LoadBalanceMethod.CACHE_AWARE:
        tokens = 2048
        prompts = [[(n // 4 if i < 16 else n) << 32 | i for i in range(32)] for n in range(512)]
    turns = itertools.cycle(prompts)

    def once() -> None:
        for _ in range(200):
            rank, number = budget.dispatch(method, tokens, 7, next(turns))
            budget.update(rank, number, 1, tokens)

    return _median_us(once) * 1000 / 200


def detok(body: bytes, tokenizer_file: Path, rows: int, workers: int) -> float:
    """Microseconds a token: one token a stream, a stop string on half of the streams."""
    detokenizer = _detokenizer(tokenizer_file)
    for i in range(rows):
        stops = ("never said",) if i % 2 == 0 else ()
        detokenizer.open(mint_rid(i % workers, EPOCH, i), TextOptions(stops=stops))
    return _median_us(lambda: detokenizer.step(body)) / rows


def fanout(body: bytes, rows: int, workers: int, program: Path, paced: bool) -> float:
    """Microseconds of CPU a request, of this process with libzmq's thread."""
    with _folder() as folder, ExitStack() as peers, zmq.Context() as context:
        sockets: dict[tuple[int, int], zmq.Socket[bytes]] = {}
        for worker in range(workers):
            peers.enter_context(_peer(program, "drain", folder, worker))
            socket = peers.enter_context(context.socket(zmq.PUSH))
            socket.linger = 0
            socket.connect(f"ipc://{folder / http_worker_ipc(worker, EPOCH)}")
            sockets[worker, EPOCH] = socket
        seqs = dict.fromkeys(sockets, 0)

        def send() -> None:
            for worker, epoch, part in split_batch(Kind.BATCH_STR, body):
                route = (worker, epoch)
                seqs[route] += 1
                envelope = Envelope(Kind.BATCH_STR, sender_epoch=EPOCH, seq=seqs[route], rows=rows)
                sockets[route].send_multipart([encode_envelope(envelope), part], copy=False)

        send()
        time.sleep(0.1)
        batches = 100
        began, due = time.process_time(), time.monotonic()
        for _ in range(batches):
            send()
            if paced:
                due += 0.002
                time.sleep(max(0.0, due - time.monotonic()))
        if not paced:
            time.sleep(0.1)
        return (time.process_time() - began) * 1e6 / (batches * rows)


def router(ids: int, program: Path) -> float:
    """Messages a second, with dispatch and in-flight table."""
    return _forward(1, ids, 0, program)


def controller(ranks: int, program: Path) -> float:
    """Messages a second, load reports coming back after every 32 requests of a rank."""
    return _forward(ranks, 128, 32, program)


def _forward(ranks: int, ids: int, report: int, program: Path) -> float:
    requests = 10_000
    with _folder() as folder, zmq.Context() as context, ExitStack() as stack:
        ingress, egress, to_ranks = _bind(stack, context, folder, ranks)
        greeting = [encode_envelope(Envelope(Kind.HELLO, sender_epoch=EPOCH, seq=1)), b"\xc0"]

        def greet() -> None:
            # Each waits for its rank to connect.
            for socket in to_ranks:
                socket.send_multipart(greeting)

        receiver = stack.enter_context(_peer(program, "receiver", folder, ranks, requests, report, meanwhile=greet))
        stack.enter_context(_peer(program, "sender", folder, requests, ids))
        budget = DPBudget(ranks)
        in_flight: dict[int, tuple[int, list[bytes]]] = {}
        poller = zmq.Poller()
        poller.register(ingress, zmq.POLLIN)
        poller.register(egress, zmq.POLLIN)
        seqs = [1] * ranks
        while len(in_flight) < requests:
            for socket, _ in poller.poll(10_000):
                frames = socket.recv_multipart()
                envelope = decode_envelope(frames[0])
                if envelope.kind == Kind.BATCH_TOKEN_ID and envelope.load is not None:
                    load = envelope.load
                    tokens = load.held_tokens + load.pending_tokens
                    budget.update(envelope.sender, envelope.last_dispatch, load.running + load.waiting, tokens)
                elif envelope.kind == Kind.GENERATE:
                    rank, number = budget.dispatch(LoadBalanceMethod.TOTAL_TOKENS, ids)
                    seqs[rank] += 1
                    envelope.rank, envelope.dispatch = rank, number
                    envelope.sender_epoch, envelope.seq = EPOCH, seqs[rank]
                    in_flight[envelope.id] = (rank, frames)
                    to_ranks[rank].send_multipart([encode_envelope(envelope), *frames[1:]])
        return float(receiver())


def control(streams: int, workers: int, tokenizer_file: Path, program: Path) -> float:
    """Cores that a step a millisecond would take: CPU milliseconds a step."""
    with _folder() as folder, zmq.Context() as context, ExitStack() as stack:
        ingress, egress, (rank,) = _bind(stack, context, folder, 1)
        stepper = stack.enter_context(_peer(program, "stepper", folder, streams, workers))
        to_workers = []
        for worker in range(workers):
            stack.enter_context(_peer(program, "client", folder, worker, workers, streams))
            socket = stack.enter_context(context.socket(zmq.PUSH))
            socket.linger = 0
            socket.connect(f"ipc://{folder / http_worker_ipc(worker, EPOCH)}")
            to_workers.append(socket)
        detokenizer = _detokenizer(tokenizer_file)
        opened = 0
        while opened < streams:
            frames = ingress.recv_multipart()
            envelope = decode_envelope(frames[0])
            if envelope.kind == Kind.GENERATE:
                opened += 1
                detokenizer.open(envelope.id, TextOptions(stops=("never said",) if opened % 2 else ()))
                envelope.dispatch = opened
                rank.send_multipart([encode_envelope(envelope), *frames[1:]])
        assert stepper() == "stepping"
        steps, began, seq = 40, time.process_time(), 0
        for _ in range(steps):
            frames = egress.recv_multipart()
            if decode_envelope(frames[0]).kind != Kind.BATCH_TOKEN_ID:
                continue
            bodies, _aborts = detokenizer.step(frames[1])
            seq += 1
            for worker, _, body in bodies:
                envelope = Envelope(Kind.BATCH_STR, sender_epoch=EPOCH, seq=seq, rows=streams)
                to_workers[worker].send_multipart([encode_envelope(envelope), body], copy=False)
        return (time.process_time() - began) * 1000 / steps


def _detokenizer(tokenizer_file: Path) -> Detokenizer:
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    return Detokenizer(lambda ids, skip: str(tokenizer.decode(ids, skip_special_tokens=skip)))


def _bind(
    stack: ExitStack, context: zmq.Context[zmq.Socket[bytes]], folder: Path, ranks: int
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes], list[zmq.Socket[bytes]]]:
    def bound(kind: int, name: str) -> zmq.Socket[bytes]:
        socket = stack.enter_context(context.socket(kind))
        socket.linger = 0
        socket.bind(f"ipc://{folder / name}")
        return socket

    to_ranks = [bound(zmq.PUSH, f"rank{rank}.ipc") for rank in range(ranks)]
    return bound(zmq.PULL, "ingress.ipc"), bound(zmq.PULL, "egress.ipc"), to_ranks


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="servekit-bench-") as folder:
        yield Path(folder)


@contextmanager
def _peer(
    program: Path, role: str, folder: Path, *numbers: int, meanwhile: Callable[[], None] = lambda: None
) -> Iterator[Callable[[], str]]:
    """A process of the Rust bench in a role; what is yielded reads the next line that it says.

    Args:
        meanwhile: what it needs before it is ready.
    """
    command = [program, "--peer", role, folder, *map(str, numbers)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout
        try:
            meanwhile()
            if said.readline().strip() != "ready":
                raise RuntimeError(f"{role} did not start")
            yield lambda: said.readline().strip()
        finally:
            process.kill()
