"""`bough plan`: predicts a model's memory and speed from the headers of its weights and the machine's speeds."""

from __future__ import annotations

import argparse
import json
import os

from bough.cli.flags.planning import PLAN_SETTINGS, PlanConfig
from bough.cli.planning.demonstration import placement_flags
from bough.cli.planning.plan_model import make_plan
from bough.cli.planning.plan_report import as_json, print_report
from bough.config.processes import parse
from bough.errors import ConfigError


async def plan(arguments: argparse.Namespace) -> int:
    """Print a plan as tables and a plot, or as one JSON line."""
    result = make_plan(settings_from(arguments))
    if arguments.json:
        print(json.dumps(as_json(result)))
    else:
        print_report(result)
    return 0


def settings_from(arguments: argparse.Namespace) -> PlanConfig:
    """Settings from the flags, else from the target's environment variables.

    Raises:
        ConfigError: names the invalid flag.
    """
    flags = ["--model", arguments.model, *placement_flags(arguments.model, os.environ)]
    for name in PLAN_SETTINGS:
        if (value := getattr(arguments, name)) is not None:
            flags += ["--" + name.replace("_", "-"), value]
    settings = parse(PlanConfig, "target_worker", flags, os.environ)
    for name in ("host_memory", "host_link_speed"):
        if settings.device == "cpu" and (value := getattr(settings, name)):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag}: must not be given with --device cpu, whose memory is the host's, got {value}")
    return settings
