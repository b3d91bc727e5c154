"""Drafts of targets with experts, windows shorter than a row, capped scores or sinks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import save_model
from test_distill import CPU, SIZES, distilled, plain_logits, served_agreement
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from bough.distill.teacher import Network, Template
from bough.distill.text import Script, Writer
from bough.model.checkpoint import Checkpoint
from bough.model.experts import has_own_products
from bough.model.loading import DTYPES
from bough.model.tokenizer_files import load_tokenizer_files
from bough.tokenizer import Tokenizer

OTHERS: dict[str, dict[str, float]] = {  # caps are low enough to change what a random model says
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16},
    "gemma2": {
        "head_dim": 16,
        "sliding_window": 9,
        "query_pre_attn_scalar": 1,
        "attn_logit_softcapping": 0.05,
        "final_logit_softcapping": 0.1,
    },
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},  # whose router is a linear layer, and more
    "gpt_oss": {"head_dim": 16, "sliding_window": 9, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def save_other(folder: Path, model_type: str, num_layers: int) -> Path:
    """A random model."""
    sizes = {**SIZES, "num_hidden_layers": num_layers, "num_attention_heads": 4, "num_key_value_heads": 2}
    return save_model(folder, AutoConfig.for_model(model_type, **sizes, **OTHERS[model_type], pad_token_id=0))


def experts_of(layers: nn.ModuleList) -> nn.Module:
    """Of the first layer."""
    return next(module for module in layers[0].modules() if has_own_products(module))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_gradients_through_experts_are_those_of_transformers(model_type: str, dtype: str, tmp_path: Path) -> None:
    folder = save_other(tmp_path / "target", model_type, 1)
    network = Network(Checkpoint.open(folder), (), dtype, CPU)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype], experts_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(40, SIZES["hidden_size"], generator=generator).to(DTYPES[dtype]).requires_grad_()
    weights, chosen = torch.rand(40, 4, generator=generator).topk(2)
    weights = weights.to(DTYPES[dtype]).requires_grad_()
    results = []
    for experts in (experts_of(network.layers), experts_of(theirs.model.layers)):
        out = experts(hidden, chosen, weights)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), (hidden, weights))))
    tolerance = 1e-5 if dtype == "float32" else 3e-2
    for own, right in zip(*results, strict=True):
        assert (own - right).norm() < tolerance * right.norm()


@pytest.mark.parametrize("model_type", OTHERS)
def test_rows_are_read_as_the_target_reads_them(model_type: str, tmp_path: Path) -> None:
    """A token at a time, as the writer does, and a whole row at once; also documents that do not begin the row."""
    folder = save_other(tmp_path / "target", model_type, 2)
    teacher = Network(Checkpoint.open(folder), (), "float32", CPU)
    template = Template.of(Tokenizer(load_tokenizer_files(folder)))
    rows, opening = Writer(teacher, Script(template, 14, 10), seed=3).write(2, 64, lambda _: None), template.opening
    assert len(rows.starts[0].unique()) > 1
    with torch.inference_mode():
        hidden = teacher.hidden(rows.placed(torch.tensor(opening)))[0, len(opening) :]
        batched = teacher.logits(hidden).log_softmax(-1)
    kept = batched.gather(1, rows.top_ids[0].long())
    torch.testing.assert_close(kept, rows.top_log_probs[0].float(), atol=4e-3, rtol=0)  # kept in float16
    for start in rows.starts[0].unique().tolist():
        own = rows.starts[0] == start
        alone = plain_logits(folder, [*opening, *rows.tokens[0, own].tolist()])[len(opening) :]
        torch.testing.assert_close(batched[own], alone.log_softmax(-1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("model_type", OTHERS)
def test_a_draft_is_brought_nearer_and_served_as_it_was_trained(model_type: str, tmp_path: Path) -> None:
    folder = save_other(tmp_path / "target", model_type, 4)
    flags = ("--text-tokens", "2000", "--text-rows", "16", "--tokens", "6000", "--learning-rate", "0.01")
    manifest = distilled(folder, tmp_path / "out", "--drop-layers", "2", *flags).manifest
    assert manifest.top4 > manifest.untrained_top4
    assert served_agreement(folder, tmp_path / "out", "float32") == pytest.approx(manifest.top1, abs=0.03)
