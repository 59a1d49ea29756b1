"""Operators' commands to the whole server. Each goes to every process that it concerns, whichever worker is asked."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import Request
from starlette.responses import Response

from servekit.config.server_args import LOG_LEVELS
from servekit.http.body import read_body
from servekit.http.errors import error_response
from servekit.http.generation import manager_of
from servekit.http.keys import operator_router
from servekit.http.openapi import describe_body
from servekit.http.sse import json_value
from servekit.messages import requests as r
from servekit.messages.envelope import Kind, party_title
from servekit.tokenizer.control_messages import CONTROL, Answers
from servekit.tokenizer.refusal import Refusal

router = operator_router()

DEADLINE_S = 10.0
PROFILE_DEADLINE_S = 120.0
"""To write a profile takes long."""
MAX_BODY = 1 << 20


class FlushCacheRequest(msgspec.Struct):
    """Nothing has to be said."""


class ProfileRequest(msgspec.Struct):
    """Nothing has to be said: profiles go to the folder that `--profile-dir` names."""

    output_dir: str | None = None


class PauseRequest(msgspec.Struct):
    """Nothing has to be said."""


class SetLogLevelRequest(msgspec.Struct):
    """What is logged from now on: debug, info, warning or error."""

    level: str


class AbortRequest(msgspec.Struct):
    """Which requests to end.

    Attributes:
        rid: id of a response, or of a choice as `/debug/state` shows it.
        abort_all: all of them.
    """

    rid: str | None = None
    abort_all: bool = False


# Taken, so that who sends it hears why it is refused.
_PROFILE = describe_body(ProfileRequest, required=False, shown={"output_dir": None})


@router.post("/flush_cache", openapi_extra=describe_body(FlushCacheRequest, required=False))
async def flush_cache(request: Request) -> Response:
    """Drop every cached prefix that no request uses."""
    await read_body(request, FlushCacheRequest, MAX_BODY, optional=True)
    return await _command(request, Kind.FLUSH_CACHE, r.FlushCacheReq())


@router.post("/start_profile", openapi_extra=_PROFILE)
async def start_profile(request: Request) -> Response:
    """Begin to record what each rank computes."""
    await _check_profile(request)
    return await _command(request, Kind.PROFILE, r.ProfileReq(True), PROFILE_DEADLINE_S)


@router.post("/stop_profile", openapi_extra=_PROFILE)
async def stop_profile(request: Request) -> Response:
    """Write what was recorded; the answer names the files."""
    await _check_profile(request)
    return await _command(request, Kind.PROFILE, r.ProfileReq(False), PROFILE_DEADLINE_S)


async def _check_profile(request: Request) -> None:
    body = await read_body(request, ProfileRequest, MAX_BODY, optional=True)
    if body.output_dir is not None:
        raise Refusal(
            400, "output_dir: a request can't choose a folder of the server, --profile-dir does", param="output_dir"
        )


@router.post("/pause_generation", openapi_extra=describe_body(PauseRequest, required=False))
async def pause_generation(request: Request) -> Response:
    """Have all ranks compute nothing more until they are told to continue; requests are taken and wait."""
    await read_body(request, PauseRequest, MAX_BODY, optional=True)
    return await _command(request, Kind.PAUSE, r.PauseReq())


@router.post("/continue_generation", openapi_extra=describe_body(PauseRequest, required=False))
async def continue_generation(request: Request) -> Response:
    """Go on after a pause."""
    await read_body(request, PauseRequest, MAX_BODY, optional=True)
    return await _command(request, Kind.CONTINUE, r.ContinueReq())


@router.post(
    "/set_log_level", openapi_extra=describe_body(SetLogLevelRequest, shown={"level": {"enum": list(LOG_LEVELS)}})
)
async def set_log_level(request: Request) -> Response:
    """Log more, or less, in every process but main."""
    body = await read_body(request, SetLogLevelRequest, MAX_BODY)
    if body.level not in LOG_LEVELS:
        raise Refusal(400, f"level must be one of {', '.join(LOG_LEVELS)}", param="level")
    return await _command(request, Kind.SET_LOG_LEVEL, r.SetLogLevelReq(body.level))


@router.post("/abort_request", openapi_extra=describe_body(AbortRequest))
async def abort_request(request: Request) -> Response:
    """End requests with an error, whichever worker has them; `aborted` says how many there were."""
    body = await read_body(request, AbortRequest, MAX_BODY)
    if body.abort_all == (body.rid is not None):
        raise Refusal(400, "one of rid and abort_all is needed", param="rid")
    ids = [] if body.rid is None else [body.rid]
    answers = await manager_of(request).control(
        Kind.ABORT_REQUESTS, r.AbortRequestsReq(ids, body.abort_all), DEADLINE_S
    )
    found = [data["aborted"] for data in answers.data().values() if data]
    return _answer(answers, aborted=sum(found))


async def _command(request: Request, kind: Kind, body: msgspec.Struct, deadline_s: float = DEADLINE_S) -> Response:
    return _answer(await manager_of(request).control(kind, body, deadline_s))


def _answer(answers: Answers, **more: Any) -> Response:
    """200 if all obeyed, 504 if somebody did not answer, 409 if somebody would not; each with who said what."""
    told = answers.data()
    said = {
        party_title(number): {"ok": reply.ok, "message": reply.message, "data": told[number]}
        for number, reply in sorted(answers.replies.items())
        if number != CONTROL or not reply.ok
    }
    facts = {**more, "answers": said, "no_answer": answers.no_answer}
    if answers.ok:
        return Response(json_value({"status": "ok", **facts}), media_type="application/json")
    status, code = (504, "no_answer") if answers.silent else (409, "refused")
    return error_response(Refusal(status, "; ".join(answers.failures()), code=code), **facts)
