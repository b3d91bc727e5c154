"""Log-probabilities in OpenAI's form: with each token's text and bytes."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bough.protocol.generation import PromptLogprobs
from bough.protocol.sampling_params import PositionLogprobs, TokenLogprob
from orchestrator.http_api.fields.errors import Json

MINUS_INFINITY = -9999.0  # JSON has no infinity

TokenBytes = Callable[[int], bytes]  # bytes of a token, possibly part of a character
Spell = Callable[[str], TokenBytes]  # takes a model's name


def chat_logprobs(positions: Sequence[PositionLogprobs], token_bytes: TokenBytes) -> list[Json]:
    """One entry for each token, as in `choices[].logprobs.content` of a chat."""

    def entry(token: TokenLogprob) -> Json:
        data = token_bytes(token.token_id)
        return {"token": token_text(data), "logprob": finite(token.logprob), "bytes": list(data)}

    return [entry(at.token) | {"top_logprobs": [entry(top) for top in at.top]} for at in positions]


class TokensSpelled(NamedTuple):
    """Four lists with an entry for each token, as in `choices[].logprobs` of a completion."""

    tokens: list[str]
    token_logprobs: list[float | None]  # None for a prompt's first token
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]  # of the token's text in the whole text, in characters

    def extend(self, more: TokensSpelled) -> None:
        self.tokens.extend(more.tokens)
        self.token_logprobs.extend(more.token_logprobs)
        self.top_logprobs.extend(more.top_logprobs)
        self.text_offset.extend(more.text_offset)


def completion_logprobs(
    positions: Sequence[PositionLogprobs], begins: Sequence[int], token_bytes: TokenBytes
) -> TokensSpelled:
    """Entries of tokens whose texts begin at these characters of the whole text."""
    tokens = [token_text(token_bytes(at.token.token_id)) for at in positions]
    likeliest = [_by_text(at, token_bytes) for at in positions]
    return TokensSpelled(tokens, [finite(at.token.logprob) for at in positions], [*likeliest], [*begins])


def prompt_logprobs(event: PromptLogprobs, token_bytes: TokenBytes) -> TokensSpelled:
    """Entries of a prompt's tokens; its first has no log-probability."""
    first = len(event.token_ids) - len(event.logprobs)
    tokens = [token_text(token_bytes(token_id)) for token_id in event.token_ids[:first]]
    spelled = TokensSpelled(tokens, [None] * first, [None] * first, [*event.begins[:first]])
    spelled.extend(completion_logprobs(event.logprobs, event.begins[first:], token_bytes))
    return spelled


def _by_text(at: PositionLogprobs, token_bytes: TokenBytes) -> dict[str, float]:
    """The likeliest tokens and the sampled one. Of tokens with equal text the likeliest counts."""
    by_text: dict[str, float] = {}
    for token in (*at.top, at.token):
        by_text.setdefault(token_text(token_bytes(token.token_id)), finite(token.logprob))
    return by_text


def finite(logprob: float) -> float:
    """Replace infinity by a number for JSON."""
    return logprob if math.isfinite(logprob) else MINUS_INFINITY


def token_text(data: bytes) -> str:
    """The text of a token's bytes; what is no whole character is replaced."""
    return sys.intern(data.decode(errors="replace"))  # one object for the many entries of a token
