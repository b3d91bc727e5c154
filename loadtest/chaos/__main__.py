"""Injects faults at random moments while streams run, and counts lost, repeated and differing tokens.

    python -m loadtest.chaos --faults 100

An index, two targets, two drafts and two orchestrators serve a random model of four layers, all behind proxies; half of
the second target's layers are at a stage. While streams run, processes are killed and restarted or suspended, the index
is emptied, connections are cut, stalled and swallowed, and calls are delayed, refused, answered without a reply, and
sent twice. Ends with one JSON line. The exit status is 1 if a token was lost or repeated, or a stream differed from the
undisturbed one, hung, or ended without a proper status.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bough.client import Client
from bough.config.flag_parser import FlagParser
from bough.config.processes import PLANNERS, DraftConfig, OrchestratorConfig, TargetConfig, parse
from bough.pb import target_pb2
from loadtest.chaos.cluster import REPLICAS, ChaosCluster, chaos_cluster
from loadtest.chaos.proxy import CallFault
from loadtest.chaos.streams import Streams, make_scripts, undisturbed
from loadtest.common.tiny_model import TINY, save_model

KILLS = ("target", "stage", "draft", "orchestrator", "index")
CALL_FAULTS = {f"calls: {fault.value}": fault for fault in CallFault}
LINK_FAULTS = ("link: reset", "link: fin", "link: stall", "link: swallow")
FAULTS = (*(f"kill {kind}" for kind in KILLS), "kill target", "flush", "pause", *LINK_FAULTS, *CALL_FAULTS)


@dataclass(slots=True)
class Resumes:
    """How long sessions of a killed target waited for their next token, from whichever target it came."""

    where: dict[str, str] = field(default_factory=dict)  # session: the target that was last asked
    waiting: dict[str, float] = field(default_factory=dict)  # session: when its target was killed
    asked: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # session: times of kill and next call

    def heard(self, target: str, request: bytes) -> None:
        """Record a call to a target; a call after the kill goes to one that is alive."""
        session = target_pb2.VerifyRequest.FromString(request).context.session_id
        if session in self.waiting:
            self.asked.setdefault(session, []).append((self.waiting.pop(session), time.monotonic()))
        self.where[session] = target

    def killed(self, target: str, running: Iterable[str]) -> None:
        """Record that a target was killed; `running` are the sessions that have a stream."""
        now = time.monotonic()
        self.waiting |= {session: now for session in running if self.where.get(session) == target}

    def seconds(self, streams: Streams) -> list[float]:
        """Seconds from each kill to the next token of a stream that continued."""
        waits = []
        for session, received in streams.ended:
            for killed, asked in self.asked.get(session, ()):
                later = [moment for moment, _ in received.rounds if moment > asked]
                if received.began < killed and later:
                    waits.append(later[0] - killed)
        return waits


class Chaos:
    """Injects one fault after another, and undoes each after a while."""

    def __init__(
        self, cluster: ChaosCluster, streams: Streams, resumes: Resumes, rng: random.Random, seconds: float
    ) -> None:
        """`seconds` is the mean time between faults."""
        self.counts: Counter[str] = Counter()
        self._cluster, self._streams, self._resumes, self._rng = cluster, streams, resumes, rng
        self._seconds = seconds
        self._undoing: set[asyncio.Task[None]] = set()

    async def run(self, num_faults: int) -> None:
        """Cause `num_faults` faults, every kind as often as any other; returns when all are undone."""
        whole, rest = divmod(num_faults, len(FAULTS))
        kinds = [*FAULTS * whole, *self._rng.sample(FAULTS, rest)]
        self._rng.shuffle(kinds)
        for kind in kinds:
            await asyncio.sleep(self._rng.expovariate(1 / self._seconds))
            self._begin(kind, await self._fault(kind))
        await asyncio.gather(*self._undoing)

    def _begin(self, kind: str, fault: Coroutine[Any, Any, None]) -> None:
        self.counts[kind] += 1
        print(f"{time.strftime('%H:%M:%S')} {sum(self.counts.values())}: {kind}", file=sys.stderr, flush=True)
        task = asyncio.create_task(fault)
        self._undoing.add(task)
        task.add_done_callback(self._undoing.discard)

    async def _fault(self, kind: str) -> Coroutine[Any, Any, None]:
        """Choose the fault's victim."""
        cluster, rng, seconds = self._cluster, self._rng, self._rng.uniform(0.3, 3.0)
        if kind.startswith("kill "):
            return self._kill(await self._victim(kind.removeprefix("kill ")), seconds)
        if kind == "flush":
            return cluster.flush_index()
        if kind == "pause":
            up = [name for name in cluster.endpoints if not cluster.is_paused_or_down(name)]
            return cluster.pause(rng.choice(up), seconds)
        if kind in CALL_FAULTS:
            calls = [endpoint.calls for endpoint in cluster.endpoints.values() if endpoint.calls is not None]
            return rng.choice(calls).misbehave(CALL_FAULTS[kind], rng.uniform(0.1, 0.6), seconds)
        link = rng.choice([endpoint.link for endpoint in cluster.endpoints.values()])
        if kind in ("link: reset", "link: fin"):
            return _at_once(lambda: link.cut(is_reset=kind == "link: reset"))
        return link.stall(seconds) if kind == "link: stall" else link.swallow(seconds)

    async def _victim(self, kind: str) -> str:
        """Wait until every process of a kind is in use, and choose one; there is only one index."""
        while True:
            names = self._cluster.names(kind)
            used = [name for name in names if await self._cluster.is_used(name)]
            if len(used) == len(names):
                return self._rng.choice(used)
            await asyncio.sleep(0.2)

    async def _kill(self, name: str, seconds: float) -> None:
        self._cluster.kill(name)
        if name.startswith("target"):
            self._resumes.killed(name, self._streams.running)
        await asyncio.sleep(seconds)
        self._cluster.restart(name)


