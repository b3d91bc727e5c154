"""GGUF files: bit for bit what their weights, as the library gguf writes them out, give in a folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GgufConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from bough.cli.machine.memory_division import draft_needs
from bough.config.processes import DraftConfig, parse
from bough.errors import CheckpointError
from bough.model.architecture.architecture import load_config
from bough.model.batch.batch import Batch, Segment
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.checkpoint.container import TensorPlace
from bough.model.checkpoint.gguf_file import BLOCKS
from bough.model.checkpoint.model_places import load_tokenizer_files
from bough.model.checkpoint.tensor_source import FreshMemory
from bough.model.kv.session_kv import KVSlot
from bough.model.loading.default_settings import conversion
from bough.model.loading.loading import build_skeleton
from bough.model.quant.ggml_blocks import TYPES, Blocks
from bough.model.running.runner import ResidentModel
from bough.model.sizes.model_sizes import find_model, model_shapes
from bough.tokenization.tokenizer import Tokenizer
from bough.trees.tree import Tree
from draft_worker.model.sources import load_draft
from loadtest.common.tiny_model import save_model
from loadtest.peers.gguf import permuted
from tests.fakes.gpu.device_sweeps import Where, on_cpu, on_device, require_close, three_sweeps
from tests.fakes.model.gguf_files import finish, random_blocks, values_of, write_gguf
from tests.fakes.model.packed_files import TOKENS, rewrite
from tests.fakes.models import CPU, plain_logits, streamed

COMMON: dict[str, Any] = {
    "vocab_size": 262, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2, "bos_token_id": 260,
    "eos_token_id": 261,
}  # fmt: skip
GEMMA: dict[str, Any] = {"head_dim": 32, "sliding_window": 12, "query_pre_attn_scalar": 32}
LAYERS = ["sliding_attention", "full_attention"]
MODELS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**COMMON, head_dim=32),
    "llama, head tied": LlamaConfig(**COMMON, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**COMMON),
    "qwen3": Qwen3Config(**COMMON, head_dim=32),
    "qwen3moe": Qwen3MoeConfig(
        **COMMON, head_dim=32, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True
    ),
    "gemma2": Gemma2Config(**COMMON, **GEMMA),
    "gemma3": Gemma3TextConfig(**COMMON, **GEMMA, layer_types=LAYERS[:1] * 2),
}
WIDE = LlamaConfig(**COMMON | {"hidden_size": 256, "intermediate_size": 256})
MIXED = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q4_K", "output": "Q6_K"}  # as Q4_K_M


def mixed(tensor: str) -> str:
    return next((kind for part, kind in MIXED.items() if part in tensor), "Q4_K")


def logits(model: ResidentModel) -> torch.Tensor:
    """(num_tokens, vocab_size) of a few tokens in a row."""
    slot = KVSlot(model.skeleton.kv_shape(), len(TOKENS), CPU)
    chain = Tree.of(TOKENS, list(range(-1, len(TOKENS) - 1)), [0.0] * len(TOKENS))
    return model.logits(Batch([Segment.tree(slot, 0, chain)], None, CPU)).clone()


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model of Q4_K_M's types, and the same written out in float32."""
    folder = tmp_path_factory.mktemp("gguf")
    source = save_model(folder / "source", WIDE)
    values = write_gguf(source, folder / "model.Q4_K_M.gguf", mixed)
    return folder / "model.Q4_K_M.gguf", rewrite(source, folder / "plain", values, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", TYPES)
def test_a_block_has_the_values_of_the_library(kind: str, dtype: torch.dtype) -> None:
    """Of any bits, in order and in llama's order of rows, rounded once."""
    blocks = random_blocks(kind, 24, 512, np.random.default_rng(len(kind)))
    wanted = values_of(blocks, kind).to(dtype)
    place, raw = TensorPlace("w", Path(), 0, blocks.nbytes, "U8", blocks.shape), [torch.from_numpy(blocks).flatten()]
    assert torch.equal(Blocks(place, kind).value(raw, dtype, FreshMemory(CPU)), wanted)
    ordered = Blocks(place, kind, 4).value(raw, dtype, FreshMemory(CPU))
    assert torch.equal(torch.from_numpy(permuted(ordered.float().numpy(), 3)).to(dtype), wanted)
    assert BLOCKS[kind] == gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [*((name, "Q8_0") for name in MODELS), ("llama", "F16"), ("gemma3", "BF16")])
