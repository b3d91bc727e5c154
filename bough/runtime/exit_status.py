"""Exit statuses of all commands and processes."""

from __future__ import annotations

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


def status_of(error: BoughError) -> int:
    """The exit status of a program that ends with this error."""
    return MISUSED if isinstance(error, CALLERS) else FAILED
