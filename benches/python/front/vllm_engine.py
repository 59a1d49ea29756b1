"""An engine without a model for `vllm-rs`: one token per step for every running request, as servekit's mock rank does.

    STEP_MS=20 python benches/python/front/vllm_engine.py tcp://127.0.0.1:5550

It speaks what vLLM 0.33 calls the engine core's protocol: a handshake on the given address, then requests on DEALER
sockets and one message of outputs a step on PUSH sockets.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import msgspec
import zmq

IDENTITY = (0).to_bytes(2, "little")
WORDS = (260, 282, 253, 284, 418, 355, 314, 327, 911, 1250, 2504, 3410)
ADD, ABORT, CALL = b"\x00", b"\x01", b"\x03"
READY = {
    "max_model_len": 8192, "num_gpu_blocks": 65536, "block_size": 16, "dp_stats_address": None, "dtype": "bfloat16",
    "vllm_version": "0.33.0", "world_size": 1, "data_parallel_size": 1, "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1, "decode_context_parallel_size": 1, "data_parallel_rank": 0, "max_num_seqs": 1024,
    "max_num_batched_tokens": 8192, "instance_id": "mock", "supports_lora": False, "max_loras": 0,
}  # fmt: skip
ANSWERS = {"get_supported_tasks": ["generate"], "is_sleeping": False, "is_scheduler_paused": False}

encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode


class Engine:
    """The running requests, each with its tokens so far, its limit and the server that asked."""

    def __init__(self, handshake: str, step_s: float) -> None:
        self.step_s = step_s
        self.running: dict[str, list[int]] = {}
        context = zmq.Context(1)
        hello = context.socket(zmq.DEALER)
        hello.setsockopt(zmq.IDENTITY, IDENTITY)
        hello.connect(handshake)
        hello.send(encode({"status": "HELLO", "local": False, "headless": True}))
        addresses = decode(hello.recv())["addresses"]
        hello.send(encode({"status": "READY", "local": False, "headless": True}))
        self.poller = zmq.Poller()
        self.inputs = [self.open(context, zmq.DEALER, address) for address in addresses["inputs"]]
        self.outputs = [self.open(context, zmq.PUSH, address) for address in addresses["outputs"]]
        for socket in self.inputs:
            socket.send(encode(READY))
            self.poller.register(socket, zmq.POLLIN)

    def open(self, context: zmq.Context[Any], kind: int, address: str) -> zmq.Socket[bytes]:
        socket = context.socket(kind)
        socket.setsockopt(zmq.IDENTITY, IDENTITY)
        socket.set_hwm(0)
        socket.connect(address)
        return socket

    def run(self) -> None:
        due = time.monotonic()
        while True:
            if not self.running:
                self.poller.poll()
                due = time.monotonic() + self.step_s
            elif (left := due - time.monotonic()) > 0:
                # Whole milliseconds are too coarse for short steps.
                time.sleep(left)
            for socket in self.inputs:
                while socket.poll(0):
                    self.take(socket.recv_multipart())
            if self.running and time.monotonic() >= due:
                self.step()
                due = max(due + self.step_s, time.monotonic() - self.step_s)

    def take(self, frames: list[bytes]) -> None:
        if frames[0] == ADD:
            request = decode(frames[1])
            self.running[request[0]] = [0, request[3]["max_tokens"], request[11] if len(request) > 11 else 0]
        elif frames[0] == ABORT:
            for name in decode(frames[1]):
                self.running.pop(name, None)
        elif frames[0] == CALL:
            client, call, method, _ = decode(frames[1])
            answer = [call, None, [None, ANSWERS.get(method)]]
            self.outputs[client].send(encode([0, [], None, time.monotonic(), answer]))

    def step(self) -> None:
        rows: list[list[Any]] = [[] for _ in self.outputs]
        ended: list[list[str]] = [[] for _ in self.outputs]
        for name, request in self.running.items():
            request[0] += 1
            done, limit, client = request
            row: list[Any] = [name, [WORDS[done % len(WORDS)]]]
            if done >= limit:
                row += [None, None, None, 1]
                ended[client].append(name)
            rows[client].append(row)
        for client, socket in enumerate(self.outputs):
            if rows[client]:
                tail = [None, ended[client]] if ended[client] else []
                socket.send(encode([0, rows[client], None, time.monotonic(), *tail]))
            for name in ended[client]:
                del self.running[name]


if __name__ == "__main__":
    Engine(sys.argv[1], float(os.environ["STEP_MS"]) / 1000).run()
