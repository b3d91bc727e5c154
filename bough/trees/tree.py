"""A tree of guessed tokens, as flat arrays.

Knows nothing of models, workers or wires. Masks, depths and paths are derived here and stored nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bough.errors import InvalidTree
from bough.trees.draft_probs import DraftProbs
from bough.trees.tree_plan import Scheme

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """Node 0 is the root, the last committed token; parents come before children, siblings best first."""

    tokens: IntArray  # (num_nodes,)
    parents: IntArray  # (num_nodes,) index of the parent; -1 at the root
    log_probs: FloatArray  # (num_nodes,) draft's conditional log-probability; 0 at the root
    draft_probs: DraftProbs | None = None  # what children were sampled from, where verification asks for it
    # (num_draws,) nodes in the order in which they were sampled, one as often as it was; None is all in their own
    draws: IntArray | None = None

    @classmethod
    def of(cls, tokens: Sequence[int], parents: Sequence[int], log_probs: Sequence[float]) -> Tree:
        """From lists, in the layout of the fields."""
        return cls(
            np.asarray(tokens, dtype=np.int32),
            np.asarray(parents, dtype=np.int32),
            np.asarray(log_probs, dtype=np.float32),
        )

    @classmethod
    def root(cls, token: int) -> Tree:
        """A tree without guesses: verifying it is plain decoding."""
        return cls.of([token], [-1], [0.0])

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_places(self) -> int:
        """Nodes, or as many as there would be if equal draws did not share one."""
        return max(len(self), 1 + len(self.draws)) if self.draws is not None else len(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tree):
            return NotImplemented
        return self.draft_probs == other.draft_probs and all(
            np.array_equal(mine, theirs)  # type: ignore[arg-type]  # None equals None
            for mine, theirs in (
                (self.tokens, other.tokens),
                (self.parents, other.parents),
                (self.log_probs, other.log_probs),
                (self.draws, other.draws),
            )
        )

    def depths(self) -> IntArray:
        """(num_nodes,) levels below the root."""
        depths = [0]
        for parent in self.parents[1:].tolist():
            depths.append(depths[parent] + 1)
        return np.array(depths, np.int32)

    def path(self, node: int) -> list[int]:
        """Nodes from the root down to `node`, both included."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = int(self.parents[node])
        return nodes[::-1]

    def path_table(self) -> IntArray:
        """(num_nodes, max_depth + 1): row i lists the path to node i from the root; unused places hold 0."""
        depths, parents = self.depths().tolist(), self.parents.tolist()
        table = np.zeros((len(self), max(depths) + 1), dtype=np.int32)
        for node in range(1, len(self)):
            table[node] = table[parents[node]]
            table[node, depths[node]] = node
        return table

    def ancestor_mask(self) -> BoolArray:
        """(num_nodes, num_nodes): [i, j] is true where j is i or an ancestor of i."""
        mask = np.eye(len(self), dtype=np.bool_)
        for node in range(1, len(self)):
            mask[node] |= mask[self.parents[node]]
        return mask

    def children(self) -> list[dict[int, int]]:
        """For each node its children: token to node."""
        children: list[dict[int, int]] = [{} for _ in range(len(self))]
        for node in range(1, len(self)):
            children[self.parents[node]][int(self.tokens[node])] = node
        return children

    def along(self, tokens: Iterable[int]) -> list[int]:
        """Nodes below the root that spell the leading tokens, as far as the tree has them."""
        children, nodes = self.children(), [0]
        for token in tokens:
            node = children[nodes[-1]].get(token)
            if node is None:
                break
            nodes.append(node)
        return nodes[1:]

    def scores(self) -> FloatArray:
        """(num_nodes,) log-probability of the whole path from the root."""
        scores = self.log_probs.copy()
        for node in range(1, len(self)):
            scores[node] += scores[self.parents[node]]
        return scores

    def trimmed(self, budget: int) -> Tree:
        """The `budget` best-scoring nodes in their old order."""
        if budget < 1:
            raise InvalidTree(f"budget: {budget} is no tree size; 1 or more would do")
        return self if len(self) <= budget else self.only(best_nodes(self.scores(), budget))

    def only(self, nodes: NDArray[np.intp]) -> Tree:
        """These nodes, which ascend, each with its parent; of a tree that was sampled what is left is no sample."""
        assert self.draft_probs is None, "a sample cannot be trimmed"
        new_index = np.full(len(self), -1, dtype=np.int32)
        new_index[nodes] = np.arange(len(nodes), dtype=np.int32)
        parents = np.where(self.parents[nodes] < 0, -1, new_index[self.parents[nodes]]).astype(np.int32)
        return Tree(self.tokens[nodes], parents, self.log_probs[nodes])

    def drawn_below(self, node: int, scheme: Scheme) -> IntArray:
        """Children of a node in the order in which they were drawn; one that equal draws share as often as that.

        Those that were not drawn, but added to a sample, are none of them.
        """
        drawn = np.arange(len(self), dtype=np.int32)
        if scheme is not Scheme.TARGET and self.draws is not None:
            drawn = self.draws
        below: IntArray = drawn[self.parents[drawn] == node]
        return below

    def validate(self, vocab_size: int, max_nodes: int, scheme: Scheme = Scheme.TARGET) -> None:
        """Checks every rule, also those of the scheme by which it is to be verified; once at each process boundary.

        Raises:
            InvalidTree: naming the first node at fault.
        """
        size = len(self)
        if size == 0 or len(self.parents) != size or len(self.log_probs) != size:
            raise InvalidTree(
                f"tree: {size} tokens, {len(self.parents)} parents and {len(self.log_probs)} log_probs; "
                "a tree has a root, and one of each for every node"
            )
        if size > max_nodes:
            raise InvalidTree(f"tree.tokens: {size} nodes; at most {max_nodes} are verified at once")
        for node in range(size):
            self._validate_node(node, vocab_size)
        self._validate_siblings()
        if self.draft_probs is not None:
            self.draft_probs.validate(size, vocab_size)
        if self.draws is not None:
            self._validate_draws(self.draws, max_nodes)
        if scheme is not Scheme.TARGET:
            self._validate_sample(scheme)

    def _validate_node(self, node: int, vocab_size: int) -> None:
        token, parent, log_prob = int(self.tokens[node]), int(self.parents[node]), float(self.log_probs[node])
        if not 0 <= token < vocab_size:
            raise InvalidTree(f"tree.tokens[{node}]: {token} is outside the vocabulary of {vocab_size}")
        if node == 0 and parent != -1:
            raise InvalidTree(f"tree.parents[0]: {parent}; the root has no parent (-1)")
        if node > 0 and not 0 <= parent < node:
            raise InvalidTree(f"tree.parents[{node}]: {parent}; a parent comes before its child, so 0 to {node - 1}")
        if not log_prob <= 1e-6:  # also catches NaN
            raise InvalidTree(f"tree.log_probs[{node}]: {log_prob}; a log-probability is a number not above 0")

    def _validate_siblings(self) -> None:
        first_with: dict[tuple[int, int], int] = {}
        for node in range(1, len(self)):
            key = (int(self.parents[node]), int(self.tokens[node]))
            if key in first_with:
                raise InvalidTree(
                    f"tree.tokens[{node}]: {key[1]} is already the token of its sibling {first_with[key]}; "
                    "siblings have distinct tokens"
                )
            first_with[key] = node

    def _validate_draws(self, draws: IntArray, max_nodes: int) -> None:
        if len(draws) >= max_nodes:
            raise InvalidTree(f"tree.draws: {len(draws)}; a tree of at most {max_nodes} nodes has {max_nodes - 1}")
        drawn = {*draws.tolist()}
        if not drawn <= {*range(1, len(self))}:
            raise InvalidTree(f"tree.draws: nodes from 1 to {len(self) - 1} would do")
        for node in sorted(drawn):
            if self.parents[node] != 0 and int(self.parents[node]) not in drawn:
                raise InvalidTree(f"tree.draws: node {node}, but not its parent {self.parents[node]}; both would do")

    def _validate_sample(self, scheme: Scheme) -> None:
        """Whether all that was drawn can have been sampled as the scheme says."""
        if scheme is Scheme.MULTI_ROUND and self.draws is None and len(self) > 1:
            raise InvalidTree(
                f"tree.draws: missing, but node 0 has children; {scheme.value} verification would do with all "
                "nodes in the order in which they were drawn"
            )
        if scheme.is_without_replacement and self.draws is not None and len({*self.draws.tolist()}) < len(self.draws):
            raise InvalidTree(f"tree.draws: a node twice; for {scheme.value} verification each once would do")
        for node in range(len(self)):
            drawn = self.drawn_below(node, scheme)
            if len(drawn) == 0:
                continue
            if self.draft_probs is None or node not in self.draft_probs.nodes:
                raise InvalidTree(
                    f"tree.draft_probs: missing for node {node}; {scheme.value} verification would do with what its "
                    "children were sampled from"
                )
            possible = self.draft_probs.of(node)[0]
            # Without replacement, what comes after all that was possible is drawn from the other tokens.
            num_possible = len(possible) if scheme.is_without_replacement else len(drawn)
            for child in drawn[:num_possible].tolist():
                if self.tokens[child] not in possible:
                    raise InvalidTree(
                        f"tree.tokens[{child}]: {self.tokens[child]} cannot have been sampled from tree.draft_probs of "
                        f"node {node}; one of its tokens would do"
                    )


def best_nodes(scores: FloatArray, budget: int) -> NDArray[np.intp]:
    """(budget,) the best-scoring nodes, ascending.

    A node never scores above its parent (log-probabilities are not positive) and ties go to the earlier node, so that
    parents of these are among them.
    """
    return np.sort(np.argsort(-scores, kind="stable")[:budget])
