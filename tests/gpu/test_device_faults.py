"""A device that fails, a disk that fails once, and a disk that hangs."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bough.config.processes import TargetConfig
from bough.errors import AcceleratorFull, AcceleratorLost, ConfigError
from bough.model import faults
from bough.model.batch.batch import Batch, Segment
from bough.model.kv.session_kv import KVArena
from bough.processes.worker_process import watch
from bough.rpc.status_map import ERROR_NAMES
from bough.runtime.exit_status import EXIT_LOST
from bough.sizing.row_counts import RowCounts
from bough.trees.tree import Tree
from target_worker.link import direct_io
from target_worker.scheduler import engine as scheduling
from target_worker.scheduler.engine import STILL_SECONDS, SweepEngine
from target_worker.stages.passes import StagePass
from target_worker.sweep.held_layers import within_memory
from target_worker.sweep.streamed_model import StreamedModel, StreamedSweeper
from target_worker.verification.verdict import RowReader
from tests.fakes.gpu.device_sweeps import Where, on_the_device, three_sweeps
from tests.fakes.gpu.pretend import device, pretending
from tests.fakes.gpu.pretend_streams import PretendedEvent
from tests.fakes.models import CPU
from tests.fakes.target import LIMITS, NO_GRAMMARS, Clock, FakeModel, new_pool, verify_call

STICKY = "CUDA error: an illegal memory access was encountered\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1"


LOST = torch.AcceleratorError(STICKY)


def failing_once(monkeypatch: pytest.MonkeyPatch, error: Exception, at: int) -> None:
    """The attention call of this number fails, in the middle of a layer."""
    calls, index_copy = [0], torch.Tensor.index_copy_

    def fail(self: torch.Tensor, *args: Any) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == at:
            raise error
        return index_copy(self, *args)

    monkeypatch.setattr(torch.Tensor, "index_copy_", fail)


def lost(*_: Any) -> torch.Tensor:
    raise LOST


def sweep(model: StreamedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_once(monkeypatch, LOST, at=4)
    three_sweeps(model, device())


def copy_layers(model: StreamedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PretendedEvent, "synchronize", lost)
    model.tiers.restart()
    three_sweeps(model, device())


def warm_up(model: StreamedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = model.skeleton.kv_shape()
    slot = KVArena(shape, shape.empty(40, device())).take(40)
    failing_once(monkeypatch, LOST, at=1)
    model.warm_up(slot, 8)


def read_logits(model: StreamedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    row = torch.ones(3).to(device())
    monkeypatch.setattr(torch.Tensor, "copy_", lost)
    RowReader().read(row)


def pass_on(model: StreamedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first wait for the device, which has its error, is for the rows for the next stage."""
    slot = KVArena(shape := model.skeleton.kv_shape(), shape.empty(40, device())).take(40)
    batch = Batch([Segment.tree(slot, 0, Tree.root(3))], model.rows, model.device)
    monkeypatch.setattr(torch.Tensor, "cpu", lost)
    StagePass([], [], torch.zeros(1, 1)).after(batch, *model.run_layers(batch))


