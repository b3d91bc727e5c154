"""The command line of every program here."""

from __future__ import annotations

import argparse


class FlagParser(argparse.ArgumentParser):
    """Takes flags by their whole names: an abbreviation would mean another flag, or none, once there are more of them.

    Parsers of subcommands are of the same kind. The description is shown as it is written.
    """

    def __init__(self, prog: str | None = None, description: str | None = None) -> None:
        as_written = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, description=description, formatter_class=as_written, allow_abbrev=False)
