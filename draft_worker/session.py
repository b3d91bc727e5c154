"""A session at the draft worker: its KV, kept between rounds and rolled back to what was committed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from bough.errors import InvalidRequest
from bough.growth import BestFirst
from bough.messages import Context, GrowCall
from bough.model.batch import Batch, Segment
from bough.model.draw import adjusted, filtered, gumbel_noise
from bough.model.kv import KVSlot
from bough.sampling import SamplingParams
from bough.tree import Tree
from draft_worker.grow import Children, Growth, grow_best_first

NUM_CANDIDATES = 256  # tokens that are considered as children; far more than are ever taken


class DraftModel(Protocol):
    """The seam below growing: a resident model, or a fake."""

    device: torch.device

    def logits(self, batch: Batch) -> torch.Tensor:
        """(num_logit_rows, vocab_size) float32."""
        ...


class DraftSession:
    """Grows trees for one session; remembers the last tree's KV, so that what of it was accepted is not run again."""

    def __init__(self, slot: KVSlot) -> None:
        self.slot = slot
        self._last_tree: dict[int, dict[int, int]] = {}  # expanded node (by its slot row) -> child token -> child's row
        self._last_root: tuple[int, int] | None = None  # token and slot row

    def grow(self, call: GrowCall, model: DraftModel, branch: int) -> tuple[Tree, int]:
        """A tree for the call, and how many draft steps it took.

        Raises:
            PrefixMissing: this worker holds less of the session, or something else, than the caller believes.
        """
        if not isinstance(call.plan.growth, BestFirst):
            raise InvalidRequest("growth: only best_first is grown here so far")
        self._stand_on(call.context)
        expansion = _Expansion(self.slot, call, model, branch)
        tree = grow_best_first(call.root_token, call.plan.growth, call.sampling.stop_token_ids, expansion.expand)
        self._remember(expansion)
        return tree, expansion.num_steps

    def _stand_on(self, context: Context) -> None:
        """Rolls back to the committed prefix, and takes over from the last tree what has been committed since."""
        self.slot.stand_on(context.context_start, context.prefix_hash)
        rows: list[int] = []
        if self._last_root is not None and context.context_start == self._last_root[1]:
            rows = self._accepted_rows(context.tokens)
        self.slot.compact(rows, context.tokens[: len(rows)])
        self._last_root, self._last_tree = None, {}

    def _accepted_rows(self, tokens: Sequence[int]) -> list[int]:
        """Slot rows of the expanded nodes of the last tree along these tokens."""
        assert self._last_root is not None
        token, row = self._last_root
        if not tokens or tokens[0] != token:
            return []
        rows = [row]
        for token in tokens[1:]:
            child = self._last_tree.get(rows[-1], {}).get(token)
            if child is None:
                break
            rows.append(child)
        return rows

    def _remember(self, expansion: _Expansion) -> None:
        if expansion.growth is None:
            return
        self._last_root = (int(expansion.growth.tokens[0]), self.slot.length)
        for node, row in expansion.row_of.items():
            if node:
                parent_row = expansion.row_of[int(expansion.growth.parents[node])]
                self._last_tree.setdefault(parent_row, {})[int(expansion.growth.tokens[node])] = row


class _Expansion:
    """Expands nodes of one growing tree with the draft model. Expanded node number k takes slot row base + k."""

    def __init__(self, slot: KVSlot, call: GrowCall, model: DraftModel, branch: int) -> None:
        self.slot = slot
        self.call = call
        self.model = model
        self.branch = branch
        self.base = call.context.base_length
        self.row_of: dict[int, int] = {}  # expanded node -> slot row
        self.num_steps = 0
        self.growth: Growth | None = None

    def expand(self, growth: Growth, nodes: Sequence[int]) -> Children:
        """One draft step; the first also runs the context that the worker does not hold yet."""
        self.growth = growth
        for node in nodes:
            self.row_of[node] = self.base + len(self.row_of)
        segments = [self._segment(growth, nodes)]
        if self.num_steps == 0:
            segments.insert(0, self._pending_context())
        logits = self.model.logits(Batch(segments, None, self.model.device))
        self.num_steps += 1
        if self.num_steps == 1:
            new = self.call.context.tokens[self.slot.length - self.call.context.context_start :]
            self.slot.compact(range(self.slot.length, self.base), new)
        return self._children(growth, nodes, logits)

    def _pending_context(self) -> Segment:
        start = self.slot.length
        return Segment.context(self.slot, start, self.call.context.tokens[start - self.call.context.context_start :])

    def _path(self, growth: Growth, node: int) -> list[int]:
        path = []
        while node >= 0:
            path.append(node)
            node = int(growth.parents[node])
        return path[::-1]

    def _segment(self, growth: Growth, nodes: Sequence[int]) -> Segment:
        depths = growth.depths[nodes]
        tail = np.zeros((len(nodes), int(depths.max()) + 1), np.int32)
        for i, node in enumerate(nodes):
            tail[i, : depths[i] + 1] = [self.row_of[step] for step in self._path(growth, node)]
        rows = np.array([self.row_of[node] for node in nodes], np.int32)
        return Segment(self.slot, growth.tokens[nodes], self.base + depths, rows, self.base, tail, True)

    def _children(self, growth: Growth, nodes: Sequence[int], logits: torch.Tensor) -> Children:
        """The tokens that the target is likeliest to draw, given the noise with which it will draw them.

        With noise G at temperature T the target takes the largest of logit + T G: greedy decoding of perturbed logits.
        So the draft's guess is the softmax of its own logits perturbed in the same way, and at T = 0 the plain softmax.
        """
        params = self.call.sampling
        if params.has_penalties or params.logit_bias:
            logits = self._adjusted(growth, nodes, logits)
        values, candidates = logits.topk(min(NUM_CANDIDATES, logits.shape[1]), dim=1)
        tokens, scores = candidates.cpu().numpy(), values.cpu().numpy().astype(np.float64)
        if not params.is_greedy:
            scores = self._perturbed(growth, nodes, tokens, scores, logits.shape[1])
        peak = scores.max(1, keepdims=True)
        with np.errstate(divide="ignore"):
            log_probs = scores - peak - np.log(np.exp(scores - peak).sum(1, keepdims=True))
        best = np.argsort(-log_probs, axis=1, kind="stable")[:, : self.branch]
        return Children(
            np.take_along_axis(tokens, best, 1).astype(np.int32),
            np.minimum(np.take_along_axis(log_probs, best, 1), 0.0).astype(np.float32),
        )

    def _perturbed(
        self, growth: Growth, nodes: Sequence[int], tokens: np.ndarray, scores: np.ndarray, vocab_size: int
    ) -> np.ndarray:
        params: SamplingParams = self.call.sampling
        depths = growth.depths[nodes]
        noise = {depth: gumbel_noise(params.seed, self.base + 1 + depth, vocab_size) for depth in set(depths.tolist())}
        return np.stack(
            [
                params.temperature * (filtered(scores[i], params) + noise[depth][tokens[i]])
                for i, depth in enumerate(depths.tolist())
            ]
        )

    def _adjusted(self, growth: Growth, nodes: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        held = self.slot.tokens
        rows = [
            adjusted(
                row.astype(np.float64),
                self.call.sampling,
                [*held, *(int(growth.tokens[step]) for step in self._path(growth, node))],
                self.call.context.prompt_length,
            )
            for node, row in zip(nodes, logits.cpu().numpy(), strict=True)
        ]
        return torch.from_numpy(np.stack(rows)).float()
