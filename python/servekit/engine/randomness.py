"""Random numbers that depend on nothing but (seed, position). Needs no torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def draw_keys(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Two 32-bit keys for each (seed, position), [2, rows]: splitmix64 over both."""
    x = splitmix(splitmix(seeds) ^ positions.astype(np.uint64))
    return np.stack((x, x >> np.uint64(32))).astype(np.uint32).view(np.int32)


def splitmix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of splitmix64 (https://prng.di.unimi.it/splitmix64.c), for each number."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
