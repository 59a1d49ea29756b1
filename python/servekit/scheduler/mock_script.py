"""Scripts for the mock rank: which request gets which tokens, when, and which faults strike. `docs/mock.md` explains.

A script is a JSON or TOML file with a list of `rules`; the first rule that fits a request decides how it goes.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

Step = int | list[int]


class ScriptError(ValueError):
    """The script can't be read or asks for what does not exist; the text is one line."""


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something that goes wrong on the rank.

    Attributes:
        kind: die ends the process with `status`, or with SIGKILL if that is None. hang stops the whole rank for
            `for_ms`, slow does the same before one step. malformed sends a body that is no batch. bad_utf8 replaces
            the ids of the row by bytes that no text holds. double_finish closes the request a second time one step
            later. stale_report repeats the load and the dispatch number of that moment for `for_ms`, missing_report
            sends none for so long. lost_finish never closes the request.
        at: the number of rows that the request has got before it strikes.
        for_ms: how long it lasts, in milliseconds.
        status: exit status of die.
    """

    kind: Literal[
        "die",
        "hang",
        "slow",
        "malformed",
        "bad_utf8",
        "double_finish",
        "lost_finish",
        "stale_report",
        "missing_report",
    ]
    at: int = 0
    for_ms: float = 3_600_000.0
    status: int | None = 1


class Finish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the request ends when its scripted tokens are used up."""

    type: Literal["stop", "length", "abort", "error"] = "stop"
    matched: int | str | None = None
    message: str | None = None
    status: int = 0


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which requests, and what happens to them. A selector that is absent fits every request.

    Attributes:
        rank: only on this rank.
        nth: only the nth request that the rank accepts, from 1; or any of a list.
        prompt: only requests whose prompt, as text with special tokens, contains this.
        prompt_ids: only requests whose prompt ids contain this sequence.
        tokens: what each step gives: an id, or a list of 0 to k ids. None cycles the default ids.
        repeat: start `tokens` again when they are used up, instead of `finish`.
        first_ms: milliseconds from acceptance to the first row; None is one step.
        step_ms: milliseconds between the request's rows; None is the rank's step.
        finish: how it ends when `tokens` are used up.
        faults: what goes wrong.
    """

    rank: int | None = None
    nth: int | list[int] | None = None
    prompt: str | None = None
    prompt_ids: list[int] | None = None
    tokens: list[Step] | None = None
    repeat: bool = False
    first_ms: float | None = None
    step_ms: float | None = None
    finish: Finish = Finish()
    faults: list[Fault] = []


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole script."""

    rules: list[Rule] = []


def load_script(path: Path) -> Script:
    """Read a script; TOML if the name ends so, else JSON.

    Raises:
        ScriptError: the file can't be read, or a field is unknown or of a wrong type.
    """
    try:
        data = path.read_bytes()
        plain = tomllib.loads(data.decode()) if path.suffix == ".toml" else msgspec.json.decode(data)
        script = msgspec.convert(plain, type=Script)
    except OSError as error:
        raise ScriptError(f"--mock-script {path}: {error.strerror}") from None
    except (ValueError, msgspec.DecodeError) as error:
        raise ScriptError(f"--mock-script {path}: {error}") from None
    for number, rule in enumerate(script.rules, 1):
        ids = [token for step in rule.tokens or [] for token in ([step] if isinstance(step, int) else step)]
        if any(not 0 <= token < 1 << 32 for token in ids):
            raise ScriptError(f"--mock-script {path}: rule {number} has a token that is no u32")
        if rule.repeat and not rule.tokens:
            raise ScriptError(f"--mock-script {path}: rule {number} repeats tokens that it does not have")
    return script


class Rules:
    """The rules of one rank, applied to requests as they come."""

    def __init__(self, script: Script, rank: int, tokenizer_file: str) -> None:
        """Keep what concerns this rank.

        Args:
            script: all rules.
            rank: this rank's number.
            tokenizer_file: loaded only if a rule asks for text.
        """
        self._rules = [rule for rule in script.rules if rule.rank in (None, rank)]
        self._decode = _decoder(tokenizer_file) if any(rule.prompt is not None for rule in self._rules) else None
        self._count = 0
        faults = [fault.kind for rule in self._rules for fault in rule.faults]
        self.bad_ids = _invalid_text(tokenizer_file) if "bad_utf8" in faults else []

    def match(self, input_ids: bytes) -> Rule | None:
        """Rule for the next request, whose prompt is little-endian u32."""
        self._count += 1
        return next((rule for rule in self._rules if self._fits(rule, input_ids)), None)

    def _fits(self, rule: Rule, input_ids: bytes) -> bool:
        if rule.nth is not None and self._count not in ([rule.nth] if isinstance(rule.nth, int) else rule.nth):
            return False
        ids = memoryview(input_ids).cast("I").tolist()
        if rule.prompt_ids is not None:
            n = len(rule.prompt_ids)
            if not any(ids[i : i + n] == rule.prompt_ids for i in range(len(ids) - n + 1)):
                return False
        return rule.prompt is None or (self._decode is not None and rule.prompt in self._decode(ids))


def _decoder(tokenizer_file: str) -> Callable[[list[int]], str]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(tokenizer_file)
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))


def _invalid_text(tokenizer_file: str) -> list[int]:
    """An id whose only byte is 0xE2, the start of a character of three bytes: twice in a row, it is no text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(tokenizer_file)
    for token in ("<0xE2>", "\u00e2"):
        found = tokenizer.token_to_id(token)
        if found is not None:
            return [found, found]
    raise ScriptError("--mock-script: bad_utf8 needs a tokenizer with byte tokens, and this one has none")
