"""Has the target tell the log-probabilities of a prompt's tokens, which go to it as trees of one path."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np

from bough.errors import InvalidRequest
from bough.protocol.generation import PromptLogprobs
from bough.protocol.prefix_hash import TokenHistory
from bough.tokenization.tokenizer import Tokenizer
from bough.trees.tree import Tree
from orchestrator.cluster.target_place import TargetPlace
from orchestrator.rounds.verifier import Verifier
from orchestrator.sessions.detokenizer import TextStream
from orchestrator.sessions.session import Session
from orchestrator.sizing.plans import Proposal


async def scored_prompt(
    session: Session, place: TargetPlace, verifier: Verifier, num_top: int
) -> AsyncIterator[PromptLogprobs]:
    """Yield the log-probabilities of a session's prompt, a tree's worth at a time, each with `num_top` alternatives.

    The whole prompt is computed, whatever the target holds of it. Afterwards the target holds all of it. Raises what a
    round does, and InvalidRequest if the target does not score given tokens.
    """
    prompt = [*session.tokens[: session.prompt_length]]
    tokenizer = place.target.tokenizer
    begins = await verifier.directory.tokenizing.run(lambda: token_begins(tokenizer, prompt))
    place.believe(0)
    session.cached_tokens = 0
    yield PromptLogprobs(tuple(prompt[:1]), (), begins[:1])
    num_scored = 1
    while num_scored < len(prompt):
        # The last token that was scored is the root, as its keys and values count as not held.
        chain = prompt[num_scored - 1 : num_scored - 1 + place.target.info.max_nodes]
        proposal = Proposal(Tree.chain(chain), False, np.zeros(0, np.intp), is_given=True)
        with session.trace.child("score") as session.span, _standing_at(session, num_scored, num_top):
            result, _ = await verifier.verify(session, place, proposal)
            session.round += 1
        if [at.token.token_id for at in result.verdict.logprobs] != chain[1:]:
            raise InvalidRequest("prompt_logprobs", "must be left out, as this target worker is older and reports none")
        scored = slice(num_scored, num_scored + len(chain) - 1)
        num_scored = scored.stop
        place.believe(min(result.held_length, num_scored - 1))
        yield PromptLogprobs(tuple(chain[1:]), result.verdict.logprobs, begins[scored])


@contextmanager
def _standing_at(session: Session, length: int, num_top: int) -> Iterator[None]:
    """The session as if its prompt had `length` tokens."""
    before = session.tokens, session.sampling
    session.tokens = TokenHistory(session.tokens[:length])
    session.sampling = replace(session.sampling, logprobs=num_top)
    try:
        yield
    finally:
        session.tokens, session.sampling = before


def token_begins(tokenizer: Tokenizer, prompt: Sequence[int]) -> tuple[int, ...]:
    """Where each token of a prompt begins in the text that `decode_prompt` gives; what is added to it takes no room."""
    text = TextStream(partial(tokenizer.decode_showing, shown=tokenizer.special_tokens))
    num_added = tokenizer.num_added(prompt)
    begins = [0] * num_added
    for token in prompt[num_added:]:
        begins.append(text.length)
        text.push(token)
    return tuple(begins)
