"""A draft worker that answers with nonsense costs a round its guesses (DESIGN.md, rule 1)."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from fake_fleet import FakeDraft, Fleet
from streams import expected, read

from bough.client import Client
from bough.errors import BoughError
from bough.rpc import ERROR_KEY, HASH_KEY, LENGTH_KEY
from orchestrator.workers import DraftClient


@pytest.mark.parametrize("length", ["-5", "many", "", "9" * 30])
async def test_a_draft_that_holds_what_cannot_be(fakes: Fleet, length: str) -> None:
    await fakes.target("t1")
    draft = FakeDraft("d1", fakes.tokenizer)

    async def grow(request: Any, context: Any) -> None:
        metadata = ((ERROR_KEY, "PrefixMissing"), (LENGTH_KEY, length), (HASH_KEY, "x"))
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no", metadata)

    draft.Grow = grow  # type: ignore[method-assign,assignment]
    await fakes.worker(draft)
    requests, server = await fakes.orchestrator("--draft", "workers")
    async with Client(server.address) as client:
        seen = await read(client)
    assert seen.token_ids == expected(fakes)
    assert requests.directory.find("d1") is None or seen.end.speculation.num_degraded_rounds


async def test_an_answer_that_is_no_message() -> None:
    """gRPC makes None of it, and tells nobody but the log."""

    async def call() -> None:
        return None

    client = DraftClient("127.0.0.1:1")
    with pytest.raises(BoughError, match=r"127\.0\.0\.1:1: its answer is no such message"):
        await client._errors(call())
    await client.close()
