"""The draft's sparse sampling distributions, which the sampled verification schemes need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bough.errors import InvalidTree

MOST_ENTRIES = 256  # limit for one node; our drafts sample from several times fewer


@dataclass(frozen=True, slots=True, eq=False)
class DraftProbs:
    """For each expanded node of a tree, the tokens that its children were sampled from and their probabilities.

    Sampling and verification both read probabilities through `of`, so they agree bit for bit.
    """

    nodes: NDArray[np.int32]  # (num_expanded,) ascending
    offsets: NDArray[np.int32]  # (num_expanded + 1,) nodes[i] has entries offsets[i] to offsets[i + 1]
    tokens: NDArray[np.int32]  # (num_entries,) distinct within a node
    weights: NDArray[np.float32]  # (num_entries,) above 0, unnormalised probabilities

    @classmethod
    def joined(cls, by_node: Mapping[int, tuple[NDArray[np.int32], NDArray[np.float32]]]) -> DraftProbs:
        """Join the (tokens, weights) of each node."""
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
        """Build from ascending nodes and their (num_nodes, num_entries) tokens and weights; weight 0 is no entry."""
        is_entry = weights > 0
        offsets = np.append(0, np.cumsum(is_entry.sum(1))).astype(np.int32)
        return cls(nodes.astype(np.int32), offsets, tokens[is_entry], weights[is_entry])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DraftProbs):
            return NotImplemented
        mine, theirs = ((d.nodes, d.offsets, d.tokens, d.weights) for d in (self, other))
        return all(np.array_equal(one, two) for one, two in zip(mine, theirs, strict=True))

    def of(self, node: int) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """Tokens and probabilities, each (num_entries,), that the children of `node` were sampled from.

        Raises:
            KeyError: the node was not expanded.
        """
        index = int(np.searchsorted(self.nodes, node))
        if index == len(self.nodes) or self.nodes[index] != node:
            raise KeyError(node)
        entries = slice(self.offsets[index], self.offsets[index + 1])
        return self.tokens[entries], normalised(self.weights[entries])

    def validate(self, num_nodes: int, vocab_size: int) -> None:
        """Check the arrays; raises InvalidTree naming the first invalid node."""
        sizes = np.diff(self.offsets)
        if (
            len(self.offsets) != len(self.nodes) + 1
            or self.offsets[0] != 0
            or (sizes < 1).any()
            or self.offsets[-1] != len(self.tokens)
            or len(self.weights) != len(self.tokens)
        ):
            raise InvalidTree(
                "tree.draft_probs",
                "must have at least one token for each node and one weight for each token",
                f"{len(self.nodes)} nodes, {len(self.tokens)} tokens, {len(self.weights)} weights",
            )
        if len(self.nodes) and sizes.max() > MOST_ENTRIES:
            raise InvalidTree(
                "tree.draft_probs",
                f"node {self.nodes[sizes.argmax()]} must have at most {MOST_ENTRIES} tokens",
                sizes.max(),
            )
        if len(self.nodes) and (np.diff(self.nodes) < 1).any() | (self.nodes[0] < 0) | (self.nodes[-1] >= num_nodes):
            raise InvalidTree("tree.draft_probs.nodes", f"must ascend within 0 to {num_nodes - 1}")
        for index, node in enumerate(self.nodes.tolist()):
            entries = slice(self.offsets[index], self.offsets[index + 1])
            tokens, weights = self.tokens[entries], self.weights[entries]
            if tokens.min() < 0 or tokens.max() >= vocab_size or len(np.unique(tokens)) < len(tokens):
                raise InvalidTree(
                    "tree.draft_probs", f"tokens of node {node} must be distinct and from 0 to {vocab_size - 1}"
                )
            if not ((weights > 0) & np.isfinite(weights)).all():
                raise InvalidTree("tree.draft_probs", f"weights of node {node} must be finite and above 0")


def normalised(weights: NDArray[np.float32]) -> NDArray[np.float64]:
    """Weights (..., num_entries) divided by their sum, in float64; padding with zeros does not change the result."""
    probs: NDArray[np.float64] = weights.astype(np.float64)
    probs /= probs.cumsum(-1)[..., -1:]  # adds sequentially; the order of additions in `sum` depends on the length
    return probs
