"""Random models as GGUF files, written by the library gguf as llama.cpp's converter writes them, and their values."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from transformers import AutoTokenizer

from loadtest.peers.gguf import IN_LAYER, OUTSIDE, permuted

Array = npt.NDArray[Any]
ARCHITECTURES = {"qwen3_moe": "qwen3moe", "gemma3_text": "gemma3"}  # by model_type, where they differ
NAMES = OUTSIDE | {"lm_head.weight": "output.weight"}
NAMES_IN_LAYER = IN_LAYER | {f"self_attn.{part}_proj.bias": f"attn_{part}.bias" for part in "qkv"}
NAMES_IN_LAYER |= {f"self_attn.{part}_norm.weight": f"attn_{part}_norm.weight" for part in "qk"}
NAMES_IN_LAYER |= {"mlp.gate.weight": "ffn_gate_inp.weight"}
NAMES_IN_LAYER |= {f"mlp.experts.{part}_proj.weight": f"ffn_{part}_exps.weight" for part in ("gate", "up", "down")}
OF_GEMMA = {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
}
SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # bytes of float16 numbers
EXPERT = re.compile(r"(.*\.experts)\.\d+(\..*)")

Kinds = Callable[[str], str]  # the type of a tensor by its name


def random_blocks(kind: str, rows: int, columns: int, rng: np.random.Generator, size: float = 0.3) -> Array:
    """Blocks (rows, bytes) uint8 of arbitrary bits whose values are up to about `size`."""
    count, num_bytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (rows, columns // count, num_bytes), np.uint8)
    most = {
        "Q8_0": 128,
        "Q2_K": 48,
        "Q3_K": 128,
        "Q4_K": 945,
        "Q5_K": 1953,
        "Q6_K": 4096,
        "IQ4_NL": 127,
        "IQ4_XS": 4064,
    }.get(kind, 16)
    for at in SCALES.get(kind, (0, 2) if kind.endswith("_1") else (0,)):
        scales = (rng.uniform(-1, 1, blocks.shape[:2]) * size / most).astype(np.float16)
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def values_of(blocks: Array, kind: str) -> torch.Tensor:
    """What the library makes of blocks."""
    return torch.from_numpy(gguf.quants.dequantize(blocks, GGMLQuantizationType[kind]))


def stored_as(weight: torch.Tensor, kind: str, rng: np.random.Generator) -> tuple[Array, torch.Tensor]:
    """A tensor in a type, and its values; of blocks that the library does not make, others of the same shape."""
    array, qtype = weight.float().numpy(), GGMLQuantizationType[kind]
    if kind in SCALES:
        stored = random_blocks(kind, int(np.prod(array.shape[:-1])), array.shape[-1], rng)
        return stored.reshape(*array.shape[:-1], -1), values_of(stored, kind).reshape(weight.shape)
    stored = gguf.quants.quantize(array, qtype)
    return stored, values_of(stored, kind)


def write_gguf(source: Path, file: Path, kinds: Kinds, **changed: Any) -> dict[str, torch.Tensor]:
    """Write a folder's model, its vectors in F32; `changed` are fields of the architecture with _ for dots.

    Returns the values of all tensors as they are in a folder.
    """
    from tests.fakes.model.packed_files import tensors_of

    config, rng = json.loads((source / "config.json").read_text()), np.random.default_rng(3)
    architecture = ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer, values = GGUFWriter(file, architecture), dict[str, torch.Tensor]()
    add_fields(writer, config, changed)
    add_tokenizer(writer, source)
    for name, weight in stacked(tensors_of(source)).items():
        tensor = name_of(name, architecture)
        kind = kinds(tensor) if weight.dim() > 1 and "gate_inp" not in tensor else "F32"
        heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}.get(name[-13:-12], 0)
        if architecture.startswith("gemma") and tensor.endswith("norm.weight"):
            weight = weight + 1
        array, value = stored_as(weight, kind, rng)
        if architecture == "llama" and heads and "self_attn" in name:
            array = permuted(array, heads)
        writer.add_tensor(tensor, array, raw_dtype=GGMLQuantizationType[kind])
        value = value - 1 if architecture.startswith("gemma") and tensor.endswith("norm.weight") else value
        values |= unstacked(name, value)
    finish(writer)
    return values


def finish(writer: GGUFWriter) -> None:
    """Write what has been added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def name_of(name: str, architecture: str) -> str:
    """llama.cpp's name of a tensor."""
    if name in NAMES:
        return NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    names = NAMES_IN_LAYER | (OF_GEMMA if architecture.startswith("gemma") else {})
    return f"blk.{layer}.{names[rest]}"


def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors with all experts of a layer in one."""
    found: dict[str, list[torch.Tensor]] = {}
    for name in sorted(tensors, key=lambda name: [int(part) if part.isdigit() else -1 for part in name.split(".")]):
        found.setdefault(EXPERT.sub(r"\1\2", name), []).append(tensors[name])
    return {name: torch.stack(parts) if ".experts." in name else parts[0] for name, parts in found.items()}


def unstacked(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """The reverse."""
    if ".experts." not in name:
        return {name: value}
    return {name.replace(".experts.", f".experts.{index}."): part for index, part in enumerate(value)}


def add_fields(writer: GGUFWriter, config: dict[str, Any], changed: dict[str, Any]) -> None:
    """What llama.cpp's converter says of a model."""
    ropes = config["rope_parameters"]
    fields = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(ropes.get("full_attention", ropes)["rope_theta"]),
        "vocab_size": config["vocab_size"],
    }
    if head_dim := config.get("head_dim"):
        fields |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if count := config.get("num_experts") or config.get("num_local_experts"):
        fields |= {"expert_count": count, "expert_used_count": config["num_experts_per_tok"]}
        fields["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if writer.arch.startswith("gemma"):
        fields["attention.sliding_window"] = config["sliding_window"]
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(name):
            fields[name] = float(config[name])
    kinds = {int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING}
    for name, value in (fields | changed).items():
        if value is not None:
            writer.add_key_value(f"{writer.arch}.{name}", value, kinds[type(value)])


def add_tokenizer(writer: GGUFWriter, source: Path) -> None:
    """A folder's tokenizer of bytes."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    vocabulary = [token for _, token in sorted((index, token) for token, index in tokenizer.get_vocab().items())]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary)
    writer.add_token_scores([0.0] * len(vocabulary))
    writer.add_token_types([3 if token in ("<s>", "</s>") else 1 for token in vocabulary])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)