def test_a_model_says_what_its_values_say_in_a_folder(name: str, kind: str, tmp_path: Path) -> None:
    """Its configuration included, as the folder has the original one."""
    source, file = save_model(tmp_path / "source", MODELS[name]), tmp_path / "model.gguf"
    plain = rewrite(source, tmp_path / "plain", write_gguf(source, file, lambda _: kind), None)
    with streamed(file, torch.float32, expert_slabs=8 * ("moe" in name)) as mine:
        assert torch.equal(three_sweeps(mine, CPU), on_cpu(plain, torch.float32))
        last = plain_logits(mine, TOKENS)[-1]
        assert not mine.skeleton.unused
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    torch.testing.assert_close(last, model(torch.tensor([TOKENS])).logits[0, -1], atol=1e-4, rtol=1e-4)


def test_transformers_reads_the_same_file_alike(tmp_path: Path) -> None:
    """Of an architecture that it reads whole."""
    source, file = save_model(tmp_path / "source", MODELS["llama"]), tmp_path / "model.gguf"
    write_gguf(source, file, lambda _: "Q4_1", **{"rope.dimension_count": 32})
    quantization = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=torch.float32, quantization_config=quantization
    )
    with streamed(file, torch.float32) as mine:
        last = plain_logits(mine, TOKENS)[-1]
    torch.testing.assert_close(last, model(torch.tensor([TOKENS])).logits[0, -1], atol=1e-4, rtol=1e-4)
    theirs, ours = AutoConfig.from_pretrained(tmp_path, gguf_file=file.name).to_dict(), load_config(file).to_dict()
    others = {"_name_or_path", "architectures", "quantization_config", "dtype"}
    assert {key for key in theirs if theirs[key] != ours.get(key)} <= others


def test_a_mixture_of_types_gives_trees_the_bits_of_plain_decoding(wide: tuple[Path, Path]) -> None:
    """From memory, streamed, and as a draft."""
    file, plain = wide
    wanted = on_cpu(plain, torch.bfloat16)
    for resident in (0, 4):
        with streamed(file, torch.bfloat16, max_resident=resident) as model:
            assert torch.equal(three_sweeps(model, CPU).float(), wanted)
    mine, theirs = (logits(load_draft(Checkpoint.open(path), (1,), "float32", CPU)) for path in wide)
    assert torch.equal(mine, theirs)


def test_a_device_s_kernel_writes_matrices_late(wide: tuple[Path, Path]) -> None:
    require_close(on_device(wide[0], Where(), torch.float32), on_cpu(wide[0], torch.float32))


@pytest.mark.parametrize("kinds", ["Q4_K_M", "F16"])
def test_a_plan_has_the_sizes_of_the_file(kinds: str, wide: tuple[Path, Path], tmp_path: Path) -> None:
    file = wide[0]
    if kinds == "F16":
        file = tmp_path / "model.gguf"
        write_gguf(save_model(tmp_path / "source", MODELS["qwen3moe"]), file, lambda _: "F16")
    planned, skeleton = (
        model_shapes(find_model(str(file)), "bfloat16", 0, 64),
        build_skeleton(Checkpoint.open(file), torch.bfloat16),
    )
    layers = [{place for slot in slots for place in slot.source.places} for slots in skeleton.layer_slots]
    assert planned.layer_bytes == tuple(sum(place.num_bytes for place in places) for places in layers)
    assert planned.description == skeleton.describe()
    assert planned.description.endswith(", bfloat16, Q6_K, Q4_K (gguf)" if kinds != "F16" else ", bfloat16, F16 (gguf)")
    assert (isinstance(planned.packed, Blocks) and planned.packed.kind in ("Q4_K", "Q6_K")) == (kinds != "F16")


def test_a_draft_s_memory_is_that_of_its_numbers(wide: tuple[Path, Path]) -> None:
    needs = [draft_needs(parse(DraftConfig, "d", ["--model", str(path), "--dtype", "float32"], {})) for path in wide]
    assert needs[0] == needs[1]


def test_a_file_s_tokenizer_and_template(wide: tuple[Path, Path]) -> None:
    mine, theirs = (load_tokenizer_files(path) for path in wide)
    text = "A tree of guesses, ünverified."
    assert Tokenizer(mine).encode(text) == Tokenizer(theirs).encode(text)
    assert (mine.chat_template, mine.eos_token_ids, mine.bos_token) == (
        theirs.chat_template,
        theirs.eos_token_ids,
        theirs.bos_token,
    )


