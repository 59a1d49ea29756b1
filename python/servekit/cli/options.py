"""What servekit adds to click: hidden spellings, help in sections, sizes, and one line for every mistake."""

from __future__ import annotations

import difflib
import json
import re
from typing import Any

import click

from servekit.cli.flags import EXAMPLES, GROUPS

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


class Size(click.ParamType[int]):
    """Bytes, as a number or with a unit: 16777216, 16MiB, 16MB, 16M (powers of two unless it says MB)."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes of a size."""
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        match = re.fullmatch(r"(\d+)\s*([KMG]?)(I?B)?", str(value).strip().upper())
        if match is None:
            self.fail(f"{value!r} is no size such as 16777216 or 16MiB", param, ctx)
        number, prefix, unit = match.groups()
        return int(number) * _UNITS[prefix + ("B" if unit == "B" and prefix else "")]


class Texts(click.ParamType[tuple[str, ...]]):
    """A text, or a JSON list of texts, which is how vLLM spells several: `["https://a.example"]`."""

    name = "texts"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """One or more texts."""
        if isinstance(value, tuple):
            return value
        text = str(value).strip()
        if not text.startswith("["):
            return (text,)
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            self.fail(f"{text!r} is no JSON list of texts", param, ctx)
        return tuple(found)


class Option(click.Option):
    """An option with hidden aliases and a section of the help."""

    def __init__(self, *args: Any, aliases: tuple[str, ...] = (), group: str, **kwargs: Any) -> None:
        names, *rest = args
        super().__init__([*names, *aliases], *rest, **kwargs)
        # A switch names both of its sides: --this/--no-this.
        self.aliases = {side.strip() for alias in aliases for side in alias.split("/")}
        self.group = group

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Flag and help, without the aliases."""
        opts, secondary = self.opts, self.secondary_opts
        self.opts = [each for each in opts if each not in self.aliases]
        self.secondary_opts = [each for each in secondary if each not in self.aliases]
        try:
            return super().get_help_record(ctx)
        finally:
            self.opts, self.secondary_opts = opts, secondary

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """The canonical spelling, for messages."""
        return self.opts[0]


class Command(click.Command):
    """A command whose help is in sections and ends with examples as they were written."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """All sections that have an option."""
        for group in GROUPS:
            options = [
                each
                for each in self.get_params(ctx)
                if isinstance(each, click.Option) and getattr(each, "group", GROUPS[-1]) == group
            ]
            records = [record for option in options if (record := option.get_help_record(ctx)) is not None]
            if records:
                with formatter.section(group):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The examples."""
        formatter.write("\n" + EXAMPLES)


def one_line(error: click.ClickException, command: click.Command) -> str:
    """A mistake on the command line in one line; for an unknown flag with the nearest one that exists."""
    if isinstance(error, click.NoSuchOption):
        known = [name for param in command.params for name in (*param.opts, *param.secondary_opts)]
        return unknown_flag(error.option_name, known)
    return " ".join(error.format_message().split())


def unknown_flag(name: str, known: list[str]) -> str:
    """What to say of a flag that does not exist."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"unknown flag {name}" + (f"; did you mean {near[0]}?" if near else "; --help lists all")
