"""Devices and host memory: chosen by name, refused by name."""

from __future__ import annotations

import itertools
from pathlib import Path
from unittest.mock import MagicMock, call

import pytest
import torch

import bough.model.running.device
from bough.config.processes import DraftConfig, TargetConfig, parse
from bough.errors import ConfigError
from bough.model.architecture.architecture import load_config
from bough.model.backends import cpu
from bough.model.kv.session_kv import KVShape
from bough.model.running.device import choose_device, on_host, on_host_together, require_fast
from bough.model.sizes.memory_budget import fixed_bytes
from bough.sizing.placement import Fixed, Tier
from draft_worker import worker as draft_workers
from draft_worker.worker import DraftWorker
from target_worker.sweep import held_layers
from target_worker.sweep.held_layers import choose_places
from target_worker.worker import TargetWorker

GB = 1000**3
GPU = torch.device("cuda", 0)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_auto_uses_a_gpu_if_there_is_one(two_gpus: None) -> None:
    assert [choose_device(name) for name in ("auto", "cpu", "cuda", "cuda:1")] == [
        GPU,
        torch.device("cpu"),
        GPU,
        torch.device("cuda", 1),
    ]
    with pytest.raises(ConfigError, match="--device: must be cuda:0 to cuda:1, got cuda:2"):
        choose_device("cuda:2")


def test_without_a_gpu_auto_is_the_cpu_and_workers_refuse_a_gpu(no_gpu: None, tiny: Path) -> None:
    assert choose_device("auto") == torch.device("cpu")
    flags = ["--model", str(tiny), "--device", "cuda"]
    with pytest.raises(ConfigError, match=r"--device: must be cpu or auto, as torch .*, got cuda"):
        TargetWorker(parse(TargetConfig, "t", flags, {}), "t")
    with pytest.raises(ConfigError, match="--device: must be cpu or auto"):
        DraftWorker(parse(DraftConfig, "d", flags, {}), "d")