async def _at_once(act: Callable[[], None]) -> None:
    act()


@dataclass(frozen=True, slots=True)
class Plan:
    """The amount of work to run."""

    num_faults: int
    num_streams: int  # at once
    num_scripts: int
    max_length: int  # tokens of a script
    seconds_between: float
    seed: int


async def run_chaos(plan: Plan, model: Path) -> dict[str, Any]:
    """The figures of one run."""
    rng, resumes = random.Random(plan.seed), Resumes()
    scripts = make_scripts(plan.num_scripts, rng, TINY.vocab_size - 2, plan.max_length)
    async with chaos_cluster(*_configs(model), rng, resumes.heard) as cluster:
        async with Client(cluster.orchestrators[0]) as client:
            answers = [await undisturbed(client, script) for script in scripts]
        began = time.monotonic()
        streams = Streams(cluster.orchestrators, scripts, answers)
        running = asyncio.create_task(streams.run(plan.num_streams, random.Random(rng.random())))
        chaos = Chaos(cluster, streams, resumes, rng, plan.seconds_between)
        await chaos.run(plan.num_faults)
        await cluster.wait_until_usable(REPLICAS, REPLICAS)
        streams.stop()
        await running
        unplanned = dict(cluster.unplanned_ends)
    return {
        "faults": sum(chaos.counts.values()),
        "faults_by_kind": dict(sorted(chaos.counts.items())),
        "calls_faulted": sum(
            endpoint.calls.num_faulted for endpoint in cluster.endpoints.values() if endpoint.calls is not None
        ),
        **_of_streams(streams),
        **_of_resumes(resumes.seconds(streams)),
        "unplanned_ends": unplanned,
        "seed": plan.seed,
        "seconds": round(time.monotonic() - began, 1),
    }


def _configs(model: Path) -> tuple[TargetConfig, DraftConfig, list[OrchestratorConfig]]:
    """Settings with room for fewer sessions than there may be, and timeouts of seconds.

    One orchestrator sizes trees itself and may do without a draft on such a model. The other has fixed sizes, so every
    round calls a draft and its faults take effect.
    """
    flags = ["--model", str(model), "--dtype", "float32", "--threads", "1", "--max-nodes", "32"]
    target = [*flags, "--resident-layers", "0", "--metrics-port", "-1", "--kv-memory", "8MB", "--lease-seconds", "2"]
    orchestrator = ["--port", "0", "--draft-timeout", "1", "--target-timeout", "5", "--queue-timeout", "20"]
    orchestrator += ["--metrics-port", "-1", "--budget", "8", "--depth", "3"]
    return (
        parse(TargetConfig, "target_worker", target, {}),
        parse(DraftConfig, "draft_worker", [*flags, "--drop-layers", "2"], {}),
        [parse(OrchestratorConfig, "orchestrator", [*orchestrator, "--planner", planner], {}) for planner in PLANNERS],
    )


def _of_streams(streams: Streams) -> dict[str, Any]:
    tally = streams.tally
    return {
        "streams_finished": tally.finished,
        "streams_ended_with_a_status": sum(tally.statuses.values()),
        "statuses": dict(tally.statuses),
        "unclear_ends": dict(tally.unclear),
        "hung_streams": tally.hung,
        "unequal_streams": tally.unequal,
        "lost_tokens": tally.lost_tokens,
        "repeated_tokens": tally.repeated_tokens,
        "tokens": tally.tokens,
        "histories_sent_again": tally.sent_again,
    }


def _of_resumes(seconds: list[float]) -> dict[str, Any]:
    """Seconds to the next token of streams whose target was killed."""
    return {
        "resumes": len(seconds),
        "resume_seconds_median": round(statistics.median(seconds), 3) if seconds else None,
        "resume_seconds_worst": round(max(seconds), 3) if seconds else None,
    }


def has_failed(figures: dict[str, Any]) -> bool:
    """Whether the figures contain a failure."""
    names = ("unclear_ends", "hung_streams", "unequal_streams", "lost_tokens", "repeated_tokens")
    return any(figures[name] for name in names)


def main() -> int:
    """Print the faults as they are injected, and one JSON line."""
    parser = FlagParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--streams", type=int, default=6, help="concurrent streams")
    parser.add_argument("--scripts", type=int, default=18, help="number of different conversations")
    parser.add_argument("--max-length", type=int, default=400, help="longest conversation in tokens, at most 512")
    parser.add_argument("--seconds-between", type=float, default=1.5, help="mean time between faults")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    plan = Plan(
        arguments.faults,
        arguments.streams,
        arguments.scripts,
        arguments.max_length,
        arguments.seconds_between,
        arguments.seed,
    )
    with TemporaryDirectory(prefix="bough-tiny-") as folder:
        figures = asyncio.run(run_chaos(plan, save_model(Path(folder))))
    print(json.dumps(figures))
    return int(has_failed(figures))


if __name__ == "__main__":
    raise SystemExit(main())
