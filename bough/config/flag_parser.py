"""The command line of every program here."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn, TypeVar

from bough.config.parsers import number

Value = TypeVar("Value")


class FlagParser(argparse.ArgumentParser):
    """Takes flags by their whole names: an abbreviation would mean another flag, or none, once there are more of them.

    Parsers of subcommands are of the same kind. The description is shown as it is written. An error is one line.
    """

    def __init__(self, prog: str | None = None, description: str | None = None) -> None:
        as_written = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, description=description, formatter_class=as_written, allow_abbrev=False)
        self.register("type", int, checked(number(int)))
        self.register("type", float, checked(number(float)))

    def error(self, message: str) -> NoReturn:
        """End with status 2; argparse would print the names of all flags before the one that is wrong."""
        self.exit(2, f"error: {message.removeprefix('argument ')}; see {self.prog} --help\n")


def checked(parse: Callable[[str], Value]) -> Callable[[str], Value]:
    """The type of a flag that `parse` reads: argparse would drop the text of its ValueError."""

    def read(text: str) -> Value:
        try:
            return parse(text)
        except ValueError as exc:
            raise argparse.ArgumentTypeError(f"{exc}, got {text!r}") from None

    return read
