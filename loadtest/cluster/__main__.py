"""Disturbs a Ray cluster over network namespaces on one machine, and checks that no stream loses anything.

    python -m loadtest.cluster
    python -m loadtest.cluster --steps redeployed index_moved head_killed

Three hosts (network namespaces; needs root) run simulated workers: draft workers and an orchestrator on one, the target
on another, and the index, another orchestrator and Ray's head on a third. While streams run, the target's host and the
draft's are cut off and come back, the target's replica is killed, draft workers are scaled by load, and all programs
are redeployed with other settings. The index moves to another host. At last every process on the head's host is killed,
while streams use the remaining orchestrator. Ends with one JSON line. The exit status is 1 if a replica was misplaced
or replaced without need, or a stream failed, hung, or differed from the undisturbed one.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bough.client import Client
from bough.config.flag_parser import FlagParser
from bough.errors import BoughError
from bough.protocol.generation import GenerateOptions, TextPrompt
from deploy.check import check, load
from loadtest.chaos.streams import Streams, Tally, make_scripts, undisturbed
from loadtest.cluster.hosts import missing
from loadtest.cluster.ray_cluster import DRAFT, FRONT, HTTP_PORT, OTHER_INDEX, TARGET, RayCluster, ray_cluster, until
from loadtest.common.streams import stream

CONFIG = Path(__file__).parent.parent.parent / "deploy" / "two-machines.yaml"
PROFILE = Path(__file__).parent.parent / "data" / "cluster-profile.json"
CALLS_PER_DRAFT = 0.7  # trees growing at once per draft: exceeded with MANY streams, not reached with FEW


def trial_config() -> dict[str, Any]:
    """deploy/two-machines.yaml with simulated workers, without keys, with autoscaled drafts and longer timeouts."""
    config = load(CONFIG)
    config["http_options"] = {"host": "0.0.0.0", "port": HTTP_PORT}
    for deployment in _deployments(config):
        name, program = deployment["name"], {"simulate": str(PROFILE), "insecure": True}
        deployment["ray_actor_options"].pop("num_gpus", None)
        if name == "Index":
            deployment["user_config"]["insecure"] = True
        elif name == "Target":
            deployment["user_config"] = {"program": {**program, "drain_seconds": 5}}
        elif name == "Draft":
            deployment["user_config"] = {"program": {**program, "drain_seconds": 5}}
            del deployment["num_replicas"]
            deployment["autoscaling_config"] = {
                "min_replicas": 1,
                "max_replicas": 2,
                "metrics_interval_s": 1,  # Serve's check of look_back_period_s reads this, not the environment variable
                "look_back_period_s": 4,
                "upscale_delay_s": 1,
                "downscale_delay_s": 4,
                "policy": {
                    "policy_function": "deploy.policies:PerReplica",
                    "policy_kwargs": {"metric": "calls", "most": CALLS_PER_DRAFT},
                },
            }
        elif name == "Orchestrator":
            deployment |= {
                "num_replicas": 2,
                "max_replicas_per_node": 1,
            }  # one on each of two hosts, at the same fixed port
            program = deployment["user_config"]["program"]
            program |= {"draft_timeout": 2, "failover_timeout": 300, "drain_seconds": 5, "insecure": True}
            del program["keys"]
    check(config)
    return config


def with_other_settings(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with a changed setting for every program."""
    for deployment in _deployments(config):
        if "program" in deployment["user_config"]:
            deployment["user_config"]["program"]["drain_seconds"] = 4
    return config


