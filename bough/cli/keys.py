"""`bough keys`: adds, lists and removes API keys in an orchestrator's key file."""

from __future__ import annotations

import argparse
import fcntl
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from bough.errors import ConfigError
from bough.runtime.log_lines import say
from bough.security.keys import (
    LIMITS,
    ApiKey,
    hash_of,
    new_key,
    read_keys,
    require_limit,
    require_name,
    require_time,
)
from bough.security.private_files import read_file, write_private

FILE_VARIABLE = "BOUGH_ORCHESTRATOR_KEYS"
FLAG = "--file"


def add_keys(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("action", choices=("add", "list", "remove"), help="what to do; add prints the new key once")
    parser.add_argument("name", nargs="?", help="the tenant's name; a tenant may have several keys")
    file = os.environ.get(FILE_VARIABLE, "")
    parser.add_argument(FLAG, default=file, help=f"key file, as in the orchestrator's --keys ({FILE_VARIABLE})")
    parser.add_argument(
        "--id", default="", help="with remove: remove only the tenant's key with this id, as shown by list"
    )
    parser.add_argument("--expires", help="with add: a time such as 2027-01-31T00:00:00Z (default: never)")
    limits = {
        "--requests": "maximum concurrent requests (default: unlimited)",
        "--tokens-per-minute": "maximum tokens of prompts and output (default: unlimited)",
        "--sessions": "maximum named sessions (default: 10,000)",
    }
    for flag, text in limits.items():
        parser.add_argument(flag, type=int, default=0, help=f"with add: {text}")


async def keys(arguments: argparse.Namespace) -> int:
    """Change or list the file.

    Raises:
        ConfigError: names the invalid flag.
    """
    if not arguments.file:
        raise ConfigError(f"{FLAG}: must be the key file ({FILE_VARIABLE} sets it too), got nothing")
    if arguments.action == "list":
        return _list(arguments.file)
    name = require_name("NAME", arguments.name or "")
    with _alone(arguments.file):
        return _add(arguments, name) if arguments.action == "add" else _remove(arguments, name)


def _add(arguments: argparse.Namespace, name: str) -> int:
    if arguments.id:
        raise ConfigError(f"--id: must be given with remove only, as add makes a new id, got {arguments.id}")
    lines = _lines(arguments.file) if Path(arguments.file).exists() else []
    key, now = new_key(), datetime.now(UTC)
    entry = ApiKey(
        name,
        hash_of(key),
        now.isoformat(timespec="seconds"),
        None if arguments.expires is None else require_time("--expires", arguments.expires),
        **{name: require_limit(f"--{name.replace('_', '-')}", getattr(arguments, name)) for name in LIMITS},
    )
    if entry.has_expired(now.timestamp()):
        raise ConfigError(f"--expires: must be in the future, got {arguments.expires}, and it is {entry.created}")
    _write(arguments.file, [*lines, entry.to_line()])
    print(f"key {entry.key_id} of {name}; it is shown only now, as only its hash is stored:", file=sys.stderr)
    print(key)
    return 0


def _list(file: str) -> int:
    for key in read_keys(f"{FLAG}: {file}", read_file(FLAG, file)):
        ends = f"{'ended' if key.has_expired(time.time()) else 'ends'} {key.expires}" if key.expires else "never ends"
        limits = [f"{key.requests} requests at once"] if key.requests else []
        limits += [f"{key.tokens_per_minute} tokens a minute"] if key.tokens_per_minute else []
        limits += [f"{key.sessions} sessions"] if key.sessions else []
        say(", ".join((f"{key.name}  {key.key_id}  made {key.created or 'some time'}, {ends}", *limits)))
    return 0


def _remove(arguments: argparse.Namespace, name: str) -> int:
    lines = _lines(arguments.file)
    entries = [(line, read_keys(FLAG, line)) for line in lines]
    ids = {key.key_id: line for line, (key,) in entries if key.name == name}
    if not ids:
        raise ConfigError(f"NAME: must be a tenant with a key in {arguments.file}, got {name}")
    if arguments.id and arguments.id not in ids:
        raise ConfigError(f"--id: must be an id of {name} in {arguments.file}: {', '.join(ids)}, got {arguments.id}")
    removed = [ids[arguments.id]] if arguments.id else [*ids.values()]
    _write(arguments.file, [line for line in lines if line not in removed])
    print(f"{len(removed)} of {name} removed; running requests finish", file=sys.stderr)
    return 0


def _lines(file: str) -> list[str]:
    """Non-empty lines of the file, which must be valid."""
    text = read_file(FLAG, file)
    read_keys(f"{FLAG}: {file}", text)
    return [line for line in text.splitlines() if line.strip()]


def _write(file: str, lines: list[str]) -> None:
    write_private(FLAG, file, "".join(f"{line}\n" for line in lines))


@contextmanager
def _alone(file: str) -> Iterator[None]:
    """Lock the file's folder: two commands at once would undo each other's changes."""
    try:
        folder = os.open(Path(os.path.realpath(file)).parent, os.O_RDONLY)
    except OSError as exc:
        raise ConfigError(f"{FLAG}: {file} must be in an existing folder, got: {exc.strerror}") from exc
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
