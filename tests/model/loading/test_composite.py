"""Language models that are parts of models which also see: the text is computed, and the rest left where it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3TextConfig,
    Mistral3Config,
    MistralConfig,
    PixtralVisionConfig,
    PretrainedConfig,
    Qwen3_5Config,
    Qwen3_5TextConfig,
    Qwen3_5VisionConfig,
    SiglipVisionConfig,
)

from bough.errors import CheckpointError
from bough.model.batch.batch import Batch, Segment
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.loading.loading import build_skeleton
from bough.trees.tree import Tree
from loadtest.common.packed_model import pack
from loadtest.common.tiny_tokenizer import save_tokenizer
from tests.fakes.model.families import COMMON, LINEAR
from tests.fakes.model.packed_files import require_same_sizes
from tests.fakes.models import CPU, new_slot, streamed

TEXT: dict[str, Any] = {**COMMON, "sliding_window": 12}
EYES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
}
MODELS: dict[str, PretrainedConfig] = {
    "gemma3, head tied": Gemma3Config(
        text_config=Gemma3TextConfig(**TEXT, query_pre_attn_scalar=16).to_dict(),
        vision_config=SiglipVisionConfig(**EYES, patch_size=14).to_dict(),
        mm_tokens_per_image=4,
        dtype="float32",
    ),
    "mistral3, head of its own": Mistral3Config(
        text_config=MistralConfig(**TEXT).to_dict(),
        vision_config=PixtralVisionConfig(**EYES, patch_size=14).to_dict(),
        tie_word_embeddings=False,
        dtype="float32",
    ),
    "qwen3.5, recurrent layers": Qwen3_5Config(
        text_config=Qwen3_5TextConfig(**COMMON, **LINEAR).to_dict(),
        vision_config=Qwen3_5VisionConfig(depth=1, hidden_size=32, intermediate_size=32, num_heads=2).to_dict(),
        dtype="float32",
    ),
}
PROMPT, NUM_TOKENS = [5, 77, 9, 200, 31], 24


@pytest.fixture(scope="module", params=MODELS)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A random model that sees, as transformers saves it, and what it says greedily after a prompt."""
    torch.manual_seed(3)
    model = AutoModelForImageTextToText.from_config(MODELS[request.param]).eval()
    folder = tmp_path_factory.mktemp("seeing")
    model.save_pretrained(folder)
    save_tokenizer(folder)
    said = model.generate(torch.tensor([PROMPT]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None)
    return folder, said[0, len(PROMPT) :].tolist()


def greedy(folder: Path) -> list[int]:
    """What the streamed model says."""
    tokens = list(PROMPT)
    with streamed(folder, torch.float32) as model:
        slot = new_slot(model)
        while len(tokens) < len(PROMPT) + NUM_TOKENS:
            held, root = slot.length, tokens[-1]
            segments = [
                Segment.context(slot, held, tokens[held:-1]),
                Segment.tree(slot, len(tokens) - 1, Tree.root(root)),
            ]
            logits = model.sweep(Batch(segments, model.rows, CPU))[0]
            slot.compact(range(held, len(tokens)), tokens[held:])
            tokens.append(int(logits[-1].argmax()))
    return tokens[len(PROMPT) :]


@pytest.mark.slow
def test_text_equals_that_of_the_whole_model(seeing: tuple[Path, list[int]]) -> None:
    folder, said = seeing
    assert greedy(folder) == said


@pytest.mark.slow
def test_names_of_older_files_are_accepted(seeing: tuple[Path, list[int]], tmp_path: Path) -> None:
    """As the first such checkpoints on the hub have them."""
    folder, said = seeing
    older = tmp_path / "older"
    older.mkdir()
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        own = name.removeprefix("model.language_model.").removeprefix("language_model.model.")
        if own != name:
            name = f"language_model.model.{own}"
        elif name == "lm_head.weight":
            name = "language_model.lm_head.weight"
        tensors[name] = tensor
    save_file(tensors, older / "model.safetensors", metadata={"format": "pt"})
    (older / "config.json").write_text((folder / "config.json").read_text())
    assert greedy(older) == said


def test_a_composite_model_can_be_planned_and_packed(seeing: tuple[Path, list[int]], tmp_path: Path) -> None:
    folder, _ = seeing
    packed = pack(folder, 4, tmp_path / "packed")
    assert build_skeleton(Checkpoint.open(packed), torch.bfloat16).quantization is not None
    require_same_sizes(packed)


def test_an_unsupported_part_is_refused_by_name(seeing: tuple[Path, list[int]], tmp_path: Path) -> None:
    config = json.loads((seeing[0] / "config.json").read_text())
    config["text_config"]["head_dim"] = "sixteen"
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(seeing[0] / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        build_skeleton(Checkpoint.open(tmp_path), torch.float32)
