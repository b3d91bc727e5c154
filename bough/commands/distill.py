"""`bough distill`: a draft for a target that has no small sibling, as a few megabytes beside its checkpoint."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import fields

from bough.config import DistillConfig, parse
from bough.distill.run import make_adapter
from bough.errors import ConfigError
from bough.model.hub import fetch


async def distill(arguments: argparse.Namespace) -> int:
    """Writes text, chooses layers, trains; each goes on where an interrupted run has left off."""
    config = settings_from(arguments)
    fetch(config.target)
    made = make_adapter(config).manifest
    print(
        f"{config.out}: use it with --draft-adapter; agreement with held-out answers: top-1 {made.top1:.3f} "
        f"(untrained {made.untrained_top1:.3f}), top-4 {made.top4:.3f} ({made.untrained_top4:.3f})",
        file=sys.stderr,
    )
    if made.top1 <= made.untrained_top1:
        print(
            "it guesses no better than the same layers untrained: more --tokens would do, or a smaller --learning-rate",
            file=sys.stderr,
        )
    return 0


def settings_from(arguments: argparse.Namespace) -> DistillConfig:
    """What the flags ask for, over what the environment says.

    Raises:
        ConfigError: naming the flag and its value.
    """
    flags = ["--target", arguments.target]
    for f in fields(DistillConfig):
        value = getattr(arguments, f.name)
        if f.name != "target" and value is not None:
            flags += ["--" + f.name.replace("_", "-"), value]
    config = parse(DistillConfig, "distill", flags, os.environ)
    if config.drop_layers and config.num_layers:
        raise ConfigError(f"--num-layers: {config.num_layers}; --drop-layers says already which layers are left")
    return config
