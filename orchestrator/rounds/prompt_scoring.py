"""Has the target tell the log-probabilities of a prompt's tokens, which go to it as trees of one path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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


@dataclass(slots=True)
class PromptScoring:
    """The log-probabilities of a session's prompt, a tree's worth at a time, each with `num_top` alternatives.

    The whole prompt is computed, whatever the target holds of it. Afterwards the target holds all of it.
    """

    session: Session
    place: TargetPlace
    verifier: Verifier
    num_top: int
    _begins: tuple[int, ...] = ()  # of all tokens
    _num_scored: int = 0

    @property
    def is_over(self) -> bool:
        return self._num_scored == self.session.prompt_length

    async def next(self) -> PromptLogprobs:
        """The next tokens' log-probabilities; the first token has none.

        Raises what a round does, and InvalidRequest if the target does not score given tokens.
        """
        session, place, begin = self.session, self.place, self._num_scored
        if begin == 0:
            prompt, tokenizer = [*session.tokens[: session.prompt_length]], place.target.tokenizer
            self._begins = await self.verifier.directory.tokenizing.run(lambda: token_begins(tokenizer, prompt))
            place.believe(0)
            session.cached_tokens, self._num_scored = 0, 1
            return PromptLogprobs(tuple(prompt[:1]), (), self._begins[:1])
        # The last token that was scored is the root, as its keys and values count as not held.
        end = min(begin - 1 + place.target.info.max_nodes, session.prompt_length)
        chain = [*session.tokens[begin - 1 : end]]
        proposal = Proposal(Tree.chain(chain), False, np.zeros(0, np.intp), is_given=True)
        with session.trace.child("score") as session.span, _standing_at(session, begin, self.num_top):
            result, _ = await self.verifier.verify(session, place, proposal)
            session.round += 1
        if [at.token.token_id for at in result.verdict.logprobs] != chain[1:]:
            raise InvalidRequest("prompt_logprobs", "must be left out, as this target worker is older and reports none")
        self._num_scored = end
        place.believe(min(result.held_length, end - 1))
        return PromptLogprobs(tuple(chain[1:]), result.verdict.logprobs, self._begins[begin:end])


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
