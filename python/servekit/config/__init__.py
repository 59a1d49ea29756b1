"""What main tells its children: one structure, handed over in shared memory."""

from __future__ import annotations

from typing import Any

import msgspec

from servekit.config.model_info import ModelError, ModelInfo
from servekit.config.port_args import PortArgs
from servekit.config.server_args import ConfigError, ServerArgs

__all__ = ["Config", "ConfigError", "ModelError", "ModelInfo", "PortArgs", "SchedulerInfo", "ServerArgs"]


class Config(msgspec.Struct, frozen=True):
    """Everything a process has to know before it starts."""

    server_args: ServerArgs
    port_args: PortArgs
    model_info: ModelInfo


class SchedulerInfo(msgspec.Struct, frozen=True):
    """What the ranks told main when they were ready: one plain dict a rank (`Rank.info`)."""

    ranks: list[dict[str, Any]]
