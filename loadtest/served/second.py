"""Measures what a second orchestrator adds, on a machine that has no cores for two orchestrators and their workers.

Everything is `SLOWER` times slower: sweeps and draft steps take so many times as long, and each orchestrator has as
small a share of a core (a control group's quota, which needs root). So it has for each round the processor time that it
would have on a core of its own and sweeps of a second, while workers, index and load, which keep the machine's cores,
need that much less of them: orchestrators are what bends first. Figures are told as of whole cores and sweeps of a
second: rates times `SLOWER`, lags divided by it. A step begins with more streams while those before it run on.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bough.concurrency.tasks import end
from bough.errors import ConfigError
from loadtest.common.limits import slowed
from loadtest.locust.samples import Sample
from loadtest.served.carrying import ANSWER_TOKENS, MAX_NODES, MOST_LAG_SECONDS, measured, room_for
from loadtest.served.profiles import write_profile
from loadtest.served.stack import Stack, stack
from loadtest.served.streams import Ask, Door, GrpcDoor

SLOWER = 5
SWEEP_SECONDS = 1.0 * SLOWER
SETTLE_SWEEPS, MEASURED_SWEEPS = 2, 6  # of a step; answers of a sweep come together, so few sweeps count roughly
RETRY_SECONDS = 1.0  # after a stream that failed


async def second(numbers: Sequence[int]) -> dict[str, Any]:
    """Let ascending numbers of streams for each orchestrator run on one and on two.

    Raises:
        ConfigError: this user may not limit processors by control groups.
    """
    one, two = [await _carried(numbers, replicas) for replicas in (1, 2)]
    ratios = [
        round(more["rounds_per_second"] / less["rounds_per_second"], 3) if less["rounds_per_second"] else None
        for less, more in zip(one, two, strict=True)
    ]
    bends = {"one": bent_at(one), "two": bent_at(two)}
    return {"slower": SLOWER, "one": one, "two": two, "bent_at_streams": bends, "rounds_ratios": ratios}


def bent_at(steps: Sequence[dict[str, Any]]) -> int | None:
    """The first number of streams whose event loop was late, or that brought under half of the rounds they should."""
    streams, rounds = 0, 0.0
    for step in steps:
        wanted = step["streams"] - streams  # one a second of each stream that came
        if step["loop_lag_p99_seconds"] > MOST_LAG_SECONDS or step["rounds_per_second"] - rounds < 0.5 * wanted:
            return int(step["streams"])
        streams, rounds = step["streams"], step["rounds_per_second"]
    return None


async def _carried(numbers: Sequence[int], replicas: int) -> list[dict[str, Any]]:
    """Figures of each number of streams on each of so many orchestrators."""
    with TemporaryDirectory() as folder:
        rows = max(4096, MAX_NODES * max(numbers) * replicas)  # a sweep has room for every tree
        profile = write_profile(Path(folder), SWEEP_SECONDS, knee_rows=rows, max_nodes=MAX_NODES)
        async with stack(profile, room_for(max(numbers))) as running:
            for _ in range(replicas - 1):
                await running.add("orchestrator")
            with ExitStack() as quotas:
                slow([child.process.pid for child, _ in running.replicas["orchestrator"]], quotas)
                return await _climb(running, numbers)


def slow(process_ids: Iterable[int], quotas: ExitStack) -> None:
    """Slow processes until `quotas` is closed. Raises ConfigError where this user may not."""
    try:
        for process_id in process_ids:
            quotas.enter_context(slowed(process_id, 1 / SLOWER))
    except OSError as exc:
        raise ConfigError(f"second: control groups must be there and writable, as by root: {exc}") from exc


async def _climb(running: Stack, numbers: Sequence[int]) -> list[dict[str, Any]]:
    doors = [GrpcDoor(address) for address in running.addresses("orchestrator")]
    users, samples, steps = list[asyncio.Task[None]](), list[Sample](), list[dict[str, Any]]()
    try:
        for number in numbers:
            for user in range(len(users), number * len(doors)):
                users.append(asyncio.create_task(_live(doors[user % len(doors)], user, samples)))
            await asyncio.sleep(SETTLE_SWEEPS * SWEEP_SECONDS)
            step = await measured(running, len(users), MEASURED_SWEEPS * SWEEP_SECONDS)
            steps.append(as_of_whole_cores(step) | {"failed": sum(bool(sample.error) for sample in samples)})
            samples.clear()
    finally:
        await end(*users)
        for door in doors:
            await door.close()
    return steps


async def _live(door: Door, user: int, samples: list[Sample]) -> None:
    """Ask again and again. First answers have various lengths, so that not all streams begin anew at once."""
    for turn in itertools.count():
        num_tokens = ANSWER_TOKENS if turn else 1 + 7 * user % ANSWER_TOKENS
        answered = await door(Ask(f"question {user} {turn}", num_tokens, seed=user))
        samples.append(answered.sample)
        if answered.sample.error:
            await asyncio.sleep(RETRY_SECONDS)


def as_of_whole_cores(step: dict[str, Any]) -> dict[str, Any]:
    """Figures of sweeps of a second and orchestrators with a core each, from those of all that `SLOWER` slowed."""
    rates = ("rounds_per_second", "tokens_per_second", "orchestrator_ms_a_stream_and_second")
    told = step | {name: round(SLOWER * step[name], 2) for name in rates}
    cores = told["orchestrator_ms_a_stream_and_second"] * step["streams"] / 1000
    return told | {
        "loop_lag_p99_seconds": step["loop_lag_p99_seconds"] / SLOWER,
        "share_of_orchestrators_cores": round(cores / step["orchestrators"], 2),
    }
