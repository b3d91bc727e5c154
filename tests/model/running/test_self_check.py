"""The choice of a GPU's backend at a start, on the pretended device, whose kernels fail by turns."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bough.config.cache_paths import cache_folder
from bough.config.processes import DraftConfig, TargetConfig, parse
from bough.errors import AcceleratorFull, ConfigError
from bough.model import backend as backends
from bough.model.backend import REFERENCE_NOTE, RUNGS, backend_of, choose_backend, computing_by, load
from bough.model.backends.triton import TritonBackend
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.loading.loading import Skeleton, build_skeleton
from bough.model.packed import Stack
from bough.model.quant.format import Dequantized, place_of
from bough.model.quant.formats import SAMPLES
from bough.model.quant.ggml_blocks import sample
from bough.model.running import kernel_checks, self_check
from bough.model.running.device import working_on
from bough.model.running.kernel_checks import Check, _few_outputs, _layout, checks_of
from bough.model.running.self_check import backend_notes, checked_backend
from draft_worker import worker as draft_workers
from draft_worker.worker import DraftWorker
from loadtest.common.tiny_model import save_model
from target_worker.sweep import held_layers
from target_worker.worker import TargetWorker
from tests.fakes.gpu.pretend import device, pretending
from tests.fakes.model.families import FAMILIES, of_two_layers
from tests.fakes.model.packed_files import packed_as
from tests.fakes.models import CPU
from tests.fakes.tiers import long_but

Product = Callable[..., torch.Tensor]
GPU = torch.device("cuda", 0)
CARD = "NVIDIA L40 (8, 9), the driver is of CUDA 13.0"


def multiply(rows: torch.Tensor, matrix: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A product whose bits do not depend on the order of its sums."""
    out = rows.double() @ backend_of(device()).written_out(matrix, rows.dtype).double().t()
    return (out if bias is None else out + bias.double()).to(rows.dtype)


@pytest.fixture
def skeleton(tiny: Path) -> Skeleton:
    return build_skeleton(Checkpoint.open(tiny), torch.bfloat16)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Few and short paths: the reference attends row by row."""
    monkeypatch.setenv("BOUGH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(kernel_checks, "CONTEXT", 20)
    monkeypatch.setattr(kernel_checks, "NUM_ROWS", 96)
    monkeypatch.setattr(self_check, "card", lambda _: CARD)
    monkeypatch.setattr(backends, "_chosen", [])
    monkeypatch.setattr(TritonBackend, "multiply", staticmethod(multiply))
    for rung in RUNGS:
        monkeypatch.setattr(type(load(rung)), "make_ready", lambda *_: None)
    with pretending():
        yield


def cached() -> list[Path]:
    return [*(cache_folder() / "self-checks").iterdir()]


@pytest.fixture
def num_checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the checks that are run."""
    run, names = Check.run, list[str]()

    def counted(self: Check, *operands: Any) -> None:
        names.append(self.name)
        run(self, *operands)

    monkeypatch.setattr(Check, "run", counted)
    return names


