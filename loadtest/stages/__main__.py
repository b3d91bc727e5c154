"""Measures a target on two hosts (network namespaces; needs root), and disturbs a stage while streams run.

    python -m loadtest.stages
    python -m loadtest.stages --faults 100 --repeats 0

The demonstration on two hosts of 1.4 GB, over 1 Gbit/s with 0.5 ms and over 100 Mbit/s with 10 ms in each direction,
against one host of 1.4 GB whose disk reads 500 MB/s, and against plain decoding. Then faults at the stage of a small
model: killed and restarted, stopped for some seconds, or cut off. Ends with one JSON line; the exit status is 1 if a
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
from loadtest.stages.speed import HOSTS, compare, figures

MUST_BE_ZERO = (
    "lost_tokens",
    "repeated_tokens",
    "unequal_streams",
    "hung_streams",
    "failed_streams",
    "unequal_answers",
)
NOISE = 0.97  # of repeated measurements: a ratio above it is not slower


async def measure(repeats: int, num_tokens: int, plain_tokens: int, faults: int, seed: int) -> dict[str, Any]:
    """Run both parts, each unless its number is 0."""
    found: dict[str, Any] = {"two_in_flight_over_one": None}  # one sweep is in flight at a time
    began = time.monotonic()
    with hosts(*(name for names in HOSTS.values() for name in names)) as made:
        if repeats:
            found |= figures(await compare(repeats, num_tokens, plain_tokens, made))
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
    parser.add_argument("--tokens", type=int, default=48, help="of a self-sized answer")
    parser.add_argument(
        "--plain-tokens", type=int, default=16, help="of a plain answer, whose tokens take equally long"
    )
    parser.add_argument("--faults", type=int, default=20, help="faults; 0 disturbs nothing")
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args()
    if problem := missing() or ("" if can_limit() else "no control groups that limit memory and disk"):
        print(f"error: {problem}", file=sys.stderr)
        return 2
    try:
        found = asyncio.run(measure(flags.repeats, flags.tokens, flags.plain_tokens, flags.faults, flags.seed))
    except BoughError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    print(json.dumps(found))
    return int(has_failed(found))


if __name__ == "__main__":
    raise SystemExit(main())
