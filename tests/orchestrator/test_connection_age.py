"""Connections that end after a while, so that a balancer may choose anew: calls that run lose nothing by it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from bough.pb import generation_pb2
from bough.protocol import codec_generation as wire
from bough.protocol.generation import Finished, GenerateOptions, Started, TextPrompt, Tokens
from bough.rpc.server import open_channel
from bough.rpc.services import GENERATION, stub_of
from orchestrator.service import GenerationService
from tests.fakes.stage import TOKEN, FakeTarget, orchestrating, staged

NUM_TOKENS = 60


@pytest.mark.slow
async def test_a_stream_outlives_its_connections_age_and_new_calls_go_over_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's connection to the orchestrator, and the orchestrator's to the target, which is called each round."""
    peers, target_peers = [], []
    get_loads, verify = GenerationService.GetLoads, FakeTarget.Verify

    async def noted(self: GenerationService, request: Any, context: Any) -> generation_pb2.Loads:
        peers.append(context.peer())
        return await get_loads(self, request, context)

    async def noted_verify(self: FakeTarget, request: Any, context: Any) -> Any:
        target_peers.append(context.peer())
        return await verify(self, request, context)

    monkeypatch.setattr(GenerationService, "GetLoads", noted)
    monkeypatch.setattr(FakeTarget, "Verify", noted_verify)
    options = GenerateOptions(max_tokens=NUM_TOKENS, temperature=0.0)
    async with (
        staged(tmp_path, max_connection_age=0.5) as stage,
        orchestrating(stage, "--max-connection-age", "0.5") as orchestrator,
        open_channel(orchestrator.address) as channel,
    ):
        stage.target.sweep_seconds = 0.05
        stub = stub_of(GENERATION, channel)
        call = stub.Generate(wire.request_to_wire(TextPrompt("hello"), options))
        events = []
        async for message in call:
            events.append(wire.event_from_wire(message))
            await stub.GetLoads(generation_pb2.GetLoadsRequest())
        assert isinstance(events[0], Started)
        tokens = [token for event in events if isinstance(event, Tokens) for token in event.token_ids]
        assert tokens == [TOKEN] * NUM_TOKENS
        end = events[-1]
        assert isinstance(end, Finished)
        assert (end.num_failovers, end.warnings) == (0, ())
        assert call.done()
    assert len(set(peers)) > 1, "the channel has connected anew while the stream went on"
    assert len(set(target_peers)) > 1


@pytest.mark.slow
async def test_without_an_age_a_connection_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peers = set()
    get_loads = GenerationService.GetLoads

    async def noted(self: GenerationService, request: Any, context: Any) -> generation_pb2.Loads:
        peers.add(context.peer())
        return await get_loads(self, request, context)

    monkeypatch.setattr(GenerationService, "GetLoads", noted)
    async with staged(tmp_path) as stage, orchestrating(stage) as orchestrator:
        for _ in range(20):
            await orchestrator.client.loads()
            await asyncio.sleep(0.1)
    assert len(peers) == 1
