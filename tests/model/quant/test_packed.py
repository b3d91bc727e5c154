"""Weights in 4 and 8 bits, of GPTQ and AWQ, and what all formats share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bough.errors import CheckpointError
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.checkpoint.container import TensorPlace
from bough.model.checkpoint.safetensors_folder import read_header
from bough.model.checkpoint.tensor_source import FreshMemory
from bough.model.cpu.float_bits import from_half, put_number
from bough.model.cpu.jit import strict
from bough.model.cpu.unpack import write_out
from bough.model.loading import loading
from bough.model.loading.loading import bind_all, build_skeleton, logical_sources, read_place
from bough.model.quant.awq import AwqFormat
from bough.model.quant.compressed_tensors import CompressedTensorsFormat
from bough.model.quant.format import PackedTensors, WeightFormat
from bough.model.quant.fp8 import Fp8Format
from bough.model.quant.gptq import Gptq, GptqFormat
from tests.fakes.model.packed_files import TOKENS, awq, gptq, in_words, raw_parts, rewrite, tensors_of
from tests.fakes.model.published_formats import INT4, compressed
from tests.fakes.models import plain_logits, streamed


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("auto-gptq", GptqFormat(4, zero_offset=1)),
        ("auto-gptq-desc-act", GptqFormat(4, zero_offset=1)),
        ("autoawq", AwqFormat()),
        (
            "compressed-tensors",
            CompressedTensorsFormat.of(compressed("pack-quantized", {**INT4, "symmetric": False}), ""),
        ),
        (
            "compressed-tensors-fp8",
            Fp8Format.of({"weight_block_size": [64, 64]}, ""),
        ),
    ],
)
def test_layers_packed_by_the_libraries_are_read(name: str, quantization: WeightFormat) -> None:
    """tests/data/pack_layers.py says how they were made; `weight` is what the library multiplies by."""
    file = Path(__file__).parents[2] / "data" / f"{name}.safetensors"
    sources = logical_sources(Checkpoint(file.parent, read_header(file)), quantization)
    packed, weight = sources["layer.weight"], load_file(file)["weight"]
    value = packed.value(raw_parts(packed), torch.float16, FreshMemory(torch.device("cpu")))
    assert torch.equal(value, weight)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("make", "bits", "in_order", "quantization"),
    [
        (gptq, 4, True, {"quant_method": "gptq", "bits": 4, "group_size": 32}),
        (gptq, 4, False, {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}),
        (gptq, 8, True, {"quant_method": "gptq", "bits": 8, "group_size": 32}),
        (awq, 4, True, {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}),
    ],
)
def test_community_checkpoints_load_unchanged(
    tiny: Path,
    tmp_path: Path,
    make,
    bits: int,
    in_order: bool,
    quantization: dict[str, object],
    dtype: torch.dtype,
) -> None:
    rng = np.random.default_rng(4)
    packed, plain = {}, {}
    for name, tensor in tensors_of(tiny).items():
        if "proj" not in name:
            packed[name] = plain[name] = tensor
            continue
        parts, value = make(tensor, bits, 32, rng, in_order)
        packed.update({f"{name.removesuffix('.weight')}.{part}": data for part, data in parts.items()})
        plain[name] = value.to(dtype)
    quantized = rewrite(tiny, tmp_path / "quantized", packed, quantization)
    written = rewrite(tiny, tmp_path / "written", plain, None)
    with streamed(quantized, dtype) as mine, streamed(written, dtype) as theirs:
        left, right = (torch.stack(plain_logits(model, TOKENS)).float() for model in (mine, theirs))
        if dtype != torch.bfloat16:
            torch.testing.assert_close(left, right, atol=1e-4 if dtype == torch.float32 else 5e-2, rtol=2e-2)
        else:  # in bfloat16 layers that are written out are compiled whole, and round otherwise
            assert (left - right).abs().mean() < 0.03 * right.std()
    slots = build_skeleton(Checkpoint.open(quantized), dtype).layer_slots[1]
    for slot in slots:
        slot.bind(raw_parts(slot.source), dtype, FreshMemory(torch.device("cpu")))
        wanted = plain[slot.source.places[0].name.replace("qweight", "weight")].to(dtype)
        assert torch.equal(getattr(slot.module, slot.key), wanted)


@pytest.mark.parametrize(
    ("named", "zero_offset"),
    [
        ({}, 1),
        ({"checkpoint_format": None}, 1),
        ({"checkpoint_format": "GPTQ"}, 1),
        ({"checkpoint_format": "gptq_v2"}, 0),
        ({"format": "gptq_v2"}, 0),
    ],
)
def test_zero_points_follow_the_formats_version(named: dict[str, object], zero_offset: int) -> None:
    """Files with an empty field were read as of the second version, and ones with the newer field as of the first."""
    assert GptqFormat.of({"bits": 4, **named}, "") == GptqFormat(4, zero_offset)


def test_weights_that_stay_in_another_data_type_are_converted_in_parts(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, the embeddings of a large vocabulary would be in memory twice for a moment, which no budget counts."""
    monkeypatch.setattr(loading, "CONVERTED_BYTES", 1000)
    largest: list[int] = []

    def read(place: TensorPlace) -> torch.Tensor:
        largest.append(place.num_bytes)
        return read_place(place)

    monkeypatch.setattr(loading, "read_place", read)
    skeleton = build_skeleton(Checkpoint.open(tiny), torch.bfloat16)
    bind_all(skeleton, torch.device("cpu"))
    assert max(largest) <= 1000
    for name, tensor in tensors_of(tiny).items():
        assert torch.equal(skeleton.model.get_parameter(name), tensor.to(torch.bfloat16)), name


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("scales", lambda t: t[:-1], r"qzeros must have shape \[1, 12\], got \[2, 12\]"),
        ("qzeros", lambda t: t[:, :-1], r"qzeros must have shape \[2, 12\], got \[2, 11\]"),
        ("scales", lambda t: torch.cat((t, t[:1])), r"must have groups of equal size|must have shape"),
    ],
)
def test_packed_tensors_that_do_not_match_are_named(
    tiny: Path,
    tmp_path: Path,
    part: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    message: str,
) -> None:
    """The kernels would read beyond the end of a tensor that is too short."""
    source = in_words(tmp_path / "whole", "awq", True, tiny)
    packed, victim = tensors_of(source), f"model.layers.1.mlp.up_proj.{part}"
    packed[victim] = change(packed[victim])
    quantization = json.loads((source / "config.json").read_text())["quantization_config"]
    folder = rewrite(source, tmp_path / "model", packed, quantization)
    with pytest.raises(CheckpointError, match=message):
        build_skeleton(Checkpoint.open(folder), torch.float32)


