"""Registration of a process in the index, renewed by heartbeats."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from bough.concurrency.tasks import background
from bough.errors import Unavailable
from bough.registry.records import WorkerRecord
from bough.registry.registry import Registry

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.75


@asynccontextmanager
async def registered(registry: Registry, present: Callable[[], WorkerRecord]) -> AsyncIterator[None]:
    """Registers a process for the duration of the block and renews its lease, also across outages of the index.

    `present` returns the record at each heartbeat; its load may change, its id may not.
    """
    await registry.register(present())
    try:
        async with background(_beat(registry, present)):
            yield
    finally:
        with suppress(Unavailable):
            await registry.deregister(present().worker_id)


async def _beat(registry: Registry, present: Callable[[], WorkerRecord]) -> None:
    is_lost = False
    while True:
        await asyncio.sleep(HEARTBEAT_SECONDS)
        try:
            await registry.register(present())
            if is_lost:
                logger.warning("the index at %s takes heartbeats again", registry.safe_url)
            is_lost = False
        except Unavailable as exc:
            if not is_lost:
                logger.warning("%s; trying on", exc)
            is_lost = True
        except Exception:  # a failing `present` must not end the heartbeats
            logger.exception("a heartbeat failed; trying on")
