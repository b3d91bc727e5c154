"""Load test with locust: latency percentiles, goodput, and the number of users at which latency rises.

    python -m loadtest.locust --simulate two-cores-resident --users 8 --seconds 60
    python -m loadtest.locust --simulate two-cores-resident --rate 5 --seconds 60
    python -m loadtest.locust --simulate two-cores-resident --step-users 4
    python -m loadtest.locust --address HOST:7411 --http http://HOST:8000 --users 32 --doors grpc http

Without --address, it starts its own bough: the demonstration models, or simulated workers with --simulate. The load is
a closed loop of --users, some of whom hold conversations, or an open loop of requests at --rate. With --step-users,
users are added until the time to the first token is --bend times its first value, or a request is refused. Put an API
key, if one is required, into BOUGH_API_KEY. Ends with one JSON line, with figures for each API and for all requests:

first_token_seconds   TTFT: exact percentiles over finished requests
token_seconds         TPOT: (last event - first) / tokens after those of the first event. Tokens arrive in bursts;
                      answers that arrive as one event have no TPOT and no gaps
longest_gap_seconds   the longest time within an answer without a token
seconds_a_request     from the request to its last token
goodput_...           the same for requests within --slo-ttft and --slo-tpot
refused, failed       RESOURCE_EXHAUSTED or 429; any other error. `unfinished` requests ran when the test ended
offered_...           with --rate: requests sent per second
steps                 with --step-users: requests, TTFT p95, tokens per second and refusals by number of users
bent_at_users         with --step-users: the number of users when latency had risen; null if it has not

The exit status is 1 if a request failed or none finished (refused and unfinished requests have not failed), and 2 if
the test could not run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from bough.config.flag_parser import FlagParser, checked
from bough.config.parsers import number
from bough.errors import BoughError
from bough.processes import exit_with_parent
from bough.processes.launch import launched
from loadtest.common.stacks import http_url_of, stack_settings
from loadtest.locust.plan import Plan, parse_kinds
from loadtest.locust.samples import Objective, Sample, percentile, read_samples, span_seconds, summarise

STOP_SECONDS = 30.0  # locust's wait for running requests at its end
POLL_SECONDS = 0.1
KILL_SECONDS = 60.0  # until a locust that does not end is killed
DEFAULT_MIX = "40:64:3,200:64:2,600:32:1"
DEFAULT_USERS, MOST_USERS = 8, 512  # who wait for their answers; to whom users climb
DAY = 86_400.0  # seconds, the most that a test may take


class Apis(NamedTuple):
    """Addresses of the system under test."""

    address: str  # of gRPC
    http_url: str  # without /v1; empty for none


@asynccontextmanager
async def system(arguments: argparse.Namespace) -> AsyncIterator[Apis]:
    """The system given by --address and --http, or a newly started one."""
    if arguments.address or arguments.http:
        yield Apis(arguments.address, arguments.http)
        return
    async with launched(stack_settings(arguments.simulate), lambda _: None) as cluster:
        yield Apis(cluster.address, await http_url_of(cluster.address))


def plan_from(arguments: argparse.Namespace, apis: Apis, samples: Path) -> Plan:
    """The plan for locust's process."""
    return Plan(
        apis=tuple(arguments.doors),
        address=apis.address,
        http_url=apis.http_url,
        kinds=arguments.mix,
        conversations=arguments.conversations,
        turns=arguments.turns,
        think_seconds=arguments.think,
        rate=arguments.rate,
        timeout_seconds=arguments.timeout,
        samples_path=str(samples),
        seed=arguments.seed,
        step_users=arguments.step_users,
        step_seconds=arguments.step_seconds,
        max_users=arguments.users,
        bend=arguments.bend,
        most_seconds=arguments.most_seconds,
    )


async def run_locust(plan: Plan, arguments: argparse.Namespace) -> None:
    """Run locust to its end. Raises SystemExit if locust itself fails, or does not end."""
    users = 1 if plan.rate else arguments.users
    command = [
        *(sys.executable, "-m", "locust", "-f", str(Path(__file__).with_name("locustfile.py")), "--headless"),
        *("--only-summary", "--html", arguments.html, "--stop-timeout", f"{STOP_SECONDS:.0f}"),
        *("--exit-code-on-error", "0", "--loglevel", "WARNING"),
    ]
    if not plan.step_users:
        command += ["--users", str(users), "--spawn-rate", str(users), "--run-time", f"{math.ceil(arguments.seconds)}s"]
    environment = {**os.environ, **plan.to_environment()}
    process = exit_with_parent.start(  # otherwise locust would continue if this command is killed
        command, lambda line: subprocess.Popen(line, env=environment, stdout=subprocess.DEVNULL)
    )
    limit = arguments.seconds if not plan.step_users else arguments.most_seconds
    try:
        async with asyncio.timeout(limit + STOP_SECONDS + KILL_SECONDS):
            while (status := process.poll()) is None:
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError as exc:
        raise SystemExit(f"locust did not end within {limit + STOP_SECONDS + KILL_SECONDS:g} s") from exc
    finally:
        if process.returncode is None:
            process.kill()
            process.wait()
    if status != 0:
        raise SystemExit(f"locust ended with status {status}")


