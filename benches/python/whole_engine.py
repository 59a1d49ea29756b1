"""`make bench-engine`: the torch engine on the demo model, the whole server through HTTP, beside what else does that.

    python benches/python/whole_engine.py [--out benches/engine.json] [--runs 3] [--only NAME ...] [--peers VENV]
                                             [-- FLAGS OF servekit-serve]

Prompts are random tokens, new ones for each run, so that no cache knows them; outputs are greedy and have their full
length. Client and server share the cores that this process may use: give it a machine that does nothing else.

Peers are measured in the same run with the same client, if VENV has them; make one like this (no compiler needed):

    python3 -m venv peers && peers/bin/pip install xllamacpp gguf transformers torch

Its llama.cpp server gets the demo model with weights in float16 and in Q8_0, written from the same file; transformers
generates in its own process in float32, without a server.

Writes a list of {name, unit, value (median), low, high (of the runs), baseline (the best peer's), ratio (how many times
better than that), peers (each one's value), machine, commit}.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.jobs import Target, batch, decode, first_token, gap_ratio
from engine.overhead import step_overhead_ms
from engine.servers import HERE, llama, servekit
from provenance import ROOT, cores, publish, warn_of_load
from servekit.config.model_source import demo_model


@dataclass(frozen=True)
class Figure:
    """Something measured through HTTP: unit, whether more is better, and one sample of it."""

    unit: str
    more: bool
    sample: Callable[[Target, random.Random], float]


FIGURES = {
    "batch16_256_64_output_tokens_per_s": Figure("tokens/s", True, batch),
    "batch16_shared_prefix_output_tokens_per_s": Figure("tokens/s", True, lambda t, r: batch(t, r, shared=224)),
    "decode_1_tokens_per_s": Figure("tokens/s", True, lambda t, r: decode(t, r, 1, 128)),
    "decode_16_tokens_per_s": Figure("tokens/s", True, lambda t, r: decode(t, r, 16, 64)),
    "decode_64_tokens_per_s": Figure("tokens/s", True, lambda t, r: decode(t, r, 64, 48)),
    "prefill_512_tokens_per_s": Figure("tokens/s", True, lambda t, r: 512 / first_token(t, r, 512)),
    "ttft_128_ms": Figure("ms", False, lambda t, r: 1e3 * first_token(t, r, 128)),
    "gap_p99_ratio_long_prefill": Figure("of idle", False, gap_ratio),
}
OVERHEAD = "scheduler_overhead_256_ms"


def measure(target: Target, names: list[str], runs: int) -> dict[str, list[float]]:
    """Samples of each figure; a run before them, which does not count, warms the server up."""
    rng = random.Random(int.from_bytes(os.urandom(8)))
    first_token(target, rng, 64)
    samples = {}
    for name in names:
        samples[name] = [FIGURES[name].sample(target, rng) for _ in range(runs)]
        print(f"  {name:44} {statistics.median(samples[name]):10.4g}", flush=True)
    return samples


def has(python: Path, package: str) -> bool:
    """Whether a peer's package is there; says so if it is not."""
    found = subprocess.run([str(python), "-c", f"import {package}"], capture_output=True).returncode == 0
    if not found:
        print(f"{python} can't import {package}: not measured")
    return found


def measure_peers(venv: Path, names: list[str], runs: int, folder: Path) -> dict[str, dict[str, float]]:
    """Each peer's medians."""
    python, found = venv / "bin" / "python", {}
    # llama.cpp has 16 slots here, and a client that waits for one measures something else.
    slots = [name for name in names if name != "decode_64_tokens_per_s"]
    for kind in ("F16", "Q8_0") if has(python, "xllamacpp") else ():
        model = folder / f"demo-{kind}.gguf"
        script = [str(python), str(HERE / "peer_llama.py"), "convert", str(demo_model()), str(model), kind]
        subprocess.run(script, check=True)
        print(f"llama.cpp, {kind}")
        with llama(python, model, folder) as target:
            samples = measure(target, slots, runs)
        found[f"llama.cpp {kind}"] = {name: statistics.median(values) for name, values in samples.items()}
    if not has(python, "transformers"):
        return found
    print("transformers, float32", flush=True)
    script = [str(python), str(HERE / "peer_transformers.py"), str(demo_model()), str(cores())]
    done = subprocess.run(script, check=True, stdout=subprocess.PIPE, text=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    found["transformers float32"] = {name: value for name, value in figures.items() if name in names}
    return found


def entry(name: str, unit: str, more: bool, values: list[float], peers: dict[str, float]) -> dict[str, Any]:
    """One object of the result."""
    value = statistics.median(values)
    baseline = (max if more else min)(peers.values()) if peers else None
    ratio = None if not baseline else value / baseline if more else baseline / value
    bounds = {"low": min(values), "high": max(values)}
    return {"name": name, "unit": unit, "value": value, **bounds, "baseline": baseline, "ratio": ratio, "peers": peers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benches" / "engine.json")
    parser.add_argument("--runs", type=int, default=3, help="samples of each figure")
    parser.add_argument("--only", nargs="+", choices=[*FIGURES, OVERHEAD], help="these figures alone")
    parser.add_argument("--peers", type=Path, help="virtual environment with xllamacpp, gguf, transformers and torch")
    own = sys.argv[1:]
    flags = own[own.index("--") + 1 :] if "--" in own else []
    args = parser.parse_args(own[: own.index("--")] if "--" in own else own)
    warn_of_load()
    names = [name for name in FIGURES if not args.only or name in args.only]
    peers: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="servekit-bench-") as folder:
        print("servekit", flush=True)
        with servekit(demo_model(), Path(folder), flags) as target:
            samples = measure(target, names, args.runs)
        if args.peers is not None:
            peers = measure_peers(args.peers, names, args.runs, Path(folder))
    found = []
    for name, values in samples.items():
        theirs = {peer: figures[name] for peer, figures in peers.items() if name in figures}
        found.append(entry(name, FIGURES[name].unit, FIGURES[name].more, values, theirs))
    if not args.only or OVERHEAD in args.only:
        found.append(entry(OVERHEAD, "ms", False, [step_overhead_ms(256) for _ in range(args.runs)], {}))
    publish(found, args.out, "best peer")


if __name__ == "__main__":
    main()
