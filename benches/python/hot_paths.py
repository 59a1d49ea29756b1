"""`make bench`: the Rust hot paths beside plain Python doing the same work on the same frames.

    python benches/python/hot_paths.py [--out benches/results.json]

Runs `cargo bench`, then the baselines, prints one table and writes a list of objects: name, unit, value (median), low
and high (of its samples), baseline, ratio (how many times better than the baseline), machine, commit. Figures drift
with the machine and with what else it does; ratios say more.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import baselines
import msgspec
from provenance import ROOT, publish, warn_of_load
from servekit.config.model_source import demo_model
from servekit.messages.envelope import Kind
from servekit.models.gguf_file import GgufFile
from servekit.reference import LoadBalanceMethod
from servekit.tokenizer.gguf_tokenizer import write_tokenizer_json

CRITERION = ROOT / "target" / "criterion"


class Estimate(msgspec.Struct):
    """One of criterion's estimates, in nanoseconds."""

    point_estimate: float
    confidence_interval: dict[str, float]


class Estimates(msgspec.Struct):
    """What this reads of criterion's file."""

    median: Estimate


def criterion(name: str, bench: str, unit: str, scale: float) -> dict[str, Any]:
    """A figure of criterion's, its nanoseconds times `scale`."""
    file = CRITERION / bench / "new" / "estimates.json"
    median = msgspec.json.decode(file.read_bytes(), type=Estimates).median
    bounds = median.confidence_interval
    low, high = bounds["lower_bound"] * scale, bounds["upper_bound"] * scale
    return {"name": name, "unit": unit, "value": median.point_estimate * scale, "low": low, "high": high}


def criterion_figures() -> list[dict[str, Any]]:
    """Split, detokenize, dispatch."""
    figures = []
    for kind in ("str", "token_id", "token_id_top5"):
        short = kind.replace("_id", "id")
        for rows in (1, 16, 64, 256, 1024):
            for workers in (1, 4, 16):
                name = f"split_{short}_b{rows}_w{workers}_us_per_request"
                figures.append(criterion(name, f"split/{kind}/b{rows}_w{workers}", "us", 1e-3 / rows))
    for rows in (16, 64, 256, 1024):
        name = f"detok_b{rows}_w4_us_per_token"
        figures.append(criterion(name, f"detok/b{rows}_w4", "us", 1e-3 / rows))
    for method, short in DISPATCH.items():
        for ranks in (2, 8, 64, 256):
            figures.append(criterion(f"dispatch_{short}_{ranks}_ns", f"dispatch/{method}/{ranks}", "ns", 1))
    return figures


DISPATCH = {
    "round_robin": "round_robin",
    "follow_bootstrap_room": "room",
    "total_requests": "requests",
    "total_tokens": "tokens",
    "cache_aware": "cached",
}


def baseline(name: str, frames: Path, tokenizer: Path, program: Path) -> float | None:
    """The baseline of a figure; None for figures that are none of servekit's."""
    parts = name.split("_")
    numbers = {part[0]: int(part[1:]) for part in parts if part[1:].isdigit() and part[0] in "bw"}
    if parts[0] == "split":
        kind = Kind.BATCH_STR if parts[1] == "str" else Kind.BATCH_TOKEN_ID
        body = frames / f"{name.removesuffix('_us_per_request').removeprefix('split_')}.msgpack"
        return baselines.split(kind, body.read_bytes(), numbers["b"]) if body.exists() else None
    if parts[0] == "fanout":
        body = frames / f"str_b{numbers['b']}_w{numbers['w']}.msgpack"
        return baselines.fanout(body.read_bytes(), numbers["b"], numbers["w"], program, "every" in parts)
    if parts[0] == "detok":
        body = frames / f"tokenid_b{numbers['b']}_w{numbers['w']}.msgpack"
        return baselines.detok(body.read_bytes(), tokenizer, numbers["b"], numbers["w"])
    if parts[0] == "dispatch":
        method = next(method for method, short in DISPATCH.items() if f"dispatch_{short}_" in name)
        return baselines.dispatch(LoadBalanceMethod(method), int(parts[-2]))
    if parts[0] == "router" and parts[-1] == "s":
        return baselines.router(int(parts[1].removeprefix("ids")), program)
    if parts[0] == "controller" and parts[-1] == "s":
        return baselines.controller(int(parts[1]), program)
    if parts[0] == "control":
        return baselines.control(256, 2, tokenizer, program)
    return None


def add_baselines(figures: list[dict[str, Any]], frames: Path, tokenizer: Path, program: Path) -> None:
    """Add baseline and ratio to each figure."""
    for figure in figures:
        name = figure["name"]
        figure["baseline"] = baseline(name, frames, tokenizer, program)
    values = {figure["name"]: figure for figure in figures}
    for figure in figures:
        if figure["unit"] == "of proxy":
            rate = figure["name"].replace("share_of_proxy", "messages_per_s")
            # The same proxy for both, so the shares are as the rates.
            figure["baseline"] = figure["value"] * values[rate]["baseline"] / values[rate]["value"]
        more_is_better = figure["unit"] in ("of proxy", "messages/s")
        if figure["baseline"] is None:
            figure["ratio"] = None
        elif more_is_better:
            figure["ratio"] = figure["value"] / figure["baseline"]
        else:
            figure["ratio"] = figure["baseline"] / figure["value"]


def bench_program() -> Path:
    """Builds all benches; the program of the plane's."""
    build = ["cargo", "bench", "--no-run", "--quiet", "--message-format=json"]
    lines = subprocess.run(build, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    programs = [json.loads(line) for line in lines if '"compiler-artifact"' in line]
    return next(Path(p["executable"]) for p in programs if p["target"]["name"] == "plane" and p["executable"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benches" / "results.json")
    args = parser.parse_args()
    warn_of_load()
    print("Building the benches.")
    program = bench_program()
    with tempfile.TemporaryDirectory(prefix="servekit-bench-") as folder:
        frames, tokenizer, lines = Path(folder), Path(folder) / "tokenizer.json", Path(folder) / "figures"
        with GgufFile(demo_model()) as file:
            write_tokenizer_json(file, tokenizer)
        settings = {
            "SERVEKIT_BENCH_TOKENIZER": str(tokenizer),
            "SERVEKIT_BENCH_FRAMES": str(frames),
            "SERVEKIT_BENCH_FIGURES": str(lines),
        }
        print("Measuring Rust, about two minutes.")
        subprocess.run(["cargo", "bench", "--quiet"], cwd=ROOT, check=True, env=os.environ | settings)
        figures = criterion_figures() + [json.loads(line) for line in lines.read_text().splitlines()]
        print("Measuring plain Python, about a minute.")
        add_baselines(figures, frames, tokenizer, program)
    publish(figures, args.out, "plain Python")


if __name__ == "__main__":
    main()
