"""Weights in 4 and 8 bits: bough's own, GPTQ's and AWQ's, each bit for bit what the written-out weights give."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from bough.errors import CheckpointError, ConfigError, StreamError
from bough.model.checkpoint.checkpoint import Checkpoint, TensorPlace, read_header
from bough.model.checkpoint.pack_manifest import MANIFEST_NAME
from bough.model.checkpoint.tensor_source import FreshMemory
from bough.model.cpu.float_bits import from_half, put_number
from bough.model.cpu.jit import strict
from bough.model.loading import loading
from bough.model.loading.late_writes import bind_all
from bough.model.loading.loading import build_skeleton, read_place
from bough.model.loading.weight_map import logical_sources
from bough.model.packing import shard_writer as packing
from bough.model.packing.pack import pack
from bough.model.quant.awq import AwqFormat
from bough.model.quant.bough_format import BoughFormat, Packed
from bough.model.quant.compressed_tensors import CompressedTensorsFormat
from bough.model.quant.format import PackedTensors, QuantFormat, write_out
from bough.model.quant.fp8 import Fp8Format
from bough.model.quant.gptq import GptqFormat
from bough.model.quant.quantize import GROUP_SIZES, quantize
from bough.model.running.runner import ResidentModel
from tests.conftest import TINY, save_model
from tests.fakes.model.packed_files import MIXTRAL, TOKENS, awq, flip, gptq, raw_parts, rewrite, tensors_of
from tests.fakes.model.published_formats import INT4, compressed
from tests.fakes.models import plain_logits, streamed


def written_out(packed: torch.Tensor, scales: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """The format in the plainest words: element by element."""
    rows, size = packed.shape[0], GROUP_SIZES[bits]
    columns = packed.shape[1] * 8 // bits
    out = torch.empty(rows, columns)
    for column in range(columns):
        group, j = divmod(column, size)
        if bits == 8:
            integer = packed[:, column].float()
        else:
            byte = packed[:, group * size // 2 + j % (size // 2)].int()
            integer = (byte >> 4 if j >= size // 2 else byte & 15).float()
        out[:, column] = integer * scales[0, :, group].float()
        if bits == 4:
            out[:, column] += scales[1, :, group].float()
    return out.to(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("config", [TINY, MIXTRAL], ids=["llama", "mixtral"])
def test_a_packed_model_is_bitwise_the_model_with_its_weights_written_out(
    config: object, bits: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    original = save_model(tmp_path / "original", config)
    pack(str(original), bits, tmp_path / "packed", shard_bytes=100_000)
    values, packed = {}, tensors_of(tmp_path / "packed")
    for name, tensor in packed.items():
        if name.endswith(".packed"):
            base = name.removesuffix(".packed")
            values[base] = written_out(tensor, packed[f"{base}.packed_scales"], bits, dtype)
        elif not name.endswith(".packed_scales"):
            values[name] = tensor
    matrices = {n: t for n, t in tensors_of(original).items() if "proj" in n or ".experts." in n}
    assert {n.removesuffix(".packed") for n in packed if n.endswith(".packed")} == {
        name for name, tensor in matrices.items() if tensor.shape[1] % GROUP_SIZES[bits] == 0
    }, "all matrices of the layers, and neither embeddings nor routers"
    plain = rewrite(original, tmp_path / "plain", values, None)
    with streamed(tmp_path / "packed", dtype) as mine, streamed(plain, dtype) as theirs:
        for left, right in zip(plain_logits(mine, TOKENS), plain_logits(theirs, TOKENS), strict=True):
            assert torch.equal(left, right)
    if dtype == torch.float32:
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=dtype)
        torch.testing.assert_close(left, model(torch.tensor([TOKENS])).logits[0, -1], atol=1e-4, rtol=1e-4)


@settings(max_examples=25)
@given(seed=st.integers(0, 2**31), bits=st.sampled_from([4, 8]), scale=st.floats(1e-3, 1e3))
def test_packing_errs_by_less_than_half_a_step(seed: int, bits: int, scale: float) -> None:
    weight = torch.randn(8, 128, generator=torch.Generator().manual_seed(seed)) * scale
    packed, scales = quantize(weight, bits)
    place = [
        TensorPlace("w", Path(), 0, t.numel() * t.itemsize, d, tuple(t.shape))
        for t, d in ((packed, "U8" if bits == 4 else "I8"), (scales, "F16"))
    ]
    source = Packed(place[0], place[1], bits)
    value = source.value(
        [packed.view(torch.uint8).flatten(), scales.view(torch.uint8).flatten()],
        torch.float32,
        FreshMemory(torch.device("cpu")),
    )
    assert torch.equal(value, written_out(packed, scales, bits, torch.float32))
    steps = scales[0].float().abs().repeat_interleave(GROUP_SIZES[bits], 1)
    if bits == 8:
        is_inside = weight.abs() <= 127 * steps
    else:
        offsets = scales[1].float().repeat_interleave(GROUP_SIZES[bits], 1)
        is_inside = (weight >= offsets) & (weight <= offsets + 15 * steps)
        plain = (weight.view(8, -1, 32).amax(2) - weight.view(8, -1, 32).amin(2)).repeat_interleave(32, 1) / 15
        assert (value - weight).square().sum() <= 1.01 * (plain**2 / 12).sum() + 1e-9, "the range alone does no better"
    assert ((value - weight).abs()[is_inside] <= 0.5001 * steps[is_inside]).all()


def test_a_grid_of_sixteen_values_is_found_again() -> None:
    """Such as a model has that was in 4 bits before."""
    generator = torch.Generator().manual_seed(1)
    scales, offsets = torch.rand(2, 16, 4, generator=generator).half().float()
    integers = torch.randint(0, 16, (16, 4, 32), generator=generator).float()
    integers[:, :, 0], integers[:, :, 1] = 0, 15
    weight = (integers * scales[:, :, None] - offsets[:, :, None]).view(16, 128)
    value = written_out(*quantize(weight, 4), 4, torch.float32)
    torch.testing.assert_close(value, weight, rtol=2e-3, atol=2e-3)


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
def test_layers_packed_by_the_libraries_themselves(name: str, quantization: QuantFormat) -> None:
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
def test_community_checkpoints_load_as_they_are(
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
    ("quantization", "message"),
    [
        (
            {"quant_method": "quark"},
            "quant_method: must be one of bough, gptq, .*, fp8, mxfp4, modelopt, or left .*, got 'quark'",
        ),
        ({"quant_method": "gptq", "bits": 3}, "bits: must be 4 or 8, got 3"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version: must be 'gemm', got 'gemv'"),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            "checkpoint_format: must be 'gptq' or 'gptq_v2', got 'marlin'",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    tiny: Path, tmp_path: Path, quantization: dict[str, object], message: str
) -> None:
    folder = rewrite(tiny, tmp_path / "model", tensors_of(tiny), quantization)
    with pytest.raises(CheckpointError, match=message):
        build_skeleton(Checkpoint.open(folder), torch.float32)


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
def test_zeros_are_those_of_the_version(named: dict[str, object], zero_offset: int) -> None:
    """Files with an empty field were read as of the second version, and ones with the newer field as of the first."""
    assert GptqFormat.of({"bits": 4, **named}, "") == GptqFormat(4, zero_offset)


def test_a_packed_weight_without_its_scales_is_named(tiny: Path, tmp_path: Path) -> None:
    pack(str(tiny), 4, tmp_path / "packed")
    tensors = tensors_of(tmp_path / "packed")
    del tensors["model.layers.1.mlp.up_proj.weight.packed_scales"]
    folder = rewrite(tiny, tmp_path / "model", tensors, {"quant_method": "bough", "bits": 4})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight\.packed_scales.* is missing"):
        build_skeleton(Checkpoint.open(folder), torch.float32)


def test_packing_goes_on_where_it_was_interrupted(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    pack(str(tiny), 4, whole, shard_bytes=100_000)
    real, calls = packing.save_file, []

    def fails(tensors: dict[str, torch.Tensor], file: Path, metadata: dict[str, str]) -> None:
        calls.append(file)
        if len(calls) == 3:
            file.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        real(tensors, file, metadata=metadata)

    monkeypatch.setattr(packing, "save_file", fails)
    with pytest.raises(ConfigError, match=r"packed-00002.*the disk is full; make room and run the same command again"):
        pack(str(tiny), 4, broken, shard_bytes=100_000)
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        Checkpoint.open(broken)
    pack(str(tiny), 4, broken, shard_bytes=100_000)
    assert len(calls) == len(list(whole.glob("*.safetensors"))) + 1, "whole shards are not written again"
    assert {f.name: f.read_bytes() for f in broken.iterdir()} == {f.name: f.read_bytes() for f in whole.iterdir()}


def test_packing_refuses_what_would_overwrite(tiny: Path, tmp_path: Path) -> None:
    pack(str(tiny), 4, tmp_path / "packed")
    with pytest.raises(ConfigError, match="with another packed model"):
        pack(str(tiny), 8, tmp_path / "packed")
    with pytest.raises(ConfigError, match="must be another folder than the model's"):
        pack(str(tiny), 4, tiny)
    with pytest.raises(ConfigError, match="is packed already"):
        pack(str(tmp_path / "packed"), 4, tmp_path / "twice")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="--out: must be an empty or a new folder"):
        pack(str(tiny), 4, tmp_path / "full")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "bough_pack.json.partial").touch()  # by a run that was killed in its first moment
    pack(str(tiny), 4, tmp_path / "begun")


def test_where_nothing_can_be_written(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=f"--out: {out} cannot be made: .*; choose another folder"):
            pack(str(tiny), 4, out)


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 2}', '{"shards": {}, "checksums": 3, "weight_map": {}}'])
def test_a_damaged_manifest(tiny: Path, tmp_path: Path, content: str) -> None:
    """On going on with a run, and on opening what it made."""
    packed = tmp_path / "packed"
    pack(str(tiny), 4, packed)
    (packed / MANIFEST_NAME).write_text(content)
    for use in (lambda: pack(str(tiny), 4, packed), lambda: build_skeleton(Checkpoint.open(packed), torch.float32)):
        with pytest.raises(
            CheckpointError, match=f"{MANIFEST_NAME}: is damaged: .*run `bough pack` into another folder"
        ):
            use()


def test_a_disk_that_fills_at_the_end_is_an_error_too(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packing.shutil, "copyfile", fails)
    with pytest.raises(ConfigError, match="the disk is full; make room"):
        pack(str(tiny), 4, tmp_path / "packed")
    monkeypatch.undo()
    pack(str(tiny), 4, tmp_path / "packed")
    assert Checkpoint.open(tmp_path / "packed").tensors


def with_a_tensor(folder: Path, name: str, tensor: torch.Tensor) -> None:
    """One more in the first file, for which no architecture has a place."""
    file = min(folder.glob("*.safetensors"))
    save_file({**load_file(file), name: tensor}, file, metadata={"format": "pt"})


def test_tensors_of_any_data_type_are_copied(tiny: Path, tmp_path: Path) -> None:
    folder, numbers = Path(shutil.copytree(tiny, tmp_path / "model")), torch.arange(7)
    with_a_tensor(folder, "position_ids", numbers)
    pack(str(folder), 4, tmp_path / "packed")
    assert torch.equal(tensors_of(tmp_path / "packed")["position_ids"], numbers)


def test_a_tensor_of_a_data_type_that_is_not_known_is_named(tiny: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "model"))
    with_a_tensor(folder, "scale", torch.ones(4).to(torch.float8_e5m2))
    with pytest.raises(CheckpointError, match=r"tensor scale must be stored as one of BF16, .* got F8_E5M2"):
        pack(str(folder), 4, tmp_path / "packed")


def test_packing_needs_room_before_it_begins(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(packing.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ConfigError, match=r"0\.00 GB are to be written and 0\.00 GB are free"):
        pack(str(tiny), 4, tmp_path / "packed")


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.2.mlp.up_proj.weight.packed"])
def test_a_model_that_stays_in_memory_is_compared_with_its_checksums(tiny: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "packed"
    pack(str(tiny), 4, folder)
    checkpoint = Checkpoint.open(folder)
    flip(checkpoint.tensors[name])
    with pytest.raises(CheckpointError, match=f"{name} does not have the checksum"):
        ResidentModel(build_skeleton(checkpoint, torch.float32), torch.device("cpu"))


@pytest.mark.parametrize("max_resident", [0, 4])
def test_a_byte_that_has_changed_is_found_and_named(tiny: Path, tmp_path: Path, max_resident: int) -> None:
    folder = tmp_path / "packed"
    pack(str(tiny), 4, folder)
    place = Checkpoint.open(folder).tensors["model.layers.2.mlp.up_proj.weight.packed"]
    flip(place)
    with (
        streamed(folder, torch.float32, max_resident=max_resident) as model,
        pytest.raises(StreamError, match=r"layers\.2\.mlp\.up_proj\.weight\.packed .*checksum"),
    ):
        plain_logits(model, TOKENS)


def test_what_stays_in_another_data_type_is_converted_in_parts(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, the embeddings of a large vocabulary would stand in memory twice for a moment, which no budget counts."""
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
def test_packed_tensors_that_do_not_fit_one_another_are_named(
    tiny: Path,
    tmp_path: Path,
    part: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    message: str,
) -> None:
    """The kernels would read beyond the end of whatever is too short."""
    rng, packed = np.random.default_rng(5), {}
    for name, tensor in tensors_of(tiny).items():
        if "proj" not in name:
            packed[name] = tensor
            continue
        parts, _ = awq(tensor, 4, 32, rng, True)
        packed.update({f"{name.removesuffix('.weight')}.{key}": data for key, data in parts.items()})
    victim = f"model.layers.1.mlp.up_proj.{part}"
    packed[victim] = change(packed[victim])
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    folder = rewrite(tiny, tmp_path / "model", packed, quantization)
    with pytest.raises(CheckpointError, match=message):
        build_skeleton(Checkpoint.open(folder), torch.float32)


