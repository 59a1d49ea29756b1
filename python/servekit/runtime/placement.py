"""Which cores a rank of a group runs on: its part of those that the server was granted."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence


def cores_of(granted: Sequence[int], index: int, ranks: int) -> list[int]:
    """Cores of one of the ranks of a machine: neighbours, disjoint, about as many for each; all, if there are too few.

    Args:
        granted: cores that the process may use, in order.
        index, ranks: which rank of the machine it is, all stages and replicas counted.
    """
    count = len(granted)
    if count < ranks:
        return list(granted)
    return list(granted[count * index // ranks : count * (index + 1) // ranks])


def take_cores(index: int, ranks: int) -> int:
    """Stay on this rank's cores from now on; arguments as of `cores_of`.

    Returns:
        How many ranks share them: 1, or all where there are too few cores, or they can't be chosen.
    """
    if not hasattr(os, "sched_setaffinity"):
        return ranks
    granted = sorted(os.sched_getaffinity(0))
    if len(granted) < ranks:
        return ranks
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cores_of(granted, index, ranks))
        return 1
    return ranks