def test_norms_in_float32_are_no_conversion_to_speak_of(wide: tuple[Path, Path]) -> None:
    assert not conversion(Checkpoint.open(wide[0]).tensors.values(), torch.bfloat16)


def test_a_file_is_told_by_its_header_and_its_weights(wide: tuple[Path, Path], tmp_path: Path) -> None:
    copy = shutil.copyfile(wide[0], tmp_path / "other.gguf")
    first = Checkpoint.open(wide[0])
    assert (first.name, Checkpoint.open(copy).name) == ("model.Q4_K_M", "other")
    assert first.fingerprint() == Checkpoint.open(copy).fingerprint()
    for at in (first.tensors["blk.1.ffn_up.weight"].offset + 5, copy.read_bytes().find(b"</s>")):
        shutil.copyfile(wide[0], copy)
        with copy.open("r+b") as stream:
            stream.seek(at)
            stream.write(b"?")
        assert first.fingerprint() != Checkpoint.open(copy).fingerprint()


def test_scaled_rotations_are_those_of_transformers(tmp_path: Path) -> None:
    """As llama.cpp writes those of Llama 3.1, as factors; linear and yarn by their fields."""
    llama3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = LlamaConfig(**COMMON, rope_parameters={**llama3, "original_max_position_embeddings": 64})
    source, file = save_model(tmp_path / "source", config), tmp_path / "model.gguf"
    plain = AutoModelForCausalLM.from_pretrained(source)
    factors = 5e5 ** -(torch.arange(0, 16, 2) / 16) / plain.model.rotary_emb.inv_freq
    assert factors.max() > 7.9
    values = write_gguf(source, file, lambda _: "F32")
    folder = rewrite(source, tmp_path / "plain", values, None)
    with_factors(file, factors)
    with streamed(file, torch.float32) as mine, streamed(folder, torch.float32) as theirs:
        far = [
            [model.skeleton.model.model.rotary_emb(torch.ones(1), torch.arange(250)[None]) for model in (mine, theirs)]
        ]
        ((left, right),) = far
        torch.testing.assert_close(left, right)
        torch.testing.assert_close(plain_logits(mine, TOKENS), plain_logits(theirs, TOKENS))
    for kind in ("linear", "yarn"):
        fields = {"rope.scaling.type": kind, "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
        write_gguf(source, file, lambda _: "F32", **fields)
        rope = load_config(file).rope_parameters
        assert (rope["rope_type"], rope["factor"]) == (kind, 4.0)
        assert rope.get("original_max_position_embeddings") == (64 if kind == "yarn" else None)
        assert build_skeleton(Checkpoint.open(file), torch.float32).model.model.rotary_emb.rope_type == kind


def with_factors(file: Path, factors: torch.Tensor) -> None:
    """Write the file again with a tensor of factors."""
    reader, writer = gguf.GGUFReader(file), GGUFWriter(file.with_suffix(".new"), "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_key_value(
                name, field.contents(), field.types[0], field.types[1] if len(field.types) > 1 else None
            )
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.add_tensor("rope_freqs.weight", factors.float().numpy())
    finish(writer)
    file.with_suffix(".new").rename(file)


def test_a_split_model_is_read_from_its_first_file(tmp_path: Path) -> None:
    """Whose files, after the first, have tensors alone."""
    source, whole = save_model(tmp_path / "source", MODELS["llama"]), tmp_path / "whole.gguf"
    write_gguf(source, whole, lambda _: "Q8_0")
    reader = gguf.GGUFReader(whole)
    first, second = (tmp_path / f"model-{n:05d}-of-00002.gguf" for n in (1, 2))
    for number, file in enumerate((first, second)):
        writer = GGUFWriter(file, "llama")
        for name, field in reader.fields.items() if file == first else ():
            if not name.startswith("GGUF.") and name != "general.architecture":
                sub_type = field.types[1] if len(field.types) > 1 else None
                writer.add_key_value(name, field.contents(), field.types[0], sub_type)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        for tensor in reader.tensors[number::2]:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        finish(writer)
    with streamed(first, torch.float32) as model:
        assert torch.equal(three_sweeps(model, CPU), on_cpu(whole, torch.float32))
    with pytest.raises(CheckpointError, match=r"00002\.gguf: is one of 2 files of a split model; must be the first"):
        Checkpoint.open(second)
    second.rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.gguf: cannot be read"):
        Checkpoint.open(first)
