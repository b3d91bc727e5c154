"""Real programs under a supervisor, and health checks in a loop as in Ray Serve."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from deploy.index import IndexPlace, IndexServer
from deploy.settings import Role, read_program
from deploy.supervisor import Supervisor
from tests.fakes.waiting import PATIENCE_SECONDS

HOST = "127.0.0.1"
PROFILE = Path(__file__).parents[3] / "loadtest" / "data" / "cluster-profile.json"


@asynccontextmanager
async def supervised(
    role: Role, index_url: str, folder: Path, program: dict[str, Any], **supervision: float
) -> AsyncIterator[Supervisor]:
    user_config = {"program": program, "log_folder": str(folder), **supervision}
    supervisor = Supervisor(read_program(role, user_config), HOST, IndexPlace(index_url))
    try:
        await supervisor.start()
        yield supervisor
    finally:
        await supervisor.stop()


async def checked_until_it_fails(supervised: Supervisor | IndexServer) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            await supervised.check()
            await asyncio.sleep(0.05)
