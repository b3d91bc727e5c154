"""What a draft sampled from, sparse: the distributions that some ways of verifying need to know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bough.errors import InvalidTree

MOST_ENTRIES = 256  # of one node: several times what a draft of ours samples from


@dataclass(frozen=True, slots=True, eq=False)
class DraftProbs:
    """For each expanded node of a tree the tokens that its children were sampled from, and their probabilities.

    Whoever samples and whoever verifies takes `of`, and so the same numbers to the last bit.
    """

    nodes: NDArray[np.int32]  # (num_expanded,) ascending
    offsets: NDArray[np.int32]  # (num_expanded + 1,) node i has entries offsets[i] to offsets[i + 1]
    tokens: NDArray[np.int32]  # (num_entries,) distinct within a node
    weights: NDArray[np.float32]  # (num_entries,) above 0; divided by their sum they are probabilities

    @classmethod
    def joined(cls, by_node: Mapping[int, tuple[NDArray[np.int32], NDArray[np.float32]]]) -> DraftProbs:
        """From tokens and weights of each node."""
        nodes = sorted(by_node)
        sizes = [len(by_node[node][0]) for node in nodes]
        return cls(
            np.asarray(nodes, np.int32),
            np.concatenate(([0], np.cumsum(sizes))).astype(np.int32),
            np.concatenate([np.zeros(0, np.int32), *(by_node[node][0] for node in nodes)]),
            np.concatenate([np.zeros(0, np.float32), *(by_node[node][1] for node in nodes)]),
        )

    @classmethod
    def of_rows(cls, nodes: NDArray[np.intp], tokens: NDArray[np.int32], weights: NDArray[np.float32]) -> DraftProbs:
        """From (num_nodes, num_entries) tokens and weights; 0 is no entry. Nodes ascend."""
        is_entry = weights > 0
        offsets = np.append(0, np.cumsum(is_entry.sum(1))).astype(np.int32)
        return cls(nodes.astype(np.int32), offsets, tokens[is_entry], weights[is_entry])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DraftProbs):
            return NotImplemented
        mine, theirs = ((d.nodes, d.offsets, d.tokens, d.weights) for d in (self, other))
        return all(np.array_equal(one, two) for one, two in zip(mine, theirs, strict=True))

    def of(self, node: int) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """Tokens and probabilities, each (num_entries,), that the children of a node were sampled from.

        Raises:
            KeyError: nothing is known of the node.
        """
        index = int(np.searchsorted(self.nodes, node))
        if index == len(self.nodes) or self.nodes[index] != node:
            raise KeyError(node)
        entries = slice(self.offsets[index], self.offsets[index + 1])
        return self.tokens[entries], normalised(self.weights[entries])

    def validate(self, num_nodes: int, vocab_size: int) -> None:
        """Raises InvalidTree naming the first node at fault."""
        sizes = np.diff(self.offsets)
        if (
            len(self.offsets) != len(self.nodes) + 1
            or self.offsets[0] != 0
            or (sizes < 1).any()
            or self.offsets[-1] != len(self.tokens)
            or len(self.weights) != len(self.tokens)
        ):
            raise InvalidTree(
                f"tree.draft_probs: {len(self.nodes)} nodes, {len(self.tokens)} tokens, {len(self.weights)} weights; "
                "every node has at least one token, and every token a weight"
            )
        if len(self.nodes) and sizes.max() > MOST_ENTRIES:
            raise InvalidTree(
                f"tree.draft_probs: {sizes.max()} tokens of node {self.nodes[sizes.argmax()]}; at most {MOST_ENTRIES}, "
                "the likeliest, would do"
            )
        if len(self.nodes) and (np.diff(self.nodes) < 1).any() | (self.nodes[0] < 0) | (self.nodes[-1] >= num_nodes):
            raise InvalidTree(f"tree.draft_probs.nodes: ascending numbers from 0 to {num_nodes - 1} would do")
        for index, node in enumerate(self.nodes.tolist()):
            entries = slice(self.offsets[index], self.offsets[index + 1])
            tokens, weights = self.tokens[entries], self.weights[entries]
            if tokens.min() < 0 or tokens.max() >= vocab_size or len(np.unique(tokens)) < len(tokens):
                raise InvalidTree(
                    f"tree.draft_probs: tokens of node {node}: distinct ones of the vocabulary of {vocab_size} would do"
                )
            if not ((weights > 0) & np.isfinite(weights)).all():
                raise InvalidTree(f"tree.draft_probs: weights of node {node}: finite numbers above 0 would do")


def normalised(weights: NDArray[np.float32]) -> NDArray[np.float64]:
    """Weights (..., num_entries) divided by their sum, in double precision; zeros among them change no bit of it."""
    probs: NDArray[np.float64] = weights.astype(np.float64)
    probs /= probs.cumsum(-1)[..., -1:]  # one after another: `sum` adds in groups that depend on how many there are
    return probs
