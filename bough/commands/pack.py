"""`bough pack`: a smaller checkpoint, in 4 or 8 bits."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bough.model.checkpoint import resolve
from bough.model.pack import pack as write_packed


async def pack(arguments: argparse.Namespace) -> int:
    """Writes the packed model, or goes on where an interrupted run has left off."""
    folder = Path(arguments.out) if arguments.out else Path(f"{resolve(arguments.model).name}-{arguments.bits}bit")
    write_packed(arguments.model, arguments.bits, folder)
    print(f"{folder}: use it as --target, or as --draft", file=sys.stderr)
    return 0
