"""`POST /generate`, as users of SGLang know it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET, Meta, UnsetType
from starlette.responses import Response

from servekit.http.answers import Generated
from servekit.http.body import read_body
from servekit.http.generation import generate, manager_of
from servekit.http.logprobs import LEAST
from servekit.http.openapi import describe_body
from servekit.http.prompts import IDS_SCHEMA, TEXTS_SCHEMA, check_ids, encode_prompts, prompts_of
from servekit.http.shapes import ended
from servekit.http.sse import event, json_value
from servekit.tokenizer import options as opt
from servekit.tokenizer.ask import Ask
from servekit.tokenizer.encoding import TextEncoder, unpack_ids
from servekit.tokenizer.logprobs import LogprobOptions, Score
from servekit.tokenizer.manager import TokenizerManager
from servekit.tokenizer.pieces import TokenPieces
from servekit.tokenizer.refusal import Refusal
from servekit.tokenizer.state import Choice, Job, Prompt

router = APIRouter()

DEFAULT_MAX_NEW_TOKENS = 128
MAX_NAMED_IDS = 1024
"""Most tokens whose logprobs one prompt may ask for."""


class SamplingOptions(opt.Unbuilt, kw_only=True):
    """How one prompt's tokens are chosen. Without `max_new_tokens` there are 128; null lets the context decide."""

    max_new_tokens: opt.NaturalInt | UnsetType | None = UNSET
    min_new_tokens: opt.NaturalInt | None = None
    temperature: opt.Temperature | None = None
    top_p: opt.TopP | None = None
    top_k: opt.TopK | None = None
    min_p: opt.MinP | None = None
    presence_penalty: opt.Penalty | None = None
    frequency_penalty: opt.Penalty | None = None
    repetition_penalty: opt.RepetitionPenalty | None = None
    logit_bias: opt.LogitBias | None = None
    sampling_seed: int | None = None
    n: opt.Choices | None = None
    stop: opt.Stops | None = None
    stop_token_ids: opt.StopTokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    custom_params: Any = None


TopCount = Annotated[int, Meta(ge=0, le=opt.MAX_TOP_LOGPROBS)]
StartLen = Annotated[int, Meta(ge=-1)]
Room = Annotated[int, Meta(ge=0, le=opt.MAX_ROOM)]
Port = Annotated[int, Meta(ge=1, le=65535)]


class GenerateRequest(msgspec.Struct, kw_only=True):
    """One prompt or a list of them, as text or as ids. Options may be lists with an entry for each prompt.

    Attributes:
        text, input_ids: the prompts; exactly one of the two.
        rid: what the client calls the request; only echoed.
        return_logprob: tell the logprob of each new token.
        logprob_start_len: tell those of the prompt's tokens from this position on, -1 for none.
        top_logprobs_num: likeliest tokens to tell at each position.
        token_ids_logprob: tokens whose logprobs to tell at each position.
        return_text_in_logprobs: beside each of these ids, tell its text.
    """

    text: str | list[str] | None = None
    input_ids: list[opt.TokenId | list[opt.TokenId]] | None = None
    sampling_params: SamplingOptions | list[SamplingOptions] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: StartLen | list[StartLen] | None = None
    top_logprobs_num: TopCount | list[TopCount] | None = None
    token_ids_logprob: list[opt.TokenId | list[opt.TokenId]] | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    data_parallel_rank: opt.NaturalInt | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Meta(max_length=1024)] | None = None
    bootstrap_host: str | list[str] | None = None
    bootstrap_port: Port | list[Port | None] | None = None
    bootstrap_room: Room | list[Room] | None = None
    input_embeds: Any = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    session_params: Any = None
    lora_path: Any = None
    custom_logit_processor: Any = None
    return_hidden_states: Any = None


_UNBUILT = (
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "session_params",
    "lora_path",
    "custom_logit_processor",
    "return_hidden_states",
)


