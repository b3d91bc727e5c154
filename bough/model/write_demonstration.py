"""The demonstration target: SmolLM2-135M-Instruct, block-expanded to a size that must be streamed.

Block expansion (LLaMA Pro, arXiv 2401.02415): copies of a block whose `o_proj` and `down_proj` are zero are read and
computed in full but change nothing. So the text is the original model's, at the cost of a model ten times as large.

`python -m bough.model.write_demonstration FOLDER [COPIES]` writes it, unless it exists. This module imports neither
torch nor transformers, which would take longer than writing.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from bough.config.cache_paths import EXPANSION_NAME, is_written, make_space, original_file
from bough.errors import BoughError
from bough.model.checkpoint.atomic_files import replace
from bough.model.checkpoint.container import TensorPlace
from bough.model.checkpoint.gguf_file import GgufHeader, read_gguf
from bough.model.checkpoint.gguf_model import gguf_config
from bough.model.checkpoint.gguf_tokenizer import gguf_tokenizer
from bough.model.checkpoint.safetensors_folder import INDEX_NAME
from bough.tokenization.demonstration_template import write_template

BLOCK_TENSORS = {  # GGUF's names of a block's tensors, and transformers'
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTSIDE_TENSORS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
ZEROED = ("attn_output", "ffn_down")
ROTATED = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}  # their rows are in llama.cpp's order

NUM_WRITERS = 4  # files that are written at once: each waits for the disk at its end

Bfloat16 = np.ndarray[Any, np.dtype[np.uint16]]  # bits, as numpy has no bfloat16


def write_demonstration(folder: Path, copies: int) -> None:
    """Write the model atomically, with `copies` identity copies after every block.

    Raises:
        ConfigError: the package with the weights is missing, or the disk is too full.
    """
    if is_written(folder, copies):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    make_space(folder, copies)
    header = read_gguf(original_file())
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    try:
        partial.mkdir()
        write_tokenizer(header, partial)
        _write_weights(header, partial, copies)
        _write_config(header, partial, copies)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)


def write_tokenizer(header: GgufHeader, folder: Path) -> None:
    """Write the GGUF file's tokenizer, with the demonstration's chat template."""
    tokens = header.list_of("tokenizer.ggml.tokens")
    (folder / "tokenizer.json").write_bytes(gguf_tokenizer(header).tokenizer_json)
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # transformers' names and GGUF's
    special = {f"{name}_token": tokens[header.fields[f"tokenizer.ggml.{key}_token_id"]] for name, key in names.items()}
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special})
    write_template(folder)


def _write_weights(header: GgufHeader, folder: Path, copies: int) -> None:
    """Write one file for each original block with its copies, and one for everything else."""
    config = gguf_config(header.file)
    num_blocks = config["num_hidden_layers"]
    weight_map: dict[str, str] = {}

    def write(name: str, tensors: Mapping[str, Bfloat16]) -> None:
        content = f"{len(tensors)} tensors of the demonstration"
        replace(folder / name, lambda partial: _save(tensors, partial), content)
        weight_map.update(dict.fromkeys(tensors, name))

    def write_block(index: int) -> None:
        write(f"block-{index:03d}.safetensors", expanded_block(header, config, index, copies))

    outside = {name: _bfloat16(_read(header.tensors[stored])) for stored, name in OUTSIDE_TENSORS.items()}
    write("outside-blocks.safetensors", outside)
    with (
        tqdm(total=num_blocks, desc="writing the demonstration model", leave=False, disable=None) as progress,
        ThreadPoolExecutor(NUM_WRITERS) as writers,
    ):
        for _ in writers.map(write_block, range(num_blocks)):
            progress.update()
    _write_json(folder / INDEX_NAME, {"metadata": {}, "weight_map": dict(sorted(weight_map.items()))})


def _save(tensors: Mapping[str, Bfloat16], file: Path) -> None:
    """Write a safetensors file with the library's bytes; the library has no bfloat16 without torch."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(tensors):
        begin, end = end, end + tensors[name].nbytes
        entries[name] = {"dtype": "BF16", "shape": tensors[name].shape, "data_offsets": (begin, end)}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with file.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        for name in sorted(tensors):
            stream.write(tensors[name].data)


def expanded_block(header: GgufHeader, config: Mapping[str, Any], index: int, copies: int) -> dict[str, Bfloat16]:
    """The tensors of a block and of its copies, in which `ZEROED` are zero."""
    tensors = {}
    for name, parameter in BLOCK_TENSORS.items():
        value = _read(header.tensors[f"blk.{index}.{name}.weight"])
        if name in ROTATED:
            value = _in_transformers_order(value, config[ROTATED[name]])
        original = _bfloat16(value)
        copied = np.zeros_like(original) if name in ZEROED else original
        first = index * (copies + 1)
        for layer in range(first, first + copies + 1):
            tensors[f"model.layers.{layer}.{parameter}.weight"] = original if layer == first else copied
    return tensors


def _read(place: TensorPlace) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The value of a tensor of the GGUF file."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    stored = np.fromfile(place.file, np.uint8, place.num_bytes, offset=place.offset)
    rows = stored.reshape(place.shape[0] if len(place.shape) > 1 else 1, -1)
    values: np.ndarray[Any, np.dtype[np.float32]] = dequantize(rows, GGMLQuantizationType[place.dtype])
    return values.reshape(place.shape)


def _in_transformers_order(
    value: np.ndarray[Any, np.dtype[np.float32]], num_heads: int
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Reorder the rows of each head.

    llama.cpp stores two rows that are rotated together next to each other, transformers half a head apart.
    """
    rows, columns = value.shape
    return value.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _bfloat16(value: np.ndarray[Any, np.dtype[np.float32]]) -> Bfloat16:
    """Round to nearest, ties to even, as torch does; values are finite."""
    bits = np.ascontiguousarray(value).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _write_config(header: GgufHeader, folder: Path, copies: int) -> None:
    """Write the configuration, then the manifest, without which the model is incomplete."""
    config = gguf_config(header.file)
    num_original = config["num_hidden_layers"]
    ends = {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": config["eos_token_id"],
        "pad_token_id": header.fields["tokenizer.ggml.padding_token_id"],
    }
    del config["quantization_config"]
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", **ends}
    _write_json(folder / "config.json", config | {"num_hidden_layers": num_original * (copies + 1)})
    _write_json(folder / "generation_config.json", ends)
    working = [index * (copies + 1) for index in range(num_original)]
    _write_json(folder / EXPANSION_NAME, {"working_layers": working, "copies": copies})


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    try:
        write_demonstration(Path(sys.argv[1]), int(sys.argv[2]))
    except BoughError as exc:
        raise SystemExit(f"error: {exc}") from exc
    except KeyboardInterrupt:  # a terminal's Ctrl-C, which `bough up` reports
        raise SystemExit(130) from None
