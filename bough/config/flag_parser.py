"""The command line of every program here."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn


class FlagParser(argparse.ArgumentParser):
    """Takes flags by their whole names: an abbreviation would mean another flag, or none, once there are more of them.

    Parsers of subcommands are of the same kind. The description is shown as it is written. An error is one line.
    """

    def __init__(self, prog: str | None = None, description: str | None = None) -> None:
        as_written = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, description=description, formatter_class=as_written, allow_abbrev=False)
        self.register("type", int, _number(int, "a whole number"))
        self.register("type", float, _number(float, "a number"))

    def error(self, message: str) -> NoReturn:
        """End with status 2; argparse would print the names of all flags before the one that is wrong."""
        self.exit(2, f"error: {message.removeprefix('argument ')}; see {self.prog} --help\n")


def _number(kind: type[int] | type[float], name: str) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {name}, got {text!r}") from None

    return read
