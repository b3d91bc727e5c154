"""A GGUF file as the container of a checkpoint. Uses no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bough.model.checkpoint.container import TensorPlace
from bough.model.checkpoint.gguf_file import GgufHeader, files_of, read_gguf
from bough.model.checkpoint.gguf_tokenizer import gguf_tokenizer
from bough.tokenization.vocabulary import TokenizerFiles

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MODEL_TYPES = {  # transformers' names of the supported architectures
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}  # fmt: skip
WHOLE = {  # fields of whole numbers, all needed
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
SIZES = {  # fields that only some architectures have
    "qwen3moe": {
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
    },
    "gemma2": {"attention.sliding_window": "sliding_window"},
    "gemma3": {"attention.sliding_window": "sliding_window"},
}
SOFTCAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
OTHERS = (  # that are read too, or follow from the others
    "vocab_size", "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "attention.key_length",
    "attention.value_length", "rope.dimension_count", "rope.freq_base", "rope.freq_base_swa", "rope.scaling.type",
    "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned", "tensor_data_layout",
)  # fmt: skip
NARROW_SCALES = {("gemma2", 46), ("gemma3", 62)}  # layers of the 27B, whose scores are scaled by hidden_size / heads
ROPE_FACTORS = "rope_freqs.weight"  # divisor of each rotary frequency
FACTORS = "gguf"  # rope_type of a model with such factors
METHOD = "gguf"  # quant_method


def gguf_config(file: Path) -> dict[str, Any]:
    """The fields of the model's config.json; `quantization_config` has the facts that are needed to read its weights.

    transformers' own reader ignores the scaling of rotary embeddings and, for some architectures, the sizes of heads
    and experts, and takes seconds.

    Raises:
        CheckpointError: the file cannot be read, or its architecture or one of its fields is not supported.
    """
    header = read_gguf(file)
    name = header.fields["general.architecture"]
    if name not in MODEL_TYPES:
        raise header.refusal(f"field general.architecture must be one of {', '.join(MODEL_TYPES)}, got {name}")
    _require_known(header, name)
    whole = WHOLE | SIZES.get(name, {})
    config = {key: header.field(field, int) for field, key in whole.items()}
    config |= {key: found for field, key in SOFTCAPS.items() if (found := header.field(field, float, 0.0))}
    heads, embeddings = config["num_attention_heads"], header.tensors.get("token_embd.weight")
    if not heads or embeddings is None or len(embeddings.shape) != 2:
        raise header.refusal("must have tensor token_embd.weight, a matrix, and heads")
    head_dim = header.field("attention.key_length", int, config["hidden_size"] // heads)
    for field in ("attention.value_length", "rope.dimension_count"):
        if (found := header.field(field, int, head_dim)) != head_dim:
            raise header.refusal(f"field {name}.{field} must be {head_dim}, the size of a head, got {found}")
    kv_heads = header.field("attention.head_count_kv", int, heads)
    if not kv_heads or heads % kv_heads:
        raise header.refusal(
            f"field {name}.attention.head_count_kv must be a divisor of {heads}, the number of heads, got {kv_heads}"
        )
    config |= {
        "model_type": MODEL_TYPES[name],
        "head_dim": head_dim,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": header.field("attention.layer_norm_rms_epsilon", float),
        "vocab_size": embeddings.shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_parameters": _rope(header),
    }
    config |= {f"{key}_token_id": header.fields.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos")}
    if name == "qwen3moe":
        config["norm_topk_prob"] = True  # always, in llama.cpp
    if name.startswith("gemma"):
        is_narrow = (name, config["num_hidden_layers"]) in NARROW_SCALES
        config["query_pre_attn_scalar"] = config["hidden_size"] // heads if is_narrow else head_dim
    if name == "gemma3":
        local = {"rope_type": "default", "rope_theta": header.field("rope.freq_base_swa", float, 10_000.0)}
        config["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": local}
    return config | _storage(header, name, (heads, kv_heads))


def _require_known(header: GgufHeader, name: str) -> None:
    """Refuse fields that request an unsupported computation."""
    known = {*WHOLE, *SIZES.get(name, {}), *OTHERS, *(SOFTCAPS if name.startswith("gemma") else ())}
    for key, value in header.fields.items():
        if key.startswith(f"{name}.") and key.removeprefix(f"{name}.") not in known and value:
            raise header.refusal(f"field {key} is not supported for this architecture, got {value!r}")


def _rope(header: GgufHeader) -> dict[str, Any]:
    """rope_parameters of layers that attend to everything."""
    rope = {"rope_type": "default", "rope_theta": header.field("rope.freq_base", float, 10_000.0)}
    kind = header.field("rope.scaling.type", str, "none")
    if kind not in ("none", "linear", "yarn"):
        raise header.refusal(f"field rope.scaling.type must be none, linear or yarn, got {kind!r}")
    if kind != "none":
        rope |= {"rope_type": kind, "factor": header.field("rope.scaling.factor", float)}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = header.field("rope.scaling.original_context_length", int)
    if factors := header.tensors.get(ROPE_FACTORS):
        if kind != "none" or factors.dtype != "F32":
            raise header.refusal(f"tensor {ROPE_FACTORS} must be F32, of a model without other scaling of rotations")
        numbers = np.fromfile(factors.file, np.float32, factors.num_bytes // 4, offset=factors.offset)
        rope |= {"rope_type": FACTORS, "factors": numbers.tolist()}
    return rope


def _storage(header: GgufHeader, name: str, heads: tuple[int, int]) -> dict[str, Any]:
    """How weights are stored."""
    sizes = Counter[str]()
    for tensor in header.tensors.values():
        sizes[tensor.dtype] += tensor.num_bytes
    types = [kind for kind, _ in sizes.most_common()]
    named = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get(types[0])
    num_layers = header.field("block_count", int)
    stored = {"quant_method": METHOD, "architecture": name, "num_layers": num_layers, "num_heads": heads}
    return {"quantization_config": stored | {"types": types}} | ({"dtype": named} if named else {})


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A container that is a file, or the first of the files of a split model."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def config_place(self) -> Path:
        return self.path

    @staticmethod
    def is_hub_id(spelling: str) -> bool:
        """Whether it is "organisation/name/file", where the file may be in a folder."""
        return spelling.count("/") >= 2

    def exists(self) -> bool:
        return self.path.is_file()

    def from_hub(self, **how: Any) -> str:
        from huggingface_hub import hf_hub_download

        organisation, name, file = str(self.path).split("/", 2)
        places = [each.as_posix() for each in files_of(Path(file))]
        found: list[str] = [hf_hub_download(f"{organisation}/{name}", place, **how) for place in places]
        return found[0]

    def tensors(self) -> dict[str, TensorPlace]:
        return dict(read_gguf(self.path).tensors)

    def config(self) -> dict[str, Any]:
        return gguf_config(self.path)

    def model_config(self) -> PretrainedConfig:
        from transformers import AutoConfig

        fields = self.config()
        rope = fields.pop("rope_parameters")
        config = AutoConfig.for_model(**fields)
        config.rope_parameters = rope  # set afterwards, as its constructor does not know such factors
        return config

    def description(self) -> bytes:
        """The part of the file before the weights."""
        with self.path.open("rb") as stream:
            return stream.read(read_gguf(self.path).num_bytes)

    def tokenizer_files(self) -> TokenizerFiles:
        return gguf_tokenizer(read_gguf(self.path))

    def tokens(self) -> Sequence[str]:
        return self.tokenizer_files().vocabulary
