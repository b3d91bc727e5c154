"""docs/design.md, rule 2, on the streamed model: a row's logits are the same bits in any tree, batch and place."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from bough.model.architecture.architecture import max_positions
from bough.model.backend import computing_by
from bough.model.batch.batch import Batch, Segment
from bough.trees.tree import Tree
from loadtest.common.tiny_model import save_model
from target_worker.sweep.streamed_model import StreamedModel
from tests.fakes.model.families import FAMILIES, KINDS, of_two_layers, random_tree
from tests.fakes.models import CPU, decode, new_slot, plain_logits, streamed
from tests.fakes.tiers import long_but


def test_a_sweep_of_context_only_computes_no_logits(tiny: Path) -> None:
    """A prompt longer than a sweep once failed in the output head, which had no rows."""
    with streamed(tiny, torch.float32) as model:
        slot = new_slot(model)
        logits, _ = model.sweep(Batch([Segment.context(slot, 0, [1, 2, 3])], model.rows, CPU))
        assert logits.shape[0] == 0


def test_a_committed_path_has_the_bits_of_decoding(tiny: Path) -> None:
    """Compaction moves KV, which must not change what follows."""
    rng = np.random.default_rng(2)
    with streamed(tiny, torch.bfloat16) as model:
        prompt, tree, slot = [5, 6, 7], random_tree(rng, 30, root=9), new_slot(model)
        model.sweep(Batch([Segment.context(slot, 0, prompt), Segment.tree(slot, 3, tree)], model.rows, CPU))
        slot.compact(range(3), prompt)
        path = tree.path(29)
        slot.compact([3 + node for node in path], [int(tree.tokens[node]) for node in path])
        batch = Batch([Segment.tree(slot, slot.length, Tree.root(11))], model.rows, CPU)
        after = model.sweep(batch)[0][0]
        assert torch.equal(after, plain_logits(model, [*slot.tokens, 11])[-1])


class Session(NamedTuple):
    """A context that is new in a sweep, and the tree below it."""

    prompt: list[int]
    tree: Tree
    segments: tuple[Segment, Segment]


def random_session(model: StreamedModel, rng: np.random.Generator, text: list[int] | None = None) -> Session:
    """Of positions on this side of the attention's blocks, beyond them, or across; it may begin as `text` does."""
    prompt = (text or rng.integers(0, 256, 69).tolist())[: rng.integers(1, 70)]
    tree, slot = random_tree(rng, int(rng.integers(1, 45)), root=int(rng.integers(256))), new_slot(model)
    return Session(prompt, tree, (Segment.context(slot, 0, prompt), Segment.tree(slot, len(prompt), tree)))


IN_FLOAT32 = [
    "llama",
    "qwen3 moe",
    "qwen3.5, recurrent layers",
    "gemma2, soft-capping, alternating windows",
    "starcoder2, biases",
]


CASES = long_but(
    [*((family, torch.bfloat16) for family in KINDS), ("llama", torch.float32)],
    [*((family, torch.bfloat16) for family in FAMILIES), *((family, torch.float32) for family in IN_FLOAT32)],
)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", long_but([torch.bfloat16], [torch.bfloat16, torch.float32]), ids=str)
@pytest.mark.parametrize("family", KINDS)
def test_the_references_logits_have_the_bits_of_plain_decoding(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    with computing_by("reference"):
        test_logits_have_the_bits_of_plain_decoding(family, dtype, tmp_path)


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_logits_have_the_bits_of_plain_decoding(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Of every node on a path of a random tree, which is at any place among others of random sessions, and contexts."""
    rng = np.random.default_rng(list(FAMILIES).index(family))
    text = rng.integers(0, 256, 69).tolist()  # as both sessions that are looked at begin: it is decoded once
    with streamed(save_model(tmp_path / "model", of_two_layers(family)), dtype) as model:
        looked_at = []
        for _ in range(2):
            sessions = [random_session(model, rng) for _ in range(rng.integers(0, 4))]
            chosen = int(rng.integers(len(sessions) + 1))
            sessions.insert(chosen, random_session(model, rng, text))
            order = rng.permutation(np.repeat(np.arange(len(sessions)), 2)).tolist()
            met, segments, begins, num_logits = set[int](), [], {}, 0
            for number in order:  # a context before its tree
                segments.append(sessions[number].segments[number in met])
                if number in met:
                    begins[number], num_logits = num_logits, num_logits + len(sessions[number].tree)
                met.add(number)
            logits = model.sweep(Batch(segments, model.rows, CPU))[0]
            tree = sessions[chosen].tree
            path = tree.path(int(tree.depths().argmax()))
            rows = logits[[begins[chosen] + node for node in path]]
            looked_at.append((len(sessions[chosen].prompt), [int(tree.tokens[node]) for node in path], rows))
        plain = new_slot(model)
        for length, tokens, rows in sorted(looked_at, key=lambda one: one[0]):
            decode(model, plain, text[plain.length : length])
            below = new_slot(model)
            below.fork(plain, length)
            for mine, wanted in zip(rows, decode(model, below, tokens), strict=True):
                assert torch.equal(mine, wanted)


def test_a_second_rotary_table_is_beyond_a_models_context(tmp_path: Path) -> None:
    """One token there, and all others of the sweep are placed by that table too: nothing is let that far."""
    config = FAMILIES["phi3, two rotary tables"]
    longest = max_positions(config)
    assert longest == 256
    with streamed(save_model(tmp_path / "model", config), torch.bfloat16) as model:

        def beside(position: int) -> torch.Tensor:
            slot, root = new_slot(model), Tree.root(7)
            session = [Segment.context(slot, 0, [5, 6, 9]), Segment.tree(slot, 3, root)]
            batch = Batch([*session, Segment.tree(new_slot(model), position, root)], model.rows, CPU)
            return model.sweep(batch)[0][0].clone()

        assert torch.equal(beside(0), beside(longest - 1))
        assert not torch.equal(beside(0), beside(longest))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_sweep_equals_generate(family: str, tmp_path: Path) -> None:
    """A tree that holds the greedy continuation among wrong guesses is accepted along exactly that continuation."""
    folder = save_model(tmp_path / "model", of_two_layers(family))
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = list(range(20, 44))
    wanted = reference.generate(
        torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, len(prompt) :].tolist()
    tokens, parents = [prompt[-1]], [-1]
    spine = 0
    for token in wanted[:-1]:
        tokens += [(token + 1) % 256, token]
        parents += [spine, spine]
        spine = len(tokens) - 1
    tree = Tree.of(tokens, parents, [0.0] * len(tokens))
    with streamed(folder, torch.float32) as model:
        slot = new_slot(model)
        segments = [Segment.context(slot, 0, prompt[:-1]), Segment.tree(slot, len(prompt) - 1, tree)]
        logits = model.sweep(Batch(segments, model.rows, CPU))[0]
    assert [int(logits[node].argmax()) for node in tree.path(spine)] == wanted
