"""Incremental detokenizer: emits whole characters only, and nothing after the start of a stop text."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

REPLACEMENT = "\ufffd"  # decoders' output for incomplete characters
MAX_HALF = 3  # limit of bytes of an incomplete UTF-8 character, and so of the U+FFFD in its place
MAX_WINDOW = 24  # limit of tokens that are decoded at once
SHORT_WINDOW = 8  # tokens that determine how a text ends


class TextPiece(NamedTuple):
    """The text added by one token."""

    text: str
    stop: str | None  # the stop text that is now complete; neither it nor later text is emitted


class StopTexts:
    """Stop texts as one automaton: it reads the output character by character and remembers one state.

    The state is the longest end of the output with which a longer stop text begins. Transitions are looked up in the
    sorted stop texts, so building it costs a sort. A state only loses characters that it has gained, so a whole output
    takes about two lookups per character, whatever the number and length of the stop texts (Aho and Corasick, 1975).
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._sorted = sorted(set(texts))
        self._by_last: dict[str, list[str]] = {}  # longest first
        for text in sorted(self._sorted, key=len, reverse=True):
            self._by_last.setdefault(text[-1:], []).append(text)

    def step(self, state: str, character: str) -> tuple[str, str | None]:
        """The next state, and the stop text that ends with this character: the longest if there are several."""
        end = state + character
        complete = next((stop for stop in self._by_last.get(character, ()) if end.endswith(stop)), None)
        while end and not self.may_become(end):
            end = end[1:]
        return end, complete

    def may_become(self, part: str) -> bool:
        """Whether a longer stop text begins with `part`: it would be the next in sorted order."""
        place = bisect_right(self._sorted, part)
        return place < len(self._sorted) and self._sorted[place].startswith(part)


class TextStream:
    """Decodes one output. `decode` turns a list of tokens into text.

    Only a bounded window of the last tokens is decoded, so every token costs the same.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        """A stop text that is complete within the first `min_tokens` tokens is ignored."""
        self._decode = decode
        self._stops = StopTexts(stop)
        self._num_early = min_tokens  # tokens before the output may end
        self._includes_stop = include_stop
        self._window: list[int] = []  # the last tokens; earlier ones no longer affect decoding
        self._num_complete = 0  # tokens of the window that form whole characters, all emitted
        self._num_taken = 0  # characters of the window's text that were emitted
        self._held = ""  # text that may be the beginning of a stop text: the state of `_stops`
        self._num_emitted = 0  # characters

    @property
    def length(self) -> int:
        """Characters of the text so far, withheld ones included: where the next token's text begins."""
        return self._num_emitted + len(self._held)

    def push(self, token: int) -> TextPiece:
        """Add a token; returns the text that is now certain."""
        self._window.append(token)
        self._num_early -= 1
        text = self._decode(self._window)
        certain = text.rstrip(REPLACEMENT)
        if len(certain) == len(text):
            return self._emit(self._take_all(text))
        new = certain[self._num_taken :]  # empty if the decoder revises earlier text
        self._num_taken += len(new)
        if len(self._window) > MAX_WINDOW:
            new += self._shorten(text)
        return self._emit(new)

    def finish(self) -> str:
        """The rest of the text; incomplete characters become U+FFFD, which completes no stop text."""
        rest, self._held = self._held + self._take_all(self._decode(self._window)), ""
        return rest

    def _take_all(self, text: str) -> str:
        """New text of the window; the last tokens stay as context, as decoders treat spaces by context."""
        new = text[self._num_taken :]
        del self._window[: self._num_complete]
        self._num_complete = len(self._window)
        self._num_taken = len(self._decode(self._window))
        return new

    def _shorten(self, text: str) -> str:
        """Cut the window to its last tokens in the middle of a possible character; returns text that is now certain.

        The text of the last tokens ends like that of the whole window, even if cut bytes change. In a run of
        U+FFFD only the last ones may begin a character; earlier ones are certain. If a decoder behaves otherwise, all
        are.
        """
        pending = text[self._num_taken :]
        del self._window[:-SHORT_WINDOW]
        self._num_complete = 0
        shorter = self._decode(self._window)
        kept = pending[max(0, len(pending) - MAX_HALF) :]
        if not shorter.endswith(kept):
            kept = ""
        self._num_taken = len(shorter) - len(kept)
        return pending[: len(pending) - len(kept)]

    def _emit(self, new: str) -> TextPiece:
        held = self._held
        for num_read, character in enumerate(new, start=1):
            held, stop = self._stops.step(held, character)
            if stop is not None and self._num_early < 0:
                text = self._held + new[:num_read]  # nothing after the stop text is emitted
                self._held = ""
                self._window, self._num_complete, self._num_taken = [], 0, 0
                return TextPiece(text if self._includes_stop else text.removesuffix(stop), stop)
        text = self._held + new
        self._held = held
        certain = text[: len(text) - len(held)]
        self._num_emitted += len(certain)
        return TextPiece(certain, None)


def overlap(text: str, mark: str) -> int:
    """Length of the longest suffix of a text that is a prefix of a mark."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)
