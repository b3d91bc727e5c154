"""`bough.reference` is right, and the product computes what it computes."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from bough import reference
from bough.client import Client
from bough.model.sampling.sampler import gumbel_noise
from bough.processes.launch import Cluster
from bough.protocol.generation import GenerateOptions, Speculation, TokenPrompt, Tokens
from bough.reference import KV, Llama, Tree
from bough.trees.optimal_tree import best_shape, expected_tokens
from bough.trees.tree_plan import BestFirst, StaticShape
from draft_worker.growth.grower import BestFirstGrower, Candidates
from target_worker.verification.verify import Draw, conditional_distribution
from tests.fakes.chi_square import fit

PROMPT = [*range(40, 56), *range(60, 72), *range(40, 52)]
NO_STOPS = np.zeros(0, np.int32)


@pytest.fixture(scope="module")
def target(tiny: Path) -> Llama:
    return Llama.load(tiny)


@pytest.fixture(scope="module")
def draft(target: Llama) -> Llama:
    return replace(target, layers=[0, 1, 3])


def generated(target: Llama, draft: Llama, temperature: float, seed: int, budget: int) -> list[reference.Round]:
    grow = partial(reference.grow, temperature=temperature, seed=seed, budget=budget)
    verify = partial(reference.verify, temperature=temperature, seed=seed)
    return [*reference.generate(target, draft, PROMPT, 24, grow, verify)]


def text_of(rounds: list[reference.Round]) -> list[int]:
    return [token for round_ in rounds for token in round_.tokens]


def test_greedy_decoding_equals_transformers(tiny: Path, target: Llama, draft: Llama) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    text = list(PROMPT)
    for _ in range(24):
        text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    assert text_of(generated(target, draft, 0.0, 0, budget=1)) == text[len(PROMPT) :]


@pytest.mark.parametrize(("temperature", "seed"), [(0.0, 0), (0.7, 1), (1.3, 2)])
async def test_reference_and_product_generate_the_same_tokens_with_any_tree(
    tiny_cluster: Cluster, target: Llama, draft: Llama, temperature: float, seed: int
) -> None:
    plain = text_of(generated(target, draft, temperature, seed, budget=1))
    rounds = generated(target, draft, temperature, seed, budget=12)
    assert text_of(rounds) == plain
    assert len(rounds) < len(plain)
    options = GenerateOptions(max_tokens=24, temperature=temperature, seed=seed, ignore_eos=True)
    async with Client(tiny_cluster.address) as client:
        for speculation in (Speculation(disabled=True), Speculation(budget=12)):
            events = client.generate(TokenPrompt(tuple(PROMPT)), replace(options, speculation=speculation))
            tokens = [token async for event in events if isinstance(event, Tokens) for token in event.token_ids]
            assert tokens == plain


def test_noise_equals_the_products() -> None:
    logits = torch.zeros(300)
    perturbed = reference.perturbed(logits, temperature=1.0, seed=2**63 + 5, position=77)
    assert np.allclose(perturbed.numpy(), gumbel_noise(2**63 + 5, 77, 300), rtol=1e-12)


@pytest.mark.parametrize(("budget", "width", "depth"), [(1, 1, 1), (8, 2, 8), (24, 8, 3), (40, 4, 6)])
def test_a_tree_equals_the_products(draft: Llama, budget: int, width: int, depth: int) -> None:
    """The product's grower is given the reference's log-probabilities."""
    kv, other = KV(draft, 400), KV(draft, 400)
    expected = reference.grow(kv, PROMPT, 0.0, 0, budget, width, depth)
    grower = BestFirstGrower(PROMPT[-1], BestFirst(budget, width, depth), budget, NO_STOPS)
    after_root, rows = other.read_text(PROMPT)[-1:], {0: -1}
    while len(frontier := grower.frontier()):
        nodes = frontier.tolist()
        if nodes != [0]:
            after_root = other.read(grower.tree.tokens[nodes].tolist(), [rows[grower.tree.parents[n]] for n in nodes])
            rows |= {node: row for row, node in enumerate(nodes, len(rows) - 1)}
        best = after_root.double().log_softmax(1).topk(budget)
        tokens, log_probs = best.indices.numpy().astype(np.int32), best.values.numpy().astype(np.float32)
        grower.take(frontier, Candidates(tokens, log_probs))
    tree = grower.finished()
    assert paths(tree.tokens.tolist(), tree.parents.tolist()) == paths(expected.tokens, expected.parents)


def paths(tokens: list[int], parents: list[int]) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return set(found)


@pytest.mark.parametrize("budget", [1, 2, 7, 30])
def test_the_best_shape_is_worth_as_much_as_the_products(budget: int) -> None:
    acceptance = np.array([reference.ACCEPTANCE])
    parents = reference.best_shape(reference.ACCEPTANCE, budget)
    assert len(parents) == budget
    assert all(parent < node for node, parent in enumerate(parents))
    products = best_shape(acceptance, budget, budget) if budget > 1 else StaticShape(())
    worth = expected_tokens(StaticShape(tuple(parents[1:])), acceptance)
    assert worth == pytest.approx(expected_tokens(products, acceptance))


def test_sequoias_rule_accepts_as_often_as_the_products() -> None:
    """Chance passes this bound once in a million runs."""
    target_probs = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05], dtype=torch.float64)
    draft_probs = torch.tensor([0.1, 0.2, 0.3, 0.15, 0.25], dtype=torch.float64)
    drawn = [2, 4, 0]
    random, counts = torch.Generator().manual_seed(1), Counter[int]()
    for _ in range(20_000):
        child, left = reference.accept({token: token + 1 for token in drawn}, target_probs, draft_probs, random)
        counts[int(left.multinomial(1, generator=random)) if child is None else child - 1] += 1
    draws, probs = [], draft_probs.numpy().copy()
    for token in drawn:
        draws.append(Draw(token, np.arange(5, dtype=np.int32), probs.copy()))
        probs[token] = 0.0
        probs /= probs.sum()
    expected = conditional_distribution(target_probs.numpy(), draws)
    assert fit(np.array([counts[token] for token in range(5)]), expected) > 1e-6


def test_text_with_sequoias_scheme_has_the_targets_distribution(target: Llama, draft: Llama) -> None:
    """The first token of many runs, sharpened to few likely tokens; chance passes this bound once in a million runs."""
    random, shape = torch.Generator().manual_seed(3), reference.best_shape(reference.ACCEPTANCE, 6)
    kv, draft_kv = KV(target, 400), KV(draft, 400)
    kv.read_text(PROMPT[:-1])
    counts: Counter[int] = Counter()
    for _ in range(200):
        draft_kv.length = 0
        tree = reference.grow_sample(draft_kv, PROMPT, shape, 0.3, random)
        logits = kv.read(tree.tokens, tree.parents)
        kv.commit([])
        path, bonus = reference.verify_sample(tree, logits, kv.length, 0.3, random)
        counts[tree.tokens[path[1]] if len(path) > 1 else bonus] += 1
    probs = (logits[0] / 0.3).softmax(0).double().numpy()
    assert fit(np.array([counts[token] for token in range(len(probs))]), probs) > 1e-6


def test_a_tree_is_drawn_with_its_accepted_nodes() -> None:
    tree = Tree.root(7)
    first = tree.add(0, 8)
    tree.add(first, 9)
    tree.add(0, 5)
    lines = [*reference.drawing(tree, [0, first], lambda tokens: str(tokens[0]))]
    assert lines == ["'7'", "├─'8' ✓", "│ └─'9'", "└─'5'"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["Hi", "--nodes", "0"], "--nodes: must be 1 to 256, got 0"),
        (["Hi", "--sequoia"], "--temperature: must be at least 0, or above 0 with --sequoia, got 0.0"),
        (["Hi", "--temperature", "-1"], "--temperature: must be at least 0, or above 0 with --sequoia, got -1.0"),
    ],
)
def test_invalid_options_are_named(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        reference.main(arguments)
    assert ended.value.code == 2
    assert error in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_prints_trees_and_plain_decodings_text(smollm: Path) -> None:
    run = "import runpy, sys; sys.argv[1:] = [*{}, *{}]; runpy.run_module('bough.reference', run_name='__main__')"
    flags = ["The sky is blue because", "--max-tokens", "8", "--nodes"]
    code = "\n".join(run.format(flags, [nodes]) for nodes in ("1", "8"))  # in one process, which imports torch
    command = [sys.executable, "-c", code]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    plain = lines.index("8 tokens in 8 passes of the target")
    assert lines[plain - 1] == lines[-2]
    assert any("✓" in line for line in lines[plain:])


def test_sequoias_rule_handles_draws_that_only_rounding_allows() -> None:
    """At low temperatures the draft's probabilities underflow; the target's token is still drawn from what is left."""
    random = torch.Generator().manual_seed(1)
    target_probs, draft_probs = torch.tensor([0.3, 0.7, 0.0, 0.0]), torch.tensor([1.0, 0.0, 0.0, 0.0])
    for _ in range(50):
        child, left = reference.accept({0: 1, 2: 2, 3: 3}, target_probs, draft_probs, random)
        assert child == 1 or left.tolist() == [0.0, 1.0, 0.0, 0.0]
