"""`GET /version` and `GET /server_info`, alias `/get_server_info`."""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

import msgspec
from fastapi import APIRouter, Request

from servekit import __version__
from servekit.http.generation import manager_of

router = APIRouter()

SECRETS = frozenset({"admin_api_key"})
"""Flags whose values are never shown."""


@router.get("/version")
async def version() -> dict[str, str]:
    """Version of servekit."""
    return {"version": __version__}


@router.get("/server_info")
@router.get("/get_server_info")
async def server_info(request: Request) -> dict[str, Any]:
    """Flags, versions, the model, the ranks, and which worker answers."""
    manager = manager_of(request)
    config = manager.config
    flags = msgspec.to_builtins(config.server_args)
    model = msgspec.to_builtins(config.model_info)
    model.pop("chat_template")
    return {
        "version": __version__,
        "python": platform.python_version(),
        "platform": sys.platform,
        "server_args": {k: v if k not in SECRETS or v is None else "***" for k, v in flags.items()},
        "model_info": model,
        "worker": {"index": manager.worker, "epoch": manager.epoch, "pid": os.getpid()},
        "control": {"epoch": config.port_args.control_epoch},
        "scheduler_info": request.app.state.scheduler_info(),
    }