@router.post(
    "/generate",
    openapi_extra=describe_body(
        GenerateRequest,
        one_of={"text": TEXTS_SCHEMA, "input_ids": IDS_SCHEMA},
        shown=dict.fromkeys(_UNBUILT),
        answer=Generated | list[Generated],
        streams=True,
        ranked=True,
    ),
)
async def generate_(request: Request) -> Response:
    """Go on with one or more prompts."""
    manager = manager_of(request)
    body = await read_body(request, GenerateRequest, manager.config.server_args.max_body_size)
    for field in _UNBUILT:
        if getattr(body, field) not in (None, False, [], {}):
            raise opt.unsupported(field)
    if (body.text is None) == (body.input_ids is None):
        raise Refusal(400, "one of text and input_ids is needed", param="text")
    model = manager.config.model_info
    given: str | list[Any] | None = body.input_ids if body.text is None else body.text
    prompts = prompts_of(given, model, "input_ids" if body.text is None else "text")
    batch = isinstance(given, list) and not (given and isinstance(given[0], int))
    items = _Items(body, len(prompts), batch, model.vocab_size)
    options = items.options(model.name)
    return await generate(
        request,
        manager,
        options,
        size=sum(map(len, prompts)),
        tokenize=lambda: _tokenize(manager, prompts, items, options),
        shape=_GenerateShape(items, options, manager.encoder.pieces if body.return_text_in_logprobs else None),
    )


class _Items:
    """The options of each prompt, whether they came as one for all or as lists.

    Attributes:
        batch: the client sent a list of prompts and gets a list of answers.

    Raises:
        Refusal: a list has not an entry for each prompt.
    """

    def __init__(self, body: GenerateRequest, count: int, batch: bool, vocab_size: int) -> None:
        self.body, self.batch, self._count = body, batch, count
        self._sampling = self._each("sampling_params", body.sampling_params or SamplingOptions())
        self._return = self._each("return_logprob", body.return_logprob)
        self._start = self._each("logprob_start_len", body.logprob_start_len)
        self._top = self._each("top_logprobs_num", body.top_logprobs_num)
        self._ids = self._each("token_ids_logprob", _named_ids(body.token_ids_logprob, count, vocab_size))
        self._hosts = self._each("bootstrap_host", body.bootstrap_host)
        self._ports = self._each("bootstrap_port", body.bootstrap_port)
        self._rooms = self._each("bootstrap_room", body.bootstrap_room)
        rids = body.rid if isinstance(body.rid, list) else [_name(body.rid, i, batch) for i in range(count)]
        self.rids: list[Any] = self._each("rid", rids)

    def _each(self, field: str, value: Any) -> list[Any]:
        if not isinstance(value, list):
            return [value] * self._count
        if len(value) != self._count:
            raise Refusal(400, f"{field} has {len(value)} entries for {self._count} prompts", param=field)
        return value

    def options(self, model: str) -> list[opt.GenerationOptions]:
        """The options of each prompt, by the names that all routes share; prompts with the same share an object.

        Raises:
            Refusal: one can't be obeyed.
        """
        body = self.body
        own = any(isinstance(field, list) for field in (body.bootstrap_host, body.bootstrap_port, body.bootstrap_room))
        made: list[opt.GenerationOptions] = []
        choices = 0
        for i, sampling in enumerate(self._sampling):
            if own or not made or sampling is not self._sampling[i - 1]:
                room = self._rooms[i]
                if room is not None and not isinstance(body.bootstrap_room, list):
                    # Each choice has a room of its own, and those before have taken some.
                    room += choices
                made.append(self._one(i, sampling, model, room))
            else:
                made.append(made[-1])
            choices += made[-1].choices
        return made

    def _one(self, i: int, sampling: SamplingOptions, model: str, room: int | None) -> opt.GenerationOptions:
        opt.check_unbuilt(sampling)
        if sampling.custom_params:
            raise opt.unsupported("custom_params")
        return opt.GenerationOptions(
            model=model,
            max_tokens=DEFAULT_MAX_NEW_TOKENS if sampling.max_new_tokens is UNSET else sampling.max_new_tokens,
            min_tokens=sampling.min_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=sampling.logit_bias,
            seed=sampling.sampling_seed,
            n=sampling.n,
            stop=sampling.stop,
            stop_token_ids=sampling.stop_token_ids,
            ignore_eos=sampling.ignore_eos,
            skip_special_tokens=sampling.skip_special_tokens,
            no_stop_trim=sampling.no_stop_trim,
            return_token_ids=True,
            stream=self.body.stream,
            data_parallel_rank=self.body.data_parallel_rank,
            priority=self.body.priority,
            cache_salt=self.body.cache_salt,
            bootstrap_host=self._hosts[i],
            bootstrap_port=self._ports[i],
            bootstrap_room=room,
        )

    def logprobs(self, i: int) -> LogprobOptions | None:
        """Which logprobs prompt `i` wants."""
        if not self._return[i]:
            return None
        start = self._start[i]
        return LogprobOptions(self._top[i] or 0, -1 if start is None else start, self._ids[i])


