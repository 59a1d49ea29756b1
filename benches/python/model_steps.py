"""Steps of the torch engine on the demo model, in this process: what the model itself takes, without a server.

    python benches/python/model_steps.py [--seconds 2] [--only NAME ...] [--profile]

Prints of each job the milliseconds of a step (median and best) and its tokens per second, or where Python spends it.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from provenance import about, warn_of_load
from servekit.config.model_source import demo_model
from servekit.engine.plan import Plan, SamplingColumns
from servekit.engine.torch_runner import TorchRunner, load_torch_runner
from servekit.runtime.launcher import SCHEDULER_ENV

PAGE = 16
CONTEXT = 1024


@dataclass(frozen=True)
class Job:
    """Steps of `rows` sequences with `count` new tokens each, behind `start` others."""

    rows: int
    start: int
    count: int


JOBS = {
    "decode_1": Job(1, 100, 1),
    "decode_4": Job(4, 100, 1),
    "decode_16": Job(16, 300, 1),
    "decode_64": Job(64, 100, 1),
    "prefill_16": Job(1, 0, 16),
    "prefill_64": Job(1, 0, 64),
    "prefill_128": Job(1, 0, 128),
    "prefill_512": Job(1, 0, 512),
    "prefill_4x256": Job(4, 0, 256),
}


def plans(job: Job, rng: np.random.Generator) -> Iterator[Plan]:
    """A job's steps, its sequences growing by a token each while they fit their pages."""
    n = job.rows
    width = CONTEXT // PAGE
    tables = 1 + np.arange(n * width).reshape(n, width)
    off = np.zeros(n, np.float32)
    start = job.start
    for step in range(1, 1 << 30):
        if start + job.count > CONTEXT:
            start = job.start
        starts = np.full(n, start)
        columns = SamplingColumns(off, off + 1, starts * 0, off, starts.astype(np.uint64), starts + job.count)
        counts, ids = np.full(n, job.count), rng.integers(100, 40000, n * job.count)
        yield Plan(step, ids, starts, counts, tables, np.arange(n), columns)
        start += job.count == 1


def run(runner: TorchRunner, job: Job, seconds: float) -> list[float]:
    """Seconds of each step."""
    times, until = [], time.perf_counter() + seconds
    for plan in plans(job, np.random.default_rng(1)):
        began = time.perf_counter()
        runner.collect(runner.launch(plan))
        times.append(time.perf_counter() - began)
        if time.perf_counter() > until and len(times) > 5:
            return times[2:]
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--only", nargs="+", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    if missing := {name: value for name, value in SCHEDULER_ENV.items() if name not in os.environ}:
        # What libraries read when they are loaded must be there before.
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | missing)
    warn_of_load()
    runner = load_torch_runner(
        demo_model(),
        device="cpu",
        dtype="auto",
        ranks=1,
        rank=0,
        page=PAGE,
        max_model_len=CONTEXT,
        max_total_tokens=65 * CONTEXT,
        progress=lambda done, total: None,
    )
    print(f"{about()['machine']}, linear layers {runner.info['linear']}, {runner.info['threads']} threads")
    for name in args.only:
        job = JOBS[name]
        if args.profile:
            with cProfile.Profile() as profile:
                run(runner, job, args.seconds)
            pstats.Stats(profile).sort_stats("tottime").print_stats(18)
            continue
        times = run(runner, job, args.seconds)
        median = statistics.median(times)
        print(
            f"{name:16} {median * 1e3:9.2f} ms  best {min(times) * 1e3:8.2f}"
            f"  {job.rows * job.count / median:9.1f} tokens/s",
            flush=True,
        )


if __name__ == "__main__":
    main()
