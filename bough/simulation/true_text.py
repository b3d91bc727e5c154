"""The target's text below a root: the text model's, or tokens that the request's grammar allows.

A token is a function of seed, position and the allowed tokens there, which follow from the earlier tokens. So it is the
same with any tree and at any worker, and a draft knows it as well as the target does.
"""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bough.errors import InvalidRequest
from bough.grammar.allowed_tokens import AllowedTokens
from bough.protocol.sampling_params import SamplingParams
from bough.simulation.hashing import mixed, uniforms
from bough.simulation.text_model import FIRST_WORD, NUM_WORDS, TextModel
from bough.simulation.tokenizer import END_TOKEN, byte_token

AHEAD = 16  # tokens of a text without a grammar that are computed together
LONG = 200  # tokens of an output after which everything is closed if possible
_CLOSE, _CHOOSE = 11, 12  # uses of random numbers


class Closing(NamedTuple):
    """A token that ends a part of an output, and how often it is drawn if it is allowed."""

    token: int
    rate: float


QUOTE, COLON = byte_token('"'), byte_token(":")
END = Closing(END_TOKEN, 0.25)
STRING_END = Closing(QUOTE, 0.25)  # after some four words
# In order of preference: an array has an entry or two, and recursion comes to an end.
CLOSINGS = (
    END,
    Closing(byte_token("}"), 0.75),
    Closing(byte_token("]"), 0.75),
    STRING_END,
    Closing(byte_token(","), 0.75),
)
CLOSINGS_IN_STRINGS = END, STRING_END  # brackets are text inside these


def _among(tokens: Sequence[int]) -> NDArray[np.bool_]:
    chosen = np.zeros(FIRST_WORD + NUM_WORDS, np.bool_)
    chosen[list(tokens)] = True
    return chosen


_SIGNS = [byte_token(chr(code)) for code in range(ord("!"), ord("~") + 1)]
_WORDS = range(FIRST_WORD, FIRST_WORD + NUM_WORDS)
_BLANKS = [byte_token(blank) for blank in " \n\t\r"]
FREE = [byte_token("\n"), *_SIGNS, *_WORDS]  # all are allowed in free text
# Drawn in this order of preference; blanks come last. Exponents would soon make a number infinite, and escapes a text
# ugly.
TIERS = (
    _among([token for token in _SIGNS if token not in map(byte_token, "eE\\")]),
    _among(_SIGNS),
    ~_among(_BLANKS),
)
TIERS_IN_STRINGS = _among([*map(byte_token, ascii_letters)]), *TIERS


class TrueText:
    """The tokens of a request after a root, which are computed as they are asked for."""

    def __init__(
        self,
        model: TextModel,
        sampling: SamplingParams,
        held: Sequence[int],
        root: int,
        prompt_length: int,
        allowed: AllowedTokens | None,
    ) -> None:
        """`held` are the tokens before the root; `allowed` those of the request's grammar.

        Raises InvalidRequest if the output so far does not follow the grammar.
        """
        self._model, self._seed, self._allowed = model, text_seed(sampling), allowed
        self._place = [*held, root], sampling
        self._first = len(held) + 1  # position after the root
        self._prompt_length = prompt_length
        self._path = [] if self._first <= prompt_length else [root]  # of the output, below `held`
        self._tokens: list[int] = []
        if allowed is not None:
            allowed.stand_on(list(map(int, held[prompt_length:])))

    def is_below(self, held: Sequence[int], root: int, sampling: SamplingParams) -> bool:
        """Whether this is the text below the root of these tokens."""
        return self._place == ([*held, root], sampling)

    def __getitem__(self, index: int) -> int:
        """The token at this offset from the first one below the root."""
        while len(self._tokens) <= index:
            self._tokens += self._model_text() if self._allowed is None else [self._next_allowed(self._allowed)]
        return self._tokens[index]

    def _model_text(self) -> list[int]:
        begin = self._first + len(self._tokens)
        following: list[int] = self._model.truth(self._seed, np.arange(begin, begin + AHEAD)).tolist()
        return following

    def _next_allowed(self, allowed: AllowedTokens) -> int:
        path, position = [*self._path, *self._tokens], self._first + len(self._tokens)
        following = allowed.after(path)
        if following is None or not following.any():
            raise InvalidRequest("constraint", "must allow the output so far, and a token after it")
        last = path[-1] if path else -1
        return allowed_token(self._model, self._seed, position, following, last, position - self._prompt_length)


def allowed_token(
    model: TextModel, seed: int, position: int, following: NDArray[np.bool_], last: int, num_before: int
) -> int:
    """The true token at a position among the allowed ones (vocab_size,), after `num_before` tokens of output.

    It is the model's if that is allowed, but open structures are closed before long. `last` is the token before it; it
    prevents empty strings.
    """
    here = np.array([position])
    if following[FREE].all() and following[token := int(model.truth(seed, here)[0])]:
        return token
    # A colon is text, or only blanks are allowed besides it.
    closings, tiers = (CLOSINGS_IN_STRINGS, TIERS_IN_STRINGS) if following[COLON] else (CLOSINGS, TIERS)
    closing = next((each for each in closings if following[each.token]), None)
    others = following.copy()
    if closing is not None:
        rate = 1.0 if num_before >= LONG else 0.0 if closing.token == last == QUOTE else closing.rate
        if uniforms(mixed(_CLOSE, seed, here))[0] < rate:
            return closing.token
        others[closing.token] = False
    if others[word := int(model.words(seed, here)[0])]:
        return word
    for tier in tiers[1:] if num_before >= LONG else tiers:
        if len(choices := np.flatnonzero(others[: len(tier)] & tier)):
            return int(choices[int(mixed(_CHOOSE, seed, here)[0]) % len(choices)])
    return closing.token if closing is not None else int(np.argmax(following))


def text_seed(sampling: SamplingParams) -> int:
    """The seed of a request's text; the same for all greedy requests."""
    return 0 if sampling.is_greedy else sampling.seed
