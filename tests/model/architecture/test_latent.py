"""Latent attention: what slots hold of it, and its weights; and functions that run side by side."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, Ernie4_5_MoeConfig

from bough.cli.machine.memory_division import draft_needs
from bough.config.processes import DraftConfig, TargetConfig, parse
from bough.model.architecture.moe import ask, is_side_by_side, side_by_side
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.kv.session_kv import KVShape, KVSlot
from bough.model.loading.loading import build_skeleton
from bough.model.sizes.memory_budget import fixed_bytes
from bough.trees.tree_plan import MAX_EXPANSIONS
from loadtest.common.tiny_model import save_model
from tests.fakes.gpu.device_sweeps import on_cpu
from tests.fakes.model.families import FAMILIES
from tests.fakes.model.packed_files import rewrite, stored_as, tensors_of

V3 = FAMILIES["deepseek v3, yarn"]
BIAS = "model.layers.2.mlp.gate.e_score_correction_bias"


def test_a_token_stores_its_latent_and_its_rotated_key() -> None:
    """1.2 KB a layer of DeepSeek V3, where the heads' keys and values would be 80 KB."""
    shape = KVShape.of(AutoConfig.for_model("deepseek_v3"), torch.bfloat16)
    assert shape.row_bytes == 61 * (512 + 64) * 2
    slot = KVSlot(KVShape(2, 1, 4, torch.float32, value_dim=6), 5, torch.device("cpu"))
    assert (slot.keys.shape, slot.values.shape) == ((2, 5, 1, 4), (2, 5, 1, 6))
    within = KVShape(2, 1, 4, torch.float32, value_dim=6).within(memoryview(bytearray(5 * 2 * 10 * 4)), 5)
    assert [part.shape for part in within] == [slot.keys.shape, slot.values.shape]


def test_a_drafts_memory_includes_latents(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", V3)
    needs = draft_needs(parse(DraftConfig, "d", ["--model", str(folder), "--dtype", "float32"], {}))
    assert needs.session == (256 + MAX_EXPANSIONS) * KVShape.of(V3, torch.float32).row_bytes


def test_a_cpus_memory_includes_scores_of_all_heads() -> None:
    """Of a tile of 16 rows in each thread: 8 KB for each key that a session may have."""
    config = AutoConfig.for_model("deepseek_v3", max_position_embeddings=163_840)
    shape, found = KVShape.of(config, torch.bfloat16), []
    for num_threads in (1, 5):
        flags = f"--max-context 20000 --max-nodes 480 --kv-memory 4GB --threads {num_threads}"
        settings = parse(TargetConfig, "t", ["--model", "m", *flags.split()], {})
        found.append(fixed_bytes(settings, False, config, shape, 0, 0).activations)
    scores = 4 * 16 * 128 * 20480 * 4
    assert scores < found[1] - found[0] < 1.1 * scores


def test_deepseeks_fp8_format_is_read(tmp_path: Path) -> None:
    """With a layer that predicts further tokens, which is left out, and a router's biases, which stay in float32."""
    source = save_model(tmp_path / "source", V3)
    further = {"model.layers.4.eh_proj.weight": torch.ones(64, 96)}
    bias = {BIAS: torch.linspace(4.0, 4.001, 8)}  # all equal in bfloat16
    source = rewrite(source, tmp_path / "whole", tensors_of(source) | further | bias, None)
    packed, plain = stored_as("DeepSeek", source, tmp_path, torch.bfloat16)
    assert torch.equal(on_cpu(packed, torch.bfloat16), on_cpu(plain, torch.bfloat16))
    skeleton = build_skeleton(Checkpoint.open(packed), torch.bfloat16)
    (slot,) = (slot for slot in skeleton.layer_slots[2] if slot.key == "e_score_correction_bias")
    assert not skeleton.unused
    raw = bias[BIAS].view(torch.uint8)
    assert torch.equal(slot.materialize([raw], torch.bfloat16, None), bias[BIAS])


def test_a_router_stored_in_float32_stays_in_float32(tmp_path: Path) -> None:
    """Ernie's patterns are `gate.weight` and the module `moe_statics`; what else is stored in float32 is rounded."""
    config = Ernie4_5_MoeConfig(
        vocab_size=262, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, moe_num_experts=4, moe_k=2, moe_layer_start_index=1,
        max_position_embeddings=64,
    )  # fmt: skip
    folder = save_model(tmp_path / "model", config)
    skeleton = build_skeleton(Checkpoint.open(folder), torch.bfloat16)
    kept = [s.source.places[0].name for s in skeleton.layer_slots[1] if getattr(s.source, "keeps_dtype", False)]
    gate = "model.layers.1.mlp.gate.weight"
    assert sorted(kept) == [gate, "model.layers.1.mlp.moe_statics.e_score_correction_bias"]
    assert on_cpu(folder, torch.bfloat16).isfinite().all()


number: ContextVar[int] = ContextVar("number")


def test_all_coroutines_ask_before_any_continues_and_have_their_own_context_variables() -> None:
    seen: list[str] = []

    def act(name: str, num_questions: int) -> Callable[[], str]:
        def run() -> str:
            assert is_side_by_side()
            token = number.set(num_questions)
            for question in range(num_questions):
                seen.append(f"{name}{question}")
                assert ask((name, question)) == f"{name} {question}"
                assert number.get() == num_questions
            number.reset(token)
            return name.upper()

        return run

    rounds: list[list[tuple[str, int]]] = []

    def answer(questions: list[tuple[str, int]]) -> list[str]:
        rounds.append(questions)
        return [f"{name} {question}" for name, question in questions]

    assert side_by_side([act("a", 2), act("b", 0), act("c", 1)], answer) == ["A", "B", "C"]
    assert seen == ["a0", "c0", "a1"]
    assert rounds == [[("a", 0), ("c", 0)], [("a", 1)]]
    assert not is_side_by_side()


@pytest.mark.parametrize("is_answer_wrong", [True, False])
def test_an_error_reaches_the_caller_and_the_others_release_their_resources(is_answer_wrong: bool) -> None:
    given_back: list[str] = []

    def holds() -> None:
        try:
            ask("what")
        finally:
            given_back.append("it")

    def fails() -> None:
        if not is_answer_wrong:
            raise ValueError("wrong")
        ask("what")

    def answer(_: list[str]) -> list[str]:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        side_by_side([holds, fails], answer)
    assert given_back == ["it"]
