"""The same requests through any group of ranks: what each rank of it runs, and what came out.

`python -m tests.unit.group_job JOBS WORLD` is rank WORLD of every job of a file in turn; its last line is what it saw.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from servekit.config.port_args import orders_ipc, results_ipc
from servekit.engine.group import join_group
from servekit.engine.torch_runner import TorchRunner, load_torch_runner
from servekit.messages.requests import SamplingParams, TokenizedGenerateReqInput
from servekit.runtime.ranks import Sizes, make_ranks
from servekit.scheduler.follower import Follower, LeadingRunner
from servekit.scheduler.orders import OrderReceiver, OrderSender, ResultReceiver, ResultSender
from servekit.scheduler.profiling import Profiler
from servekit.scheduler.scheduler import Scheduler, SchedulerConfig

from tests.unit.scheduler_world import Rows
from tests.unit.tiny_models import VOCABULARY

CONTEXT, PAGE, ABORTED = 64, 4, 5


class Seen:
    """A runner that writes down what was sampled, on whatever rank."""

    def __init__(self, runner: Any) -> None:
        self._runner, self.info = runner, runner.info
        self._digest, self.steps = hashlib.sha256(), 0

    def launch(self, plan: Any) -> Any:
        handle = self._runner.launch(plan)
        self._digest.update(self._runner.collect(handle).tokens.tobytes())
        self.steps += 1
        return handle

    def collect(self, handle: Any) -> Any:
        return self._runner.collect(handle)

    def told(self) -> list[Any]:
        return [self.steps, self._digest.hexdigest()]


def load(path: str, partition: list[int], join: Any = None) -> TorchRunner:
    torch.set_num_threads(1)
    return load_torch_runner(
        Path(path),
        device="cpu",
        dtype="float32",
        ranks=1,
        rank=0,
        page=PAGE,
        max_model_len=CONTEXT,
        max_total_tokens=None,
        progress=lambda done, total: None,
        join=join,
        partition=partition,
    )


def serve(runner: Any, flights: int) -> dict[str, Any]:
    """Requests of all kinds at once; what came out, and how many steps were in flight."""
    pages = 160
    sizes = {"max_running": 32, "max_waiting": 100, "max_prefill_tokens": 48, "chunked_prefill_size": 16}
    limits = {"max_model_len": CONTEXT, "vocab_size": VOCABULARY, "end_ids": ()}
    scheduler = Scheduler(SchedulerConfig(**sizes, **limits, page=PAGE, pages=pages, flights=flights))
    generator = np.random.RandomState(7)
    for rid in range(12):
        # One token, and as many as the context holds.
        length = {0: 1, 1: CONTEXT - 1}.get(rid, int(generator.randint(2, 40)))
        ids = generator.randint(0, VOCABULARY, size=length).astype("<u4").tobytes()
        params = SamplingParams(max_new_tokens=12, ignore_eos=True, seed=rid, temperature=0.9 if rid % 3 == 2 else 0.0)
        scheduler.add(rid, TokenizedGenerateReqInput(rid, ids, params))
    rows, most, flying = Rows(), 0, deque()
    while True:
        step = scheduler.plan()
        if step is not None:
            flying.append((step, runner.launch(step.plan)))
        elif not flying:
            break
        most = max(most, len(flying))
        if step is None or len(flying) == flights:
            done, handle = flying.popleft()
            scheduler.complete(done, runner.collect(handle))
        rows.take(scheduler.take_batch())
        if len(rows.ids.get(ABORTED, ())) == 3:
            scheduler.abort(ABORTED)
    rows.take(scheduler.take_batch())
    scheduler.flush_cache()
    free = scheduler.state()["pages_free"] == pages
    return {"ids": {rid: ids for rid, ids in rows.ids.items() if rid != ABORTED}, "flights": most, "all free": free}


def member(job: dict[str, Any], world: int, folder: Path) -> dict[str, Any]:
    """Be one rank of a job."""
    sizes = Sizes(**job["sizes"])
    rank = make_ranks(sizes)[world]
    join = partial(join_group, rank, sizes, job["address"], job["listener"] if world == 0 else -1, timeout_s=60.0)
    seen = Seen(load(job["model"], job["partition"], lambda device: join(device=device)))
    addresses = [f"ipc://{folder}/{job['name']}-{orders_ipc(0, each)}" for each in range(sizes.world)]
    back = f"ipc://{folder}/{job['name']}-{results_ipc(0)}"
    if rank.leader:
        orders, results = OrderSender(addresses[1:]), ResultReceiver(back) if sizes.pipeline > 1 else None
        told = serve(LeadingRunner(seen, orders, results), sizes.pipeline)
        orders.stop()
    else:
        tells = rank.pp == sizes.pipeline - 1 > 0 and rank.tp == 0
        profiler = Profiler(folder, "none")
        Follower(seen, OrderReceiver(addresses[world]), ResultSender(back) if tells else None, profiler).run()
        told = {}
    dist.destroy_process_group()
    return {**told, "sampled": seen.told(), "last": rank.pp == sizes.pipeline - 1}


def main() -> None:
    file, world = Path(sys.argv[1]), int(sys.argv[2])
    found = {}
    for job in json.loads(file.read_text()):
        if world < Sizes(**job["sizes"]).world:
            found[job["name"]] = member(job, world, file.parent)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
