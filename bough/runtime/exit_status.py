"""Exit statuses of all commands and processes, and the end of a process after a fatal error."""

from __future__ import annotations

import logging
import os
import sys
import threading

from bough.errors import BoughError, ConfigError, InvalidRequest, NotFound, PairingError, Unauthenticated

FAILED = 1  # also where a check, such as that of `bough doctor`, has found something
MISUSED = 2  # as argparse has it
EXIT_SIGNAL = 128  # plus the signal's number, as in a shell
CALLERS = ConfigError | InvalidRequest | PairingError | NotFound | Unauthenticated
MEANINGS = """exit statuses:
  0    done
  1    failed, as where no server answers, or a check found a problem
  2    a flag, setting, model or request is wrong
  130  ended by Ctrl-C
  141  nobody reads the output
  143  ended by SIGTERM"""
EXIT_LOST = 3  # of its GPU, or of its weights
LAST_SECONDS = 1.0  # time to reply to callers before that exit

logger = logging.getLogger(__name__)


def status_of(error: BoughError) -> int:
    """The exit status of a program that ends with this error."""
    return MISUSED if isinstance(error, CALLERS) else FAILED


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
