"""Damaged checkpoints are found at start, by the name of what is wrong; and hub ids resolve through the cache."""

from __future__ import annotations

import errno
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, MixtralConfig

from bough.errors import CheckpointError
from bough.model.architecture.architecture import build_empty, cut_layers
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.checkpoint.model_places import fetch, load_tokenizer_files, resolve
from bough.model.checkpoint.safetensors_folder import INDEX_NAME
from bough.model.loading.loading import build_skeleton
from loadtest.common.tiny_model import save_model
from target_worker.link.layer_extents import ALIGNMENT, plan_layer


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def shards(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.safetensors"))
    assert len(found) > 1, "the tiny model is to have several shards"
    return found


def with_header(header: bytes) -> Callable[[bytes], bytes]:
    return lambda _: struct.pack("<Q", len(header)) + header + bytes(8)


def without_offsets(data: bytes) -> bytes:
    begin = data.index(b'"data_offsets":[') + len(b'"data_offsets":[')
    end = data.index(b"]", begin)
    return data[:begin] + b"[]".ljust(end - begin) + data[end:]


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    **{f"first {keep} bytes": (lambda data, keep=keep: data[:keep], "truncated") for keep in (0, 5, 100, -100)},
    "no JSON": (with_header(b"x" * 16), "header is not a JSON object"),
    "a list": (with_header(b"[1, 2, 3, 4]    "), "header is not a JSON object"),
    "a number": (with_header(b"17              "), "header is not a JSON object"),
    "null": (with_header(b"null            "), "header is not a JSON object"),
    "nested": (with_header(b"[" * 100_000), "header is not a JSON object"),
    "infinite": (
        with_header(b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,1e999]}}'),
        "header entry of w is malformed",
    ),
    "negative": (
        with_header(b'{"w":{"dtype":"F32","shape":[-1,-1],"data_offsets":[0,4]}}'),
        r"w must have no negative dimension.*\[-1, -1\]",
    ),
    "offsets that are no numbers": (without_offsets, "malformed"),
    "another data type": (
        lambda data: data.replace(b'"dtype":"F32', b'"dtype":"F16', 1),
        r"tensor \S+ has \d+ bytes, but F16 of shape .* takes \d+",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_shard_is_named(name: str, copy: Path) -> None:
    victim, (damage, message) = shards(copy)[0], DAMAGES[name]
    victim.write_bytes(damage(victim.read_bytes()))
    with pytest.raises(CheckpointError, match=f"{victim.name}: .*{message}"):
        Checkpoint.open(copy)


def test_a_missing_or_unreadable_shard_is_named(copy: Path) -> None:
    victim = shards(copy)[1]
    victim.unlink()
    with pytest.raises(CheckpointError, match=f"{victim.name}.*missing"):
        Checkpoint.open(copy)
    victim.symlink_to("/proc/self/mem")  # whose first bytes cannot be read
    with pytest.raises(CheckpointError, match=f"{victim.name}: cannot be read: .*Input/output error"):
        Checkpoint.open(copy)


@pytest.mark.parametrize("weight_map", [[1, 2], {"lm_head.weight": 7}, {"lm_head.weight": None}, None, "files"])
def test_an_invalid_index_is_refused(copy: Path, weight_map: object) -> None:
    (copy / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=INDEX_NAME):
        Checkpoint.open(copy)


def test_a_tensor_in_the_index_must_be_in_its_file(copy: Path) -> None:
    index = json.loads((copy / INDEX_NAME).read_text())
    index["weight_map"]["model.layers.9.extra"] = shards(copy)[0].name
    (copy / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model\.layers\.9\.extra"):
        Checkpoint.open(copy)


def test_a_tensor_in_two_files_is_read_from_the_indexed_one(copy: Path) -> None:
    """Left behind when its folder was moved."""
    first, second = shards(copy)[:2]
    name = next(iter(load_file(first)))
    save_file({**load_file(second), name: torch.zeros(load_file(first)[name].shape)}, second)
    assert Checkpoint.open(copy).tensors[name].file == first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": "sixty"}, "hidden_size"),
        ({"num_hidden_layers": 5}, r"model\.layers\.4\..*missing"),
        ({"intermediate_size": 128}, r"configuration's shape \[128, 64\], got \[96, 64\]"),
        ({"model_type": "no-such-model"}, "no-such-model"),
        ({"quantization_config": {"quant_method": "quark"}}, "quant_method: must be one of gptq, .*, got 'quark'"),
    ],
)
def test_an_inconsistent_configuration_is_refused(copy: Path, change: dict[str, object], message: str) -> None:
    config = json.loads((copy / "config.json").read_text()) | change
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        build_skeleton(Checkpoint.open(copy), torch.float32)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (AutoConfig.for_model("llama", num_hidden_layers=4), {}),
        (
            AutoConfig.for_model("smollm3", num_hidden_layers=4, no_rope_layers=[1, 0, 1, 0]),
            {"no_rope_layers": [0, 0]},
        ),
        (
            AutoConfig.for_model("qwen2_moe", num_hidden_layers=4, mlp_only_layers=[1]),
            {"mlp_only_layers": [0], "decoder_sparse_step": 1},
        ),
        (
            AutoConfig.for_model("qwen3_moe", num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[1]),
            {"mlp_only_layers": [0], "decoder_sparse_step": 1},
        ),
        (
            AutoConfig.for_model("deepseek_v3", num_hidden_layers=4, first_k_dense_replace=3),
            {"first_k_dense_replace": 1},
        ),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_the_configurations_layer_settings_follow_the_layers(config: Any, wanted: dict[str, object]) -> None:
    cut_layers(config, (1, 3))
    assert config.num_hidden_layers == 2
    assert {name: getattr(config, name) for name in wanted} == wanted


SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 50}


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("llama4_text", "layers of chunked_attention"),
        ("minimax", "layers of linear_attention keep a state, which is supported on trees only in qwen3_next"),
        ("mamba", "keep a state"),
        ("bloom", "computes attention by itself"),
        ("stablelm", "computes attention by itself"),
        ("gpt2", "does not list its layers"),
        ("falcon", "does not build it as a language model with bough's attention"),
        ("deepseek_v32", "layers of indexed_attention"),
        ("longcat_flash", r"layer 0 has 2 attentions with latents \(MLA\), but slots have room for one"),
        ("gemma3n_text", "attend to the keys of others"),
        ("gemma4_text", "head_dim.* is a per-layer attribute"),
        ("reformer", "is_decoder=True"),
    ],
)
def test_unsupported_architectures_are_refused_by_name_and_reason(model_type: str, reason: str) -> None:
    config = AutoConfig.for_model(model_type)
    for name, value in SMALL.items():
        if hasattr(config, name):
            setattr(config, name, value)
    if model_type in ("llama4_text", "minimax"):
        config.layer_types = config.layer_types[:2]
    if model_type == "gemma3n_text":
        config.layer_types, config.num_kv_shared_layers = ["full_attention"] * 2, 1
    with pytest.raises(CheckpointError, match=f"model_type '{model_type}' cannot be run: .*{reason}"):
        build_empty(config, torch.float32)


@pytest.mark.parametrize("part", ["self_attn.q_proj.weight", "block_sparse_moe.experts.1.w1.weight"])
def test_a_tensor_of_an_unsupported_data_type_is_refused(tmp_path: Path, part: str) -> None:
    """Also where it is one of many that make up a parameter."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = MixtralConfig(**sizes, vocab_size=262, num_hidden_layers=1, num_local_experts=2)
    folder = save_model(tmp_path / "mixtral", config)
    name = f"model.layers.0.{part}"
    place = Checkpoint.open(folder).tensors[name]
    data = place.file.read_bytes()
    begin = data.index(f'"{name}"'.encode())
    place.file.write_bytes(data[:begin] + data[begin:].replace(b'"dtype":"F32"', b'"dtype":"U32"', 1))
    with pytest.raises(CheckpointError, match=f"tensor {name} must be stored as one of .*BF16.* got U32"):
        build_skeleton(Checkpoint.open(folder), torch.float32)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """As written by `save_pretrained` of a model alone."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(
        CheckpointError, match=rf"^{tmp_path}: must have a tokenizer\.json, or another .*, got: [^\n]+$"
    ):
        load_tokenizer_files(tmp_path)


def test_missing_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"must be a folder or a GGUF file that exists, .*nowhere"):
        Checkpoint.open(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match="must be a folder or a model in the local"):
        Checkpoint.open("some-org/some-model")


def test_a_hub_id_resolves_through_the_cache(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout that huggingface_hub writes, made by hand."""
    from huggingface_hub import constants

    revision = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "models--org--tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(revision)
    (repo / "snapshots").mkdir()
    (repo / "snapshots" / revision).symlink_to(tiny, target_is_directory=True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert resolve("org/tiny") == repo / "snapshots" / revision
    assert Checkpoint.open("org/tiny").fingerprint() == Checkpoint.open(tiny).fingerprint()


def test_an_incomplete_snapshot_names_the_remedy(tiny: Path, tmp_path: Path) -> None:
    """Such as `bough plan` leaves, which fetches config.json alone."""
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    shutil.copyfile(tiny / "config.json", snapshot / "config.json")
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: .* is missing; fetch the whole model with `hf download`"
    ):
        Checkpoint.open(snapshot)


def test_missing_files_of_a_hub_id_are_fetched(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, dict[str, object]]] = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda model, **how: asked.append((model, how)))
    fetch(str(tiny), "org/one", "org/one", "org/other", "/org/no-id")
    assert [model for model, _ in asked] == ["org/one", "org/other"]
    assert "local_files_only" not in asked[0][1]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (LocalEntryNotFoundError("no connection"), "a folder or a model in the local Hugging Face cache, got org/one"),
        (OSError(errno.ENOSPC, "No space left on device"), "org/one cannot be fetched: .*No space left"),
    ],
)
def test_files_that_cannot_be_fetched_are_an_error(
    error: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(CheckpointError, match=message):
        fetch("org/one")


def test_layers_are_aligned_extents_with_their_tensors(tiny: Path) -> None:
    skeleton = build_skeleton(Checkpoint.open(tiny), torch.float32)
    for slots in skeleton.layer_slots:
        layer = plan_layer("layer", slots)
        for extent in layer.extents:
            assert extent.offset % ALIGNMENT == extent.num_bytes % ALIGNMENT == extent.slab_offset % ALIGNMENT == 0
            assert extent.num_bytes - ALIGNMENT < extent.needed_bytes <= extent.num_bytes
        for place, begin in layer.begins.items():
            (home,) = [
                e
                for e in layer.extents
                if e.file == place.file and e.offset <= place.offset < e.offset + e.needed_bytes
            ]
            assert begin == home.slab_offset + place.offset - home.offset
            assert place.offset + place.num_bytes <= home.offset + home.needed_bytes
