"""A target over gRPC: calls end with their callers, scoring delays no other call, and it reports its backend."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
import pytest

from bough.config.processes import TargetConfig, parse
from bough.errors import ConfigError
from bough.model.backend import REFERENCE_NOTE, computing_by
from bough.pb.target_pb2 import VerifyReply
from bough.protocol import codec
from bough.protocol.messages import Timings, Verdict, VerifyCall, VerifyResult
from bough.protocol.sampling_params import PositionLogprobs, TokenLogprob
from bough.rpc.server import open_channel, serving
from bough.rpc.services import TARGET, add_service, stub_of
from bough.trees.tree import Tree
from target_worker.service import TargetService
from target_worker.worker import TargetWorker
from tests.fakes.target import verify_call
from tests.fakes.waiting import PATIENCE_SECONDS, until


class SlowWorker:
    """Takes calls in and answers none."""

    vocab_size, max_nodes = 50, 16

    def __init__(self) -> None:
        self.futures: list[Future[VerifyResult]] = []

    def verify(self, call: VerifyCall) -> Future[VerifyResult]:
        self.futures.append(Future())
        return self.futures[-1]


async def until_cancelled(worker: SlowWorker) -> None:
    await until(lambda: worker.futures and worker.futures[0].cancelled())


@pytest.mark.parametrize("how", ["deadline", "cancellation", "connection"])
async def test_an_abandoned_call_is_cancelled(how: str) -> None:
    worker, servicer = SlowWorker(), TargetService()
    servicer.loaded = worker
    async with serving("127.0.0.1", 0, TARGET.full_name, partial(add_service, TARGET, servicer)) as served:
        channel = open_channel(f"127.0.0.1:{served.port}")
        request = codec.verify_call_to_wire(verify_call("a", [1, 2]))
        seconds = 2.0 if how == "deadline" else 10 * PATIENCE_SECONDS  # or the deadline would cancel the others, too
        call = stub_of(TARGET, channel).Verify(request, timeout=seconds)
        if how != "deadline":
            await until(lambda: worker.futures)
            call.cancel() if how == "cancellation" else await channel.close()
        await until_cancelled(worker)
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            await call
        await channel.close()


class Scorer(SlowWorker):
    """Answers at once, with the scores of two given tokens."""

    def verify(self, call: VerifyCall) -> Future[VerifyResult]:
        future = Future[VerifyResult]()
        at = PositionLogprobs(TokenLogprob(1, -1.0), ())
        future.set_result(VerifyResult(Verdict((1, 2), 0, (at, at)), 5, Timings()))
        return future


async def test_scores_of_given_tokens_are_encoded_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, servicer, encode = list[threading.Thread](), TargetService(), codec.verify_result_to_wire

    def encoded(result: VerifyResult) -> VerifyReply:
        threads.append(threading.current_thread())
        return encode(result)

    monkeypatch.setattr(codec, "verify_result_to_wire", encoded)
    servicer.loaded = Scorer()
    call = replace(verify_call("a", [1, 2]), tree=Tree.chain([3, 1, 1]), is_given=True)
    reply = await servicer.Verify(codec.verify_call_to_wire(call), None)
    assert [at.token.logprob for at in reply.logprobs] == [-1.0, -1.0]
    assert threads
    assert threading.main_thread() not in threads


FLAGS = "--max-context 64 --kv-memory 1MB --dtype float32 --device cpu"


def worker_of(folder: Path, backend: str) -> TargetWorker:
    return TargetWorker(
        parse(TargetConfig, "t", ["--model", str(folder), "--backend", backend, *FLAGS.split()], {}), "t"
    )


def test_the_reference_is_named_in_identity_and_notes(tiny: Path) -> None:
    with computing_by("cpu"):  # what a worker chooses counts for its process
        worker = worker_of(tiny, "reference")
        try:
            info = worker.info()
            names = {"model_name": info.model_name, "backend": "reference"}
            assert worker._metrics.registry.get_sample_value("bough_backend", names) == 1
        finally:
            worker.close()
    assert "by torch's operators" in info.arithmetic
    assert REFERENCE_NOTE in info.notes


def test_kernels_of_another_device_are_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--backend: must be auto, cpu or reference on cpu, got triton$"):
        worker_of(tiny, "triton")
