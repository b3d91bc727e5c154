"""Scenarios from the flags of `bough simulate`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bough.config.parsers import number
from bough.errors import ConfigError
from bough.simulation.capacity_choice import Size
from bough.simulation.profile import Profile, load_profile
from bough.simulation.scenario import RequestKind, Scenario

MOST_USERS = 100_000
MOST_WORKERS = 100_000
_KIND = re.compile(r"([0-9]{1,7}):([0-9]{1,7})(?::([0-9]{1,6}(?:\.[0-9]{1,6})?))?")


def scenarios_from(arguments: argparse.Namespace) -> list[Scenario]:
    """A scenario for each number of users.

    Raises:
        ConfigError: names the invalid flag.
    """
    profile = _profile(arguments)
    fixed = _fixed(arguments)

    def read(name: str, parse: Callable[[str], Any]) -> Any:
        return _number(f"--{name}", getattr(arguments, name), parse)

    return [
        Scenario(
            profile,
            num_users=_number("--users", users, number(int, 1, MOST_USERS)),
            num_targets=read("targets", number(int, 1, MOST_WORKERS)),
            num_drafts=read("drafts", number(int, 0, MOST_WORKERS)),
            kinds=parse_mix(arguments.mix),
            think_seconds=read("think", number(float, 0, 1e6)),
            gather=read("gather", number(float, 0, 1e6)),
            fixed=fixed,
            seed=read("seed", number(int, 0)),
        )
        for users in arguments.users
    ]


def parse_mix(text: str) -> tuple[RequestKind, ...]:
    """Kinds of requests from "200:200" or "200:200:4,2000:100:1".

    Raises:
        ConfigError: the text is invalid.
    """
    kinds = []
    for part in text.split(","):
        match = _KIND.fullmatch(part.strip())
        kind = RequestKind(int(match[1]), int(match[2]), float(match[3] or 1)) if match else None
        if kind is None or not (kind.prompt_tokens and kind.output_tokens and kind.weight):
            raise ConfigError(f"--mix: must be PROMPT:OUTPUT or PROMPT:OUTPUT:WEIGHT, all above 0, got {part!r}")
        kinds.append(kind)
    return tuple(kinds)


def _profile(arguments: argparse.Namespace) -> Profile:
    profile = load_profile(arguments.profile)
    if arguments.network is None:
        return profile
    seconds = _number("--network", arguments.network, number(float, 0, 1e3))
    return replace(profile, network=replace(profile.network, one_way_seconds=seconds))


def _fixed(arguments: argparse.Namespace) -> Size | None:
    if (arguments.nodes is None) != (arguments.depth is None):
        raise ConfigError("--nodes: must be given together with --depth, got one of them")
    if arguments.nodes is None:
        return None
    nodes = _number("--nodes", arguments.nodes, number(int, 2, 4096))
    return Size(nodes, _number("--depth", arguments.depth, number(int, 1, nodes - 1)))


def _number(flag: str, text: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(text)
    except ValueError as exc:
        raise ConfigError(f"{flag}: {exc}, got {text}") from exc
