"""A stage's calls to its head over real gRPC, in one process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import pytest

from bough.concurrency.tasks import background
from bough.errors import ConfigError, InvalidRequest, NotFound, PairingError
from bough.rpc.server import serving
from bough.rpc.services import STAGES, add_service
from bough.security.access import OPEN
from bough.sizing.stage_split import StageRoom
from target_worker.stages.joining import JoiningStage
from target_worker.stages.ring import Ring
from target_worker.stages.roster import Assignment, JoinCall, Roster, StageFacts, StageFigures
from target_worker.stages.service import StagesService
from tests.fakes.waiting import until

pytestmark = pytest.mark.slow

FACTS = StageFacts("0.1", "code", "checkpoint", "tokenizer", "bfloat16", "cpu")
CALL = JoinCall("id", "127.0.0.1:1", FACTS, StageRoom("b", 1, 1e9, 0.25), StageFigures())
LAYERS = Assignment(1, 20, 40, 4096, 8, 2048, 64, 256, 64)
JOIN_SECONDS = 0.05


@asynccontextmanager
async def head_with(roster: Roster | None, port: int = 0) -> AsyncIterator[int]:
    """A server with these stages, or that of a stage; its port."""
    service = StagesService(Ring(OPEN, is_head=roster is not None), roster)
    add = partial(add_service, STAGES, service)
    async with serving("127.0.0.1", port, STAGES.full_name, add, grace_seconds=0.0) as served:
        yield served.port


def stage_of(port: int, call: JoinCall = CALL) -> JoiningStage:
    return JoiningStage(OPEN, f"127.0.0.1:{port}", lambda: call, JOIN_SECONDS)


async def test_a_stage_gets_its_layers_and_outlives_the_absence_of_its_head(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    def num_logged(text: str) -> int:
        return sum(text in record.getMessage() for record in caplog.records)

    async with head_with(roster := Roster(FACTS, 2)) as port:
        stage = stage_of(port)
        joining = asyncio.create_task(stage.run())
        assert await asyncio.to_thread(roster.wait_complete, 60.0) == [CALL.room]
        await until(lambda: num_logged("divides the layers"))
        roster.assign([LAYERS])
        assert await stage.assigned == LAYERS
        assert roster.members() == [CALL.address]
    await until(lambda: num_logged("does not answer"))
    await asyncio.sleep(5 * JOIN_SECONDS)
    assert num_logged("does not answer") == 1
    async with head_with(roster := Roster(FACTS, 2), port):
        assert await asyncio.to_thread(roster.wait_complete, 60.0) == [CALL.room]
        roster.assign([LAYERS])
        await until(lambda: num_logged(f"stage 1 of the head at 127.0.0.1:{port}") == 2)
        assert not joining.done()
    async with head_with(roster := Roster(FACTS, 2), port):
        await asyncio.to_thread(roster.wait_complete, 60.0)
        roster.assign([replace(LAYERS, end_layer=41)])
        with pytest.raises(ConfigError, match=r"end_layer=41.*restart it"):
            await joining


async def test_a_stage_that_differs_from_its_head_ends() -> None:
    async with head_with(Roster(FACTS, 2)) as port:
        with pytest.raises(PairingError, match=r"^dtype: must be 'bfloat16' as at the head, got 'float32'"):
            await stage_of(port, replace(CALL, facts=replace(FACTS, dtype="float32"))).run()
        with pytest.raises(InvalidRequest, match="stage_id"):
            await stage_of(port, replace(CALL, stage_id="")).run()


async def test_a_stage_of_a_stage_ends() -> None:
    async with head_with(None) as port:
        with pytest.raises(NotFound, match=r"--stage-of: must be the address of the head"):
            await stage_of(port).run()


async def test_a_stage_without_a_place_asks_again() -> None:
    async with head_with(roster := Roster(FACTS, 2)) as port:
        roster.join(replace(CALL, stage_id="other", address="127.0.0.1:2"))
        roster.assign([LAYERS])
        stage = stage_of(port)
        async with background(stage.run()):
            assert await stage.assigned == LAYERS  # once the other's lease is over
