"""Ending a process after a fatal error: the loss of its GPU, or weights that were overwritten while they are served."""

from __future__ import annotations

import logging
import os
import sys
import threading

logger = logging.getLogger(__name__)

EXIT_LOST = 3
LAST_SECONDS = 1.0  # time to reply to callers before the exit


def exit_soon(error: Exception) -> None:
    """End this process after LAST_SECONDS without cleanup, with the error as the last line on standard error.

    Cleanup is skipped because closing a lost device would wait forever.
    """

    def end() -> None:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(EXIT_LOST)

    logger.critical("this process ends: %s", error)
    timer = threading.Timer(LAST_SECONDS, end)
    timer.daemon = True
    timer.start()
