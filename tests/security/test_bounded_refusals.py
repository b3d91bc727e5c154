"""What is refused is refused in few words, however long what was sent: an answer cannot be made large by a request."""

from __future__ import annotations

import pytest

from bough.client import Client
from bough.errors import BoughError, NotFound
from bough.runtime.log_lines import MAX_TEXT_BYTES, bounded
from orchestrator.http_api.body import parse
from orchestrator.http_api.fields.errors import MAX_MESSAGE, ApiError, api_error
from orchestrator.http_api.fields.generation import ChatFields
from tests.fakes.stage import Orchestrator


@pytest.mark.parametrize("name", ["x" * 100_000, "é" * 100_000, "\n\0" * 50_000, "\U0001f333" * 100_000])
async def test_a_name_of_any_length_is_refused_with_its_own_status_over_grpc(
    orchestrator: Orchestrator, name: str
) -> None:
    """Status texts travel as a header, of which a client takes some thousand bytes: more would be another error."""
    async with Client(orchestrator.address, patience_seconds=0.0) as client:
        for call in (client.abort(name), client.decisions(name)):
            with pytest.raises(BoughError) as refused:
                await call
            assert isinstance(refused.value, NotFound)
            assert len(str(refused.value)) < 4096


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [{"role": "user", "content": "x"}], "%s": 1}' % (b"x" * 100_000),
        b'{"messages": [{"role": "user", "content": "x", "%s": 1}]}' % (b"\xf0\x9f\x8c\xb3" * 100_000),
        b'{"messages": [{"role": "%s", "content": "x"}]}' % (b"x" * 100_000),
    ],
)
def test_a_field_name_of_any_length_is_refused_briefly_over_http(body: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        parse(ChatFields, body)
    assert len(refused.value.message) <= MAX_MESSAGE + 64
    assert len(refused.value.param or "") <= MAX_MESSAGE + 64


def test_unknown_names_are_refused_briefly_over_http() -> None:
    error = api_error(NotFound("model", repr("x" * 100_000) + " is not served here"), {})
    assert len(error.message) <= MAX_MESSAGE + 64
    assert error.param == "model"


def test_a_text_too_large_for_a_header_is_truncated() -> None:
    assert bounded("short é\n") == "short é\n"
    for text in ("x" * 10_000, "é" * 10_000, "\0" * 10_000, "\ud800" * 10_000, "%" * 10_000):
        cut = bounded(text)
        assert cut.endswith(" characters)")
        cost = sum(1 if 32 <= byte <= 126 and byte != ord("%") else 3 for byte in cut.encode("utf-8", "replace"))
        assert cost <= MAX_TEXT_BYTES + 64
