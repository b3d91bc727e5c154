"""A target on one host or on two, with index, draft and orchestrator on this machine."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from bough.config.addresses import joined
from bough.config.cache_paths import cache_folder
from bough.config.processes import to_flags
from bough.processes.exit_with_parent import python
from bough.processes.launch import DRAFT, ORCHESTRATOR, STAGE, TARGET, Cluster, Settings
from loadtest.cluster.hosts import Host
from loadtest.common.limits import limited
from loadtest.stages.relay import relayed

PORT = 7000  # on each host, which shares its ports with nobody
STAGE_1 = f"{STAGE}1"
CALLS = "the head at"  # in a stage's log, once it has measured its speeds, which the head's start would disturb
PROGRAM_BYTES = 700_000_000  # of Python and its libraries, in addition to --device-memory


@dataclass(frozen=True, slots=True)
class Network:
    """What is between two hosts."""

    megabits_per_second: int = 0  # 0 is no limit
    delay_seconds: float = 0.0  # in each direction

    def shape(self, host: Host) -> None:
        """Limit the rate in both directions of a host's link; the delay is that of relays."""
        limit = ("root", "tbf", "rate", f"{self.megabits_per_second}mbit", "burst", "256kb", "latency", "200ms")
        for options, device in ([], host.port), (["-n", host.namespace], "eth0"):
            subprocess.run(["/usr/sbin/tc", *options, "qdisc", "add", "dev", device, *limit], check=True)


@asynccontextmanager
async def served(
    settings: Settings, members: Sequence[Host], network: Network | None = None, read_bytes_per_second: int = 0
) -> AsyncIterator[Cluster]:
    """All processes, ready. A host's memory is limited if the target's is; its disk is that of the models."""
    head, *stages = members
    outside = f"{head.address.rpartition('.')[0]}.254"  # of this process, on the same bridge
    memory = settings.target.device_memory and settings.target.device_memory + PROGRAM_BYTES
    with TemporaryDirectory(prefix="bough-stages-") as folder, ExitStack() as stack:
        prefixes = [stack.enter_context(limited(memory, read_bytes_per_second, cache_folder())) for _ in members]
        cluster = Cluster(settings, Path(folder))
        stack.callback(cluster.stop_all)
        cluster.start_index()
        index_port = int(cluster.index_url.rpartition(":")[2])
        index = f"redis://{outside}:{relayed(outside, ('127.0.0.1', index_port))}"
        target = replace(settings.target, port=PORT, index_url=index, insecure=True, metrics_port=-1)
        doors = [(host.address, PORT) for host in members]
        if network is not None and stages:
            network.shape(stages[0])
            callers = stages[0].address, head.address  # who reaches the head, and the stage, over the network
            doors = [
                (outside, relayed(outside, door, network.delay_seconds, caller))
                for door, caller in zip(doors, callers, strict=True)
            ]
        for name, service in ((DRAFT, settings.draft), (ORCHESTRATOR, settings.orchestrator)):
            assert service is not None, "the settings have a draft"
            cluster.start(name, python(name, *to_flags(replace(service, index_url=cluster.index_url))))
        places = [*enumerate(zip(members, prefixes, doors, strict=True))]
        for number, (host, prefix, door) in reversed(places):
            place = {"stage_of": joined(*doors[0])} if number else {"stages": len(members)}
            config = replace(target, host=host.address, advertise=door[0], advertise_port=door[1], **place)
            command = [*prefix, *host.command(python(TARGET, *to_flags(config)))]
            child = cluster.start(STAGE_1 if number else TARGET, command)
            while number and not child.has_ended() and CALLS not in child.last_line():
                await asyncio.sleep(0.2)
        await cluster.wait_until_ready(lambda _: None)
        yield cluster


def memory_of(cluster: Cluster) -> list[str]:
    """What each member holds in memory and what it reads from its disk, in the words of its log."""
    logs = [cluster.children[name].log.read_text() for name in (TARGET, STAGE_1) if name in cluster.children]
    return [log.partition("held_layers: memory: ")[2].split(";")[1].strip() for log in logs]
