"""Weights for llama.cpp: what is written, and that its order of a head's rows means the same attention."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from safetensors.torch import save_file

from bough.errors import ConfigError
from bough.model.checkpoint.safetensors_folder import INDEX_NAME
from loadtest.peers import gguf as peer_gguf
from loadtest.peers.gguf import IN_LAYER, export, permuted

HIDDEN, HEADS, KV_HEADS, INNER, VOCAB, NUM_LAYERS = 64, 4, 2, 96, 40, 3
Floats = npt.NDArray[np.float64]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama of random weights, a file for each layer and one for the rest."""
    folder = tmp_path_factory.mktemp("llama")
    generator = torch.Generator().manual_seed(1)
    rows_of_kv = HIDDEN * KV_HEADS // HEADS
    shapes = {"q": (HIDDEN, HIDDEN), "k": (rows_of_kv, HIDDEN), "v": (rows_of_kv, HIDDEN), "o": (HIDDEN, HIDDEN)}
    in_layer: dict[str, tuple[int, ...]] = {f"self_attn.{name}_proj.weight": shape for name, shape in shapes.items()}
    in_layer |= {f"mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
    in_layer |= {"mlp.down_proj.weight": (HIDDEN, INNER)}
    in_layer |= {f"{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    files = {"outside": {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}}
    for layer in range(NUM_LAYERS):
        files[f"layer-{layer}"] = {f"model.layers.{layer}.{name}": shape for name, shape in in_layer.items()}
    for file, tensors in files.items():
        values = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in tensors.items()}
        save_file(values, folder / f"{file}.safetensors")
    weight_map = {name: f"{file}.safetensors" for file, tensors in files.items() for name in tensors}
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    config = {
        "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": VOCAB,
        "intermediate_size": INNER, "max_position_embeddings": 128, "num_hidden_layers": NUM_LAYERS,
        "rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 1e4},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def few_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer of three tokens in place of the package's, whose 49,152 take seconds to read and to write."""
    writer = GGUFWriter(file := tmp_path / "tokenizer.gguf", "llama")
    writer.add_token_list(["<s>", "a", "b"])
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    monkeypatch.setattr(peer_gguf, "_tokenizer_file", lambda: file)


def stored(folder: Path, name: str) -> torch.Tensor:
    from safetensors import safe_open

    file = json.loads((folder / INDEX_NAME).read_text())["weight_map"][name]
    with safe_open(folder / file, framework="pt") as opened:
        value: torch.Tensor = opened.get_tensor(name)
        return value


def rotated(head: Floats, position: int, *, is_interleaved: bool) -> Floats:
    """Rotary embedding of one head: pairs are neighbours (llama.cpp), or a half apart (Hugging Face)."""
    half = len(head) // 2
    angles = position / 1e4 ** (np.arange(half) / half)
    left, right = (head[::2], head[1::2]) if is_interleaved else (head[:half], head[half:])
    turned = left * np.cos(angles) - right * np.sin(angles), right * np.cos(angles) + left * np.sin(angles)
    return np.stack(turned, axis=1).ravel() if is_interleaved else np.concatenate(turned)


def test_scores_are_in_the_peers_order() -> None:
    rng = np.random.default_rng(2)
    num_heads, size, hidden = 3, 8, 10
    q, k = rng.normal(size=(2, num_heads * size, hidden))
    x, y = rng.normal(size=(2, hidden))
    ours = (q @ x).reshape(num_heads, size), (k @ y).reshape(num_heads, size)
    theirs = (
        (permuted(q, num_heads) @ x).reshape(num_heads, size),
        (permuted(k, num_heads) @ y).reshape(num_heads, size),
    )
    for head in range(num_heads):
        score = rotated(ours[0][head], 9, is_interleaved=False) @ rotated(ours[1][head], 4, is_interleaved=False)
        same = rotated(theirs[0][head], 9, is_interleaved=True) @ rotated(theirs[1][head], 4, is_interleaved=True)
        assert same == pytest.approx(score)
        other = rotated(ours[0][head], 9, is_interleaved=True) @ rotated(ours[1][head], 4, is_interleaved=True)
        assert other != pytest.approx(score), "the order is of consequence"


def test_the_halves_of_a_heads_rows_are_interleaved() -> None:
    assert permuted(np.arange(8).reshape(8, 1), 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_rows_that_are_no_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="rows: must be a multiple of 2 x 3 heads, got 9"):
        permuted(np.zeros((9, 2)), 3)


@pytest.mark.usefixtures("few_tokens")
def test_layers_are_taken_in_order_and_values_are_exact(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "some.gguf"
    export(checkpoint, file, (0, 2), "bf16")
    reader = GGUFReader(file)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    in_layers = {f"blk.{position}.{name}" for position in range(2) for name in IN_LAYER.values()}
    assert set(tensors) == in_layers | {"token_embd.weight", "output_norm.weight"}
    expected = {
        "token_embd.weight": stored(checkpoint, "model.embed_tokens.weight"),
        "blk.1.ffn_down.weight": stored(checkpoint, "model.layers.2.mlp.down_proj.weight"),
        "blk.1.attn_v.weight": stored(checkpoint, "model.layers.2.self_attn.v_proj.weight"),
    }
    for name, heads in (("q", HEADS), ("k", KV_HEADS)):
        weight = stored(checkpoint, f"model.layers.2.self_attn.{name}_proj.weight")
        order = permuted(np.arange(weight.shape[0]).reshape(-1, 1), heads).ravel()
        expected[f"blk.1.attn_{name}.weight"] = weight[torch.from_numpy(order)]
    for name, value in expected.items():
        assert tensors[name].tensor_type is GGMLQuantizationType.BF16
        assert tensors[name].shape.tolist() == list(reversed(value.shape)), name
        assert tensors[name].data.tobytes() == value.view(torch.uint16).numpy().tobytes(), name
    norm = tensors["blk.1.ffn_norm.weight"]
    assert norm.tensor_type is GGMLQuantizationType.F32
    wanted = stored(checkpoint, "model.layers.2.post_attention_layernorm.weight")
    assert np.array_equal(norm.data, wanted.float().numpy())
    settings = {name: field.contents() for name, field in reader.fields.items() if name.startswith("llama.")}
    assert settings["llama.block_count"] == 2
    assert settings["llama.attention.head_count_kv"] == KV_HEADS
    assert settings["llama.rope.dimension_count"] == HIDDEN // HEADS
    tokenizer = {name: field.contents() for name, field in reader.fields.items() if name.startswith("tokenizer.")}
    assert tokenizer == {
        "tokenizer.ggml.tokens": ["<s>", "a", "b"],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ messages }}",
    }


def test_the_tokenizer_is_the_packages(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "tokenizer.gguf", "llama")
    peer_gguf._add_tokenizer(writer)
    (fields,) = writer.kv_data
    assert len(fields["tokenizer.ggml.tokens"].value) == 49152
    assert fields["tokenizer.ggml.eos_token_id"].value == 2
    assert "<|im_start|>" in fields["tokenizer.chat_template"].value


@pytest.mark.usefixtures("few_tokens")
@pytest.mark.parametrize(("format_name", "largest_error"), [("f16", 0.0), ("q4_0", 0.5)])
def test_weights_in_other_formats_are_as_close_as_these_allow(
    checkpoint: Path, tmp_path: Path, format_name: str, largest_error: float
) -> None:
    from gguf.quants import dequantize

    file = tmp_path / "other.gguf"
    export(checkpoint, file, range(NUM_LAYERS), format_name)
    (tensor,) = (tensor for tensor in GGUFReader(file).tensors if tensor.name == "blk.1.ffn_up.weight")
    assert tensor.tensor_type.name == format_name.upper()
    wanted = stored(checkpoint, "model.layers.1.mlp.up_proj.weight").float().numpy()
    assert np.abs(dequantize(tensor.data, tensor.tensor_type) - wanted).max() <= largest_error


@pytest.mark.usefixtures("few_tokens")
def test_weights_that_are_not_in_bfloat16_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(
        {"model.embed_tokens.weight": torch.zeros(VOCAB, HIDDEN), "model.norm.weight": torch.zeros(HIDDEN)},
        tmp_path / "outside.safetensors",
    )
    with pytest.raises(ConfigError, match=r"embed_tokens.weight: dtype must be bfloat16, got torch.float32"):
        export(tmp_path, tmp_path / "out.gguf", (0,), "bf16")
