"""What a client may say about generation, on every route, and what becomes of it. The one place that checks it.

Ranges are part of the types, so that one pass of the JSON decoder checks them and the OpenAPI document tells them.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from servekit.config.model_info import ModelInfo
from servekit.messages.envelope import TextOptions
from servekit.messages.requests import SamplingParams
from servekit.tokenizer.refusal import Refusal, too_long

MAX_N = 128
MAX_STOPS = 128
MAX_STOP_BYTES = 16 << 10
"""Most bytes of all stop strings together: each costs the detokenizer about a hundred."""
MAX_GROUP_STOP_BYTES = 1 << 20
"""The same, times the choices of the request: each choice looks for them by itself."""
MAX_TOP_LOGPROBS = 20
MAX_REPETITION_PENALTY = 1000
MAX_DIMENSIONS = 65536
MAX_ROOM = 2**63 - 1

_SEED_MASK = (1 << 63) - 1

PositiveInt = Annotated[int, Meta(ge=1)]
NaturalInt = Annotated[int, Meta(ge=0)]
TOKEN_ID_SCHEMA = {"type": "integer", "format": "token-id"}
"""How the types say what a token id is. The OpenAPI document says it with the model's vocabulary."""
TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1, extra_json_schema=TOKEN_ID_SCHEMA)]
TokenIdText = Annotated[str, Meta(pattern="^[0-9]{1,10}$", extra_json_schema={"format": TOKEN_ID_SCHEMA["format"]})]
StopString = Annotated[str, Meta(max_length=4096)]

# Ranges that the routes share, whatever they call the fields.
Temperature = Annotated[float, Meta(ge=0)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1)]
MinP = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=MAX_REPETITION_PENALTY)]
LogitBias = dict[TokenIdText, Annotated[float, Meta(ge=-100, le=100)]]
Choices = Annotated[int, Meta(ge=1, le=MAX_N)]
Stops = StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)]
StopTokenIds = Annotated[list[TokenId], Meta(max_length=MAX_STOPS)]


class StreamOptions(msgspec.Struct, kw_only=True):
    """`include_usage` asks for a last chunk with the usage, `continuous_usage_stats` for the usage in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """The form the answer must have; only `text` is served."""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["text"]})]
    json_schema: Any = None


class Unbuilt(msgspec.Struct, kw_only=True):
    """Fields that would change the answer and that this version can't obey: refused unless they are neutral."""

    prompt_logprobs: int | None = None
    return_logprob: bool | None = None
    regex: Any = None
    ebnf: Any = None
    grammar: Any = None
    json_schema: Any = None
    structured_outputs: Any = None
    structural_tag: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    stop_regex: Any = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    repeat_penalty: float | None = None
    typical_p: float | None = None
    mirostat: int | None = None
    dry_multiplier: float | None = None
    xtc_probability: float | None = None
    dynatemp_range: float | None = None
    truncate_prompt_tokens: int | None = None
    custom_logit_processor: Any = None
    logits_processors: Any = None
    lora_path: Any = None


_NEUTRAL: dict[str, tuple[object, ...]] = {
    "return_logprob": (False,),
    "bad_words": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "repeat_penalty": (1,),
    "typical_p": (1,),
    "mirostat": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "dynatemp_range": (0,),
}


class GenerationOptions(Unbuilt, kw_only=True):
    """Fields of every request that generates. Absent and null are the same.

    Choices of a request with a `bootstrap_room` have rooms of their own: that one and those that follow it.
    """

    model: str | None = None
    max_tokens: NaturalInt | None = None
    min_tokens: NaturalInt | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: LogitBias | None = None
    seed: int | None = None
    n: Choices | None = None
    stop: Stops | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    data_parallel_rank: NaturalInt | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Meta(max_length=1024)] | None = None
    bootstrap_host: str | None = None
    bootstrap_port: Annotated[int, Meta(ge=1, le=65535)] | None = None
    bootstrap_room: Annotated[int, Meta(ge=0, le=MAX_ROOM)] | None = None
    user: str | None = None

    @property
    def streamed(self) -> bool:
        """The client reads the answer as it comes."""
        return bool(self.stream)

    @property
    def choices(self) -> int:
        """Answers wanted to each prompt."""
        return self.n or 1


