"""The tokens that may follow an output with a grammar, computed by a separate process."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from bough.errors import InvalidRequest
from bough.grammar.grammar_process import (
    LIMITS,
    NO_FIELDS,
    Fields,
    GrammarProcess,
    Limits,
    Refused,
    Vocabulary,
    to_bytes,
)
from bough.tokenization.vocabulary import TokenizerFiles

MAX_PROCESSES = 16  # processes, each of which may use memory up to its limit
_NUMBERS = itertools.count()  # of outputs


class Grammars:
    """Follows grammars for one vocabulary, of `vocab_size` logits. For any thread.

    Each grammar has its own process: none waits while another one is compiled. A process's results are shared like
    prefixes, only among calls of one salt.
    """

    def __init__(self, files: TokenizerFiles, vocab_size: int, limits: Limits = LIMITS) -> None:
        self.vocab_size = vocab_size
        self._files, self._limits = files, limits
        self._latest: OrderedDict[tuple[str, str], GrammarProcess] = OrderedDict()  # by salt and grammar
        self._lock = Lock()

    def compile(self, grammar: str, cache_salt: str = "") -> None:
        """Make a grammar ready to use. The first grammar of all takes a second, others milliseconds.

        Raises:
            InvalidRequest: the model or llguidance cannot follow it.
            Unavailable: no process can run.
        """
        self.call(grammar, cache_salt, "compile", fields={"grammar": grammar})

    def along(self, grammar: str, held: AllowedTokens | None, cache_salt: str = "") -> AllowedTokens | None:
        """The allowed tokens of an output with this grammar: `held` if they match; None without a grammar."""
        if not grammar:
            return None
        if held is not None and held.grammar == grammar:
            return held
        return AllowedTokens(grammar, cache_salt, self)

    def call(
        self, grammar: str, cache_salt: str, operation: str, payload: bytes = b"", fields: Fields = NO_FIELDS
    ) -> tuple[Fields, bytes]:
        """Call the process of a grammar, or a new one if its process has ended. Raises as `compile` does."""
        try:
            return self.process(grammar, cache_salt).call(operation, payload, fields)
        except Refused as exc:
            raise InvalidRequest("constraint", exc) from exc

    def process(self, grammar: str, cache_salt: str = "") -> GrammarProcess:
        """The process of a grammar; a new one replaces the process of the least recently used grammar."""
        vocabulary, key = self._vocabulary, (cache_salt, grammar)
        with self._lock:
            process = self._latest.setdefault(key, GrammarProcess(self._limits, vocabulary))
            self._latest.move_to_end(key)
            if len(self._latest) > MAX_PROCESSES:
                self._latest.popitem(last=False)
        return process

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        if not self._files.eos_token_ids:
            raise InvalidRequest("constraint", "must be left out: this model has no token that ends a text")
        num_tokens = max(self.vocab_size, len(self._files.vocabulary))
        return Vocabulary(self._files.tokenizer_json, num_tokens, self._files.eos_token_ids)


class AllowedTokens:
    """The tokens that may follow at each node of a tree below an output. For one thread at a time.

    All methods raise InvalidRequest if the grammar cannot be followed, or has become too complex, and Unavailable if no
    process can run.
    """

    def __init__(self, grammar: str, cache_salt: str, grammars: Grammars) -> None:
        self.grammar = grammar
        self._cache_salt, self._grammars = cache_salt, grammars
        self._number = next(_NUMBERS)
        self._output: Sequence[int] = ()
        self._known: dict[tuple[int, ...], NDArray[np.bool_] | None] = {}  # by paths below the output

    def stand_on(self, output: Sequence[int], likely: Sequence[Sequence[int]] = ()) -> None:
        """Continue from an output; these paths below it will probably be requested.

        Raises:
            InvalidRequest: it does not follow the grammar.
        """
        self._output = output
        self._known = dict(zip(map(tuple, likely), self.after_each(likely), strict=True))

    def after(self, path: Sequence[int]) -> NDArray[np.bool_] | None:
        """Tokens (vocab_size,) that may follow a path below the output; None if the path itself is not allowed."""
        if (known := tuple(path)) in self._known:
            return self._known[known]
        return self.after_each([path])[0]

    def after_each(self, paths: Sequence[Sequence[int]]) -> list[NDArray[np.bool_] | None]:
        """As `after`, for many paths with one message to the process, which takes longer than a mask."""
        payload = to_bytes([*self._output, *(token for path in paths for token in path)])
        fields: Fields = {
            "number": self._number,
            "num_output": len(self._output),
            "num_of_paths": [len(path) for path in paths],
        }
        of_grammar = self.grammar, self._cache_salt
        answer, masks = self._grammars.call(*of_grammar, "masks", payload, fields)
        if "is_unknown" in answer:  # for this process, which may have replaced another
            fields = {**fields, "grammar": self.grammar}
            answer, masks = self._grammars.call(*of_grammar, "masks", payload, fields)
        ends = np.cumsum(answer["lengths"], dtype=int)[:-1]
        all_bits = np.split(np.frombuffer(masks, np.uint8), ends) if paths else []
        return [self._allowed(bits) if len(bits) else None for bits in all_bits]

    def _allowed(self, bits: NDArray[np.uint8]) -> NDArray[np.bool_]:
        return np.unpackbits(bits, count=self._grammars.vocab_size, bitorder="little").view(np.bool_)
