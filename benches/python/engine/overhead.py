"""What a step costs beside the model: the scheduler and its output columns over the runner that computes nothing."""

from __future__ import annotations

import time

import numpy as np
from servekit.engine.dummy_runner import DummyRunner
from servekit.messages.requests import SamplingParams, TokenizedGenerateReqInput
from servekit.scheduler.scheduler import Scheduler, SchedulerConfig

VOCABULARY = 49152
STEPS = 400


def step_overhead_ms(running: int) -> float:
    """Milliseconds of a decode step of `running` requests that are not spent in the runner."""
    config = SchedulerConfig(running, running, 1 << 16, 1 << 16, 16, running * 64, 1024, VOCABULARY, (2,))
    scheduler, runner = Scheduler(config), DummyRunner(VOCABULARY)
    prompt = np.arange(100, 132, dtype="<u4").tobytes()
    for rid in range(1, running + 1):
        params = SamplingParams(max_new_tokens=STEPS + 100, temperature=0.0, ignore_eos=True)
        scheduler.add(rid, TokenizedGenerateReqInput(rid, prompt, params))
    samples = []
    for _ in range(STEPS):
        began = time.perf_counter()
        step = scheduler.plan()
        assert step is not None
        planned = time.perf_counter()
        result = runner.collect(runner.launch(step.plan))
        computed = time.perf_counter()
        scheduler.complete(step, result)
        scheduler.take_batch()
        scheduler.load()
        samples.append(planned - began + time.perf_counter() - computed)
    # The first steps hold prompts.
    return float(np.median(samples[20:])) * 1e3
