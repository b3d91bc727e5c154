"""Tokens to text as they come: only whole characters, and never past a stop text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

REPLACEMENT = "\ufffd"  # what a decoder makes of bytes that are not yet a character


class Piece(NamedTuple):
    """What one token adds."""

    text: str
    stop: str | None  # the stop text that is now complete; nothing of it, nor anything after it, is in any piece


class TextStream:
    """Decodes one output. `decode` turns a list of tokens into text."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        self._context = 0  # tokens before this one no longer matter to the decoder
        self._shown = 0  # tokens before this one have been turned into text
        self._held = ""  # text that may be the beginning of a stop text

    def push(self, token: int) -> Piece:
        """The text that becomes certain with one more token."""
        self._tokens.append(token)
        text = self._decode(self._tokens[self._context :])
        if text.endswith(REPLACEMENT):
            return Piece("", None)
        return self._emit(self._take(text))

    def finish(self) -> str:
        """What was still held back; bytes that never became a character are U+FFFD."""
        text = self._emit(self._take(self._decode(self._tokens[self._context :])))
        rest = text.text + ("" if text.stop else self._held)
        self._held = ""
        return rest

    def _take(self, text: str) -> str:
        """The part of the decoded text that is new; the last tokens stay as context, for decoders that mind spaces."""
        known = self._decode(self._tokens[self._context : self._shown])
        self._context, self._shown = self._shown, len(self._tokens)
        return text[len(known) :]

    def _emit(self, new: str) -> Piece:
        text = self._held + new
        found = [(text.find(stop), stop) for stop in self._stop if stop in text]
        if found:
            where, stop = min(found)
            self._held = ""
            return Piece(text[:where], stop)
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return Piece(text[: len(text) - keep], None)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