def test_outputs_that_are_no_whole_words_of_zeros_are_refused(tmp_path: Path) -> None:
    """Of GPTQ's zeros only whole words were asked for, and the kernel read beyond them."""
    file, format_ = tmp_path / "model.safetensors", GptqFormat(4, 1)
    tensors = {"qweight": (2, 12), "qzeros": (1, 1), "scales": (1, 12)}
    dtypes = {"qweight": torch.int32, "qzeros": torch.int32, "scales": torch.float16}
    save_file({f"x.{name}": torch.zeros(shape, dtype=dtypes[name]) for name, shape in tensors.items()}, file)
    with pytest.raises(CheckpointError, match=r"tensor x.qzeros must be whole words of 8 outputs, got 12"):
        format_.source("x.qweight", PackedTensors(read_header(file)))


@pytest.mark.parametrize(("bits", "num_inputs", "num_groups"), [(4, 6, 2), (4, 12, 2), (8, 12, 2), (8, 8192, 1)])
def test_groups_that_no_kernel_takes_are_refused(tmp_path: Path, bits: int, num_inputs: int, num_groups: int) -> None:
    """In 4 bits an odd group's last input was never written, and a GPU's kernel takes powers of two only."""
    file, kinds = tmp_path / "model.safetensors", 2 if bits == 4 else 1
    packed = torch.zeros(3, num_inputs * bits // 8, dtype=torch.uint8 if bits == 4 else torch.int8)
    scales = torch.zeros(kinds, 3, num_groups, dtype=torch.float16)
    save_file({"x.weight.packed": packed, "x.weight.packed_scales": scales}, file)
    with pytest.raises(
        CheckpointError, match=f"packed_scales makes groups of {num_inputs // num_groups} inputs; must be a power of"
    ):
        BoughFormat(bits).source("x.weight.packed", PackedTensors(read_header(file)))


def test_scales_are_what_they_are_in_float16() -> None:
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


def test_numbers_are_rounded_to_float16_as_torch_does() -> None:
    """At, beside and between all of its numbers, with their signs, and beyond them."""
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
def test_a_value_is_written_where_it_stands(dtype: torch.dtype) -> None:
    """In float16 a whole matrix was made in float32 first: gigabytes beside all budgets for a large head."""
    out = torch.empty(3, 5, dtype=dtype)
    places: list[int] = []
    write_out(out, lambda *arrays: places.append(arrays[-1].ctypes.data))
    assert places == [out.data_ptr()]
