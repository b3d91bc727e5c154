"""`python -m bough.tether PARENT_ID COMMAND...`: becomes the command, and ends when the parent does, however that ends.

A program of its own rather than code between fork and exec: forking a process in which gRPC runs is not safe, and
without such code `subprocess` does not fork.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
MODULE = ("-P", "-m")  # for Python: not from the folder that one happens to be in, where `bough` may be a clone of ours


def tethered(command: Sequence[str]) -> list[str]:
    """A command line that starts `command` so that it ends with this process."""
    return [sys.executable, *MODULE, "bough.tether", str(os.getpid()), *command]


def main() -> None:
    """Asks the kernel for SIGTERM at the parent's death, which outlives the exec."""
    parent_id, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_id:
        raise SystemExit("the parent has ended already")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
