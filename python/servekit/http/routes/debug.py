"""`GET /debug/state`: what every process holds, for operators and tests."""

from __future__ import annotations

import hmac
import ipaddress
import os
from typing import Any

from fastapi import APIRouter, Request

from servekit.http.generation import manager_of
from servekit.tokenizer.refusal import Refusal

router = APIRouter()

DEADLINE_S = 2.0


def check_operator(request: Request, admin_key: str | None) -> None:
    """Operators' routes need the admin key if there is one, and are for loopback only if there is none.

    Raises:
        Refusal: 401 or 403.
    """
    if admin_key is None:
        if not _is_loopback(request.client.host if request.client else ""):
            raise Refusal(403, "this route is for loopback only unless the server has an --admin-api-key")
        return
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode(), admin_key.encode()):
        raise Refusal(401, "this route needs the admin key", code="invalid_api_key")


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    # On a socket for both families, IPv4 clients come as mapped addresses.
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


@router.get("/debug/state")
async def debug_state(request: Request) -> dict[str, Any]:
    """Live requests of this worker, and what control and the ranks answer within two seconds."""
    manager = manager_of(request)
    check_operator(request, manager.config.server_args.admin_api_key)
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
