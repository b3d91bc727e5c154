"""Sizes of what `python -m loadtest.gpu` measures, in full and for its dry run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import LlamaConfig, MiniCPM3Config, PretrainedConfig, Qwen3_5TextConfig

from loadtest.gpu.experts import Mixture


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of all parts."""

    target: LlamaConfig  # with one layer, which is repeated: only its time is measured
    max_layers: int
    max_resident: int
    small: LlamaConfig
    families: dict[str, PretrainedConfig]  # small models of layers that are computed otherwise
    num_compared: int  # nodes of a tree that are compared with plain decoding
    recurrent_rows: tuple[int, ...]  # over which recurrent layers are timed
    mixture: Mixture
    drafts: dict[str, LlamaConfig]  # by name; the published acceptance is that of the last one
    trees: tuple[int, ...]
    profiled: tuple[int, ...]  # trees
    text_tokens: int  # of the text from which the sizer learns
    copy_bytes: int
    unpacked: tuple[tuple[int, int], tuple[int, int]]  # matrices (outputs, inputs) to compare and to time
    matrices: tuple[tuple[int, int], ...]  # of the layer whose products are compared and timed
    contexts: tuple[tuple[int, ...], tuple[int, ...]]  # numbers of rows, and context lengths


def _llama(hidden: int, intermediate: int, heads: int, kv_heads: int, layers: int, vocab: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        num_hidden_layers=layers,
        vocab_size=vocab,
        max_position_embeddings=8192,
    )


def _families(hidden: int, intermediate: int, dim: int, rank: int, vocab: int) -> dict[str, PretrainedConfig]:
    """A model of recurrent layers and attention, and one of latent attention, with 8 heads of `dim`."""
    common: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": 8,
        "num_hidden_layers": 4,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
    }
    recurrent = Qwen3_5TextConfig(
        **common,
        num_key_value_heads=2,
        head_dim=dim,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=dim,
        linear_value_head_dim=dim,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
    )
    latent = MiniCPM3Config(
        **common,
        kv_lora_rank=rank,
        q_lora_rank=rank,
        qk_rope_head_dim=dim // 2,
        qk_nope_head_dim=dim,
        v_head_dim=dim,
    )
    return {"recurrent layers": recurrent, "latents": latent}


REAL = Sizes(
    target=_llama(8192, 28672, 64, 8, 1, 128_256),
    max_layers=1000,
    max_resident=1000,
    small=_llama(1024, 2816, 16, 4, 6, 4096),
    families=_families(1024, 2816, 128, 512, 4096),
    num_compared=40,
    recurrent_rows=(64, 256),
    mixture=Mixture(layers=8, experts=64, chosen=8),
    drafts={"1B": _llama(2048, 8192, 32, 8, 16, 128_256), "8B": _llama(4096, 14336, 32, 8, 32, 128_256)},
    trees=(1, 256, 768, 64, 512),
    profiled=(64, 1024),
    text_tokens=2000,
    copy_bytes=1 << 30,
    unpacked=((1024, 8192), (28672, 8192)),
    matrices=((8192, 8192), (1024, 8192), (28672, 8192), (8192, 28672)),
    contexts=((64, 256, 768), (1024, 4096, 8192)),
)
_TINY = (64, 96, 4, 2)
MINIATURE = Sizes(
    target=_llama(*_TINY, 1, 256),
    max_layers=5,
    max_resident=2,
    small=_llama(*_TINY, 6, 256),
    families=_families(64, 96, 16, 32, 256),
    num_compared=3,
    recurrent_rows=(8,),
    mixture=Mixture(layers=3, experts=8, chosen=2),
    drafts={"tiny": _llama(*_TINY, 2, 256)},
    trees=(1, 8),
    profiled=(8,),
    text_tokens=60,
    copy_bytes=1 << 20,
    unpacked=((128, 256), (128, 256)),
    matrices=((128, 128),),
    contexts=((4,), (32,)),
)
