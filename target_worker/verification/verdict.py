"""Computes the verdict on a tree from the target's logits.

A sweep's logits stay on the device: a verdict reads only the few rows on its walk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bough.errors import InvalidRequest
from bough.grammar.allowed_tokens import AllowedTokens
from bough.model.faults import named_faults
from bough.model.running.device import on_host
from bough.model.sampling.sampler import (
    Row,
    TokenCounts,
    adjusted,
    constrained,
    draw,
    draw_by,
    position_logprobs,
    probabilities,
    require_number,
    require_numbers,
    unending,
)
from bough.protocol.messages import Verdict, VerifyCall
from bough.protocol.prefix_hash import Tokens
from bough.protocol.sampling_params import PositionLogprobs
from bough.trees.tree import Tree
from bough.trees.tree_plan import Scheme
from target_worker.verification.traversal import Traversal
from target_worker.verification.verify import conditional_distribution, draws_at, walk

NO_NUMBER = -1  # in place of a token, if a row's largest logit is not finite


def best_tokens(logits: torch.Tensor, read: Callable[[torch.Tensor], torch.Tensor] = on_host) -> torch.Tensor:
    """Argmax of each row, (num_rows,) int64 on the host; NO_NUMBER if the largest logit is not finite.

    The result takes a few kilobytes, the logits hundreds of megabytes. This is the only wait for a device's sweep.
    """
    largest, tokens = logits.max(-1)
    return read(torch.where(largest.isfinite(), tokens, NO_NUMBER))


class RowReader:
    """Copies rows of logits to the host one at a time, through one buffer, pinned for a GPU."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None  # (vocab_size,), dtype of the logits

    def read(self, row: torch.Tensor) -> Row:
        """Row (vocab_size,) as float64 on the host. Raises AcceleratorFull or AcceleratorLost."""
        if row.device.type == "cpu":
            return row.double().numpy()
        with named_faults(row.device):
            if self._buffer is None:
                self._buffer = torch.empty(row.shape, dtype=row.dtype, pin_memory=row.device.type == "cuda")
            return self._buffer.copy_(row).double().numpy()


class LogitRows:
    """The logit rows of one tree, one for each node; valid until the next sweep."""

    def __init__(self, rows: torch.Tensor, best: torch.Tensor | None, reader: RowReader) -> None:
        """`rows` is (num_nodes, vocab_size); `best` is `best_tokens` of these, or None for logits on the host."""
        self._rows, self._best, self._reader = rows, best, reader

    def after(self, path: Sequence[int]) -> Row:
        """Logits (vocab_size,) after a path of nodes."""
        return self._reader.read(self._rows[path[-1]])

    def best_after(self, path: Sequence[int]) -> int | None:
        """The token with the largest logit after a path of nodes, or NO_NUMBER; None if logits are on the host."""
        return None if self._best is None else int(self._best[path[-1]])


def compute_verdict(
    call: VerifyCall,
    held: Tokens,
    logits_after: Callable[[Sequence[int]], Row],
    best_after: Callable[[Sequence[int]], int | None] = lambda _: None,
    allowed: AllowedTokens | None = None,
) -> Verdict:
    """Compute the verdict on a tree; `held` are the tokens before the root, `allowed` those of the call's grammar.

    `logits_after` returns the target's raw logits (vocab_size,) after a path of nodes. It is called for few paths; in
    Scheme.TRAVERSAL for all with nodes below them. If only the largest logit matters, `best_after` is called first: it
    returns the argmax, -1 if that is not finite, or None if unknown.
    """
    if call.is_given:
        return _of_given(call, logits_after)
    tree, params, base = call.tree, call.sampling, call.context.base_length
    children, logprobs = tree.children(), []
    row_after = adjusted_after(call, held, allowed)

    def target_probs(node: int) -> Row:
        path = tree.path(node)
        row = row_after(path, logits_after(path))
        require_numbers(row, base + len(path))
        return probabilities(row, params)

    distribution = distributions_after(tree, call.scheme, target_probs)

    def next_token(path: Sequence[int]) -> int:
        position = base + len(path)
        is_plain = call.scheme is Scheme.TARGET and params.is_plain_greedy and position >= first_end_of(call)
        best = best_after(path) if is_plain else None
        if best is not None:
            require_number(best >= 0, position)
            return best
        raw = logits_after(path)
        row = row_after(path, raw)
        if call.scheme is Scheme.TARGET or not children[path[-1]]:
            token = draw(row, params, position)
        else:
            token = draw_by(lambda probs: distribution(path[-1], probs), row, params, position)
        if params.logprobs is not None:
            logprobs.append(position_logprobs(raw, token, params.logprobs))
        return token

    return walk(tree, next_token)._replace(logprobs=tuple(logprobs))