def without_last(rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return multiply(rows[:, :-1], matrix[:, :-1], bias)


def rounded_by_count(rows: torch.Tensor, *others: Any) -> torch.Tensor:
    out = multiply(rows, *others)
    return torch.nextafter(out, out * 2) if len(rows) == 8 else out


def uncompiled(*_: Any) -> torch.Tensor:
    raise RuntimeError("PassManager::run failed")


PRODUCTS: dict[str, tuple[Product, str]] = {  # by failure: what multiplies, and the report
    "a wrong value": (without_last, "ArithmeticError: values are up to .* further off than rounding"),
    "NaN": (lambda *operands: multiply(*operands) * torch.nan, "ArithmeticError: 1 rows have other bits than among 96"),
    "other bits among 8 rows": (rounded_by_count, "ArithmeticError: 8 rows have other bits than among 96"),
    "not compiled": (uncompiled, "RuntimeError: PassManager::run failed"),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_that_fails_leaves_products_to_the_library(
    name: str,
    skeleton: Skeleton,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    num_checks: list[str],
) -> None:
    """Which is logged and noted; the next start knows it without a check."""
    product, reason = PRODUCTS[name]
    monkeypatch.setattr(kernel_checks, "_attention", lambda *_: ())  # which takes longer
    monkeypatch.setattr(TritonBackend, "multiply", staticmethod(product))
    checked_backend("auto", [device()], skeleton)
    (note,) = notes = list(backend_notes(device()))
    assert re.match(rf"--backend: auto is not triton, which fails its self-check: product of 64 .*: {reason}", note)
    assert "--backend: triton is not used, as it fails its self-check: product of" in caplog.text
    assert backend_of(device()).name == "cublas"
    num_checks.clear()
    assert checked_backend("auto", [device()], skeleton).name == "cublas"
    assert (list(backend_notes(device())), num_checks) == (notes, [])


@pytest.mark.parametrize("kernel", ["norm", "rotate", "gate"])
def test_the_reference_computes_if_a_kernel_of_both_backends_fails(
    kernel: str, skeleton: Skeleton, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(TritonBackend, kernel)

    def wrong(self: Any, rows: torch.Tensor, *others: Any) -> Any:
        rows = rows.clone()
        rows[..., -1] *= -1.0
        return right(self, rows, *others)

    monkeypatch.setattr(TritonBackend, kernel, wrong)
    monkeypatch.setattr(kernel_checks, "_products", lambda *_: ())
    monkeypatch.setattr(kernel_checks, "_attention", lambda *_: ())
    assert checked_backend("auto", [device()], skeleton).name == "reference"
    names = {"norm": "norm of", "rotate": "rotary embeddings of", "gate": "gate of"}
    assert names[kernel] in next(backend_notes(device()))


def test_the_reference_computes_if_attention_fails(skeleton: Skeleton, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here by a key too few, of hundreds."""
    attend = TritonBackend.attend

    def without_a_key(self: Any, chunk: Any, *others: Any) -> torch.Tensor:
        for piece in chunk.pieces:
            piece.lengths = piece.lengths - (piece.lengths > 20)
        return attend(self, chunk, *others)

    monkeypatch.setattr(TritonBackend, "attend", without_a_key)
    monkeypatch.setattr(kernel_checks, "CONTEXT", 300)
    assert checked_backend("auto", [device()], skeleton).name == "reference"
    *failed, note = backend_notes(device())
    for rung, each in zip(RUNGS[:-1], failed, strict=True):
        assert re.match(rf"--backend: auto is not {rung}, .* attention of 4 heads .*: values are up to .* off", each)
    assert note == REFERENCE_NOTE


def test_a_product_that_spills_registers_is_not_used(skeleton: Skeleton, monkeypatch: pytest.MonkeyPatch) -> None:
    spilled = set[str]()

    def spills(*operands: Any) -> torch.Tensor:
        spilled.add("_product")
        return multiply(*operands)

    monkeypatch.setattr(TritonBackend, "spilling", lambda _: set(spilled))
    monkeypatch.setattr(TritonBackend, "multiply", staticmethod(spills))
    assert checked_backend("auto", [device()], skeleton).name == "cublas"
    assert next(backend_notes(device())).endswith(": _product spills registers")


@pytest.mark.slow
@pytest.mark.parametrize("family", long_but(["qwen3 next, recurrent layers"], FAMILIES))
def test_right_kernels_of_every_family_pass(family: str, tmp_path: Path) -> None:
    skeleton = build_skeleton(Checkpoint.open(save_model(tmp_path, of_two_layers(family))), torch.bfloat16)
    for check in checks_of(skeleton):
        with computing_by("triton") as backend, working_on(device()), torch.inference_mode():
            check.run(backend, skeleton.dtype, device())


PACKINGS = [("awq", 4), ("gptq, unordered", 8), ("FP8, blocks", 8), ("compressed-tensors", 4)]


@pytest.mark.parametrize(("method", "bits"), PACKINGS)
def test_products_with_packed_weights_are_checked(method: str, bits: int, tiny: Path, tmp_path: Path) -> None:
    skeleton = build_skeleton(Checkpoint.open(packed_as(method, tiny, tmp_path / "packed", bits)), torch.bfloat16)
    checks = [check for check in checks_of(skeleton) if isinstance(check.operands[-1], Dequantized)]
    assert {check.operands[-1].shape for check in checks} == {(64, 64), (32, 64), (96, 64), (64, 96)}
    for check in checks:
        with computing_by("triton") as backend, working_on(device()), torch.inference_mode():
            check.run(backend, skeleton.dtype, device())


TENSOR_WISE = replace(SAMPLES["fp8 8 bits"](1024, 512), scales=place_of("F32", 1), block=(1024, 512))  # type: ignore[type-var]


BY_HEAD = replace(sample("Q8_0", 2560, 512), half=40)  # whose heads of 80 do not divide 256


@pytest.mark.parametrize(
    "source",
    [*(make(1024, 512) for make in SAMPLES.values()), TENSOR_WISE, BY_HEAD],
    ids=[*SAMPLES, "fp8", "heads of 80"],
)
def test_few_outputs_of_a_large_packed_matrix_are_checked(source: Dequantized) -> None:
    """In the same layout, so that its tensors fit together."""
    few = _few_outputs(source)
    assert few.shape == ((256, 512) if source is not BY_HEAD else (1280, 512))
    check = Check("", ((96, 512), few), 1, kernel_checks._multiplied, 1e-3)
    with computing_by("triton") as backend, working_on(device()), torch.inference_mode():
        check.run(backend, torch.bfloat16, device())


def test_grouped_products_of_experts_that_fail_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here with the first expert's matrix for all."""
    folder = save_model(tmp_path / "model", FAMILIES["qwen2 moe, shared expert"])
    skeleton = build_skeleton(Checkpoint.open(folder), torch.bfloat16)
    right = TritonBackend.multiply_grouped

    def by_one(self: Any, rows: torch.Tensor, stack: Stack, *others: Any) -> torch.Tensor:
        return right(self, rows, stack._replace(matrices=stack.matrices[:1] * len(stack.matrices)), *others)

    monkeypatch.setattr(TritonBackend, "multiply_grouped", by_one)
    monkeypatch.setattr(kernel_checks, "_attention", lambda *_: ())
    assert checked_backend("auto", [device()], skeleton).name == "cublas"
    assert re.search(
        r"product of 64 inputs, 48 outputs of experts: .* off than rounding", next(backend_notes(device()))
    )


def test_weights_unpacked_to_other_bits_are_noticed(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_bits(rows: torch.Tensor, matrix: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = multiply(rows, matrix, bias)
        return out if isinstance(matrix, torch.Tensor) else torch.nextafter(out, out * 2)

    skeleton = build_skeleton(Checkpoint.open(packed_as("awq", tiny, tmp_path / "packed", 4)), torch.bfloat16)
    monkeypatch.setattr(TritonBackend, "multiply", staticmethod(other_bits))
    monkeypatch.setattr(kernel_checks, "_attention", lambda *_: ())
    assert checked_backend("auto", [device()], skeleton).name == "cublas"
    assert "in the layout Awq" in next(backend_notes(device()))


def test_matrices_that_are_written_out_to_other_bits_are_noticed(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although products, which read packed ones as they are, are right."""
    write = TritonBackend.write

    def other_bits(self: Any, matrix: Any, out: torch.Tensor) -> None:
        write(self, matrix, out)
        out.copy_(torch.nextafter(out, out * 2))

    def product(rows: torch.Tensor, matrix: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        with computing_by("reference"):
            return multiply(rows, matrix, bias)

    skeleton = build_skeleton(Checkpoint.open(packed_as("awq", tiny, tmp_path / "packed", 4)), torch.bfloat16)
    monkeypatch.setattr(TritonBackend, "multiply", staticmethod(product))
    monkeypatch.setattr(TritonBackend, "write", other_bits)
    monkeypatch.setattr(kernel_checks, "_attention", lambda *_: ())
    assert checked_backend("auto", [device()], skeleton).name == "reference"
    assert ": unpacking of 64 inputs, 64 outputs in the layout Awq" in next(backend_notes(device()))


def test_layouts_of_other_types_have_other_names() -> None:
    """So that none counts as checked when only the other was."""
    fp8 = SAMPLES["fp8 8 bits"](256, 512)
    int8 = replace(fp8, numbers=place_of("I8", 256, 512))  # type: ignore[type-var]
    others = replace(fp8, scales=place_of("F32", 2, 4))  # type: ignore[type-var]
    assert len({_layout(source) for source in (fp8, int8, others)}) == 3


@pytest.mark.parametrize(("kernel", "factor"), [("norm", 1.02), ("gate", 1.02), ("combine", 1.02), ("rotate", 1.1)])
def test_results_that_are_a_little_wrong_are_noticed(
    kernel: str, factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(tmp_path, FAMILIES["qwen2 moe, shared expert"])
    right = getattr(TritonBackend, kernel)

    def wrong(self: Any, *operands: Any) -> Any:
        out = right(self, *operands)
        return tuple(x * factor for x in out) if isinstance(out, tuple) else out * factor

    skeleton, wanted = build_skeleton(Checkpoint.open(folder), torch.bfloat16), {"combine": "sums", "rotate": "rotary"}
    check = next(x for x in kernel_checks._parts_of_rows(skeleton) if x.name.startswith(wanted.get(kernel, kernel)))
    with computing_by("triton") as backend, working_on(device()), torch.inference_mode():
        check.run(backend, torch.bfloat16, device())
        monkeypatch.setattr(TritonBackend, kernel, wrong)
        with pytest.raises(ArithmeticError, match="further off than rounding"):
            check.run(backend, torch.bfloat16, device())


@pytest.mark.parametrize("place", ["alone after a short path", "as a context"])
def test_attention_with_other_bits_at_some_place_is_noticed(
    place: str, skeleton: Skeleton, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = TritonBackend.attend

    def other_bits(self: Any, chunk: Any, *others: Any) -> torch.Tensor:
        out = attend(self, chunk, *others)
        is_context = any(piece.tail.shape[1] == 0 for piece in chunk.pieces)
        is_there = is_context if place == "as a context" else chunk.paths_on_host().longest < 20
        return torch.nextafter(out, out * 2) if is_there else out

    monkeypatch.setattr(TritonBackend, "attend", other_bits)
    monkeypatch.setattr(kernel_checks, "_products", lambda *_: ())
    assert checked_backend("auto", [device()], skeleton).name == "reference"
    count = 10 if place == "as a context" else 8
    assert f": ArithmeticError: {count} rows have other bits than among 96" in next(backend_notes(device()))


def test_experts_stored_transposed_are_checked_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model(tmp_path, FAMILIES["gpt-oss, sinks, alternating windows"])
    skeleton, found = build_skeleton(Checkpoint.open(folder), torch.bfloat16), set[tuple[Any, ...]]()
    right = TritonBackend.multiply_grouped

    def seen(self: Any, rows: torch.Tensor, stack: Stack, *others: Any) -> torch.Tensor:
        assert isinstance(stack.first, torch.Tensor)
        found.add((tuple(stack.first.shape), stack.first.stride()))
        return right(self, rows, stack, *others)

    monkeypatch.setattr(TritonBackend, "multiply_grouped", seen)
    with computing_by("triton") as backend, working_on(device()), torch.inference_mode():
        for check in kernel_checks._experts(skeleton):
            check.run(backend, torch.bfloat16, device())
    (_, hidden, gates), (_, width, _) = (
        slot.source.shape for slot in skeleton.layer_slots[0] if slot.source.shape[1:] and len(slot.source.shape) == 3
    )
    assert found == {((gates, hidden), (1, gates)), ((hidden, width), (1, hidden))}


def test_a_norm_without_weights_is_no_failure(skeleton: Skeleton) -> None:
    names = [check.name for check in checks_of(skeleton)]
    skeleton.layers[0].input_layernorm.weight = None  # type: ignore[assignment]
    assert [check.name for check in checks_of(skeleton)] == names


def test_a_model_without_checks_starts_with_the_reference(skeleton: Skeleton, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: Skeleton) -> tuple[Check, ...]:
        raise AttributeError("no weight")

    monkeypatch.setattr(self_check, "checks_of", unknown)
    assert checked_backend("auto", [device()], skeleton).name == "reference"
    assert next(backend_notes(device())).endswith("AttributeError: no weight")


def test_without_a_compiler_the_reference_computes(
    skeleton: Skeleton, monkeypatch: pytest.MonkeyPatch, one_check: Callable[[str], None]
) -> None:
    """Until there is one; a backend that was named is refused."""

    def refuse(*_: Any) -> None:
        raise ConfigError("--device: Triton must compile and run kernels")

    with monkeypatch.context() as patch:
        for rung in RUNGS[:-1]:
            patch.setattr(type(load(rung)), "make_ready", refuse)
        assert checked_backend("auto", [device()], skeleton) is backend_of(device()) is load("reference")
        for rung, note in zip(RUNGS[:-1], list(backend_notes(device()))[:-1], strict=True):
            assert note == (
                f"--backend: auto is not {rung}, which fails its self-check: "
                "--device: Triton must compile and run kernels"
            )
            choose_backend(rung, device())
            with pytest.raises(ConfigError, match="must compile"):
                checked_backend(rung, [device()], skeleton)
            choose_backend("reference", device())
    assert checked_backend("auto", [device()], skeleton).name == RUNGS[0]


@pytest.mark.parametrize(
    ("module", "worker", "kind"), [(held_layers, TargetWorker, TargetConfig), (draft_workers, DraftWorker, DraftConfig)]
)
def test_no_worker_is_refused_before_that_choice(
    module: Any, worker: Any, kind: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Chosen(BaseException):
        pass

    def choose(*_: Any) -> None:
        raise Chosen

    def refuse(*_: Any) -> None:
        raise ConfigError("--device: Triton must compile and run kernels")

    monkeypatch.setattr(TritonBackend, "make_ready", refuse)
    monkeypatch.setattr(module, "choose_device", lambda _: device())
    monkeypatch.setattr(module, "checked_backend", choose)
    with pytest.raises(Chosen):
        worker(parse(kind, "t", ["--model", str(tiny)], {}), "t")


def test_kernels_that_pass_are_checked_once(skeleton: Skeleton, num_checks: list[str]) -> None:
    for _ in range(2):
        assert checked_backend("auto", [device()], skeleton).name == RUNGS[0]
        assert list(backend_notes(device())) == []
        assert num_checks == [check.name for check in checks_of(skeleton)]
    assert len(num_checks) > 4


@pytest.fixture
def one_check(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that makes the only check fail with this reason, or pass without one; and name it."""

    def becomes(reason: str, name: str = "product") -> None:
        def call(_: Any, rows: Sequence[int], __: torch.Tensor) -> torch.Tensor:
            if reason:
                raise ArithmeticError(reason)
            return torch.zeros(len(rows), device=device())

        monkeypatch.setattr(self_check, "checks_of", lambda _: (Check(name, [(96, 2)], 1, call, is_shared=False),))

    becomes("")
    return becomes


@pytest.mark.parametrize("damage", ["", "{", "[]", '"triton"', "null", "\xff"])
def test_a_damaged_cache_is_ignored(
    damage: str, skeleton: Skeleton, num_checks: list[str], one_check: Callable[[str], None]
) -> None:
    checked_backend("auto", [device()], skeleton)
    (file,) = cached()
    file.write_bytes(damage.encode("latin-1"))
    one_check("wrong")
    assert checked_backend("auto", [device()], skeleton).name == RUNGS[-1], "not what was cached before"
    assert len(num_checks) == len(RUNGS)
    assert json.loads(file.read_text()) == dict.fromkeys(RUNGS[:-1], "product: ArithmeticError: wrong")


def test_each_card_and_each_shape_has_its_own_results(
    skeleton: Skeleton, monkeypatch: pytest.MonkeyPatch, one_check: Callable[..., None], tmp_path: Path
) -> None:
    checked_backend("auto", [device()], skeleton)
    one_check("wrong")
    assert checked_backend("auto", [device()], skeleton).name == RUNGS[0]
    for change in (
        lambda: monkeypatch.setattr(self_check, "card", lambda _: CARD.replace("13.0", "13.1")),
        lambda: one_check("wrong", "a larger product"),
        lambda: monkeypatch.setattr(self_check, "MODEL", tmp_path),
        lambda: ((tmp_path / "quant").mkdir(), (tmp_path / "quant" / "types.py").write_text("BITS = 4")),
    ):
        change()
        before = len(cached())
        assert checked_backend("auto", [device()], skeleton).name == RUNGS[-1]
        assert len(cached()) == before + 1


def test_one_backend_computes_on_all_devices(
    skeleton: Skeleton, monkeypatch: pytest.MonkeyPatch, one_check: Callable[[str], None]
) -> None:
    checked_backend("auto", [device()], skeleton)
    one_check("wrong")
    monkeypatch.setattr(self_check, "card", lambda place: CARD if place == device() else "another")
    assert checked_backend("auto", [device(), device(1)], skeleton) is backend_of(device()) is load(RUNGS[-1])


def test_a_spill_of_a_kernel_that_the_next_backend_has_too_changes_nothing(
    skeleton: Skeleton, monkeypatch: pytest.MonkeyPatch
) -> None:
    spilled, attend = set[str](), TritonBackend.attend

    def spills(self: Any, *others: Any) -> torch.Tensor:
        spilled.add("_attend")
        return attend(self, *others)

    monkeypatch.setattr(TritonBackend, "spilling", lambda _: set(spilled))
    monkeypatch.setattr(TritonBackend, "attend", spills)
    assert checked_backend("auto", [device()], skeleton).name == RUNGS[0]
    assert spilled


def test_a_full_gpu_is_no_failure_of_a_kernel(skeleton: Skeleton, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr(TritonBackend, "multiply", full)
    with pytest.raises(AcceleratorFull, match="no memory left: tried to allocate 2 GiB"):
        checked_backend("auto", [device()], skeleton)
    assert not (cache_folder() / "self-checks").exists()


def test_a_process_that_loses_the_gpu_starts_again_without_the_kernel(
    skeleton: Skeleton, monkeypatch: pytest.MonkeyPatch, num_checks: list[str]
) -> None:
    class Replaced(BaseException):
        pass

    def lost(*_: Any) -> torch.Tensor:  # of both backends with kernels
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def execve(program: str, command: list[str], environment: dict[str, str]) -> None:
        monkeypatch.setattr(os, "environ", environment)
        raise Replaced

    monkeypatch.setattr(TritonBackend, "attend", lost)
    monkeypatch.setattr(os, "execve", execve)
    for rung in RUNGS[:-1]:
        with pytest.raises(Replaced):
            checked_backend("auto", [device()], skeleton)
        assert os.environ[f"{self_check.LOST}{rung}"].startswith("attention of 4 heads")
    for _ in range(2):
        num_checks.clear()
        checked_backend("auto", [device()], skeleton)
        assert (backend_of(device()).name, num_checks) == (RUNGS[-1], [])
        assert "illegal memory access" in next(backend_notes(device()))
        monkeypatch.delitem(os.environ, f"{self_check.LOST}{RUNGS[0]}", raising=False)  # what is cached is enough


@pytest.mark.parametrize("rung", RUNGS)
def test_a_named_backend_is_not_checked(rung: str, skeleton: Skeleton, num_checks: list[str]) -> None:
    choose_backend(rung, device())
    assert checked_backend(rung, [device()], skeleton).name == backend_of(device()).name == rung
    assert not num_checks


def test_a_cpu_is_not_checked(skeleton: Skeleton, num_checks: list[str]) -> None:
    for name in ("auto", "cpu", "reference"):
        choose_backend(name, CPU)
        assert checked_backend(name, [CPU], skeleton).name == ("reference" if name == "reference" else "cpu")
    assert not num_checks


def test_targets_on_different_rungs_do_not_pass_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session continues only at a target with the same arithmetic, which has these names."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA L40")
    assert len({load(rung).describe(GPU) for rung in RUNGS}) == len(RUNGS)


def test_names_of_other_devices_are_refused() -> None:
    for name in ("cpu", "cuda"):
        with pytest.raises(
            ConfigError, match=rf"^--backend: must be auto, triton.* or reference on cuda:0, got {name}$"
        ):
            choose_backend(name, GPU)
    for rung in RUNGS[:-1]:
        with pytest.raises(ConfigError, match=rf"^--backend: must be auto, cpu or reference on cpu, got {rung}$"):
            choose_backend(rung, CPU)
