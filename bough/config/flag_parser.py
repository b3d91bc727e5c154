"""The command line of every program here, and flags from a file."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Callable, Collection
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from bough.config.parsers import number
from bough.errors import ConfigError

Value = TypeVar("Value")


class FlagParser(argparse.ArgumentParser):
    """Accepts only whole names of flags, as an abbreviation could mean another flag in a later version.

    Subcommands have parsers of this class too. Descriptions are not re-wrapped. An error is one line.
    """

    def __init__(self, prog: str | None = None, description: str | None = None) -> None:
        as_written = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, description=description, formatter_class=as_written, allow_abbrev=False)
        self.register("type", int, checked(number(int)))
        self.register("type", float, checked(number(float)))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuse unknown arguments with the subcommand's name; argparse would name only the program."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            similar = get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, 1, 0.75)
            hint = f" (similar: {similar[0]})" if similar else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        """Exit with status 2; argparse would print the names of all flags before the error."""
        self.exit(2, f"error: {message.removeprefix('argument ')}; see {self.prog} --help\n")


def checked(parse: Callable[[str], Value]) -> Callable[[str], Value]:
    """The type of a flag that `parse` reads: argparse would drop the text of its ValueError."""

    def read(text: str) -> Value:
        try:
            return parse(text)
        except ValueError as exc:
            raise argparse.ArgumentTypeError(f"{exc}, got {text!r}") from None

    return read


def flags_from(path: str, known: Collection[str]) -> list[str]:
    """The flags in a file such as `target = "models/70b"` and `kv-memory = "4GB"`, as command-line arguments.

    Lists are joined by commas; `true` becomes the flag without a value, and `false` omits it.

    Raises:
        ConfigError: the file cannot be read, or names a flag that is not in `known`, or has a table.
    """
    try:
        values = tomllib.loads(Path(path).read_text())
    except (OSError, ValueError) as exc:
        raise ConfigError(f"--config: must be a TOML file, got {path}: {exc}") from exc
    flags: list[str] = []
    for name, value in values.items():
        flag = f"--{name}"
        if flag not in known:
            similar = get_close_matches(flag, known, 1, 0.75)
            hint = f" (similar: {similar[0].removeprefix('--')})" if similar else ""
            raise ConfigError(f"{path}: {name}: must be the name of a flag without its dashes{hint}")
        if isinstance(value, dict) or (
            isinstance(value, list) and any(isinstance(each, dict | list) for each in value)
        ):
            raise ConfigError(f"{path}: {name}: must be a text, a number, or a list of these, got {value!r}")
        if isinstance(value, bool):
            flags += [flag] if value else []
        else:
            flags.append(f"{flag}={','.join(map(str, value)) if isinstance(value, list) else value}")
    return flags