def _of_given(call: VerifyCall, logits_after: Callable[[Sequence[int]], Row]) -> Verdict:
    """The verdict on a chain of given tokens: their log-probabilities, and the likeliest token as the bonus."""
    tokens, num_top = call.tree.tokens.tolist(), call.sampling.logprobs or 0
    rows = (logits_after(range(node)) for node in range(1, len(tokens) + 1))
    logprobs: list[PositionLogprobs] = []
    for token, row in zip([*tokens[1:], None], rows, strict=True):
        require_numbers(row, call.context.base_length + len(logprobs) + 1)
        if token is not None:
            logprobs.append(position_logprobs(row, token, num_top))
    return Verdict(tuple(range(1, len(tokens))), int(row.argmax()), tuple(logprobs))


def first_end_of(call: VerifyCall) -> int:
    """The position from which a token may end the text."""
    return call.context.prompt_length + call.sampling.min_tokens


def adjusted_after(
    call: VerifyCall, held: Tokens, allowed: AllowedTokens | None
) -> Callable[[Sequence[int], Row], Row]:
    """A function from a path of nodes and the target's raw logits after it to the logits that are drawn from.

    Raises InvalidRequest if the output so far does not follow the call's grammar.
    """
    tree, params, prompt_length = call.tree, call.sampling, call.context.prompt_length
    counts = TokenCounts.of(held if params.has_penalties else (), prompt_length)
    num_prompt = max(0, prompt_length - len(held))  # the path's root may be the prompt's last token
    if allowed is not None:
        likely = _likely_tokens(tree)
        paths = [likely[num_prompt:end] for end in range(1, len(likely) + 1)]
        allowed.stand_on(list(map(int, held[prompt_length:])), paths)

    def row_after(path: Sequence[int], raw: Row) -> Row:
        raw = raw if call.context.base_length + len(path) >= first_end_of(call) else unending(raw, params)
        if not params.has_penalties and allowed is None:
            return adjusted(raw, params, counts)
        tokens = [int(tree.tokens[node]) for node in path]
        row = adjusted(raw, params, counts.after(tokens, num_prompt) if params.has_penalties else counts)
        if allowed is None:
            return row
        following = allowed.after(tokens[num_prompt:])
        if following is None:  # no token that was drawn leads here
            raise InvalidRequest("constraint", "must allow every token of a path that is drawn")
        return constrained(row, following)

    return row_after


def _likely_tokens(tree: Tree) -> list[int]:
    """The tokens from the root to a leaf by each node's first child, which is the draft's likeliest."""
    children, node = tree.children(), 0
    tokens = [int(tree.tokens[0])]
    while children[node]:
        token, node = next(iter(children[node].items()))
        tokens.append(token)
    return tokens


def distributions_after(tree: Tree, scheme: Scheme, target_probs: Callable[[int], Row]) -> Callable[[int, Row], Row]:
    """A function from a node and the target's distribution there to the distribution of the next token.

    `target_probs` returns the target's distribution after any node, for schemes that look ahead.
    """
    if scheme is Scheme.TRAVERSAL:
        return Traversal(tree, target_probs).distribution_after
    return lambda node, probs: conditional_distribution(probs, draws_at(tree, node, scheme, len(probs)))
