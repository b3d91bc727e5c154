"""How a process ends that can do nothing right any more."""

from __future__ import annotations

import logging
import os
import sys
import threading

logger = logging.getLogger(__name__)

EXIT_LOST = 3
LAST_SECONDS = 1.0  # in which callers are told


def end_soon(error: Exception) -> None:
    """Ends this process, with its reason as the last line on standard error, whatever its threads are about.

    What a lost device holds cannot be given back in order: closing it would wait for ever.
    """

    def end() -> None:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(EXIT_LOST)

    logger.critical("this process ends: %s", error)
    timer = threading.Timer(LAST_SECONDS, end)
    timer.daemon = True
    timer.start()
