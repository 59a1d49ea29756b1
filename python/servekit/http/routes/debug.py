"""`GET /debug/state`: what every process holds, for operators and tests."""

from __future__ import annotations

import os
from typing import Any

from fastapi import Request

from servekit.http.generation import manager_of
from servekit.http.keys import operator_router

router = operator_router()

DEADLINE_S = 2.0


@router.get("/debug/state")
async def debug_state(request: Request) -> dict[str, Any]:
    """Live requests of this worker, and what control and the ranks answer within two seconds."""
    manager = manager_of(request)
    states = await manager.ask_state(DEADLINE_S)
    control = states.pop(-1)
    silent = [f"scheduler[dp={rank}]" for rank, state in sorted(states.items()) if state is None]
    return {
        "worker": {
            "index": manager.worker,
            "epoch": manager.epoch,
            "pid": os.getpid(),
            "requests": manager.live_requests(),
            **request.app.state.link_counters(),
        },
        "control": control,
        "ranks": {str(rank): state for rank, state in sorted(states.items())},
        "state_page": manager.page.snapshot(),
        "no_answer": (["control"] if control is None else []) + silent,
    }
