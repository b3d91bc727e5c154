"""A tree of guessed tokens as flat arrays; masks, depths and paths are derived on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bough.errors import InvalidTree
from bough.trees.tree_plan import Scheme

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]
NO_TOKEN = -1
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


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """A draft tree: node 0 is the root, the last committed token; parents precede children, siblings are best first."""

    tokens: IntArray  # (num_nodes,)
    parents: IntArray  # (num_nodes,) index of the parent; -1 at the root
    log_probs: FloatArray  # (num_nodes,) log-probability given the path, by the draft or the lookup; 0 at the root
    draft_probs: DraftProbs | None = None  # sampling distributions of the children; only for sampled schemes
    draws: IntArray | None = None  # (num_draws,) the nodes that were sampled, in that order; None: all, in their own
    worth: FloatArray | None = (
        None  # (num_nodes,) calibrated log-probability of acceptance if the parent is accepted; or None
    )

    @classmethod
    def of(cls, tokens: Sequence[int], parents: Sequence[int], log_probs: Sequence[float]) -> Tree:
        """Build from one token, parent and log-probability for each node."""
        return cls(
            np.asarray(tokens, dtype=np.int32),
            np.asarray(parents, dtype=np.int32),
            np.asarray(log_probs, dtype=np.float32),
        )

    @classmethod
    def root(cls, token: int) -> Tree:
        """A tree of its root alone; verifying it is plain decoding."""
        return cls.of([token], [-1], [0.0])

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> Tree:
        """A tree of one path, whose tokens all have the log-probability 0."""
        return cls.of(tokens, range(-1, len(tokens) - 1), [0.0] * len(tokens))

    @property
    def is_chain(self) -> bool:
        """Whether each node follows the one before it."""
        return bool(np.array_equal(self.parents, np.arange(-1, len(self) - 1)))

    def __len__(self) -> int:
        return len(self.tokens)

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
                (self.worth, other.worth),
            )
        )

    def depths(self) -> IntArray:
        """(num_nodes,) levels below the root."""
        depths: IntArray = along_paths(np.add, (self.parents >= 0).astype(np.int32), self.ancestors())
        return depths

    def path(self, node: int) -> list[int]:
        """Nodes from the root down to `node`, both included."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = int(self.parents[node])
        return nodes[::-1]

    def ancestors(self) -> list[NDArray[np.intp]]:
        """(num_nodes,) each: the ancestors 1, 2, 4, ... levels above each node, or the root, while some are others."""
        ancestors, above = [], np.maximum(self.parents, 0).astype(np.intp)
        while above.any():
            ancestors.append(above)
            above = above.take(above)
        return ancestors

    def path_table(self) -> IntArray:
        """(num_nodes, max_depth + 1): row i is the path from the root to node i, padded with 0."""
        depths, parents = self.depths().tolist(), self.parents.tolist()
        table = np.zeros((len(self), max(depths) + 1), dtype=np.int32)
        for node in range(1, len(self)):
            table[node] = table[parents[node]]
            table[node, depths[node]] = node
        return table

    def children(self) -> list[dict[int, int]]:
        """For each node, its children as a map from token to node."""
        children: list[dict[int, int]] = [{} for _ in range(len(self))]
        tokens = self.tokens.tolist()
        for node, parent in enumerate(self.parents.tolist()[1:], 1):
            children[parent][tokens[node]] = node
        return children

    def walk(self, token_after: Callable[[Sequence[int]], int]) -> tuple[list[int], int]:
        """Walk down from the root while the token after the path is a child's.

        `token_after` takes the nodes of the path so far. Returns the path, root included, and the first token that is
        no child's.
        """
        path, keys = [0], self.keys()
        while True:
            token = token_after(path)
            wanted = path[-1] << 32 | token
            node = int((keys == wanted).argmax())
            if keys[node] != wanted:
                return path, token
            path.append(node)

    def along(self, tokens: Iterable[int]) -> list[int]:
        """The nodes of the longest path from the root (excluded) whose tokens are a prefix of `tokens`."""
        following = iter(tokens)
        return self.walk(lambda _: next(following, NO_TOKEN))[0][1:]

    def keys(self) -> NDArray[np.int64]:
        """(num_nodes,) parent and token of each node as one number."""
        return (self.parents.astype(np.int64) << 32) | self.tokens

    @property
    def estimates(self) -> FloatArray:
        """(num_nodes,) `worth`, or `log_probs` if that is None."""
        return self.log_probs if self.worth is None else self.worth

    def scores(self) -> FloatArray:
        """(num_nodes,) log-probability of each node's path by `estimates`, which is never above its parent's."""
        steps, ancestors = np.minimum(self.estimates.astype(np.float64), 0.0), self.ancestors()
        steps[0] = 0.0
        scores = along_paths(np.add, steps, ancestors)
        lowest: FloatArray = along_paths(np.minimum, scores, ancestors).astype(np.float32)  # sums are rounded
        return lowest

    def trimmed(self, budget: int) -> Tree:
        """The tree of the `budget` best-scoring nodes, in their old order; raises InvalidTree if `budget` < 1."""
        if budget < 1:
            raise InvalidTree("budget", "must be at least 1", budget)
        return self if len(self) <= budget else self.only(best_nodes(self.scores(), budget))

    def only(self, nodes: NDArray[np.intp]) -> Tree:
        """The tree of these nodes in this order, with parents before their children; sampled trees cannot be cut."""
        assert self.draft_probs is None, "a sampled tree cannot be cut: the rest would not be a sample"
        new_index = np.full(len(self), -1, dtype=np.int32)
        new_index[nodes] = np.arange(len(nodes), dtype=np.int32)
        parents = np.where(self.parents[nodes] < 0, -1, new_index[self.parents[nodes]]).astype(np.int32)
        worth = None if self.worth is None else self.worth[nodes]
        return Tree(self.tokens[nodes], parents, self.log_probs[nodes], worth=worth)

    def sampled_children(self, node: int, scheme: Scheme) -> IntArray:
        """Children of `node` in sampling order, without nodes added after sampling."""
        drawn = np.arange(len(self), dtype=np.int32)
        if scheme.is_sampled and self.draws is not None:
            drawn = self.draws
        below: IntArray = drawn[self.parents[drawn] == node]
        return below

    def validate(self, vocab_size: int, max_nodes: int, scheme: Scheme = Scheme.TARGET) -> None:
        """Check every invariant, including those of `scheme`; called once at each process boundary.

        Raises:
            InvalidTree: names the first invalid node.
        """
        size = len(self)
        if size == 0 or len(self.parents) != size or len(self.log_probs) != size:
            raise InvalidTree(
                "tree",
                "must have at least one node, and one token, parent and log_prob for each",
                f"{size} tokens, {len(self.parents)} parents and {len(self.log_probs)} log_probs",
            )
        if len(self.estimates) != size:
            raise InvalidTree("tree.worth", "must be empty or have one entry for each node", len(self.estimates))
        if size > max_nodes:
            raise InvalidTree("tree.tokens", f"must have at most {max_nodes} nodes", size)
        self._validate_nodes(vocab_size)
        self._validate_siblings()
        if self.draft_probs is not None:
            self.draft_probs.validate(size, vocab_size)
        if self.draws is not None:
            self._validate_draws(self.draws)
        if scheme.is_sampled:
            self._validate_sample(scheme)

    def _validate_nodes(self, vocab_size: int) -> None:
        tokens, parents, log_probs = self.tokens, self.parents, self.log_probs
        if parents[0] != -1:
            raise InvalidTree("tree.parents[0]", "must be -1, as the root has no parent", parents[0])
        is_before = (parents >= 0) & (parents < np.arange(len(self)))
        is_before[0] = True
        checks: tuple[tuple[str, IntArray | FloatArray, BoolArray, Callable[[int], str]], ...] = (
            ("tokens", tokens, (tokens >= 0) & (tokens < vocab_size), lambda _: f"0 to {vocab_size - 1}"),
            ("parents", parents, is_before, lambda node: f"0 to {node - 1}, before its child"),
            ("log_probs", log_probs, log_probs <= 1e-6, lambda _: "at most 0"),  # also catches NaN
            ("worth", self.estimates, self.estimates <= 1e-6, lambda _: "at most 0"),
        )
        for name, values, is_valid, rule in checks:
            if not is_valid.all():
                node = int(is_valid.argmin())
                raise InvalidTree(f"tree.{name}[{node}]", f"must be {rule(node)}", values[node])

    def _validate_siblings(self) -> None:
        keys = self.keys()[1:]
        ordered = np.sort(keys)
        if not (ordered[1:] == ordered[:-1]).any():
            return
        is_first = np.zeros(len(keys), np.bool_)
        is_first[np.unique(keys, return_index=True)[1]] = True
        again = int(is_first.argmin())
        raise InvalidTree(
            f"tree.tokens[{again + 1}]",
            "must differ from the tokens of its siblings",
            f"{self.tokens[again + 1]}, the token of node {int((keys == keys[again]).argmax()) + 1}",
        )

    def _validate_draws(self, draws: IntArray) -> None:
        drawn = {*draws.tolist()}
        if len(drawn) < len(draws):
            raise InvalidTree(
                "tree.draws", "must have each node at most once", f"{len(draws)} draws of {len(drawn)} nodes"
            )
        if strangers := drawn - {*range(1, len(self))}:
            raise InvalidTree("tree.draws", f"must be nodes from 1 to {len(self) - 1}", min(strangers))
        for node in sorted(drawn):
            if self.parents[node] != 0 and int(self.parents[node]) not in drawn:
                raise InvalidTree(
                    "tree.draws", "must include the parent of each node", f"node {node} without {self.parents[node]}"
                )

    def _validate_sample(self, scheme: Scheme) -> None:
        """Check that the drawn nodes could have been sampled as the scheme requires."""
        for node in range(len(self)):
            drawn = self.sampled_children(node, scheme)
            if len(drawn) == 0:
                continue
            if self.draft_probs is None or node not in self.draft_probs.nodes:
                raise InvalidTree(
                    "tree.draft_probs",
                    f"must have the distribution that the children of node {node} were sampled from "
                    f"for {scheme.value} verification",
                    "none",
                )
            possible = self.draft_probs.of(node)[0]
            # Draws after the support is exhausted come from the other tokens.
            for child in drawn[: len(possible)].tolist():
                if self.tokens[child] not in possible:
                    raise InvalidTree(
                        f"tree.tokens[{child}]",
                        f"must be a token of tree.draft_probs of node {node}",
                        self.tokens[child],
                    )


def along_paths(operation: np.ufunc, values: NDArray[Any], ancestors: Sequence[NDArray[np.intp]]) -> NDArray[Any]:
    """(num_nodes,) all values on the path from the root to each node, joined by an associative `operation`.

    The root's value may count several times or never: it must be neutral, such as 1 in products.
    """
    for above in ancestors:
        values = operation(values, values.take(above))
    return values


def best_nodes(scores: FloatArray, budget: int) -> NDArray[np.intp]:
    """(budget,) the best-scoring nodes, ascending.

    Their parents are among them: no node scores above its parent, and ties go to the earlier node.
    """
    return np.sort(np.argsort(-scores, kind="stable")[:budget])
