"""SpecInfer's multi-round verification (arXiv 2305.09781), to compare with: independently sampled chains.

The product has no such scheme. Here a draft worker samples a chain a call, equal beginnings share their nodes, and the
verdict follows the target's law given every draw, repeated ones included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from bough.model.sampling.sampler import Row, adjusted, draw_by
from bough.model.sampling.token_counts import TokenCounts
from bough.protocol.messages import Verdict, VerifyCall
from bough.trees.draft_probs import DraftProbs
from bough.trees.tree import Tree
from bough.trees.tree_plan import Growth, Scheme, StaticShape, TreePlan
from loadtest.acceptance.bench import RANKS, Bench, Stream, grow_call
from target_worker.verification.verify import Draw, conditional_distribution, walk

ONE_CHAIN = Scheme.WITHOUT_REPLACEMENT  # one draw below each node, so nothing can repeat


class MultiRoundBench(Bench):
    """A bench whose trees are several independent samples; ranks are draws, and repeated draws are rejected."""

    ranks: Growth = StaticShape.chains(RANKS, 1)

    def grown(self, streams: Sequence[Stream], plan: TreePlan) -> list[Tree]:
        """Several sampled chains for each stream, merged into one tree."""
        if not isinstance(plan.growth, StaticShape) or not plan.growth.parents:  # the tree of a root alone
            return super().grown(streams, plan)
        return [merged([*self._chains(stream, plan.growth)]) for stream in streams]

    def _chains(self, stream: Stream, chains: StaticShape) -> Iterator[Tree]:
        one, num = TreePlan(StaticShape.chains(1, chains.depth), ONE_CHAIN), chains.parents.count(0)
        for index in range(num):
            call = replace(grow_call(stream, one), round=stream.rounds * num + index)
            result = self._draft.grow(call).result()
            stream.draft_held = result.held_length
            yield result.tree

    def verdicts(self, calls: Sequence[VerifyCall]) -> list[Verdict]:
        """Verdicts of multi-round verification."""
        return self._target.verify(calls, multi_round_verdict)


def merged(chains: Sequence[Tree]) -> Tree:
    """Merge sampled chains with the same root; `draws` has a node as often as it was drawn."""
    tokens, parents, draws = [int(chains[0].tokens[0])], [-1], list[int]()
    children: dict[tuple[int, int], int] = {}
    supports = {}
    for chain in chains:
        node = 0
        for depth, token in enumerate(chain.tokens[1:].tolist()):
            assert chain.draft_probs is not None, "sampled"
            supports[node] = chain.draft_probs.of(depth)
            node = children.setdefault((parent := node, token), len(tokens))
            if node == len(tokens):
                tokens.append(token)
                parents.append(parent)
            draws.append(node)
    plain = Tree.of(tokens, parents, [0.0] * len(tokens))
    draft_probs = DraftProbs.joined({node: (of, probs.astype(np.float32)) for node, (of, probs) in supports.items()})
    return replace(plain, draft_probs=draft_probs, draws=np.asarray(draws, np.int32))


def multi_round_law(tree: Tree, node: int, target_probs: Row) -> Row:
    """Probabilities (vocab_size,) of the token after a node, given draws from the draft's whole distribution."""
    drawn = tree.tokens[tree.sampled_children(node, ONE_CHAIN)].tolist()
    if not drawn:
        return target_probs
    assert tree.draft_probs is not None, "sampled"
    tokens, probs = tree.draft_probs.of(node)
    return conditional_distribution(target_probs, [Draw(token, tokens, probs) for token in drawn])


def multi_round_verdict(call: VerifyCall, _: Sequence[int], logits_after: Callable[[Sequence[int]], Row]) -> Verdict:
    """The verdict on a tree of independent samples; penalties are not counted, as no contestant has any."""
    assert not call.sampling.has_penalties
    nothing = TokenCounts.of((), call.context.prompt_length)

    def next_token(path: Sequence[int]) -> int:
        row = adjusted(logits_after(path), call.sampling, nothing)
        position = call.context.base_length + len(path)
        return draw_by(lambda probs: multi_round_law(call.tree, path[-1], probs), row, call.sampling, position)

    return walk(call.tree, next_token)
