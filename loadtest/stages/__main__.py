"""Measures a target on two hosts (network namespaces; needs root), and disturbs a stage while streams run.

    python -m loadtest.stages
    python -m loadtest.stages --repeats 0 --in-flight 0        # only the faults, a hundred, in 20 minutes

The demonstration on two hosts of 1.4 GB, over 1 Gbit/s with 0.5 ms and over 100 Mbit/s with 10 ms in each direction,
against one host of 1.4 GB whose disk reads 500 MB/s, and against plain decoding. Then four sessions at a time on two
hosts with a processor each, with one and with two sweeps in flight. Then faults at the stage of a small model: killed
and restarted, stopped for some seconds, or cut off. Ends with one JSON line; the exit status is 1 if a
stream hung, failed, or differed from its undisturbed text, or if self-sized trees were slower than plain decoding.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bough.config.flag_parser import FlagParser
from bough.errors import BoughError
from loadtest.cluster.hosts import hosts, missing
from loadtest.common.limits import can_limit
from loadtest.common.machine import processor
from loadtest.stages.faults import disturb
from loadtest.stages.in_flight import HOSTS as IN_FLIGHT
from loadtest.stages.in_flight import compare_in_flight
from loadtest.stages.speed import HOSTS, compare, figures

MUST_BE_ZERO = (
    "lost_tokens",
    "repeated_tokens",
    "unequal_streams",
    "hung_streams",
    "failed_streams",
    "unequal_answers",
    "unequal_in_flight",
)
NOISE = 0.97  # of repeated measurements: a ratio above it is not slower


async def measure(
    repeats: int, in_flight: int, num_tokens: int, plain_tokens: int, faults: int, seed: int
) -> dict[str, Any]:
    """Run the parts, each unless its number is 0."""
    found, began = dict[str, Any](), time.monotonic()
    with hosts(*(name for names in (*HOSTS.values(), *IN_FLIGHT.values()) for name in names)) as made:
        if repeats:
            found |= figures(await compare(repeats, num_tokens, plain_tokens, made))
            print(json.dumps(found), file=sys.stderr, flush=True)
        if in_flight:
            found |= await compare_in_flight(in_flight, num_tokens, made)
            print(json.dumps(found), file=sys.stderr, flush=True)
        if faults:
            with TemporaryDirectory(prefix="bough-tiny-") as folder:
                found |= await disturb(faults, seed, made["head1"], made["stage1"], Path(folder))
    return {**found, "repeats": repeats, "processor": processor(), "seconds": round(time.monotonic() - began)}


def has_failed(found: dict[str, Any]) -> bool:
    """Whether the figures contain a failure."""
    ratios = found.get("self_sized_over_plain", {}).values()
    return any(found.get(name) for name in MUST_BE_ZERO) or any(ratio < NOISE for ratio in ratios)


def main() -> int:
    """Print one JSON line last."""
    parser = FlagParser("python -m loadtest.stages", __doc__)
    parser.add_argument("--repeats", type=int, default=5, help="prompts for each side; 0 measures no speeds")
    parser.add_argument("--in-flight", type=int, default=5, help="prompts of each of four sessions; 0 measures none")
    parser.add_argument("--tokens", type=int, default=48, help="of a self-sized answer")
    parser.add_argument(
        "--plain-tokens", type=int, default=16, help="of a plain answer, whose tokens take equally long"
    )
    parser.add_argument("--faults", type=int, default=100, help="faults; 0 disturbs nothing")
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args()
    if problem := missing() or ("" if can_limit() else "no control groups that limit memory and disk"):
        print(f"error: {problem}", file=sys.stderr)
        return 2
    try:
        numbers = flags.repeats, flags.in_flight, flags.tokens, flags.plain_tokens, flags.faults, flags.seed
        found = asyncio.run(measure(*numbers))
    except BoughError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    print(json.dumps(found))
    return int(has_failed(found))


if __name__ == "__main__":
    raise SystemExit(main())
