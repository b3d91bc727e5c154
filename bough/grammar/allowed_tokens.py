"""The tokens that may follow an output that has to obey a grammar, as llguidance knows them.

They are a function of grammar, vocabulary and output alone, so a request has the same tokens wherever it runs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from itertools import takewhile
from threading import Lock
from weakref import WeakValueDictionary

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from bough.concurrency.deep_stack import on_deep_stack
from bough.errors import InvalidRequest
from bough.tokenization.vocabulary import TokenizerFiles

MAX_COMPILED = 32  # grammars that are kept for the next request with the same, beside those of sessions
# A hostile grammar takes at most some 40 MB, and a mask some tens of milliseconds.
LIMITS = LLParserLimits(max_lexer_states=50_000, step_lexer_fuel=200_000, verbose_errors=False)


class _Compiled:
    """A grammar's matcher at the beginning of an output, of which copies are moved along outputs.

    Copies share the states of their lexer, and so its limit: once one has reached it the grammar is compiled anew, and
    others with it end as they need a new state. So they are shared only where prefixes are: among calls of one salt.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.is_spent = False


class Grammars:
    """Compiles grammars for one vocabulary, of `vocab_size` logits. For any thread."""

    def __init__(self, files: TokenizerFiles, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._files = files
        self._latest: OrderedDict[tuple[str, str], _Compiled] = OrderedDict()  # by salt and grammar
        self._compiled: WeakValueDictionary[tuple[str, str], _Compiled] = WeakValueDictionary()
        self._lock = Lock()

    def compiled(self, grammar: str, cache_salt: str = "") -> _Compiled:
        """A grammar that is ready to use. The first grammar of all takes a second, others milliseconds.

        Raises:
            InvalidRequest: the model or llguidance cannot follow it.
        """
        key = cache_salt, grammar
        with self._lock:
            compiled = self._compiled.get(key)
        if compiled is None or compiled.is_spent:
            # Compiled without the lock, so that nobody with another grammar waits.
            tokenizer = self._tokenizer
            # llguidance recurses along rules that name one another, and ends the process where the stack ends.
            matcher = on_deep_stack(lambda: LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS))
            compiled = _Compiled(matcher)
            require_working(compiled.matcher)
        with self._lock:
            self._compiled[key] = self._latest[key] = compiled
            self._latest.move_to_end(key)
            if len(self._latest) > MAX_COMPILED:
                self._latest.popitem(last=False)
        return compiled

    def along(self, grammar: str, held: AllowedTokens | None, cache_salt: str = "") -> AllowedTokens | None:
        """The allowed tokens of an output with this grammar: `held` if it still works; None without a grammar."""
        if not grammar:
            return None
        if held is not None and held.grammar == grammar and held.is_working:
            return held
        return AllowedTokens(grammar, self.compiled(grammar, cache_salt), self._files.eos_token_ids, self.vocab_size)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        if not self._files.eos_token_ids:
            raise InvalidRequest("constraint: must be left out: this model has no token that ends a text")
        num_tokens = max(self.vocab_size, len(self._files.vocabulary))
        ends = [*self._files.eos_token_ids]
        return LLTokenizer(self._files.tokenizer_json.decode(), n_vocab=num_tokens, eos_token=ends)


class AllowedTokens:
    """The tokens that may follow at each place of a tree below an output. For one thread at a time."""

    def __init__(self, grammar: str, compiled: _Compiled, ends: Sequence[int], vocab_size: int) -> None:
        """`ends` are the tokens that end a text."""
        self.grammar = grammar
        self._compiled = compiled  # which is found as long as somebody holds it
        self._matcher, self._ends, self._vocab_size = compiled.matcher.deep_copy(), frozenset(ends), vocab_size
        self._output: list[int] = []  # consumed by the matcher, as is the path below it
        self._path: list[int] = []

    @property
    def is_working(self) -> bool:
        """Whether no output has become too complex, after which a matcher answers nothing any more."""
        return not self._matcher.is_error()

    def stand_on(self, output: Sequence[int]) -> None:
        """Continue from an output.

        Raises:
            InvalidRequest: it does not follow the grammar.
        """
        self._matcher.rollback(len(self._path))
        self._path = []
        if list(output[: len(self._output)]) != self._output:
            self._matcher.reset()
            self._output = []
        new = list(output[len(self._output) :])
        num_followed = self._matcher.try_consume_tokens(new)
        self._output += new[:num_followed]
        if num_followed < len(new):
            self._require_working()
            raise InvalidRequest(
                f"constraint: must allow the output so far, but its token {len(self._output)}, {new[num_followed]}, "
                "is not allowed"
            )

    def after(self, path: Sequence[int]) -> NDArray[np.bool_] | None:
        """Tokens (vocab_size,) that may follow a path below the output; None if the path is not allowed itself.

        Raises:
            InvalidRequest: the grammar has become too complex.
        """
        # The matcher is not asked about ends: it takes one that it could do without, and does not count it.
        inside = list(takewhile(lambda token: token not in self._ends, path))
        if not self._follows(inside):
            return None
        may_end = self._matcher.is_accepting()
        if len(inside) < len(path):
            return self._ending() if may_end else None
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._require_working()
        following = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        return following | self._ending() if may_end else following & ~self._ending()

    def _follows(self, path: Sequence[int]) -> bool:
        """Move the matcher to the end of a path; whether the grammar allows it."""
        num_common = next((i for i, (a, b) in enumerate(zip(self._path, path, strict=False)) if a != b), None)
        num_common = min(len(self._path), len(path)) if num_common is None else num_common
        self._matcher.rollback(len(self._path) - num_common)
        new = list(path[num_common:])
        num_followed = self._matcher.try_consume_tokens(new)
        self._path = [*path[: num_common + num_followed]]
        self._require_working()
        return num_followed == len(new)

    def _ending(self) -> NDArray[np.bool_]:
        allowed = np.zeros(self._vocab_size, np.bool_)
        allowed[[token for token in self._ends if token < self._vocab_size]] = True
        return allowed

    def _require_working(self) -> None:
        if self._matcher.is_error():
            self._compiled.is_spent = True
            require_working(self._matcher)


def require_working(matcher: LLMatcher) -> None:
    """Raise InvalidRequest if a grammar cannot be compiled, or an output has become too complex for it."""
    if matcher.is_error():
        raise InvalidRequest(f"constraint: must be a grammar that can be followed: {in_one_line(matcher.get_error())}")


def in_one_line(message: str) -> str:
    """A message of llguidance, which may have many lines, some of them markers below others."""
    return " ".join(message.split())[:300]
