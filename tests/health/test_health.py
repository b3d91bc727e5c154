"""`python -m bough.health`, which containers and scripts ask."""

from __future__ import annotations

import asyncio
from pathlib import Path

from bough.health.__main__ import main, status_of
from tests.fakes.simulated import pair_of
from tests.fakes.stack import simulated_stack


async def test_health_is_reported_for_the_process_and_by_service(tmp_path: Path) -> None:
    async with simulated_stack(tmp_path, pair_of(tmp_path)) as stack:
        address = stack.addresses["orchestrator"]  # none of which reports here that it is ready
        assert await status_of(address) == "SERVING"
        assert await status_of(address, "bough.v1.Generation") == "NOT_SERVING"
        assert await status_of(address, "bough.v1.Nothing") == "NOT_FOUND: no service 'bough.v1.Nothing'"
        assert await asyncio.to_thread(main, [address]) == 0
        assert await asyncio.to_thread(main, [address, "bough.v1.Generation"]) == 1