@pytest.mark.parametrize("act", [sweep, copy_layers, warm_up, read_logits, pass_on])
def test_a_lost_device_is_named_and_ends_the_process(
    act: Callable[[StreamedModel, pytest.MonkeyPatch], None], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise every later call would fail with the same error, while the worker accepted sessions."""
    ended: list[Exception] = []
    monkeypatch.setattr(faults, "exit_soon", ended.append)
    with (
        pretending(),
        on_the_device(tiny, Where(), torch.float32) as model,
        pytest.raises(AcceleratorLost, match=r"illegal memory access was encountered$"),
    ):
        act(model, monkeypatch)
    assert [type(error) for error in ended] == [AcceleratorLost]


ILLEGAL = "Triton Error [CUDA]: an illegal memory access was encountered"
OTHERS_ERRORS = {  # by what a library says, as a RuntimeError: what the devices answer afterwards, and what it is to us
    "Triton Error [CUDA]: unspecified launch failure": (ILLEGAL, AcceleratorLost),
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`": (ILLEGAL, AcceleratorLost),
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`": (None, AcceleratorFull),
    "Triton Error [CUDA]: out of memory": (None, AcceleratorFull),
    "The size of tensor a (3) must match the size of tensor b (4)": (None, RuntimeError),
}


@pytest.mark.parametrize("said", OTHERS_ERRORS)
def test_library_errors_are_distinguished_by_checking_the_device(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton and cuBLAS raise no AcceleratorError. Any of a target's GPUs may be the one that is lost."""
    answer, wanted = OTHERS_ERRORS[said]
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    asked: list[torch.device] = []

    def synchronize(device: torch.device) -> None:
        asked.append(device)
        if answer and device == second:
            raise RuntimeError(answer)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    ended: list[Exception] = []
    with pytest.raises(wanted) as raised, faults.named_faults(first, (second,), on_lost=ended.append):
        raise RuntimeError(said)
    assert type(raised.value) is wanted
    assert asked == ([] if wanted is AcceleratorFull else [first, second])
    if wanted is AcceleratorLost:
        assert str(raised.value) == f"--device: cuda:1 is lost to this process: {answer}"
    assert len(ended) == (wanted is AcceleratorLost)


def test_a_runtime_error_on_a_cpu_is_no_device_error() -> None:
    with pytest.raises(RuntimeError, match=r"^CUDA error: CUBLAS_STATUS_ALLOC_FAILED$"), faults.named_faults(CPU):
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")


def test_the_sweep_after_running_out_of_memory_is_right(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pretending(), on_the_device(tiny, Where(), torch.float32) as model:
        wanted = three_sweeps(model, device())
        assert model.num_layers_begun == 3 * len(model.tiers.layers), "by which a sweep that hangs is noticed"
        failing_once(monkeypatch, torch.OutOfMemoryError("tried to allocate 2 GiB"), at=4)
        with pytest.raises(AcceleratorFull, match=r"pretend:0 has no memory left: tried to allocate 2 GiB"):
            three_sweeps(model, device())
        assert torch.equal(three_sweeps(model, device()), wanted)


def test_the_process_ends_with_the_reason_and_its_own_status() -> None:
    code = "import time; from bough.runtime.exit_status import exit_soon; "
    code += "exit_soon(Exception('cuda:0 is lost')); time.sleep(60)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (EXIT_LOST, "error: cuda:0 is lost")


def test_a_peer_recognises_both_errors() -> None:
    """One that is not known becomes an error of no kind, which ends a request that could have gone elsewhere."""
    assert {"AcceleratorFull", "AcceleratorLost"} <= ERROR_NAMES.keys()


class Small(FakeModel):
    """Has memory for this many tokens at once."""

    most = LIMITS.max_nodes

    def sweep(self, batch: Any) -> Any:
        if batch.num_tokens > self.most:
            raise AcceleratorFull("--device: cuda:0 has no memory left: 2 GiB")
        return super().sweep(batch)


def test_out_of_memory_makes_sweeps_smaller_and_fails_no_request(caplog: pytest.LogCaptureFixture) -> None:
    model = Small(RowCounts(4, 4))
    limits = replace(LIMITS, max_sweep_tokens=2 * LIMITS.max_nodes)
    engine = SweepEngine(StreamedSweeper(model, NO_GRAMMARS), new_pool(Clock()), limits, 100)
    engine.start()
    try:
        prompt = [token % 30 for token in range(limits.max_sweep_tokens)]
        with caplog.at_level(logging.WARNING):
            result = engine.verify(verify_call("a", prompt)).result(10)
        assert result.verdict.bonus_token == prompt[-1] + 1
        assert "sweeps have at most" in caplog.text
        model.most = 0
        with pytest.raises(AcceleratorFull):
            engine.verify(verify_call("b", [1])).result(10)
    finally:
        engine.stop()


def test_a_failed_read_is_repeated_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"weights")
    descriptor, calls, preadv = os.open(tmp_path / "file", os.O_RDONLY), [0], os.preadv

    def fail(*args: Any) -> int:
        calls[0] += 1
        if calls[0] <= failures:
            raise OSError(5, "Input/output error")
        return preadv(*args)

    monkeypatch.setattr(os, "preadv", fail)
    try:
        target = bytearray(7)
        failures = 1
        assert direct_io._read_twice(descriptor, memoryview(target), 0) == 7
        assert target == b"weights"
        calls[0], failures = 0, 2
        with pytest.raises(OSError, match="Input/output error"):
            direct_io._read_twice(descriptor, memoryview(target), 0)
    finally:
        os.close(descriptor)


def test_a_stalled_sweep_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, done = Clock(), [0]
    sweeper = StreamedSweeper(FakeModel(), NO_GRAMMARS)
    engine = SweepEngine(sweeper, new_pool(Clock()), LIMITS, 100, progress=lambda: done[0])
    monkeypatch.setattr(scheduling, "time", SimpleNamespace(monotonic=clock))
    for engine.num_running in (0, 1):
        assert engine.trouble() == ""
    clock.now += STILL_SECONDS - 1
    assert engine.trouble() == ""
    clock.now += 2
    assert engine.trouble().startswith("a sweep has made no progress for 121 seconds")
    done[0] += 1
    assert engine.trouble() == ""
    clock.now += 2 * STILL_SECONDS
    engine.num_running = 0
    assert engine.trouble() == "", "nobody asks for anything"


async def test_health_reports_a_stall_while_it_lasts() -> None:
    stop, said = asyncio.Event(), list[bool]()

    class Served:
        async def set_ready(self, is_ready: bool) -> None:
            said.append(is_ready)

    class Worker:
        troubles = iter(["", "a disk that hangs", "a disk that hangs", ""])

        def trouble(self) -> str:
            trouble = next(self.troubles, None)
            if trouble is None:
                stop.set()
            return trouble or ""

    await asyncio.wait_for(watch(Worker(), Served(), stop, every_seconds=0.01), 10)
    assert said == [False, True]


def test_running_out_of_memory_at_the_start_names_the_flag() -> None:
    """Others may have taken some since it was asked for."""
    message = r"^--device-memory: must be less than .* cuda:0, got none: .* 2\.00 GiB\.; give"
    with (
        pytest.raises(ConfigError, match=message),
        within_memory(TargetConfig(model="m"), torch.device("cuda", 0), ()),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nAdvice")