class EmbeddingOptions(msgspec.Struct, kw_only=True):
    """Fields of a request for embeddings. `dimensions` is the length of the vectors, the model's own without it."""

    model: str | None = None
    dimensions: Annotated[int, Meta(ge=1, le=MAX_DIMENSIONS)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    data_parallel_rank: NaturalInt | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    user: str | None = None


def unsupported(field: str) -> Refusal:
    """The refusal of a field that this version can't obey."""
    return Refusal(400, f"{field} is not supported by this server yet", param=field, code="unsupported_parameter")


_unbuilt = operator.attrgetter(*Unbuilt.__struct_fields__)
_NOTHING = (None,) * len(Unbuilt.__struct_fields__)


def check_unbuilt(options: Unbuilt) -> None:
    """Nothing is asked for that this version can't obey.

    Raises:
        Refusal: naming the field at fault.
    """
    values = _unbuilt(options)
    if values == _NOTHING:
        return
    for field, value in zip(Unbuilt.__struct_fields__, values, strict=True):
        if value is not None and value not in _NEUTRAL.get(field, ()):
            raise unsupported(field)


def check(options: GenerationOptions) -> None:
    """Everything about the options that the types can't say.

    Raises:
        Refusal: naming the field at fault.
    """
    check_unbuilt(options)
    response_format = options.response_format
    if response_format is not None and response_format.type != "text":
        kind = response_format.type
        raise Refusal(
            400,
            f"response_format {kind[:40]!r} is not supported by this server yet, only 'text'",
            param="response_format",
            code="unsupported_parameter",
        )
    if options.stream_options is not None and not options.streamed:
        raise Refusal(400, "stream_options is only allowed when stream is true", param="stream_options")


def named_rank(options: GenerationOptions | EmbeddingOptions, headers: Sequence[str], ranks: int) -> int:
    """The rank that the client names in the field or in the values of its `X-Data-Parallel-Rank` headers, -1 for none.

    Raises:
        Refusal: no number, out of range, or two that differ.
    """
    named = set() if options.data_parallel_rank is None else {options.data_parallel_rank}
    for value in headers:
        value = value.strip()
        if not (value.isascii() and value.isdigit() and len(value) < 10):
            raise Refusal(400, "the X-Data-Parallel-Rank header must be one number", param="data_parallel_rank")
        named.add(int(value))
    if not named:
        return -1
    if len(named) > 1:
        raise Refusal(400, "data_parallel_rank is named twice, differently", param="data_parallel_rank")
    (rank,) = named
    if rank >= ranks:
        raise Refusal(
            400, f"data_parallel_rank {rank} does not exist: ranks are 0 to {ranks - 1}", param="data_parallel_rank"
        )
    return rank


def check_room(options: GenerationOptions, method: str, rank: int, choices: int) -> None:
    """The bootstrap room fits the way in which requests find their ranks.

    Args:
        options: of the request.
        method: how a request finds its rank.
        rank: that the client names, -1 for none.
        choices: of the request; each takes a room.

    Raises:
        Refusal: there is none and one is needed, or the last choice's is too large.
    """
    room = options.bootstrap_room
    if room is None:
        if method == "follow_bootstrap_room" and rank < 0:
            raise Refusal(400, "bootstrap_room is missing: this server chooses the rank by it", param="bootstrap_room")
    elif room + choices - 1 > MAX_ROOM:
        raise Refusal(400, f"bootstrap_room: the last choice's room is above {MAX_ROOM}", param="bootstrap_room")


def stop_strings(options: GenerationOptions) -> tuple[str, ...]:
    """The stop strings, empty ones left out."""
    stop = options.stop
    if stop is None:
        return ()
    return tuple(s for s in ([stop] if isinstance(stop, str) else stop) if s)


def check_stops(options: GenerationOptions, choices: int) -> None:
    """The stop strings of a request of that many choices take no more memory than the server can give.

    Raises:
        Refusal: they are too long.
    """
    most = min(MAX_STOP_BYTES, MAX_GROUP_STOP_BYTES // choices)
    if (size := sum(len(stop.encode()) for stop in stop_strings(options))) > most:
        raise Refusal(
            400, f"stop: {size} bytes in all are more than the {most} that {choices} choices may have", param="stop"
        )


def ids_alone(options: GenerationOptions) -> TextOptions:
    """What the detokenizer must know where there is no tokenizer.

    Raises:
        Refusal: the client gave stop strings, which are looked for in text.
    """
    if stop_strings(options):
        raise Refusal(400, "stop: this server runs without a tokenizer: give stop_token_ids instead", param="stop")
    return TextOptions(text=False, ids=True)


def text_options(options: GenerationOptions) -> TextOptions:
    """What the detokenizer must know."""
    return TextOptions(
        stops=stop_strings(options),
        include_stop=bool(options.include_stop_str_in_output),
        skip_special_tokens=options.skip_special_tokens is not False,
        text=True,
        ids=bool(options.return_token_ids),
        no_stop_trim=bool(options.no_stop_trim),
    )


def choice_seed(seed: int | None, choice: int, entropy: random.Random) -> int:
    """The seed of a choice, in [0, 2**63): drawn from (seed, choice), or from `entropy` without a seed."""
    if seed is None:
        return entropy.getrandbits(63)
    if choice == 0:
        return seed & _SEED_MASK
    return random.Random(f"{seed}/{choice}").getrandbits(63)


def sampling_params(options: GenerationOptions, max_new_tokens: int, model: ModelInfo, seed: int) -> SamplingParams:
    """The parameters of one choice. The model's own defaults fill what the client leaves open.

    Raises:
        Refusal: `min_tokens` is more than may be generated, or an id is outside the vocabulary.
    """
    min_tokens = options.min_tokens or 0
    if min_tokens > max_new_tokens:
        raise Refusal(
            400, f"min_tokens is {min_tokens}, but at most {max_new_tokens} can be generated", param="min_tokens"
        )
    stops = options.stop_token_ids or []
    if stops and max(stops) >= model.vocab_size:
        raise Refusal(400, f"stop_token_ids must be from 0 to {model.vocab_size - 1}", param="stop_token_ids")
    defaults = model.default_sampling
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_tokens,
        temperature=_either(options.temperature, defaults.get("temperature"), 1.0),
        top_p=_either(options.top_p, defaults.get("top_p"), 1.0),
        top_k=_top_k(_either(options.top_k, defaults.get("top_k"), -1)),
        min_p=_either(options.min_p, defaults.get("min_p"), 0.0),
        seed=seed,
        stop_token_ids=stops,
        ignore_eos=bool(options.ignore_eos),
        frequency_penalty=_either(options.frequency_penalty, None, 0.0),
        presence_penalty=_either(options.presence_penalty, None, 0.0),
        repetition_penalty=_either(options.repetition_penalty, defaults.get("repetition_penalty"), 1.0),
        logit_bias=_biases(options, model.vocab_size),
    )


def _biases(options: GenerationOptions, vocab_size: int) -> dict[int, float] | None:
    biases = {int(token): bias for token, bias in (options.logit_bias or {}).items()}
    if biases and max(biases) >= vocab_size:
        raise Refusal(400, f"logit_bias: token ids must be from 0 to {vocab_size - 1}", param="logit_bias")
    return biases or None


def token_limit(wanted: int | None, prompt_tokens: int, max_model_len: int) -> int:
    """How many tokens may be generated: as many as wanted, at most what the context leaves.

    Raises:
        Refusal: the prompt alone fills the context.
    """
    room = max_model_len - prompt_tokens
    if room < 1:
        raise too_long(max_model_len, str(prompt_tokens))
    return room if wanted is None else min(wanted, room)


def _either(value: float | None, default: float | None, neutral: float) -> Any:
    return value if value is not None else default if default is not None else neutral


def _top_k(value: int) -> int:
    return -1 if value <= 0 else min(value, 2**31 - 1)
