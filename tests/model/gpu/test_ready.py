"""What a worker on a GPU refuses at its start, here with the compiler's own errors."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest
import torch
import triton
from triton.runtime.build import compile_module_from_src

from bough.errors import AcceleratorFull, ConfigError
from bough.model import gpu
from bough.model.backend import backend_of
from bough.model.backends import triton as ready
from bough.model.faults import named_faults

GPU = torch.device("cuda", 0)
LAUNCHER = "#include <Python.h>\nPyMODINIT_FUNC PyInit_nothing(void) { return NULL; }\n"


def launch() -> None:
    """The step at which Triton wants a C compiler."""
    compile_module_from_src(LAUNCHER, "nothing")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "cache"))


def test_a_missing_compiler_names_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(ConfigError, match=r"^--device: on cuda:0 Triton must compile.*Failed to find C compiler.*gcc"):
        ready.require_kernels(GPU, launch)


def test_missing_headers_name_the_flag(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    paths = sysconfig.get_paths()
    monkeypatch.setattr(sysconfig, "get_paths", lambda *_, **__: {**paths, "include": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"^--device: on cuda:0 .*CalledProcessError.*Python\.h"):
        ready.require_kernels(GPU, launch)


def test_a_driver_that_is_too_old_for_tritons_kernels_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """They said that a C compiler was missing."""

    def loaded() -> None:
        raise RuntimeError("Triton Error [CUDA]: device kernel image is invalid")

    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 12090, raising=False)
    with pytest.raises(
        ConfigError, match=r"kernel image is invalid; the driver is of CUDA 12\.9, torch of "
    ) as refused:
        ready.require_kernels(GPU, loaded)
    assert "compiler" not in str(refused.value)


def test_a_missing_triton_names_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bough.model.gpu.attention_triton", None)
    monkeypatch.delattr(gpu, "attention_triton", raising=False)
    ready.kernels.cache_clear()
    with pytest.raises(ConfigError, match=r"^--device: for a GPU Triton must be installed, .*attention_triton"):
        ready.require_kernels(GPU, launch)


def test_sums_are_computed_in_float32() -> None:
    """Their defaults let cuBLAS round partial sums, by the shape of a product."""
    products = torch.backends.cuda.matmul
    before = products.allow_bf16_reduced_precision_reduction, products.allow_fp16_reduced_precision_reduction
    try:
        ready.accumulate_in_float32()
        assert not products.allow_tf32
        assert not products.allow_bf16_reduced_precision_reduction
        assert not products.allow_fp16_reduced_precision_reduction
        for name in ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"):
            assert not getattr(products, f"{name}_split_k"), "parts of sums are not added in the order of blocks' ends"
        assert not torch.backends.cudnn.allow_tf32
    finally:
        products.allow_bf16_reduced_precision_reduction, products.allow_fp16_reduced_precision_reduction = before


def test_a_cpu_is_always_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel is tried for it, and sums stay as they are."""
    tried = []
    monkeypatch.setattr(ready, "require_kernels", lambda *_: tried.append("a kernel"))
    monkeypatch.setattr(ready, "accumulate_in_float32", lambda: tried.append("sums"))
    backend_of(torch.device("cpu")).make_ready(torch.device("cpu"))
    assert not tried


def test_a_full_gpu_is_not_mistaken_for_a_missing_compiler() -> None:
    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(AcceleratorFull, match=r"^--device: cuda:0 has no memory left"), named_faults(GPU):
        ready.require_kernels(GPU, full)
