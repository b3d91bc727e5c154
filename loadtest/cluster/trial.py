"""One trial: streams run on a cluster while a host is cut off, a replica is killed, and draft workers come and go."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bough.client import Client
from deploy.check import check, load
from loadtest.chaos_streams import Streams, Tally, make_scripts, undisturbed
from loadtest.cluster.ray_cluster import DRAFT, FRONT, HTTP_PORT, TARGET, RayCluster, ray_cluster

CONFIG = Path(__file__).parent.parent.parent / "deploy" / "two-machines.yaml"
PROFILE = Path(__file__).parent.parent / "data" / "cluster-profile.json"
CUT_SECONDS = 6.0
CALM_SECONDS = 3.0  # of streams between disturbances
FEW, MANY = 2, 8  # streams at once
CALLS_PER_DRAFT = 0.7  # with MANY more trees grow at a moment than that, with FEW fewer
VOCAB_SIZE = 500  # tokens of prompts: any profile knows more


def trial_config() -> dict[str, Any]:
    """deploy/two-machines.yaml with simulated workers, drafts that scale, and patience for this network."""
    config = load(CONFIG)
    config["http_options"] = {"host": "0.0.0.0", "port": HTTP_PORT}
    for deployment in config["applications"][0]["deployments"]:
        name, program = deployment["name"], {"simulate": str(PROFILE)}
        deployment["ray_actor_options"].pop("num_gpus", None)
        if name == "Target":
            deployment["user_config"] = {"program": {**program, "drain_seconds": 5}}
        elif name == "Draft":
            deployment["user_config"] = {"program": {**program, "drain_seconds": 5}}
            del deployment["num_replicas"]
            deployment["autoscaling_config"] = {
                "min_replicas": 1,
                "max_replicas": 2,
                "metrics_interval_s": 1,
                "look_back_period_s": 4,
                "upscale_delay_s": 1,
                "downscale_delay_s": 4,
                "policy": {
                    "policy_function": "deploy.policies:PerReplica",
                    "policy_kwargs": {"metric": "calls", "most": CALLS_PER_DRAFT},
                },
            }
        elif name == "Orchestrator":
            deployment["user_config"]["program"] |= {"draft_timeout": 2, "failover_timeout": 300}
    check(config)
    return config


class Trial:
    """Disturbs a cluster step by step, and notes how long each step took."""

    def __init__(self, cluster: RayCluster, make_streams: Callable[[str], Streams]) -> None:
        """`make_streams` is given a name that no other streams of the trial have."""
        self.seconds: dict[str, float] = {}
        self.tally = Tally()
        self._cluster, self._make_streams = cluster, make_streams

    async def run(self) -> None:
        """All steps; each returns when the cluster is whole again."""
        for name, step in (
            ("target_host_cut_off", lambda: self._cut_off(TARGET)),
            ("draft_host_cut_off", lambda: self._cut_off(DRAFT)),
            ("target_replica_killed", self._kill_target),
            ("drafts_scaled_up", self._scale_up),
            ("drafts_scaled_down", self._scale_down),
        ):
            await self._step(name, step)

    async def _step(self, name: str, step: Callable[[], Awaitable[None]]) -> None:
        async with self._load(FEW, name):
            await asyncio.sleep(CALM_SECONDS)
            began = time.monotonic()
            print(f"{time.strftime('%H:%M:%S')} {name}", file=sys.stderr, flush=True)
            await step()
            self.seconds[name] = round(time.monotonic() - began, 1)
            await asyncio.sleep(CALM_SECONDS)

    async def _cut_off(self, host: str) -> None:
        machine = self._cluster.hosts[host]
        machine.cut_off()
        await asyncio.sleep(CUT_SECONDS)
        machine.bring_back()
        await self._whole()

    async def _kill_target(self) -> None:
        killed = await self._cluster.kill_replica("Target")
        await self._cluster.wait_for("Target", "target", 1, but_not=killed)

    async def _scale_up(self) -> None:
        async with self._load(MANY, "many"):
            await self._cluster.wait_for("Draft", "draft", 2)

    async def _scale_down(self) -> None:
        await self._cluster.wait_for("Draft", "draft", 1)

    async def _whole(self) -> None:
        await self._cluster.wait_for("Target", "target", 1)
        await self._cluster.wait_for("Draft", "draft", 1)

    @asynccontextmanager
    async def _load(self, num_streams: int, name: str) -> AsyncIterator[None]:
        """So many streams at once, one after another; those that run at the end of the block may finish."""
        streams = self._make_streams(name)
        streams.tally = self.tally
        running = asyncio.create_task(streams.run(num_streams, random.Random(name)))
        try:
            yield
        finally:
            streams.stop()
            await running


async def run_trial(seed: int) -> dict[str, Any]:
    """The figures of one trial."""
    began = time.monotonic()
    rng = random.Random(seed)
    scripts = make_scripts(12, rng, VOCAB_SIZE, 240)
    async with ray_cluster(trial_config()) as cluster:
        ready_seconds = time.monotonic() - began
        placement = await placement_of(cluster)
        async with Client(cluster.address) as client:
            answers = [await undisturbed(client, script) for script in scripts]
        trial = Trial(cluster, lambda name: Streams([cluster.address], scripts, answers, name))
        await trial.run()
    tally = trial.tally
    return {
        "placement_is_right": placement,
        "ready_seconds": round(ready_seconds, 1),
        "steps_seconds": trial.seconds,
        "streams_finished": tally.finished,
        "failed_streams": dict(tally.statuses + tally.unclear),
        "hung_streams": tally.hung,
        "unequal_streams": tally.unequal,
        "lost_tokens": tally.lost_tokens,
        "repeated_tokens": tally.repeated_tokens,
        "tokens": tally.tokens,
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
    }


async def placement_of(cluster: RayCluster) -> bool:
    """Whether every replica is on the host that has its resource, and every worker announces that host's address."""
    wanted = {"Index": FRONT, "Orchestrator": FRONT, "Target": TARGET, "Draft": DRAFT}
    for deployment, host in wanted.items():
        if [each.host for each in await cluster.replicas(deployment)] != [cluster.hosts[host].address]:
            return False
    for kind in (TARGET, DRAFT):
        addresses = [worker.address for worker in await cluster.workers_in_use(kind)]
        if [address.rpartition(":")[0] for address in addresses] != [cluster.hosts[kind].address]:
            return False
    return True


def has_failed(figures: dict[str, Any]) -> bool:
    """Whether anything happened that must not."""
    names = ("failed_streams", "hung_streams", "unequal_streams", "lost_tokens", "repeated_tokens")
    return not figures["placement_is_right"] or any(figures[name] for name in names)


def report(figures: dict[str, Any]) -> int:
    """One JSON line; the exit status."""
    print(json.dumps(figures))
    return int(has_failed(figures))
