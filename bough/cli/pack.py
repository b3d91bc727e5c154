"""`bough pack`: writes a checkpoint in 4 or 8 bits, or with `--draft` a draft in mixed bits."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from bough.errors import ConfigError
from bough.model.checkpoint.checkpoint import resolve
from bough.model.checkpoint.hub import fetch
from bough.model.packing.pack import pack as write_packed
from bough.model.packing.pack_draft import pack_draft

BITS, DRAFT_BITS = 4.0, 6.5  # defaults
WHOLE_BITS = (4.0, 8.0)  # allowed without --draft


async def pack(arguments: argparse.Namespace) -> int:
    """Write the packed model, or continue an interrupted run."""
    if arguments.draft:
        _pack_draft(arguments)
        return 0
    bits = BITS if arguments.bits is None else arguments.bits
    if bits not in WHOLE_BITS:
        raise ConfigError(f"--bits: must be 4 or 8, or given with --draft for mixed bits, got {bits:g}")
    if arguments.drop_layers is not None:
        raise ConfigError(f"--drop-layers: must be given with --draft only, got {list(arguments.drop_layers)}")
    if arguments.whole:
        raise ConfigError("--whole: must be given with --draft only")
    fetch(arguments.model)
    folder = _folder(arguments, f"{bits:g}bit")
    write_packed(arguments.model, int(bits), folder)
    print(f"{folder}: use it as --target, or as --draft", file=sys.stderr)
    return 0


def _pack_draft(arguments: argparse.Namespace) -> None:
    bits = DRAFT_BITS if arguments.bits is None else arguments.bits
    fetch(arguments.model)
    folder = _folder(arguments, "draft")
    written = pack_draft(arguments.model, arguments.drop_layers or (), bits, folder, is_whole=arguments.whole)
    numbers = Counter(written.layouts.values())
    kinds = ", ".join(f"{numbers[kind]} in {kind.bits} bits by {kind.group_size}" for kind in sorted(numbers))
    rest = "" if arguments.whole else f"; the rest stays in {arguments.model}"
    print(
        f"{folder}: {written.num_bytes / 1e6:.1f} MB, {written.bits_per_weight:.2f} bits a weight ({kinds}){rest}. "
        "Use it as --draft",
        file=sys.stderr,
    )


def _folder(arguments: argparse.Namespace, suffix: str) -> Path:
    return Path(arguments.out) if arguments.out else Path(f"{resolve(arguments.model).name}-{suffix}")
