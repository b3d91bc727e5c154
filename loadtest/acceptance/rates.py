"""Acceptance probabilities of k children below one node by scheme, and upper bounds for any scheme.

They are computed from a pair of distributions; this module knows no models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bough.model.sampling.draft_sampler import GREEDY_TOKENS, greedy_weights, require_numbers, without_replacement
from bough.model.sampling.sampler import filtered, largest
from bough.protocol.sampling_params import SamplingParams
from bough.trees.draft_probs import DraftProbs, normalised
from bough.trees.tree import Tree
from bough.trees.tree_plan import Scheme
from target_worker.verification.verify import conditional_distribution, draws_at

Row = NDArray[np.float64]


def draft_weights(
    logits: Row, params: SamplingParams, max_tokens: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Tokens and weights, each (at most max_tokens,), best first: what to sample guesses from.

    The draft's distribution at the request's temperature and filters without its tail; weights are above 0. At
    temperature 0, where any distribution is as right as another, they fall so steeply that a sample without
    replacement is the best tokens in their order.

    Raises:
        Unavailable: the logits hold no finite number.
    """
    require_numbers(logits.max())
    if params.is_greedy:
        best = largest(logits, min(max_tokens, GREEDY_TOKENS)).astype(np.int32)
        best = best[np.isfinite(logits[best])]
        return best, greedy_weights(len(best))
    kept = filtered(logits, params)
    best = largest(kept, max_tokens).astype(np.int32)
    weights = np.exp(kept[best] - kept.max()).astype(np.float32)
    return best[weights > 0], weights[weights > 0]


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """Target and draft probabilities at one position, on the tokens from which the draft takes children."""

    target_probs: Row  # (num_tokens + 1,) the last entry is the sum over all other tokens
    draft_probs: Row  # (num_tokens,) positive, descending, with sum 1


@dataclass(frozen=True, slots=True, eq=False)
class Hits:
    """Possible children of one or more nodes, best first: draft scores and acceptance probabilities."""

    scores: Row  # (num_nodes, num_tokens) descending along a row
    gains: Row  # (num_nodes, num_tokens) probability that the child is the target's token

    def of_each(self, sizes: list[int]) -> list[float]:
        """Acceptance with the first k children of every node."""
        return [float(self.gains[:, :k].sum(1).mean()) for k in sizes]


def by_distribution(pair: Pair) -> Hits:
    """Scheme.TARGET with the likeliest tokens as children, as in SpecExec."""
    return Hits(pair.draft_probs[None], pair.target_probs[None, :-1])


def by_sample(pair: Pair, temperature: float, rng: np.random.Generator, num: int = 500) -> Hits:
    """Scheme.TARGET with the likeliest tokens given the noise that the target draws with (Guess.SAMPLE).

    Monte Carlo, a node for each of `num` draws of the noise. The tokens that the draft never takes are one: the largest
    of their perturbed logits is distributed as that of a single token with their mass.
    """
    noise = rng.gumbel(size=(num, len(pair.target_probs)))
    with np.errstate(divide="ignore"):
        chosen = (np.log(pair.target_probs) + noise).argmax(1)
    perturbed = np.log(pair.draft_probs) + noise[:, :-1]
    ranked = np.argsort(-perturbed, axis=1)
    scores = np.exp(temperature * (np.take_along_axis(perturbed, ranked, 1) - perturbed.max(1, keepdims=True)))
    return Hits(scores / scores.sum(1, keepdims=True), (ranked == chosen[:, None]).astype(np.float64))


def placed(all_hits: list[Hits], sizes: list[int]) -> list[float]:
    """Acceptance with k children per node on average, chosen among all nodes' children by the draft's scores."""
    scores, gains = (np.concatenate([getattr(hits, name).ravel() for hits in all_hits]) for name in ("scores", "gains"))
    num_nodes = sum(len(hits.scores) for hits in all_hits)
    gained = np.append(0.0, np.cumsum(gains[np.argsort(-scores, kind="stable")]))
    return [float(gained[min(k * num_nodes, len(gains))] / num_nodes) for k in sizes]


