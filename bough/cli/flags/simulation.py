"""Scenarios from the flags of `bough simulate`."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace

from bough.errors import ConfigError
from bough.simulation.capacity_choice import Size
from bough.simulation.profile import Profile, load_profile
from bough.simulation.scenario import RequestKind, Scenario

_KIND = re.compile(r"([0-9]{1,7}):([0-9]{1,7})(?::([0-9]{1,6}(?:\.[0-9]{1,6})?))?")


def scenarios_from(arguments: argparse.Namespace) -> list[Scenario]:
    """A scenario for each number of users.

    Raises:
        ConfigError: names the invalid flag.
    """
    profile, fixed = _profile(arguments), _fixed(arguments)
    return [
        Scenario(
            profile,
            num_users=users,
            num_targets=arguments.targets,
            num_drafts=arguments.drafts,
            kinds=parse_mix(arguments.mix),
            think_seconds=arguments.think,
            gather=arguments.gather,
            fixed=fixed,
            seed=arguments.seed,
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
    return replace(profile, network=replace(profile.network, one_way_seconds=arguments.network))


def _fixed(arguments: argparse.Namespace) -> Size | None:
    nodes, depth = arguments.nodes, arguments.depth
    if (nodes is None) != (depth is None):
        raise ConfigError("--nodes: must be given together with --depth, got one of them")
    if nodes is None:
        return None
    if depth >= nodes:
        raise ConfigError(f"--depth: must be below --nodes, {nodes}, got {depth}")
    return Size(nodes, depth)
