"""The GPU's kernel of recurrent layers, interpreted: near the reference, and a row's bits depend on its path alone."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from bough.model.batch.batch import BatchPart, Segment
from bough.model.batch.state_steps import StateSteps, chain_steps
from bough.model.cpu.delta_rule import run_on_cpu
from bough.model.kv.session_kv import KVSlot
from bough.trees.tree import Tree
from loadtest.gpu import reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytest.importorskip("triton", reason="Triton is not installed; builds of torch for GPUs bring it")
if DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("without a GPU, TRITON_INTERPRET=1 has the kernel interpreted", allow_module_level=True)
KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, WIDTH = 2, 4, 12, 20, 3  # neither dimension fills its tiles
CLOSE = 2e-6


@pytest.fixture
def take_steps() -> Callable[..., torch.Tensor]:
    """Not imported where the tests are skipped."""
    kernel: Callable[..., torch.Tensor] = importlib.import_module("bough.model.gpu.delta_rule_triton").take_steps
    return kernel


class Rows:
    """What the recurrence needs of random rows, and a state before them."""

    def __init__(self, num_rows: int) -> None:
        torch.manual_seed(5)
        self.qkv = torch.randn(num_rows, 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM, device=DEVICE)
        self.decay, self.beta = torch.rand(2, num_rows, HEADS, device=DEVICE)
        self.state = torch.randn(HEADS, KEY_DIM, VALUE_DIM, device=DEVICE)

    def at(self, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.qkv[rows], self.decay[rows], self.beta[rows]

    def states(self, num_places: int) -> torch.Tensor:
        """Places for states; but for the session's own they are NaN."""
        states = self.state.new_full((HEADS, num_places, KEY_DIM, VALUE_DIM), torch.nan)
        states[:, 0] = self.state
        return states


def random_tree(size: int) -> Tree:
    rng = np.random.default_rng(size)
    parents = [-1] + [int(rng.integers(max(0, node - 5), node)) for node in range(1, size)]
    return Tree.of(list(range(size)), parents, [0.0] * size)


def steps_of(tree: Tree) -> StateSteps:
    return BatchPart(0, Segment.tree(KVSlot.__new__(KVSlot), 7, tree)).tree_steps(WIDTH)


@pytest.mark.slow
@pytest.mark.parametrize("begin", [0, 9])
def test_the_kernel_equals_the_cpus_and_torchs_operations(take_steps: Any, begin: int) -> None:
    """Of a tree's rows from `begin` on, as where an earlier chunk had the others."""
    tree, rows = random_tree(14), Rows(14)
    steps = steps_of(tree)
    assert steps.num_places > 2, "states are kept for several branches"
    first, rest = (rows.qkv, rows.decay, rows.beta), (rows.states(steps.num_places), KEY_HEADS, begin)
    table = steps.on(DEVICE).table
    mine = take_steps(*first, table, *rest)
    by_torch = reference.steps_of_table(*first, table, rows.states(steps.num_places), *rest[1:])
    cpu = [numbers.cpu() for numbers in first]
    by_cpu = run_on_cpu(*cpu, steps.steps, rows.states(steps.num_places).cpu(), *rest[1:])
    for theirs in (by_torch, by_cpu):
        torch.testing.assert_close(mine.cpu(), theirs.cpu(), atol=CLOSE, rtol=CLOSE)


@pytest.mark.slow
def test_a_nodes_bits_are_its_paths_however_the_work_is_split(take_steps: Any) -> None:
    """In a tree, and as text in two pieces, between which the state continues."""
    tree, rows = random_tree(12), Rows(12)
    steps = steps_of(tree)
    in_tree = take_steps(
        rows.qkv, rows.decay, rows.beta, steps.on(DEVICE).table, rows.states(steps.num_places), KEY_HEADS, 0
    )
    for node in (3, 8, 11):
        path, states = tree.path(node), rows.states(1)
        for part in (path[:2], path[2:]):
            if part:
                table = chain_steps(len(part), WIDTH).on(DEVICE).table
                alone = partial(take_steps, *rows.at(part), table, states, KEY_HEADS)(0)
        assert torch.equal(in_tree[node], alone[-1]), node


def test_states_are_only_read_and_written_for_branches_that_need_them() -> None:
    """A chain keeps its state at hand to the end; a fork's is put down, and taken up again for the next branch."""
    assert chain_steps(4, WIDTH).on(DEVICE).table[:, 3:].tolist() == [[1, 0], [0, 0], [0, 0], [0, 1]]
    fork = steps_of(Tree.of([1, 2, 3, 4], [-1, 0, 0, 2], [0.0] * 4))
    assert fork.on(DEVICE).table.tolist() == [
        [0, 0, 1, 1, 1],
        [1, 1, 2, 0, 1],
        [2, 1, 1, 1, 0],
        [3, 1, 1, 0, 1],
    ]
