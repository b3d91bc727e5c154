"""Tokens to text as they come: only whole characters, and never past a stop text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

REPLACEMENT = "\ufffd"  # what a decoder makes of bytes that are not yet a character
MAX_HALF = 3  # bytes of a character that is not complete, and so characters U+FFFD that may stand for them
MAX_WINDOW = 24  # tokens that the decoder is asked for at once
SHORT_WINDOW = 8  # tokens that are enough to know how a text ends


class TextPiece(NamedTuple):
    """What one token adds."""

    text: str
    stop: str | None  # the stop text that is now complete; nothing of it, nor anything after it, is in any piece


class TextStream:
    """Decodes one output. `decode` turns a list of tokens into text.

    The decoder is asked for a window of the last tokens alone, which is bounded: each token takes as much work as any
    other, whatever came before.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._window: list[int] = []  # the last tokens; those before no longer matter to the decoder
        self._num_complete = 0  # tokens of the window that stand for whole characters, all of which were taken
        self._num_taken = 0  # characters of the window's text that were taken
        self._held = ""  # text that may be the beginning of a stop text

    def push(self, token: int) -> TextPiece:
        """The text that becomes certain with one more token."""
        self._window.append(token)
        text = self._decode(self._window)
        certain = text.rstrip(REPLACEMENT)
        if len(certain) == len(text):
            return self._emit(self._take_all(text))
        new = certain[self._num_taken :]  # nothing where the decoder takes back what it has said of earlier tokens
        self._num_taken += len(new)
        if len(self._window) > MAX_WINDOW:
            new += self._shorten(text)
        return self._emit(new)

    def finish(self) -> str:
        """What was still held back; bytes that never became a character are U+FFFD."""
        text = self._emit(self._take_all(self._decode(self._window)))
        rest = text.text + ("" if text.stop else self._held)
        self._held = ""
        return rest

    def _take_all(self, text: str) -> str:
        """What is new in the window's text; the last tokens stay as context, for decoders that mind spaces."""
        new = text[self._num_taken :]
        del self._window[: self._num_complete]
        self._num_complete = len(self._window)
        self._num_taken = len(self._decode(self._window))
        return new

    def _shorten(self, text: str) -> str:
        """Cuts the window down to its last tokens, in the middle of what may yet become a character.

        The text of the last tokens alone ends as that of the window does, whatever its beginning makes of the bytes
        that were cut off. Of U+FFFD in a row only the last ones may be the beginning of a character; those before are
        certain, and returned. A decoder for which that is not so gets all of them said.
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
        text = self._held + new
        found = [(text.find(stop), stop) for stop in self._stop if stop in text]
        if found:
            where, stop = min(found)
            self._held = ""
            return TextPiece(text[:where], stop)
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return TextPiece(text[: len(text) - keep], None)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
