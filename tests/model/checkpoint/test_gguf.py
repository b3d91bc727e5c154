"""GGUF files give the bits of their weights in a folder, and files that cannot be read are refused by name."""

from __future__ import annotations

import shutil
import struct
import tracemalloc
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
from bough.model.checkpoint.model_places import fetch, load_tokenizer_files, resolve
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
from tests.fakes.model.packed_files import TOKENS, require_same_sizes, rewrite, tensors_of
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
def test_a_block_has_the_librarys_values(kind: str, dtype: torch.dtype) -> None:
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
def test_a_gguf_model_gives_the_results_of_its_values_in_a_folder(name: str, kind: str, tmp_path: Path) -> None:
    """Its configuration included, as the folder has the original one."""
    source, file = save_model(tmp_path / "source", MODELS[name]), tmp_path / "model.gguf"
    plain = rewrite(source, tmp_path / "plain", write_gguf(source, file, lambda _: kind), None)
    with streamed(file, torch.float32, expert_slabs=8 * ("moe" in name)) as mine:
        assert torch.equal(three_sweeps(mine, CPU), on_cpu(plain, torch.float32))
        last = plain_logits(mine, TOKENS)[-1]
        assert not mine.skeleton.unused
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    torch.testing.assert_close(last, model(torch.tensor([TOKENS])).logits[0, -1], atol=1e-4, rtol=1e-4)


def test_transformers_reads_the_same_values_from_the_file(tmp_path: Path) -> None:
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


def test_mixed_block_types_give_trees_the_bits_of_plain_decoding(wide: tuple[Path, Path]) -> None:
    """From memory, streamed, and as a draft."""
    file, plain = wide
    wanted = on_cpu(plain, torch.bfloat16)
    for resident in (0, 4):
        with streamed(file, torch.bfloat16, max_resident=resident) as model:
            assert torch.equal(three_sweeps(model, CPU).float(), wanted)
    mine, theirs = (logits(load_draft(Checkpoint.open(path), (1,), "float32", CPU)) for path in wide)
    assert torch.equal(mine, theirs)


def test_a_devices_kernel_unpacks_matrices_on_demand(wide: tuple[Path, Path]) -> None:
    require_close(on_device(wide[0], Where(), torch.float32), on_cpu(wide[0], torch.float32))


@pytest.mark.parametrize("kinds", ["Q4_K_M", "F16"])
def test_a_plan_uses_the_files_sizes(kinds: str, wide: tuple[Path, Path], tmp_path: Path) -> None:
    file = wide[0]
    if kinds == "F16":
        file = tmp_path / "model.gguf"
        write_gguf(save_model(tmp_path / "source", MODELS["qwen3moe"]), file, lambda _: "F16")
    require_same_sizes(file)
    planned = model_shapes(find_model(str(file)), "bfloat16", 0, 64)
    assert planned.description.endswith(", bfloat16, Q6_K, Q4_K (gguf)" if kinds != "F16" else ", bfloat16, F16 (gguf)")
    assert (isinstance(planned.packed, Blocks) and planned.packed.kind in ("Q4_K", "Q6_K")) == (kinds != "F16")


def test_a_drafts_memory_follows_its_data_types(wide: tuple[Path, Path]) -> None:
    needs = [draft_needs(parse(DraftConfig, "d", ["--model", str(path), "--dtype", "float32"], {})) for path in wide]
    assert needs[0] == needs[1]


def test_a_files_tokenizer_and_template_are_used(wide: tuple[Path, Path]) -> None:
    mine, theirs = (load_tokenizer_files(path) for path in wide)
    text = "A tree of guesses, ünverified."
    assert Tokenizer(mine).encode(text) == Tokenizer(theirs).encode(text)
    assert (mine.chat_template, mine.eos_token_ids, mine.bos_token) == (
        theirs.chat_template,
        theirs.eos_token_ids,
        theirs.bos_token,
    )


def test_norms_in_float32_are_no_reported_conversion(wide: tuple[Path, Path]) -> None:
    assert not conversion(Checkpoint.open(wide[0]).tensors.values(), torch.bfloat16)


def test_a_file_is_identified_by_its_header_and_weights(wide: tuple[Path, Path], tmp_path: Path) -> None:
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


def test_scaled_rotations_equal_transformers(tmp_path: Path) -> None:
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


def copy_fields(reader: gguf.GGUFReader, writer: GGUFWriter) -> None:
    """All but those that a writer adds by itself."""
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            sub_type = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type)


def with_factors(file: Path, factors: torch.Tensor) -> None:
    """Write the file again with a tensor of factors."""
    reader, writer = gguf.GGUFReader(file), GGUFWriter(file.with_suffix(".new"), "llama")
    copy_fields(reader, writer)
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
        if file == first:
            copy_fields(reader, writer)
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
        ({"feed_forward_length": 128}, r"ffn_gate\.weight must have .* shape \[128, 64\], got \[96, 64\]"),
        ({"block_count": 3}, r"tensor blk\.2\.attn_q\.weight, which is .*layers\.2\.self_attn\.q_proj.*, is missing"),
    ],
)
def test_an_unsupported_field_is_named(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
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
def test_an_unsupported_type_is_named_with_its_tensor(kind: str, tmp_path: Path) -> None:
    file = small(tmp_path / "model.gguf", "blk.0.attn_q.weight", kind)
    with pytest.raises(CheckpointError, match=rf"tensor blk\.0\.attn_q\.weight: its type must be .*IQ4_XS, got {kind}"):
        Checkpoint.open(file)


def test_an_unsupported_architecture_is_named(tmp_path: Path) -> None:
    file = small(tmp_path / "model.gguf", "token_embd.weight", "Q8_0", "mamba")
    with pytest.raises(CheckpointError, match=r"general\.architecture must be one of llama, .*, got mamba"):
        load_config(file)


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
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


def test_a_file_of_a_hub_id_is_found(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_damaged_field_is_refused_without_reading_the_whole_file(data: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=rf"model\.gguf: .*{message}"):
            load_tokenizer_files(file)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()
