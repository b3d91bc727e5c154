"""Disturbs a Ray cluster over network namespaces on one machine, and checks that no stream loses anything.

    python -m loadtest.cluster
    python -m loadtest.cluster --steps redeployed index_moved head_killed

Three hosts (network namespaces; needs root): draft workers and an orchestrator on one, the target on another, the
index, another orchestrator and Ray's head on a third, all with simulated workers. First every request is answered in
peace. Then, while streams run all the time: the target's host is cut off and comes back, the draft's too, the target's
replica is killed, draft workers are scaled up and down by the load, all programs get other settings by a redeploy. The
index is placed on another host, and everyone has to find it there. At last every process on the head's host is killed,
while streams ask the orchestrator that is left. Ends with one JSON line; exit status 1 where a replica was misplaced
or replaced without need, or a stream failed, hung, or was not the undisturbed one.
"""

from __future__ import annotations

import asyncio
import sys

from bough.config.flag_parser import FlagParser
from bough.errors import BoughError
from loadtest.cluster.hosts import missing
from loadtest.cluster.trial import STEPS, report, run_trial


def main() -> int:
    """Print each step, and one JSON line."""
    parser = FlagParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=[*STEPS], help="done in the order of this list")
    arguments = parser.parse_args()
    if problem := missing():
        print(f"error: {problem}", file=sys.stderr)
        return 2
    try:
        return report(asyncio.run(run_trial(arguments.seed, arguments.steps)))
    except BoughError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
