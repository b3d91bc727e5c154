"""GGUF files that cannot be read are refused by name: of the file, of its field, of the tensor and its type."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter

from bough.errors import CheckpointError
from bough.model.architecture.architecture import load_config
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.checkpoint.model_places import fetch, load_tokenizer_files, resolve
from bough.model.loading.loading import build_skeleton
from bough.model.sizes.model_sizes import find_model
from loadtest.common.tiny_model import save_model
from tests.fakes.model.gguf_files import finish, write_gguf
from tests.fakes.model.packed_files import rewrite, tensors_of
from tests.model.checkpoint.test_gguf import MODELS


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that can be read."""
    folder = tmp_path_factory.mktemp("gguf")
    write_gguf(save_model(folder / "source", MODELS["llama"]), folder / "model.gguf", lambda _: "Q8_0")
    return folder / "model.gguf"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_count": None}, r"field llama\.block_count must be a whole number, got None"),
        ({"attention.head_count_kv": 0}, r"llama\.attention\.head_count_kv must be a divisor of 4, .* got 0"),
        ({"attention.head_count": "4"}, r"attention\.head_count must be a whole number, got '4'"),
        ({"attention.layer_norm_rms_epsilon": None}, r"layer_norm_rms_epsilon must be a number, got None"),
        ({"expert_count": 8}, r"field llama\.expert_count is not supported for this architecture, got 8"),
        ({"attention.value_length": 16}, r"attention\.value_length must be 32, the size of a head, got 16"),
        ({"rope.dimension_count": 16}, r"rope\.dimension_count must be 32, the size of a head, got 16"),
        ({"rope.scaling.type": "longrope"}, r"rope\.scaling\.type must be none, linear or yarn, got 'longrope'"),
        ({"rope.scaling.type": "linear"}, r"rope\.scaling\.factor must be a number, got None"),
        ({"feed_forward_length": 128}, r"tensor blk\.0\.ffn_gate\.weight has shape \[96, 64\], but"),
        ({"block_count": 3}, r"tensor blk\.2\.attn_q\.weight, which is .*layers\.2\.self_attn\.q_proj.*, is missing"),
    ],
)
def test_a_field_that_cannot_be_followed_is_named(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    source, file = save_model(tmp_path / "source", MODELS["llama"]), tmp_path / "model.gguf"
    write_gguf(source, file, lambda _: "Q4_0", **fields)
    with pytest.raises(CheckpointError, match=message):
        build_skeleton(Checkpoint.open(file), torch.float32)


def small(file: Path, name: str, kind: str, architecture: str = "llama") -> Path:
    """A file with one tensor."""
    writer, qtype = GGUFWriter(file, architecture), GGMLQuantizationType[kind]
    writer.add_tensor(name, np.zeros((2, gguf.GGML_QUANT_SIZES[qtype][1]), np.uint8), raw_dtype=qtype)
    finish(writer)
    return file


@pytest.mark.parametrize("kind", ["IQ3_XXS", "IQ2_XXS", "TQ1_0", "MXFP4"])
def test_a_type_that_is_not_supported_is_named_with_its_tensor(kind: str, tmp_path: Path) -> None:
    file = small(tmp_path / "model.gguf", "blk.0.attn_q.weight", kind)
    with pytest.raises(CheckpointError, match=rf"tensor blk\.0\.attn_q\.weight: its type must be .*IQ4_XS, got {kind}"):
        Checkpoint.open(file)


def test_an_architecture_that_is_not_supported_is_named(tmp_path: Path) -> None:
    file = small(tmp_path / "model.gguf", "token_embd.weight", "Q8_0", "mamba")
    with pytest.raises(CheckpointError, match=r"general\.architecture must be one of llama, .*, got mamba"):
        load_config(file)


def test_a_tensor_without_a_place_is_named(tmp_path: Path) -> None:
    """A bias of queries is added, and is not to be left out in silence."""
    source, file = save_model(tmp_path / "source", MODELS["qwen3"]), tmp_path / "model.gguf"
    tensors = tensors_of(source)
    bias = {f"model.layers.{i}.self_attn.q_proj.bias": torch.ones(128) for i in range(2)}
    biased = rewrite(source, tmp_path / "biased", tensors | bias, None)
    write_gguf(biased, file, lambda _: "Q8_0")
    with pytest.raises(CheckpointError, match=r"tensor blk\.0\.attn_q\.bias has no place in a model of qwen3"):
        build_skeleton(Checkpoint.open(file), torch.float32)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"GGML" + data[4:], r"must begin with b'GGUF', as a GGUF file does, got b'GGML'"),
        (lambda data: data[:4] + b"\1\0\0\0" + data[8:], r"must be of version 2 or 3, got 1"),
        (lambda data: data[:4] + data[7:3:-1] + data[8:], r"in little-endian order, got big-endian"),
        (lambda data: data[:-40], r"is truncated"),
        (lambda data: data[:300], r"is truncated or damaged"),
        (lambda data: data[:6], r"version 2 or 3|truncated"),
        (lambda _: b"", r"must begin with b'GGUF', as a GGUF file does, got b''"),
        (lambda data: data[:8] + b"\xff" * 8 + data[16:], r"is truncated or damaged"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_refused(damage: Any, message: str, whole: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(damage(whole.read_bytes()))
    with pytest.raises(CheckpointError, match=rf"model\.gguf: .*{message}"):
        Checkpoint.open(file)


def test_a_file_of_a_hub_id(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the layout of huggingface_hub's cache; never a file outside of it."""
    from huggingface_hub import constants

    revision = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "cache" / "models--org--tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(revision)
    (repo / "snapshots" / revision / "sub").mkdir(parents=True)
    file = repo / "snapshots" / revision / "sub" / "model.gguf"
    file.symlink_to(whole)
    (tmp_path / "outside.gguf").symlink_to(whole)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    assert resolve("org/tiny/sub/model.gguf") == file
    assert find_model("org/tiny/sub/model.gguf").path == file
    (file.parent / "m-00001-of-00002.gguf").symlink_to(whole)
    for name in (
        "org/tiny/sub/m-00001-of-00002.gguf",
        "org/tiny/other.gguf",
        "org/tiny/../../../../outside.gguf",
        "org/none/model.gguf",
        "some/model.gguf",
    ):
        with pytest.raises(CheckpointError, match=r"model: .*outside|model: must be a"):
            Checkpoint.open(name)
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *where, **_: asked.append(where))
    fetch("org/tiny/sub/model.gguf", str(whole), "org/large/sub/m-00001-of-00002.gguf")
    split = [("org/large", f"sub/m-0000{number}-of-00002.gguf") for number in (1, 2)]
    assert asked == [("org/tiny", "sub/model.gguf"), *split]


def text(value: str, more: int = 0) -> bytes:
    """A text, or one whose length is `more` than it has."""
    return struct.pack("<Q", len(value) + more) + value.encode()


def header_of(name: str, kind: int, value: bytes, num_bytes: int = 0) -> bytes:
    """A header with a field of a kind, and zeros up to `num_bytes`."""
    fields = text("general.architecture") + struct.pack("<I", 8) + text("llama") + text(name)
    start = struct.pack("<4sIQQ", b"GGUF", 3, 0, 2) + fields + struct.pack("<I", kind) + value
    return start.ljust(num_bytes, b"\0")


NUMBERS_LIST = struct.pack("<IQ2I", 4, 2, 5, 6)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (header_of("general.name", 8, text("", 9 << 20), 8 << 20), r"a text ends beyond the file"),
        (header_of("general.tags", 9, struct.pack("<IQ", 0, 8 << 20), 9 << 20), r"up to 65536 elements, got 8388608"),
        (header_of("general.tags", 9, struct.pack("<IQ", 9, 1) * 2000), r"lists must be texts or numbers, got kind 9"),
        (header_of("split.count", 9, NUMBERS_LIST), r"field split\.count must be a whole number, got \[5, 6\]"),
        (header_of("split.count", 8, text("x")), r"field split\.count must be a whole number, got 'x'"),
        (header_of("tokenizer.chat_template", 4, b"\7\0\0\0"), r"tokenizer\.chat_template must be a text, got 7"),
        (header_of("tokenizer.chat_template.tool_use", 9, NUMBERS_LIST), r"template\.tool_use must be a text, got"),
        (header_of("tokenizer.ggml.tokens", 9, NUMBERS_LIST), r"tokenizer\.ggml\.tokens must be texts, got 5"),
    ],
    ids=["text", "long list", "nested", "split list", "split text", "template", "tool use", "tokens"],
)
def test_a_damaged_field_is_refused_without_reading_all(data: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=rf"model\.gguf: .*{message}"):
            load_tokenizer_files(file)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()