def steps(samples: Sequence[Sample]) -> list[dict[str, float]]:
    """Latency and throughput by number of users, if users climbed."""
    by_users = defaultdict(list)
    for sample in samples:
        by_users[sample.users].append(sample)
    return [
        {
            "users": users,
            "requests": len(each),
            "first_token_p95": round(percentile([s.first_token_seconds for s in each if not s.error], 95), 4),
            "tokens_per_second": round(sum(s.num_tokens for s in each if not s.error) / span_seconds(each), 3),
            "refused": sum(s.is_refused for s in each),
        }
        for users, each in sorted(by_users.items())
    ]


def offered_rate(samples: Sequence[Sample]) -> float:
    """Requests sent per second; below --rate if this machine is too slow."""
    begins = [sample.began for sample in samples]
    seconds = max(begins, default=0.0) - min(begins, default=0.0)
    return round((len(begins) - 1) / seconds, 3) if seconds else 0.0


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the load test and return the figures of the JSON line."""
    objective = Objective(arguments.slo_ttft or math.inf, arguments.slo_tpot or math.inf)
    with TemporaryDirectory() as folder:
        samples_path = Path(folder) / "samples.jsonl"
        async with system(arguments) as apis:
            plan = plan_from(arguments, apis, samples_path)
            await run_locust(plan, arguments)
        samples, bent_at = read_samples(samples_path), plan.read_bent_at()
    seconds = span_seconds(samples)
    by_api = {api: [sample for sample in samples if sample.api == api] for api in arguments.doors}
    return {
        **summarise(samples, seconds, objective),
        "doors": {api: summarise(each, seconds, objective) for api, each in by_api.items()},
        "offered_requests_per_second": offered_rate(samples) if arguments.rate else None,
        "steps": steps(samples) if arguments.step_users else [],
        "bent_at_users": bent_at or None,
        "report": arguments.html,
        "cores": os.cpu_count(),
        "settings": {name: value for name, value in vars(arguments).items() if name != "mix"},
    }


def read_arguments(line: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; exits with a one-line message if it is invalid."""
    parser = FlagParser(description=__doc__)
    add = parser.add_argument
    add("--address", default="", help="HOST:PORT of a running orchestrator's gRPC API")
    add("--http", default="", help="URL of its HTTP API, without /v1")
    add("--simulate", default="", metavar="PROFILE", help="start workers without weights")
    add("--doors", nargs="+", choices=("grpc", "http"), default=["grpc", "http"], help="APIs, used in turn")
    whole, seconds = checked(number(int, 1)), checked(number(float, 1.0, DAY))
    from_0, from_1 = checked(number(float, 0.0)), checked(number(float, 1.0))
    positive = checked(number(float, 0.001))
    many = f"who wait for their answers, {DEFAULT_USERS} if it is not given; with --step-users the most, {MOST_USERS}"
    add("--users", type=whole, help=many)
    add("--rate", type=from_0, default=0.0, help="requests per second, an open loop; 0 is a closed loop of users")
    add("--step-users", type=checked(number(int, 0)), default=0, help="users added in each step until latency rises")
    add("--step-seconds", type=seconds, default=20.0, help="least duration of a step")
    add("--bend", type=from_1, default=3.0, help="factor of the first step's TTFT p95 at which latency has risen")
    add("--seconds", type=seconds, default=60.0, help="duration of a test without steps")
    add("--most-seconds", type=seconds, default=1800.0, help="longest duration of a test with steps")
    add("--mix", type=parse_kinds, default=DEFAULT_MIX, help="PROMPT:ANSWER:WEIGHT,...: tokens, and relative frequency")
    add("--conversations", type=checked(number(float, 0.0, 1.0)), default=0.25, help="share who converse")
    add("--turns", type=whole, default=3, help="turns of a conversation")
    add("--think", type=from_0, default=1.0, help="mean seconds between an answer and the next question")
    add("--timeout", type=seconds, default=300.0, help="limit of a request; after it the request has failed")
    add("--slo-ttft", type=positive, help="longest time to the first token for goodput (default: any)")
    add("--slo-tpot", type=positive, help="longest time per token for goodput (default: any)")
    add("--html", default="loadtest-report.html", help="file for locust's report")
    add("--seed", type=int, default=1)
    arguments = parser.parse_args(line)
    if arguments.address and not arguments.http and "http" in arguments.doors:
        parser.error("--http: missing; must be given with --address, or --doors must be grpc")
    if arguments.http and not arguments.address and "grpc" in arguments.doors:
        parser.error("--address: missing; must be given with --http, or --doors must be http")
    if arguments.step_users and arguments.rate:
        parser.error("--step-users: must be left out with --rate, which does not depend on the number of users")
    arguments.users = arguments.users or (MOST_USERS if arguments.step_users else DEFAULT_USERS)
    return arguments


def main(line: Sequence[str] | None = None) -> int:
    """Print one JSON line, and return the exit status: 1 if requests failed or none was finished.

    It is 2, with a one-line message, if the test itself could not run.
    """
    try:
        figures = asyncio.run(run(read_arguments(line)))
    except BoughError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    print(json.dumps(figures))
    return 1 if figures["failed"] or not figures["finished"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
