"""Which device a rank computes on, in which type, and with how many threads."""

from __future__ import annotations

import os
from typing import Any

import numpy.typing as npt
import torch

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class DeviceError(ValueError):
    """A device or dtype that this machine can't give. One line for the operator."""


def share_threads(device: torch.device, ranks: int) -> None:
    """On a CPU, take this rank's part of the cores that the process may use."""
    if device.type == "cpu":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))


def choose_device(name: str, rank: int) -> torch.device:
    """The device of a rank.

    Args:
        name: auto, cpu or cuda.
        rank: of this machine; several devices are shared out.

    Raises:
        DeviceError: there is none of that kind.
    """
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise DeviceError("--device cuda: torch sees no CUDA device")
    if name == "cpu" or not available:
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def upload(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """An array on a device. To CUDA it goes from pinned memory: the host need not wait for what is computed there."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def download(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on its way to the host, into pinned memory: it may be read when the device has come so far."""
    return tensor.to("cpu", non_blocking=True)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """What to compute in: auto is float32 on a CPU and bfloat16 elsewhere."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name == "float32" and device.type == "cuda":
        # Plain float32 is what was asked for, not the shorter format of tensor cores.
        torch.backends.cuda.matmul.allow_tf32 = False
    return _DTYPES[name]
