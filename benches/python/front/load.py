"""A load generator for chat completions: one thread over raw sockets, so that it costs less than what it measures.

    python benches/python/front/load.py --port 8000 --model NAME [--connections 64] [--seconds 6] [--stream 64]

Each connection is kept alive and sends its next request when the answer to the last is complete. No two requests have
the same text. Events are found by searching the bytes, never parsed. Prints one line of JSON; times are in seconds.
"""

from __future__ import annotations

import argparse
import json
import select
import socket
import sys
import time
from array import array

_TOKEN, _ROLE = b'"content":"', b'"content":""'
_STREAM_END, _HEAD_END = b"data: [DONE]\n\n\r\n0\r\n\r\n", b"\r\n\r\n"
_NUMBER = b"wxyz"
"""Stands in the request for letters that differ from request to request."""
_KEEP = max(len(_STREAM_END), len(_TOKEN)) - 1


class Totals:
    """What all connections have seen since `begin`.

    Attributes:
        chunks: events that brought text.
        requests: answers that were complete, with the chunks of those that also began in time in `whole_chunks`.
    """

    def __init__(self) -> None:
        self.sent = 0
        self.begin()

    def next_number(self) -> bytes:
        """Four letters that have not been used, for some hundred thousand requests."""
        self.sent += 1
        return bytes(97 + self.sent // 26**i % 26 for i in range(4))

    def begin(self) -> None:
        self.began = time.perf_counter()
        self.chunks = self.requests = self.whole = self.whole_chunks = self.errors = 0
        self.first, self.gaps, self.total = array("d"), array("d"), array("d")


class Connection:
    """One client."""

    def __init__(self, address: tuple[str, int], request: bytes, stream: bool, totals: Totals) -> None:
        self.request, self.stream, self.totals = request, stream, totals
        self.socket = socket.create_connection(address, timeout=10)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.send()

    def send(self) -> None:
        self.tail, self.chunks, self.last = b"", 0, 0.0
        request = self.request.replace(_NUMBER, self.totals.next_number(), 1)
        self.sent = time.perf_counter()
        if self.socket.send(request) != len(request):
            raise RuntimeError("the request does not fit the socket's buffer")

    def readable(self) -> None:
        data = self.socket.recv(1 << 18)
        if not data:
            raise ConnectionError("the server closed a connection")
        now = time.perf_counter()
        if not self.tail and not data.startswith(b"HTTP/1.1 200"):
            self.totals.errors += 1
            raise ConnectionError(data[:500].decode(errors="replace"))
        data = self.tail + data
        if not self.stream:
            self.tail = data
            head, found, body = data.partition(_HEAD_END)
            if found and len(body) >= int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]):
                self.done(now)
            return
        chunks = data.count(_TOKEN) - data.count(_ROLE) - self.counted_in_tail()
        self.tail = data[-_KEEP:]
        if chunks:
            self.count(chunks, now)
        if data.endswith(_STREAM_END):
            self.done(now)

    def counted_in_tail(self) -> int:
        return self.tail.count(_TOKEN) - self.tail.count(_ROLE)

    def count(self, chunks: int, now: float) -> None:
        totals = self.totals
        totals.chunks += chunks
        self.chunks += chunks
        if self.last:
            totals.gaps.append(now - self.last)
        elif self.sent >= totals.began:
            totals.first.append(now - self.sent)
        totals.gaps.extend([0.0] * (chunks - 1))
        self.last = now

    def done(self, now: float) -> None:
        totals = self.totals
        totals.requests += 1
        if self.sent >= totals.began:
            totals.whole += 1
            totals.whole_chunks += self.chunks
            totals.total.append(now - self.sent)
        self.send()


def request_bytes(port: int, model: str, words: int, tokens: int, stream: bool) -> bytes:
    """A chat request of about `words` tokens."""
    text = " ".join(("time", "water", "people", "house", "music", "story", "light")[i % 7] for i in range(words))
    messages = [{"role": "user", "content": f"{_NUMBER.decode()}: {text}"}]
    body = json.dumps({"model": model, "stream": stream, "max_tokens": tokens, "messages": messages}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


def quantile(values: array[float], share: float) -> float | None:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--warm", type=float, default=1.5, help="seconds before anything counts")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--words", type=int, default=40)
    parser.add_argument("--stream", type=int, default=0, help="tokens of a stream; 0 asks for one token, not streamed")
    args = parser.parse_args()
    request = request_bytes(args.port, args.model, args.words, args.stream or 1, args.stream > 0)
    totals = Totals()
    epoll = select.epoll()
    clients: dict[int, Connection] = {}
    for _ in range(args.connections):
        client = Connection(("127.0.0.1", args.port), request, args.stream > 0, totals)
        clients[client.socket.fileno()] = client
        epoll.register(client.socket, select.EPOLLIN)

    def serve(until: float) -> None:
        while time.perf_counter() < until:
            for fd, _ in epoll.poll(max(0.0, until - time.perf_counter())):
                clients[fd].readable()

    serve(time.perf_counter() + args.warm)
    # Whoever measures the server reads its clocks at these two lines.
    print("begin", flush=True)
    totals.begin()
    cpu = time.process_time()
    serve(totals.began + args.seconds)
    seconds = time.perf_counter() - totals.began
    print("end", flush=True)
    chunks_per_token = totals.whole_chunks / (totals.whole * args.stream) if totals.whole and args.stream else None
    result = {
        "seconds": seconds,
        "requests": totals.requests,
        "tokens": totals.chunks / chunks_per_token if chunks_per_token else totals.requests,
        "chunks_per_token": chunks_per_token,
        "errors": totals.errors,
        "client_cpu_s": time.process_time() - cpu,
        "ttft_p50_s": quantile(totals.first, 0.5),
        "gap_p50_s": quantile(totals.gaps, 0.5),
        "gap_p99_s": quantile(totals.gaps, 0.99),
        "total_p50_s": quantile(totals.total, 0.5),
    }
    json.dump(result, sys.stdout)
    print(flush=True)


if __name__ == "__main__":
    main()
