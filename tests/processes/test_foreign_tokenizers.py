"""A worker's tokenizer is fetched by all that may work with it: an invalid one stops none of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from bough.pb import common_pb2
from bough.processes import compatibility
from bough.processes.compatibility import check_compatibility
from bough.protocol.generation import WorkerInfo
from tests.fakes.fleet import FakeTarget, Fleet

DRAFT = WorkerInfo("draft", "d", "m", "", "", "", 1, 1, 1, 1)


async def without_end(self: FakeTarget, request: Any, context: Any) -> AsyncIterator[common_pb2.TokenizerChunk]:
    while True:
        yield common_pb2.TokenizerChunk(tokenizer_json=b"x" * 100_000)


async def empty_chunks(self: FakeTarget, request: Any, context: Any) -> AsyncIterator[common_pb2.TokenizerChunk]:
    while True:
        yield common_pb2.TokenizerChunk()


async def nothing(self: FakeTarget, request: Any, context: Any) -> AsyncIterator[common_pb2.TokenizerChunk]:
    for _ in ():
        yield common_pb2.TokenizerChunk()


@pytest.mark.parametrize(("send", "got"), [(without_end, "more"), (empty_chunks, "more"), (nothing, "none")])
async def test_a_tokenizer_that_is_too_long_or_missing_is_left_out(
    fakes: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, send: Any, got: str
) -> None:
    """Its callers kept all that it sent within ten seconds; an empty one ended a starting worker."""
    monkeypatch.setattr(compatibility, "MAX_TOKENIZER_BYTES", 1_000_000)
    monkeypatch.setattr(FakeTarget, "GetTokenizer", send)
    await fakes.target("t")
    await check_compatibility(fakes.registry, DRAFT, fakes.tokenizer)
    assert "cannot fetch the tokenizer of t at 127.0.0.1:" in caplog.text
    assert f"its tokenizer must have 1 to 1000000 bytes, got {got}" in caplog.text
