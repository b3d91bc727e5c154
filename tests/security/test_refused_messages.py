"""What refused calls take of an orchestrator's memory is bounded by one message, and is given back."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import pytest

from bough.pb import generation_pb2 as pb
from bough.rpc.server import open_channel
from bough.runtime.allocator import configure_allocator
from tests.fakes.heap import MIB, rss_bytes
from tests.fakes.stage import MAX_CONTEXT, orchestrating, staged

NUM_CALLS = 300
PEAK_MIB = 450  # of 64 messages that arrive, and one that is decoded
LEFT_MIB = 256  # of the former, in gaps of the heap
INVALID_ID = 2**32 - 1


def serve(ports: Connection, folder: Path) -> None:
    """Run an orchestrator with a fake target in this process until something is sent to it."""

    async def run() -> None:
        async with staged(folder) as stage, orchestrating(stage) as orchestrator:
            ports.send(orchestrator.address)
            with suppress(EOFError):
                await asyncio.to_thread(ports.recv)

    configure_allocator()  # as all of bough's programs do
    asyncio.run(run())


@contextmanager
def orchestrator_process(folder: Path) -> Iterator[tuple[int, str]]:
    """An orchestrator's process id and address."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, folder))
    process.start()
    try:
        assert here.poll(60), "the orchestrator has not started"
        yield process.pid or 0, here.recv()
    finally:
        here.send(None)
        process.join(30)
        process.kill()


def request_of(token_id: int, number: int) -> bytes:
    """A request whose prompt is so often one token id."""
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[token_id] * number)).SerializeToString()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("message", "text"),
    [
        pytest.param(
            request_of(1, 3_100_000),
            f"token_ids: must have at most {MAX_CONTEXT} entries, got 3100000",
            marks=pytest.mark.long,
        ),
        (request_of(INVALID_ID, 90_000), f"token_ids.ids: must be 0 to 256, got {INVALID_ID}"),
    ],
)
async def test_refused_calls_with_token_ids_leave_no_memory_in_use(message: bytes, text: str, tmp_path: Path) -> None:
    """300 of them took 4.8 GB at once: each call had its message in use until its status was sent."""
    answers = Counter[str]()

    async def call(channel: grpc.aio.Channel) -> None:
        ask: Any = channel.unary_stream("/bough.v1.Generation/Generate")
        try:
            await ask(message).read()
        except grpc.aio.AioRpcError as exc:
            answers[f"{exc.code().name}: {exc.details()}"] += 1

    with orchestrator_process(tmp_path) as (process_id, address):
        before = peak = rss_bytes(process_id)
        async with open_channel(address) as channel:
            calls = [asyncio.create_task(call(channel)) for _ in range(NUM_CALLS)]
            while not all(each.done() for each in calls):
                await asyncio.sleep(0.02)
                peak = max(peak, rss_bytes(process_id))
            await asyncio.gather(*calls)
        after = rss_bytes(process_id)
    print(f"peak {(peak - before) / MIB:.0f} MiB, left {(after - before) / MIB:.0f} MiB")
    assert answers == {f"INVALID_ARGUMENT: {text}": NUM_CALLS}
    assert (peak - before) / MIB <= PEAK_MIB
    assert (after - before) / MIB <= LEFT_MIB
