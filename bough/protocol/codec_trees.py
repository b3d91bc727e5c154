"""Conversion of trees to and from protobuf."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bough.errors import InvalidTree
from bough.pb import common_pb2
from bough.trees.draft_probs import DraftProbs
from bough.trees.tree import Tree


def tree_to_wire(tree: Tree) -> common_pb2.Tree:
    """Convert a tree; the root's parent and log-probability are implied."""
    return common_pb2.Tree(
        tokens=tree.tokens.tolist(),
        parents=tree.parents[1:].tolist(),
        log_probs=tree.log_probs[1:].tolist(),
        draft_probs=draft_probs_to_wire(tree.draft_probs) if tree.draft_probs is not None else None,
        draws=tree.draws.tolist() if tree.draws is not None else (),
        worth=tree.worth[1:].tolist() if tree.worth is not None else (),
    )


def tree_from_wire(message: common_pb2.Tree) -> Tree:
    """Convert a tree; raises InvalidTree for inconsistent lengths. `Tree.validate` checks the rest."""
    size = len(message.tokens)
    if size == 0 or len(message.parents) != size - 1 or len(message.log_probs) != size - 1:
        raise InvalidTree(
            "tree",
            "must have at least one node, and a parent and a log_prob for each node but the root",
            f"{size} tokens, {len(message.parents)} parents and {len(message.log_probs)} log_probs",
        )
    parents = np.concatenate(([-1], np.minimum(message.parents, 2**31 - 1))).astype(np.int32)
    return Tree(
        np.asarray(message.tokens, np.int32),
        parents,
        np.concatenate(([0.0], message.log_probs)).astype(np.float32),
        draft_probs_from_wire(message.draft_probs) if message.HasField("draft_probs") else None,
        _narrow(message.draws) if message.draws else None,
        np.concatenate(([0.0], message.worth)).astype(np.float32) if message.worth else None,
    )


def draft_probs_to_wire(draft_probs: DraftProbs) -> common_pb2.DraftProbs:
    """Convert sampling distributions; offsets are sent as sizes."""
    return common_pb2.DraftProbs(
        nodes=draft_probs.nodes.tolist(),
        sizes=np.diff(draft_probs.offsets).tolist(),
        tokens=draft_probs.tokens.tolist(),
        weights=draft_probs.weights.tolist(),
    )


def draft_probs_from_wire(message: common_pb2.DraftProbs) -> DraftProbs:
    """Convert sampling distributions; `DraftProbs.validate` checks them."""
    offsets = np.concatenate(([0], np.cumsum(message.sizes, dtype=np.uint64)))
    return DraftProbs(
        _narrow(message.nodes), _narrow(offsets), _narrow(message.tokens), np.asarray(message.weights, np.float32)
    )


def _narrow(numbers: Any) -> NDArray[np.int32]:
    """Unsigned numbers as int32; larger numbers become 2**31 - 1, which every check rejects."""
    return np.minimum(np.asarray(numbers, np.uint64), 2**31 - 1).astype(np.int32)