@pytest.mark.parametrize("is_here", [False, True])
def test_a_gpu_that_torch_cannot_use_is_reported(
    is_here: bool, no_gpu: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A build of torch for CPUs, or a driver that is too old: a 70B would be very slow without a reason given."""
    monkeypatch.setattr(bough.model.running.device, "may_be_gpu", lambda _: is_here)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert choose_device("auto") == torch.device("cpu")
    told = "--device: auto is the CPU, although this machine has a GPU: torch finds none" in caplog.text
    assert told == is_here
    assert choose_device("cpu") == torch.device("cpu")
    assert len(caplog.records) == is_here, "who asks for the CPU knows"


def test_host_memory_has_no_effect_on_a_cpu(tiny: Path) -> None:
    flags = ["--model", str(tiny), "--device", "cpu", "--host-memory", "1GB"]
    with pytest.raises(ConfigError, match=r"--host-memory: must be left out on the CPU, .* got 1\.00 GB"):
        TargetWorker(parse(TargetConfig, "t", flags, {}), "t")


def gpu_settings(*flags: str) -> TargetConfig:
    return parse(TargetConfig, "t", ["--model", "m", "--device-memory", "24GB", *flags], {})


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    """140 GB free on the device, 100 GB on the host."""
    monkeypatch.setattr(held_layers, "free_device_bytes", lambda _: 140 * GB)
    monkeypatch.setattr("bough.model.sizes.memory_budget.free_memory", lambda: 100 * GB)


def test_a_gpu_has_three_tiers(free: None) -> None:
    """A model of 70B in 16 bits: 80 layers of 1.7 GB."""
    sizes, fixed = [1_700_000_000] * 80, Fixed(4 * GB, 2 * GB, GB, 0)
    placement = choose_places(sizes, fixed, gpu_settings(), GPU).placement
    assert placement.device_bytes <= 24 * GB
    assert placement.host_bytes <= 80 * GB
    assert placement.num_slabs == 2
    assert all(placement.layers(tier) for tier in (Tier.RESIDENT, Tier.HOST, Tier.DISK))
    assert not placement.layers(Tier.ELSEWHERE), "there is no other accelerator"
    all_in_ram = choose_places(sizes, fixed, gpu_settings("--host-memory", "200GB"), GPU).placement
    assert not all_in_ram.layers(Tier.DISK)


def test_kv_on_the_host_leaves_the_device_to_layers(free: None, tiny: Path) -> None:
    """Of 80 layers' KV the device holds two; the host's layers make room for the rest."""
    config, shape = load_config(tiny), KVShape(80, 8, 128, torch.bfloat16)
    flags = ("--kv-memory", "8GB", "--kv-tier")
    there, here = (fixed_bytes(gpu_settings(*flags, tier), True, config, shape, 0, 0) for tier in ("host", "device"))
    assert (here.kv, here.host_kv) == (there.host_kv, 0)
    assert there.kv == here.kv // 40
    sizes = [1_700_000_000] * 80
    on_host, on_device = (choose_places(sizes, fixed, gpu_settings(), GPU).placement for fixed in (there, here))
    assert [len(placed.layers(Tier.RESIDENT)) for placed in (on_host, on_device)] == [10, 7]
    assert len(on_host.layers(Tier.HOST)) < len(on_device.layers(Tier.HOST))
    assert on_host.host_bytes <= 80 * GB
    with pytest.raises(
        ConfigError, match=r"--host-memory: must be more than 8\.00 GB for KV slots on the host, got 5\.00 GB"
    ):
        choose_places(sizes, there, gpu_settings("--host-memory", "5GB"), GPU)


def test_layers_on_disk_need_host_memory_for_the_ring(free: None) -> None:
    with pytest.raises(ConfigError, match=r"--host-memory: must be at least 3\.40 GB, .* for 2 of them, got 1\.00 GB"):
        choose_places([1_700_000_000] * 80, Fixed(0, 0, 0, 0), gpu_settings("--host-memory", "1GB"), GPU)
    with pytest.raises(ConfigError, match=r"--host-memory: must be at least 5\.40 GB, .* for 2 of them, got 4\.00 GB"):
        choose_places([1_700_000_000] * 80, Fixed(0, 0, 0, 0, 2 * GB), gpu_settings("--host-memory", "4GB"), GPU)


@pytest.mark.parametrize("capability", ["AVX2", "AVX512"])
def test_processors_that_round_differently_have_other_names(capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's kernels are chosen by an instruction that ours may do without; sessions stay where they are then."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    names = []
    for has, by_pairs in itertools.product((False, True), repeat=2):
        monkeypatch.setattr(cpu, "has_feature", lambda _name, has=has: has)
        monkeypatch.setattr(cpu, "multiplies_pairs", lambda by_pairs=by_pairs: by_pairs)
        names.append(cpu.BACKEND.describe(torch.device("cpu")))
    assert f"CPU with {capability} and products of bfloat16, ours by pairs" in names
    assert len(set(names)) == 4


def test_a_sweep_is_waited_for_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's own wait, that of a copy, keeps a core busy for seconds."""
    calls = MagicMock()
    monkeypatch.setattr(torch.cuda, "Event", calls.event)
    monkeypatch.setattr(torch.cuda, "current_stream", calls.stream)
    calls.result.device = GPU
    assert on_host(calls.result) is calls.result.cpu()
    names = [name for name, *_ in calls.mock_calls]
    assert names[:5] == ["event", "stream", "event().record", "event().synchronize", "result.cpu"]
    assert calls.event.call_args == call(blocking=True)


def test_an_old_gpu_is_refused_in_bfloat16(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    """Kernels compile for it, without tensor cores."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    refused = r"^--dtype: must be float16 on cuda:0, Tesla T4 of compute capability 7.5, .* give --dtype float16$"
    for module in (held_layers, draft_workers):
        monkeypatch.setattr(module, "choose_device", lambda _: GPU)
        monkeypatch.setattr(module, "choose_backend", lambda *_: MagicMock())
    for worker, kind in ((TargetWorker, TargetConfig), (DraftWorker, DraftConfig)):
        with pytest.raises(ConfigError, match=refused):
            worker(parse(kind, "t", ["--model", str(tiny), "--dtype", "bfloat16"], {}), "t")
    require_fast("float16", GPU)
    require_fast("bfloat16", torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    require_fast("bfloat16", GPU)


def test_an_old_driver_is_named(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020). Please update it.")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(
        ConfigError, match=r"as torch finds none \(The NVIDIA driver .*\(found version 12020\)\), got cuda"
    ):
        choose_device("cuda")


def test_results_of_several_types_are_read_together() -> None:
    results = [torch.randn(1, 3, 5).bfloat16(), torch.arange(6, dtype=torch.int32).view(2, 3).t(), torch.arange(3)]
    for own, read in zip(results, on_host_together(results), strict=True):
        assert read.dtype == own.dtype
        assert torch.equal(read, own)