def _named_ids(ids: list[Any] | None, count: int, vocab_size: int) -> list[list[int] | None]:
    """The tokens whose logprobs each prompt wants."""
    if not ids:
        return [None] * count
    each = ids if all(isinstance(item, list) for item in ids) else [ids] * count
    for item in each:
        if len(item) > MAX_NAMED_IDS or any(isinstance(token, list) for token in item):
            message = f"token_ids_logprob must be a list of at most {MAX_NAMED_IDS} ids, or such a list for each prompt"
            raise Refusal(400, message, param="token_ids_logprob")
        if item:
            check_ids(item, vocab_size, "token_ids_logprob")
    return each


def _name(rid: str | None, i: int, batch: bool) -> str:
    if rid is None:
        return os.urandom(16).hex()
    return f"{rid}_{i}" if batch else rid


async def _tokenize(
    manager: TokenizerManager, prompts: list[str | list[int]], items: _Items, options: Sequence[opt.GenerationOptions]
) -> list[Ask]:
    size = sum(len(each) for each in prompts if isinstance(each, str))
    made: list[Ask] = await manager.encoder.run(size, _encode, manager.encoder, prompts, items, options)
    return made


def _encode(
    encoder: TextEncoder, prompts: list[str | list[int]], items: _Items, options: Sequence[opt.GenerationOptions]
) -> list[Ask]:
    return [
        Ask(Prompt(ids), option, option.max_tokens, items.logprobs(i))
        for i, (ids, option) in enumerate(zip(encode_prompts(encoder, prompts, True), options, strict=True))
    ]


class _GenerateShape:
    """Answers of this route. In a stream every event has all that there is so far."""

    def __init__(self, items: _Items, options: Sequence[opt.GenerationOptions], pieces: TokenPieces | None) -> None:
        self._items = items
        self.names = items.rids
        self._prompts = [i for i, option in enumerate(options) for _ in range(option.choices)]
        self._list = items.batch or len(self._prompts) > 1
        self._pieces = pieces
        self._began = time.monotonic()
        self._said: dict[int, tuple[str, list[int], list[Score]]] = {}

    def whole(self, job: Job) -> bytes:
        """See `Shape`."""
        answers = [self._answer(choice) for choice in job.choices]
        return json_value(answers if self._list else answers[0])

    def chunks(self, choice: Choice) -> list[bytes]:
        """See `Shape`."""
        answer = self._answer(choice)
        if not answer["output_ids"] and not ended(choice):
            return []
        if self._list:
            answer["index"] = choice.index
        return [event(json_value(answer))]

    def template(self, choice: Choice) -> tuple[bytes, bytes] | None:
        """See `Shape`; each event has more than the new text."""
        return None

    def usage(self, job: Job) -> bytes:
        """See `Shape`; each event tells it."""
        return b""

    def _answer(self, choice: Choice) -> dict[str, Any]:
        text, ids = choice.take()
        said, said_ids, scores = self._said.get(choice.index, ("", [], []))
        said, said_ids = said + text, said_ids + unpack_ids(ids)
        meta: dict[str, Any] = {
            "id": self._items.rids[self._prompts[choice.index]],
            "finish_reason": _finish(choice),
            "prompt_tokens": choice.prompt_tokens,
            "completion_tokens": choice.completion_tokens,
            "cached_tokens": choice.cached_tokens,
            "dp_rank": choice.dp_rank if choice.dp_rank >= 0 else None,
        }
        if choice.logprobs is not None:
            scores = scores + choice.logprobs.take()
            meta |= self._logprobs("input", choice.logprobs.prompt) | self._logprobs("output", scores)
        if ended(choice):
            meta["e2e_latency"] = time.monotonic() - self._began
        self._said[choice.index] = (said, said_ids, scores)
        return {"text": said, "output_ids": said_ids, "meta_info": meta}

    def _logprobs(self, side: str, scores: Sequence[Score]) -> dict[str, Any]:
        return {
            f"{side}_token_logprobs": [self._score(score.id, score.logprob) for score in scores],
            f"{side}_top_logprobs": [[self._score(*each) for each in score.top] or None for score in scores],
            f"{side}_token_ids_logprobs": [[self._score(*each) for each in score.others] or None for score in scores],
        }

    def _score(self, token: int, logprob: float | None) -> tuple[float | None, int, str | None]:
        text = None if self._pieces is None else self._pieces.piece(token).decode("utf-8", "replace")
        return None if logprob is None else max(logprob, LEAST), token, text


def _finish(choice: Choice) -> dict[str, Any] | None:
    finish = choice.finish
    if finish is None:
        return None
    if finish.type == "length":
        return {"type": "length", "length": choice.completion_tokens}
    return {"type": finish.type, "matched": finish.matched}
