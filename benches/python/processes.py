"""What the processes cost before a request comes: time to ready, memory, idle CPU, and how fast all is gone.

    python benches/python/processes.py [--runs 5] [--idle 10] [-- FURTHER FLAGS OF servekit-serve]
    python benches/python/processes.py -- --engine mock --tp 2 --pp 2 --dp 2      eight ranks

Prints one line a figure: median, smallest and largest of the runs. Serves the mock engine unless told otherwise.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
from programs import answers, cpu_seconds, free_port


def wait_for(condition: Callable[[], bool], seconds: float) -> float:
    """Seconds until a condition holds."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            raise TimeoutError(f"not within {seconds} s")
        time.sleep(0.002)
    return time.monotonic() - began


def run(flags: list[str], idle_s: float) -> dict[str, float]:
    """One life of a server."""
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "servekit.cli.serve", "--port", str(port), *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        figures = {"ready after, s": wait_for(lambda: answers(port, "/ready"), 600)}
        processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        time.sleep(1)
        ranks = [each for each in processes if "scheduler" in "".join(each.cmdline())]
        before, of_ranks, began = cpu_seconds(processes), cpu_seconds(ranks), time.monotonic()
        time.sleep(idle_s)
        passed = time.monotonic() - began
        figures[f"idle CPU over {idle_s:g} s, % of a core"] = 100 * (cpu_seconds(processes) - before) / passed
        figures[f"that of the {len(ranks)} ranks"] = 100 * (cpu_seconds(ranks) - of_ranks) / passed
        for process in processes:
            title = " ".join(process.cmdline()).strip()
            figures[f"{title}, MiB PSS"] = process.memory_full_info().pss / 2**20
        server.kill()
        figures["all gone after kill -9 of main, s"] = wait_for(
            lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes), 30
        )
        return figures
    finally:
        server.kill()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--idle", type=float, default=10.0)
    parser.add_argument("flags", nargs="*", help="flags of servekit-serve, after --")
    args = parser.parse_args()
    lives = [run(args.flags or ["--engine", "mock"], args.idle) for _ in range(args.runs)]
    for name in lives[0]:
        values = [life[name] for life in lives if name in life]
        print(f"{name:45} {statistics.median(values):9.3f}   ({min(values):.3f} to {max(values):.3f})")


if __name__ == "__main__":
    main()
