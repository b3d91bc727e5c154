"""Malformed messages to everything that decodes, in this process and over sockets; more of them on request."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from unittest.mock import Mock

import pytest

from bough.pb import draft_pb2, generation_pb2, target_pb2
from tests.fakes.fuzz import other_protocols
from tests.fakes.fuzz.decoding import Layer, all_layers, in_process, problem_of
from tests.fakes.fuzz.http_port import Answer, HttpConnection
from tests.fakes.fuzz.mutation import Mutator
from tests.fakes.fuzz.ordinary import GRPC, OF_WORKERS
from tests.fakes.fuzz.outcomes import Outcomes
from tests.fakes.fuzz.sockets import at_sockets

IN_PROCESS = int(os.environ.get("BOUGH_FUZZ_MESSAGES", "4000"))
AT_SOCKETS = int(os.environ.get("BOUGH_FUZZ_MESSAGES", "400"))
SEED = int(os.environ.get("BOUGH_FUZZ_SEED", "20"))


def test_any_bytes_are_read_or_refused_briefly() -> None:
    outcomes = in_process(IN_PROCESS, SEED)
    assert not outcomes.problems, outcomes.examples
    assert set(outcomes.counts) == {layer.name for layer in all_layers()}


@pytest.mark.slow
@pytest.mark.parametrize("has_tls", [pytest.param(False, marks=pytest.mark.long), True], ids=["plain", "tls"])
async def test_any_bytes_over_sockets_are_answered_and_leave_nothing(tmp_path: Path, has_tls: bool) -> None:
    outcomes = await at_sockets(tmp_path, AT_SOCKETS, SEED, has_tls=has_tls)
    assert not outcomes.problems, (outcomes.problems, outcomes.examples)
    assert set(outcomes.counts) == {"http", "grpc", "http2 frames", "other protocols", "target", "draft"}
    assert sum(outcomes.counts.values()) >= AT_SOCKETS
    assert len(outcomes.distinct) > AT_SOCKETS // 2, "a message that was sent before finds nothing"


@pytest.mark.parametrize("error", [RuntimeError("x"), RecursionError(), UnicodeDecodeError("utf-8", b"", 0, 1, "x")])
def test_an_unexpected_error_is_detected(error: Exception) -> None:
    def fail(data: bytes) -> object:
        raise error

    assert type(error).__name__ in problem_of(Layer("some", lambda m: m.garbage(), fail), b"x")


def test_a_seed_gives_the_same_messages() -> None:
    def drawn() -> list[bytes]:
        mutator = Mutator(3)
        return [layer.make(mutator) for layer in all_layers() for _ in range(20)]

    assert drawn() == drawn()


def test_every_method_of_all_services_is_called() -> None:
    for pb, name, calls in (
        (generation_pb2, "Generation", GRPC),
        (target_pb2, "Target", OF_WORKERS["target"]),
        (draft_pb2, "Draft", OF_WORKERS["draft"]),
    ):
        methods = pb.DESCRIPTOR.services_by_name[name].methods
        assert {f"/bough.v1.{name}/{method.name}" for method in methods} <= calls.keys()


@pytest.mark.parametrize("ends", [True, False])
async def test_a_port_must_close_connections_of_other_protocols(ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_protocols, "ANSWER_SECONDS", 30.0 if ends else 0.2)
    has_ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await (reader.read() if ends else has_ended.wait())
        writer.close()

    outcomes = Outcomes()
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        await other_protocols.OtherProtocolSender({f"127.0.0.1:{port}": None}, Mutator(1), outcomes).send()
        has_ended.set()
    assert outcomes.num_problems == (not ends)
    assert outcomes.counts == {other_protocols.LAYER: 1}


async def test_pipelined_answers_are_separated_however_they_arrive() -> None:
    connection = HttpConnection()
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    waiting = asyncio.create_task(connection.answer(60))
    for byte in chunked + b"HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{":
        connection.data_received(bytes((byte,)))
        await asyncio.sleep(0)
    assert await waiting == Answer("200", is_last=False)
    with pytest.raises(TimeoutError):
        await connection.answer(0)
    connection.data_received(b"}")
    assert await connection.answer(60) == Answer("400", is_last=True)


@pytest.mark.parametrize(
    ("error", "status"), [(None, "closed"), (ConnectionResetError(), "400, cut by a reset")], ids=["end", "reset"]
)
async def test_a_status_before_a_reset_counts(error: Exception | None, status: str) -> None:
    """A message was reported as unanswered if the next, invalid one of its pipeline cost the rest of its answer."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        transport = Mock(get_extra_info=lambda _: ours)
        connection = HttpConnection()
        connection.connection_made(transport)
        theirs.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 9\r\n\r\n")
        theirs.close()
        connection.connection_lost(error)
        assert await connection.answer(60) == Answer(status, is_last=True)
