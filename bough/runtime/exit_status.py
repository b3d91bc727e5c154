"""Exit statuses of all commands and processes, and what a process does after a fatal error."""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import NoReturn

from bough.errors import BoughError, ConfigError, InvalidRequest, NotFound, PairingError, Unauthenticated

FAILED = 1  # also if a check, such as that of `bough doctor`, has found a problem
MISUSED = 2  # argparse's status
EXIT_SIGNAL = 128  # plus the signal's number, as in a shell
CALLERS = ConfigError | InvalidRequest | PairingError | NotFound | Unauthenticated
MEANINGS = """exit statuses:
  0    done
  1    failed: no server answered, or a check found a problem, for example
  2    a flag, setting, model or request is wrong
  130  ended by Ctrl-C
  141  the reader of the output closed the pipe
  143  ended by SIGTERM"""
EXIT_LOST = 3  # of the GPU, or of the weights
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


def start_again(variable: str, value: str = "1") -> NoReturn:
    """Replace this process, without cleanup, by a new one with the same id and command and with `variable` set.

    Memory on a device is released, as the driver closes its files then.
    """
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, variable: value})
