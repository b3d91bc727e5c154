"""Hundreds of sessions opened, used and abandoned: nothing that they took is still held.

All services run in this process, so that one count sees the tasks, threads and file descriptors of all. Everything is
the real thing, gRPC and index included, but for two savings: the model has one layer of sixteen channels, and outputs
are short. What a leak would be made of does not depend on either. A session takes 9 ms of one core or more, so the
suite opens 240, of each kind 24 or more, as one that leaks is enough; BOUGH_LEAK_SESSIONS=10000 opens more.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from functools import partial
from pathlib import Path

import redis.asyncio

from bough.protocol.ids import ScopedId
from bough.protocol.messages import Context, VerifyCall
from bough.protocol.sampling_params import SamplingParams
from bough.trees.tree import Tree
from orchestrator.cluster.tokenizer_threads import NUM_THREADS
from tests.fakes.abandoner import Abandoner, Holdings
from tests.fakes.stack import Stack, stack

NUM_SESSIONS = int(os.environ.get("BOUGH_LEAK_SESSIONS", "240"))
SETTLE_SECONDS = 30.0


async def settled(services: Stack) -> None:
    """Returns when nothing is running any more; a test that hangs here has found a slot that is never freed."""
    async with asyncio.timeout(SETTLE_SECONDS):
        while services.requests.loads().num_requests_running:
            await asyncio.sleep(0.05)


async def least(services: Stack) -> Holdings:
    """What is held when that has not become less for five seconds."""
    held, seconds_alike = await holdings(services), 0
    while seconds_alike < 5:
        await asyncio.sleep(1.0)
        now = await holdings(services)
        fallen = any(less < more for less, more in zip(now, held, strict=True))
        held, seconds_alike = now, 0 if fallen else seconds_alike + 1
    return held


async def settled_to(services: Stack, before: Holdings) -> Holdings:
    """What is held when that is no more than before, or stays more: connections take a while to close."""
    for _ in range(int(SETTLE_SECONDS)):
        await asyncio.sleep(1.0)
        held = await holdings(services)
        if all(now <= then for now, then in zip(held, before, strict=True)):
            break
    return held


async def holdings(services: Stack) -> Holdings:
    """Without connections to the index: a pool keeps as many as were ever needed at once."""
    held = Holdings.now()
    async with redis.asyncio.from_url(services.index_url) as client:
        num_pooled = len(await client.client_list()) - 1
    return held._replace(descriptors=held.descriptors - num_pooled)


async def keys_without_an_end(services: Stack) -> set[bytes]:
    """Keys of the index that would stay forever."""
    async with redis.asyncio.from_url(services.index_url) as client:
        return {key async for key in client.scan_iter(count=1000) if await client.ttl(key) < 0}


async def test_abandoned_sessions_leave_nothing(tmp_path: Path) -> None:
    async with stack(tmp_path, "--kv-memory", "150KB", "--lease-seconds", "0.05", "--rows", "16") as services:
        abandoner = Abandoner(services.addresses["orchestrator"], random.Random(1))
        await abandoner.run(100, 16)  # what is made once and kept is made now
        tokenizing = services.requests.directory.tokenizing  # whose second thread starts when two texts come at once
        await asyncio.gather(*(tokenizing.run(partial(time.sleep, 0.1)) for _ in range(NUM_THREADS)))
        await settled(services)
        before = await least(services)
        keys = await keys_without_an_end(services)
        await abandoner.run(NUM_SESSIONS, 16)
        await settled(services)
        after = await settled_to(services, before)
        assert after.tasks <= before.tasks, list(asyncio.all_tasks())
        assert after.threads <= before.threads
        assert after.descriptors <= before.descriptors
        assert await keys_without_an_end(services) == keys
        services.check_integrity()
        await every_slot_can_be_had(services)
        assert sum(abandoner.outcomes.values()) == NUM_SESSIONS + 100
        assert not abandoner.outcomes.keys() & {"unfinished", "not refused"}
        for way in ("finished", "kept", "left in the middle", "gone with its connection", "aborted", "refused"):
            assert abandoner.outcomes[way] > NUM_SESSIONS // 20, abandoner.outcomes


async def every_slot_can_be_had(services: Stack) -> None:
    """As many sessions at once as the target says that it has room for: a slot that leaked would be missed."""
    sampling = SamplingParams(temperature=0.0)
    contexts = [Context.of(ScopedId(f"probe {n}"), [n], 0, 1) for n in range(services.target.info().max_sessions)]
    assert 16 <= len(contexts) <= 64, "so few that hundreds of sessions must have shared them"
    calls = [VerifyCall(context, 1, 0, Tree.root(n), sampling) for n, context in enumerate(contexts)]
    await asyncio.gather(*(asyncio.wrap_future(services.target.verify(call)) for call in calls))
