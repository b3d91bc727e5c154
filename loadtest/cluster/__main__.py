"""Several machines on one: is anything lost when a Ray cluster is disturbed?

    python -m loadtest.cluster

Three hosts (network namespaces; needs root): draft workers on one, the target on another, orchestrator, index and Ray's
head on a third, all with simulated workers. First every request is answered in peace. Then, while streams run all the
time: the target's host is cut off and comes back, the draft's too, the target's replica is killed, draft workers are
scaled up and down by the load. Ends with one JSON line; exit status 1 where a replica was misplaced or a stream failed,
hung, or was not the undisturbed one.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from bough.errors import BoughError
from loadtest.cluster.hosts import missing
from loadtest.cluster.trial import report, run_trial


def main() -> int:
    """Prints the steps as they come, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if problem := missing():
        print(f"error: {problem}", file=sys.stderr)
        return 2
    try:
        return report(asyncio.run(run_trial(arguments.seed)))
    except BoughError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
