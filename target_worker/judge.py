"""What a target makes of a tree, from its logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bough.messages import Verdict, VerifyCall
from bough.model.draw import Row, adjusted, draw, draw_by, position_logprobs
from target_worker.verify import draws_at, law_given, walk


def judge(call: VerifyCall, held: Sequence[int], logits_after: Callable[[Sequence[int]], Row]) -> Verdict:
    """The verdict on a tree; `held` are the tokens before the root.

    `logits_after` gives the target's raw logits (vocab_size,) after a path of nodes; few are ever asked for.
    """
    tree, params, base = call.tree, call.sampling, call.context.base_length
    logprobs = []

    def next_token(path: Sequence[int]) -> int:
        raw = logits_after(path)
        history = [*held, *(int(tree.tokens[node]) for node in path)] if params.has_penalties else ()
        row, position = adjusted(raw, params, history, call.context.prompt_length), base + len(path)
        draws = [*draws_at(tree, path[-1], call.scheme, len(row))]
        if draws:
            token = draw_by(lambda target_probs: law_given(target_probs, draws), row, params, position)
        else:
            token = draw(row, params, position)
        if params.logprobs is not None:
            logprobs.append(position_logprobs(raw, token, params.logprobs))
        return token

    return walk(tree, next_token)._replace(logprobs=tuple(logprobs))
