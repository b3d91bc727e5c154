"""`bough up` as a user runs it, while other tests run it too."""

from __future__ import annotations

import sys

from bough.config.addresses import free_port
from bough.processes.exit_with_parent import MODULE
from bough.processes.launch import LOCAL


def bough_up_command(*flags: str) -> list[str]:
    """Its command line, with ports of this process of pytest: of two that begin at once, both would find 8000 free."""
    ports = ["--port", "0", "--http-port", str(free_port(LOCAL))]
    return [sys.executable, *MODULE, "bough.cli.main", "up", *ports, *flags]