def with_index_elsewhere(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with the index on the host reserved for the move."""
    for deployment in _deployments(config):
        if deployment["name"] == "Index":
            deployment["ray_actor_options"]["resources"] = {OTHER_INDEX: 1}
    return config


def _deployments(config: dict[str, Any]) -> list[dict[str, Any]]:
    deployments: list[dict[str, Any]] = config["applications"][0]["deployments"]
    return deployments


CUT_SECONDS = 6.0
CALM_SECONDS = 3.0  # of undisturbed streaming between disturbances
HEADLESS_SECONDS = 20.0  # of streaming without Ray's head
ONE, FEW, MANY = 1, 2, 8  # concurrent streams; on slow machines a few are reason enough to keep a second draft worker
PROMPT, NUM_TOKENS = "Why is the sky blue?", 24
HTTP_SECONDS = 120.0
VOCAB_SIZE = 500  # of prompts; smaller than any profile's


STEPS = (
    "target_host_cut_off",
    "draft_host_cut_off",
    "target_replica_killed",
    "drafts_scaled_up",
    "drafts_scaled_down",
    "redeployed",
    "index_moved",
    "head_killed",
    "head_replaced",
)


class Trial:
    """Disturbs a cluster step by step, and records the duration of each step."""

    def __init__(self, cluster: RayCluster, make_streams: Callable[[str, list[str]], Streams]) -> None:
        """`make_streams` makes streams from a unique name and the addresses to use."""
        self.seconds: dict[str, float] = {}
        self.cuts_were_cuts = True
        self.replicas_stayed = True
        self.tally = Tally()
        self._cluster, self._make_streams = cluster, make_streams

    async def run(self, steps: Sequence[str]) -> None:
        """Run steps in the order of STEPS; each, except the head's, ends when the cluster is whole again."""
        acts: Mapping[str, Callable[[], Awaitable[None]]] = {
            "target_host_cut_off": lambda: self._cut_off(TARGET),
            "draft_host_cut_off": lambda: self._cut_off(DRAFT),
            "target_replica_killed": self._kill_target,
            "drafts_scaled_up": self._scale_up,
            "drafts_scaled_down": self._scale_down,
            "redeployed": self._redeploy,
            "index_moved": self._move_index,
            "head_killed": self._kill_head,
            "head_replaced": self._replace_head,
        }
        for name in (each for each in STEPS if each in steps):
            if name == "index_moved":  # all processes restart, so requests fail meanwhile
                await self._timed(name, acts[name])
            elif name == "head_killed":  # and with it one of the orchestrators
                await self._step(name, acts[name], [self._cluster.orchestrator_at(DRAFT)])
            else:
                await self._step(name, acts[name], num_streams=ONE if name == "drafts_scaled_down" else FEW)

    async def _step(
        self,
        name: str,
        step: Callable[[], Awaitable[None]],
        addresses: Sequence[str] | None = None,
        num_streams: int = FEW,
    ) -> None:
        """Run a step while streams use both orchestrators, or those at these addresses."""
        async with self._load(num_streams, name, addresses):
            await asyncio.sleep(CALM_SECONDS)
            await self._timed(name, step)
            await asyncio.sleep(CALM_SECONDS)

    async def _timed(self, name: str, step: Callable[[], Awaitable[None]]) -> None:
        began = time.monotonic()
        print(f"{time.strftime('%H:%M:%S')} {name}", file=sys.stderr, flush=True)
        await step()
        self.seconds[name] = round(time.monotonic() - began, 1)

    async def _cut_off(self, host: str) -> None:
        machine = self._cluster.hosts[host]
        worker, *_ = await self._cluster.workers_in_use(host)
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

    async def _redeploy(self) -> None:
        """Deploy other settings for every program; replicas stay and restart their programs."""
        await self._redeploy_with(with_other_settings(trial_config()))

    async def _redeploy_with(self, config: dict[str, Any]) -> None:
        before, replicas = await self._worker_ids(), await self._replica_ids()

        async def is_so() -> bool:
            return not before & await self._worker_ids()

        await self._cluster.redeploy(config)
        await until(is_so, "programs with the new settings")
        self._compare(replicas, await self._replica_ids())

    async def _move_index(self) -> None:
        """Move the index to another host; replicas stay and restart their programs."""
        replicas = await self._replica_ids()
        config = with_index_elsewhere(trial_config())
        host = self._cluster.hosts[DRAFT].address

        async def is_found() -> bool:
            infos = [await self._cluster.server_info(address) for address in self._cluster.addresses]
            return all(info is not None and host in info.index_url for info in infos)

        await asyncio.to_thread(self._cluster.dashboard.deploy, config)
        await until(is_found, "the orchestrators to find the index where it is now")
        await self._cluster.redeploy(config)
        self._compare(replicas, await self._replica_ids())

    async def _kill_head(self) -> None:
        """Kill the head's host with one orchestrator; the index, workers and the other orchestrator are elsewhere."""
        await self._cluster.kill_host(FRONT)
        await asyncio.sleep(HEADLESS_SECONDS)

    async def _replace_head(self) -> None:
        """Start a new head at the same address with the same disk; running replicas stay."""
        cluster = self._cluster

        async def targets_at(host: str) -> set[str]:
            found = await cluster.workers_in_use(TARGET, cluster.orchestrator_at(host))
            return {each.info.worker_id for each in found}

        async def is_back() -> bool:
            return len(await cluster.replicas("Orchestrator")) == 2 and bool(await targets_at(FRONT))

        before = await targets_at(DRAFT)
        cluster.start_head()
        await until(is_back, "an orchestrator at the new head")
        self._compare(before, await targets_at(DRAFT))
        await self._redeploy_with(with_other_settings(with_index_elsewhere(trial_config())))

    def _compare(self, before: set[Any], after: set[Any]) -> None:
        """Record whether replicas and their workers are still the same, and print those that are not."""
        if before != after:
            print(f"replaced: {sorted(before - after)} by {sorted(after - before)}", file=sys.stderr, flush=True)
            self.replicas_stayed = False

    async def _worker_ids(self) -> set[str]:
        return {each.info.worker_id for kind in (TARGET, DRAFT) for each in await self._cluster.workers_in_use(kind)}

    async def _replica_ids(self) -> set[int]:
        """Replica ids of deployments with a fixed number of replicas."""
        return {each.process_id for name in ("Target", "Orchestrator") for each in await self._cluster.replicas(name)}

    async def _whole(self) -> None:
        """Wait until everything runs; there may be several draft workers, as slow machines grow more trees at once."""

        async def is_so() -> bool:
            return bool(await self._cluster.workers_in_use(TARGET) and await self._cluster.workers_in_use(DRAFT))

        await until(is_so, "workers to be in use again")

    @asynccontextmanager
    async def _load(self, num_streams: int, name: str, addresses: Sequence[str] | None = None) -> AsyncIterator[None]:
        """Keep `num` streams running during the block; streams running at its end may finish."""
        streams = self._make_streams(name, [*(addresses or self._cluster.addresses)])
        streams.tally = self.tally
        running = asyncio.create_task(streams.run(num_streams, random.Random(name)))
        try:
            yield
        finally:
            streams.stop()
            await running


async def run_trial(seed: int, steps: Sequence[str] = STEPS) -> dict[str, Any]:
    """Run one trial and return its figures."""
    began = time.monotonic()
    rng = random.Random(seed)
    scripts = make_scripts(12, rng, VOCAB_SIZE, 240)
    async with ray_cluster(trial_config()) as cluster:
        ready_seconds = time.monotonic() - began
        placement = await placement_of(cluster)
        async with Client(cluster.address) as client:
            answers = [await undisturbed(client, script) for script in scripts]
            http_text, text = await asyncio.to_thread(ask_over_http, cluster.http_url), await ask_over_grpc(client)
        trial = Trial(cluster, lambda name, addresses: Streams(addresses, scripts, answers, name))
        await trial.run(steps)
    tally = trial.tally
    return {
        "placement_is_right": placement,
        "http_answer_is_equal": http_text == text != "",
        "cuts_were_cuts": trial.cuts_were_cuts,
        "replicas_stayed": trial.replicas_stayed,
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
    """Ask over OpenAI's API through Serve's proxy."""
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=HTTP_SECONDS) as reply:
        return str(json.load(reply)["choices"][0]["text"])


async def ask_over_grpc(client: Client) -> str:
    """Ask the same of the orchestrator over gRPC."""
    options = GenerateOptions(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    return (await stream(client, TextPrompt(PROMPT), options)).text


async def can_connect(address: str) -> bool:
    """Whether a connection to this address succeeds at once."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(1):
            _, writer = await asyncio.open_connection(host, int(port))
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def placement_of(cluster: RayCluster) -> bool:
    """Check that every replica is on the host with its resource and announces that host's address."""
    wanted = {"Index": {FRONT}, "Orchestrator": {FRONT, DRAFT}, "Target": {TARGET}, "Draft": {DRAFT}}
    for deployment, hosts in wanted.items():
        found = sorted(each.host for each in await cluster.replicas(deployment))
        if found != sorted(cluster.hosts[host].address for host in hosts):
            return False
    for kind in (TARGET, DRAFT):
        addresses = [worker.address for worker in await cluster.workers_in_use(kind)]
        if [address.rpartition(":")[0] for address in addresses] != [cluster.hosts[kind].address]:
            return False
    return True


def has_failed(figures: dict[str, Any]) -> bool:
    """Whether the figures contain a failure."""
    names = ("failed_streams", "hung_streams", "unequal_streams", "lost_tokens", "repeated_tokens")
    must = (
        "placement_is_right",
        "http_answer_is_equal",
        "cuts_were_cuts",
        "replicas_stayed",
    )
    return not all(figures[name] for name in must) or any(figures[name] for name in names)


def report(figures: dict[str, Any]) -> int:
    """Print one JSON line; returns the exit status."""
    print(json.dumps(figures))
    return int(has_failed(figures))


def main() -> int:
    """Print each step, and one JSON line."""
    parser = FlagParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=[*STEPS], help="steps, run in the listed order")
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
