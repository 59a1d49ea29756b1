"""`--config FILE`: flags from a file, YAML or TOML, spelled like on the command line without the dashes in front."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import click

from servekit.cli.options import unknown_flag


def read_config_file(path: Path, command: click.Command) -> dict[str, Any]:
    """Values by parameter name, for click's `default_map`.

    Args:
        path: a `.toml` file, or else YAML.
        command: whose flags the file may set, aliases included.

    Raises:
        click.UsageError: the file can't be read, or names a flag that does not exist.
    """
    several = {param.name for param in command.params if isinstance(param, click.Option) and param.multiple}
    names = {spelling.lstrip("-"): param.name for param in command.params for spelling in param.opts if param.name}
    values: dict[str, Any] = {}
    for key, value in _read(path).items():
        spelling = str(key).replace("_", "-")
        name = names.get(spelling)
        if name is None or name in ("config", "show_ranks"):
            raise click.UsageError(f"--config {path}: {unknown_flag(spelling, sorted(names))}")
        if name in values:
            raise click.UsageError(f"--config {path}: {spelling} is set twice, by two spellings")
        if name in several and isinstance(value, str | list):
            value = [value] if isinstance(value, str) else value
            if not all(isinstance(each, str) for each in value):
                raise click.UsageError(f"--config {path}: {spelling} must be a text or a list of texts")
        elif not isinstance(value, str | int | float):
            raise click.UsageError(f"--config {path}: {spelling} must be one plain value, not {type(value).__name__}")
        values[name] = value
    return values


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            return tomllib.loads(text)
        # Imported here: most starts have no file.
        import yaml  # type: ignore[import-untyped]

        try:
            found = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(" ".join(str(error).split())) from None
    except OSError as error:
        raise click.UsageError(f"--config {path}: {error.strerror}") from None
    except ValueError as error:
        raise click.UsageError(f"--config {path}: {error}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise click.UsageError(f"--config {path}: it must hold lines such as `port: 8000`")
    return found