def test_outputs_that_do_not_fill_words_of_zeros_are_refused(tmp_path: Path) -> None:
    """Of GPTQ's zeros only whole words were asked for, and the kernel read beyond them."""
    file, format_ = tmp_path / "model.safetensors", GptqFormat(4, 1)
    tensors = {"qweight": (2, 12), "qzeros": (1, 1), "scales": (1, 12)}
    dtypes = {"qweight": torch.int32, "qzeros": torch.int32, "scales": torch.float16}
    save_file({f"x.{name}": torch.zeros(shape, dtype=dtypes[name]) for name, shape in tensors.items()}, file)
    with pytest.raises(CheckpointError, match=r"tensor x.qzeros must be whole words of 8 outputs, got 12"):
        format_.source("x.qweight", PackedTensors(read_header(file)))


def gptq_sources(folder: Path) -> list[Gptq]:
    skeleton = build_skeleton(Checkpoint.open(folder), torch.float32)
    return [slot.source for slot in skeleton.layer_slots[0] if isinstance(slot.source, Gptq)]


@pytest.mark.parametrize("is_ordered", [True, False])
def test_groups_in_order_need_no_index(is_ordered: bool, tiny: Path, tmp_path: Path) -> None:
    """Most files name them though they are."""
    found = gptq_sources(in_words(tmp_path / "gptq", "gptq", is_ordered, tiny))
    assert len(found) == 7
    assert all((source.groups is None) == is_ordered for source in found)


@pytest.mark.parametrize("number", [-1, 2])
def test_a_missing_group_is_refused(number: int, tiny: Path, tmp_path: Path) -> None:
    """A GPU's kernel would read beyond the table, which ends its context for good."""
    folder = in_words(tmp_path / "gptq", "gptq", False, tiny)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.g_idx"][3] = number
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"q_proj\.g_idx: groups must be 0 to 1, got {number}$"):
        gptq_sources(folder)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "short"
    np.zeros(3, np.int32).tofile(file)
    with pytest.raises(CheckpointError, match="ends after 3 of 8"):
        PackedTensors({}).unless_in_order(TensorPlace("g_idx", file, 0, 32, "I32", (8,)), 1)


def test_scales_in_float16_are_exact() -> None:
    """All that are finite, the smallest and 0 with their signs too."""
    halves = np.arange(2**16, dtype=np.uint16)
    halves = halves[np.isfinite(halves.view(np.float16))]
    expected = halves.view(np.float16).astype(np.float32)
    assert np.array_equal(_floats(halves).view(np.uint32), expected.view(np.uint32))


@strict
def _floats(halves):
    out = np.empty(len(halves), np.float32)
    for i in range(len(halves)):
        out[i] = from_half(halves[i])
    return out


def test_numbers_are_rounded_to_float16_like_by_torch() -> None:
    """At, near and between all of its numbers, with their signs, and beyond them."""
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    exact = halves[np.isfinite(halves)].astype(np.float32)
    between = (exact[:-1] + exact[1:]) / 2
    odd = np.array([1e-45, 65519.996, 65520, 65536, 1e30, np.inf], np.float32)
    some = np.concatenate((exact, between, odd, -odd))
    numbers = np.concatenate((some, np.nextafter(some, np.float32(np.inf)), np.nextafter(some, np.float32(-np.inf))))
    expected = torch.from_numpy(numbers).half().view(torch.int16).numpy()
    assert np.array_equal(_halves(numbers), expected)
    assert np.isnan(_halves(np.full(1, np.nan, np.float32)).view(np.float16)).all()


@strict
def _halves(numbers):
    out = np.empty(len(numbers), np.int16)
    for i in range(len(numbers)):
        put_number(out, i, numbers[i])
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_value_is_written_at_its_position(dtype: torch.dtype) -> None:
    """In float16 a whole matrix was made in float32 first: gigabytes outside all budgets for a large head."""
    out = torch.empty(3, 5, dtype=dtype)
    places: list[int] = []
    write_out(out, lambda *arrays: places.append(arrays[-1].ctypes.data))
    assert places == [out.data_ptr()]