def one_after_another(pair: Pair, sizes: list[int], rng: np.random.Generator, num: int = 50) -> list[float]:
    """Scheme.WITHOUT_REPLACEMENT: mean over `num` samples of the probability that a child is accepted."""
    tokens, weights = np.arange(len(pair.draft_probs), dtype=np.int32), pair.draft_probs.astype(np.float32)
    deepest = min(max(sizes), len(tokens))
    total = np.zeros(len(sizes))
    for _ in range(num):
        drawn = without_replacement(tokens, normalised(weights), deepest, len(tokens), rng)
        tree = Tree(
            np.append(-1, drawn).astype(np.int32),
            np.append(-1, np.zeros(deepest)).astype(np.int32),
            np.zeros(deepest + 1, np.float32),
            DraftProbs.joined({0: (tokens, weights)}),
        )
        draws = list(draws_at(tree, 0, Scheme.WITHOUT_REPLACEMENT, len(pair.target_probs)))
        total += [conditional_distribution(pair.target_probs, draws[:k])[drawn[:k]].sum() for k in sizes]
    return [float(rate) for rate in total / num]


def in_rounds(pair: Pair, k: int) -> float:
    """SpecInfer's multi-round verification: the residual distribution does not depend on the rejected token."""
    left, draft, rejected = pair.target_probs, np.append(pair.draft_probs, 0.0), 1.0
    for _ in range(k):
        rejected *= 1.0 - np.minimum(left, draft).sum()
        residual = np.maximum(left - draft, 0.0)
        if residual.sum() == 0.0:
            return 1.0
        left = residual / residual.sum()
    return float(1.0 - rejected)


def best_then_sampled(pair: Pair, k: int) -> float:
    """The k - 1 likeliest and one drawn from the rest, at its optimum (arXiv 2502.18779, greedy drafts)."""
    head = min(k - 1, len(pair.draft_probs))
    tail = pair.draft_probs[head:]
    drawn = np.minimum(pair.target_probs[head:-1], tail / tail.sum()).sum() if len(tail) else 0.0
    return float(pair.target_probs[:head].sum() + drawn)


def bound(pair: Pair, all_within: Callable[[Row], Row]) -> float:
    """The most that any exact verification accepts (arXiv 2502.18779, theorem 2: a smallest cut of the transport).

    1 + min over sets H of tokens of target_probs(H) - P(all children in H); the best H takes tokens by the ratio of the
    draft's to the target's probability. `all_within` gives that probability for H = the first 0, 1, 2, ... of some
    draft probabilities.
    """
    with np.errstate(divide="ignore"):
        order = np.argsort(-(pair.draft_probs / pair.target_probs[:-1]), kind="stable")
    covered = np.append(0.0, np.cumsum(pair.target_probs[:-1][order]))
    return float(1.0 + (covered - all_within(pair.draft_probs[order])).min())


def bound_with_replacement(pair: Pair, k: int) -> float:
    """The bound for k independent draws."""
    return bound(pair, lambda probs: np.minimum(np.append(0.0, np.cumsum(probs)), 1.0) ** k)


def bound_without_replacement(pair: Pair, k: int) -> float:
    """The bound for k draws without replacement."""
    return bound(pair, lambda probs: first_within(probs, min(k, len(probs))))


def first_within(probs: Row, k: int, num_times: int = 2000) -> Row:
    """(num_tokens + 1,) probability that k draws without replacement are among the first 0, 1, 2, ... tokens.

    As a race of exponential arrivals: the k-th of those tokens is there before any other, E[exp(-rate of others x time
    of the k-th)], over a grid of times.
    """
    times = np.geomspace(1e-7, 1e9, num_times)
    fewer = np.zeros((k, num_times))  # probability that exactly 0, 1, ..., k - 1 have arrived
    fewer[0] = 1.0
    others = np.maximum(1.0 - np.cumsum(probs), 0.0)
    within = [0.0]
    for prob, rate in zip(probs, others, strict=True):
        absent = np.exp(-prob * times)
        fewer[1:] = fewer[1:] * absent + fewer[:-1] * (1.0 - absent)
        fewer[0] *= absent
        survival = np.exp(-rate * times) if rate > 1e-12 else np.ones(num_times)
        arrived = 1.0 - fewer.sum(0)
        middle = (survival[1:] + survival[:-1]) / 2
        within.append(float(arrived[0] * survival[0] + (np.diff(arrived) * middle).sum()))
    return np.array(within)
