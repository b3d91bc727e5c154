"""Errors that cross gRPC: a peer's error has the same text and the same parts."""

from __future__ import annotations

import pickle
from typing import Any

import grpc
import pytest

from bough.errors import AlreadyRunning, FieldError, InvalidRequest, InvalidTree, NotFound
from bough.rpc.status_map import ERROR_KEY, MAX_PART_BYTES, abort, to_error


class Call:
    """A call that keeps what it is ended with."""

    async def abort(self, code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, str | bytes], ...]) -> None:
        self.ended = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), details)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (InvalidRequest("sampling.top_p", "must be above 0", 0.0), "sampling.top_p: must be above 0, got 0.0"),
        (InvalidRequest("stop[1]", "must be short", repr("a, got b: c")), "stop[1]: must be short, got 'a, got b: c'"),
        (InvalidTree("tree.tokens[0]", "must be é"), "tree.tokens[0]: must be é"),
        (NotFound("model", "must be one of 'x'", "''"), "model: must be one of 'x', got ''"),
        (AlreadyRunning("", "it runs"), "it runs"),
    ],
)
async def test_a_fields_error_keeps_its_parts(error: FieldError, text: str) -> None:
    assert str(error) == str(pickle.loads(pickle.dumps(error))) == text
    received = await received_from(error)
    assert (type(received), received.args, str(received)) == (type(error), error.args, text)


async def test_parts_that_are_too_long_for_metadata_are_in_the_text() -> None:
    error = InvalidRequest("x" * (MAX_PART_BYTES + 1), "must be short", "y" * (MAX_PART_BYTES + 1))
    received = await received_from(error)
    assert (received.field, received.got, str(received)) == ("", None, str(error))


async def test_an_older_peers_error_has_its_text_as_problem() -> None:
    metadata = grpc.aio.Metadata((ERROR_KEY, "NotFound"))
    error = to_error(grpc.aio.AioRpcError(grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), metadata, "x: gone"), "a:1")
    assert isinstance(error, NotFound)
    assert (error.field, error.problem, error.got) == ("", "x: gone", None)


async def received_from(error: FieldError) -> Any:
    """The error as a caller receives it."""
    call: Any = Call()
    await abort(call, error)
    return to_error(call.ended, "peer:1")
