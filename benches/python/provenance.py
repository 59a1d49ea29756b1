"""What figures were measured on, and how they are written down."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def cores() -> int:
    """What this process may use."""
    return len(os.sched_getaffinity(0))


def about() -> dict[str, str]:
    """Machine and commit, in words; `+` stands for changes that are not committed."""
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    git = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        commit = ""
    machine = f"{cores()} cores of {cpu}, {platform.system()} {platform.release()}"
    return {"machine": machine, "commit": commit or "unknown"}


def warn_of_load() -> None:
    """Say so if the machine does something else."""
    if (load := os.getloadavg()[0]) > 0.5:
        print(f"The load is {load:.1f}: other programs take part of the cores, and the figures will show it.")


def publish(figures: list[dict[str, Any]], out: Path, other: str) -> None:
    """Write figures to a file, with what they were measured on, and print them as a table.

    Args:
        figures: each with name, value, and baseline and ratio, or None for these two.
        other: what the baseline is, in a word or two.
    """
    what = about()
    out.write_text(json.dumps([figure | what for figure in figures], indent=1) + "\n")
    print(f"\n{what['machine']}, commit {what['commit']}\n")
    print(f"{'':48} {'value':>12} {other:>12} {'better by':>9}")
    for figure in figures:
        beside = [f"{v:.4g}" if v is not None else "-" for v in (figure["baseline"], figure["ratio"])]
        print(f"{figure['name']:48} {figure['value']:12.4g} {beside[0]:>12} {beside[1]:>9}")
    print(f"\nWritten to {out}.")
