"""Flags of a command from a TOML file with their names."""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from difflib import get_close_matches
from pathlib import Path

from bough.errors import ConfigError


def flags_from(path: str, known: Collection[str]) -> list[str]:
    """The flags in a file such as `target = "models/70b"` and `kv-memory = "4GB"`, as a command line has them.

    Lists are joined by commas; `true` gives the flag alone, and `false` leaves it out.

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
