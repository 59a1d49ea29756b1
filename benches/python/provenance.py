"""What figures were measured on."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

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
