"""One trial: streams run on a cluster while a host is cut off, a replica is killed, and draft workers come and go."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bough.client import Client
from bough.generation import GenerateOptions, TextPrompt
from deploy.check import check, load
from loadtest.chaos_streams import Received, Streams, Tally, make_scripts, undisturbed
from loadtest.cluster.ray_cluster import DRAFT, FRONT, HTTP_PORT, TARGET, RayCluster, ray_cluster

CONFIG = Path(__file__).parent.parent.parent / "deploy" / "two-machines.yaml"
PROFILE = Path(__file__).parent.parent / "data" / "cluster-profile.json"
CUT_SECONDS = 6.0
CALM_SECONDS = 3.0  # of streams between disturbances
FEW, MANY = 2, 8  # streams at once
CALLS_PER_DRAFT = 0.7  # with MANY more trees grow at a moment than that, with FEW fewer
PROMPT, NUM_TOKENS = "Why is the sky blue?", 24
HTTP_SECONDS = 120.0
VOCAB_SIZE = 500  # tokens of prompts: any profile knows more


def trial_config() -> dict[str, Any]:
    """deploy/two-machines.yaml with simulated workers, drafts that scale, and patience for this network."""
    config = load(CONFIG)
    config["http_options"] = {"host": "0.0.0.0", "port": HTTP_PORT}
    for deployment in config["applications"][0]["deployments"]:
        name, program = deployment["name"], {"simulate": str(PROFILE), "insecure": True}
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
            program = deployment["user_config"]["program"]
            program |= {"draft_timeout": 2, "failover_timeout": 300, "insecure": True}
            del program["keys"]
    check(config)
    return config


STEPS = (
    "target_host_cut_off",
    "draft_host_cut_off",
    "target_replica_killed",
    "drafts_scaled_up",
    "drafts_scaled_down",
)


class Trial:
    """Disturbs a cluster step by step, and notes how long each step took."""

    def __init__(self, cluster: RayCluster, make_streams: Callable[[str], Streams]) -> None:
        """`make_streams` is given a name that no other streams of the trial have."""
        self.seconds: dict[str, float] = {}
        self.cuts_were_cuts = True
        self.tally = Tally()
        self._cluster, self._make_streams = cluster, make_streams

    async def run(self) -> None:
        """All steps; each returns when the cluster is whole again."""
        acts: tuple[Callable[[], Awaitable[None]], ...] = (
            lambda: self._cut_off(TARGET),
            lambda: self._cut_off(DRAFT),
            self._kill_target,
            self._scale_up,
            self._scale_down,
        )
        for name, act in zip(STEPS, acts, strict=True):
            await self._step(name, act)

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
        (worker,) = await self._cluster.workers_in_use(host)
        machine.cut_off()
        self.cuts_were_cuts &= not await can_connect(worker.address)
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
            http_text, text = await asyncio.to_thread(ask_over_http, cluster.http_url), await ask_over_grpc(client)
        trial = Trial(cluster, lambda name: Streams([cluster.address], scripts, answers, name))
        await trial.run()
    tally = trial.tally
    return {
        "placement_is_right": placement,
        "http_answer_is_equal": http_text == text != "",
        "cuts_were_cuts": trial.cuts_were_cuts,
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


def ask_over_http(url: str) -> str:
    """An answer in OpenAI's form through Serve's proxy."""
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=HTTP_SECONDS) as reply:
        return str(json.load(reply)["choices"][0]["text"])


async def ask_over_grpc(client: Client) -> str:
    """The same question, of the orchestrator itself."""
    received = Received(time.monotonic())
    options = GenerateOptions(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    await received.take(client, TextPrompt(PROMPT), options)
    return received.text


async def can_connect(address: str) -> bool:
    """Whether anybody answers there at once."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(1):
            _, writer = await asyncio.open_connection(host, int(port))
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


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
    must = ("placement_is_right", "http_answer_is_equal", "cuts_were_cuts")
    return not all(figures[name] for name in must) or any(figures[name] for name in names)


def report(figures: dict[str, Any]) -> int:
    """One JSON line; the exit status."""
    print(json.dumps(figures))
    return int(has_failed(figures))
