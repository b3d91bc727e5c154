"""The lean path of a draft against the same model as transformers runs it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GemmaConfig, LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from bough.model.batch.batch import Batch, Segment
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.kv.session_kv import KVSlot
from bough.model.llama.weights import supports_fused_layers
from bough.model.loading.loading import build_skeleton
from bough.model.running import runner
from bough.model.running.runner import ResidentModel
from bough.trees.tree import Tree
from tests.conftest import TINY, save_model

CPU = torch.device("cpu")
SIZES = {key: getattr(TINY, key) for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
SIZES |= {"num_hidden_layers": 3, "num_key_value_heads": 2, "initializer_range": 0.2, "bos_token_id": 260}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "tied, wide heads": LlamaConfig(**SIZES, tie_word_embeddings=True, head_dim=40),
    "mistral": MistralConfig(**SIZES, sliding_window=24),
    "qwen2": Qwen2Config(
        **SIZES, layer_types=["full_attention", "sliding_attention", "full_attention"],
        use_sliding_window=True, sliding_window=20,
    ),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
}  # fmt: skip
CONTEXT = [(7 * i * i + 3 * i) % 259 for i in range(70)]
TREE = Tree.of([5, 9, 11, 12, 13, 200, 201], [-1, 0, 0, 1, 1, 2, 5], [0.0] + [-1.0] * 6)


def logits_of(folder: Path, dtype: torch.dtype, lean: bool, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Of two sessions' trees in one batch, after contexts of different length; (14, vocab_size)."""
    skeleton = build_skeleton(Checkpoint.open(folder), dtype)
    assert supports_fused_layers(skeleton, CPU) or not lean
    with monkeypatch.context() as patch:
        patch.setattr(runner, "supports_fused_layers", lambda *_: lean)
        model = ResidentModel(skeleton, CPU)
    slots = [KVSlot(skeleton.kv_shape(), 120, CPU) for _ in range(2)]
    for slot in slots:
        slot.keys.fill_(float("nan"))  # what was never written must not be read
        slot.values.fill_(float("nan"))
    first, second = len(CONTEXT), 33
    assert len(model.logits(Batch([Segment.context(slots[0], 0, CONTEXT)], None, CPU))) == 0
    together = [
        Segment.tree(slots[0], first, TREE),
        Segment.context(slots[1], 0, CONTEXT[:second]),
        Segment.tree(slots[1], second, TREE),
    ]
    return model.logits(Batch(together, None, CPU)).clone()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_lean_path_is_as_near_the_truth_as_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A norm, bias, window or half of a rotary embedding left out would put it many times further away."""
    folder = perturbed(tmp_path, family)
    truth = logits_of(folder, torch.float32, False, monkeypatch)
    usual = logits_of(folder, torch.bfloat16, False, monkeypatch)
    lean = logits_of(folder, torch.bfloat16, True, monkeypatch)
    assert (lean - truth).abs().mean() < 1.25 * (usual - truth).abs().mean()


def perturbed(folder: Path, family: str) -> Path:
    """A random model of a family, none of whose parts could be left out unnoticed."""
    save_model(folder, FAMILIES[family])
    for ending in ("bias", "norm.weight"):
        perturb(folder, ending, 1.0)
    return folder


def perturb(folder: Path, ending: str, spread: float) -> None:
    """Biases and norms of a random model are 0 and 1: those left out would not be missed."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for index, name in enumerate(sorted(tensors)):
            if name.endswith(ending):
                torch.manual_seed(index)
                tensors[name] += spread * torch.rand_like(tensors[name])
        save_file(tensors, file, metadata={"format": "pt"})


def test_other_architectures_and_data_types_go_by_way_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(tmp_path, GemmaConfig(**SIZES, head_dim=16))
    skeleton = build_skeleton(Checkpoint.open(folder), torch.bfloat16)
    assert not supports_fused_layers(skeleton, CPU)
    slot = KVSlot(skeleton.kv_shape(), 20, CPU)
    logits = ResidentModel(skeleton, CPU).logits(Batch([Segment.tree(slot, 0, TREE)], None, CPU))
    assert logits.shape == (len(TREE), SIZES["vocab_size"])
    assert not supports_fused_layers(
        build_skeleton(Checkpoint.open(save_model(tmp_path / "l", TINY)), torch.float32), CPU
    )
    assert not supports_fused_layers(
        build_skeleton(Checkpoint.open(tmp_path / "l"), torch.bfloat16), torch.device("cuda")
    )
