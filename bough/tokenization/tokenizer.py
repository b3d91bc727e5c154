"""Encoding and decoding with a model's tokenizer, without torch or transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import takewhile
from typing import NamedTuple

import tokenizers

from bough.errors import BoughError, InvalidRequest
from bough.tokenization.chat_template import NONE, ChatTemplate, Messages, Objects, Variables
from bough.tokenization.vocabulary import TokenizerFiles

MAX_ID = 2**32 - 1  # largest token id that the library accepts


def _byte_characters() -> dict[str, int]:
    """GPT-2's byte-level alphabet: the byte that each character of a token stands for."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(ord("\u00ae"), 256)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_characters()


class AddedToken(NamedTuple):
    """A token that stands for a whole text."""

    token_id: int
    is_special: bool  # left out of decoded text


AddedTokens = Mapping[str, AddedToken]  # by their texts


class Tokenizer:
    """Converts text to tokens and back."""

    def __init__(self, files: TokenizerFiles) -> None:
        self.files = files
        self._tokenizer = tokenizers.Tokenizer.from_buffer(files.tokenizer_json)
        self.template = ChatTemplate(files.chat_template, files.bos_token, files.eos_token)
        self.tool_template = self.template
        if files.tool_template:
            self.tool_template = ChatTemplate(files.tool_template, files.bos_token, files.eos_token)

    @cached_property
    def longest_token(self) -> int:
        """The length of the longest token, in characters."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)))

    def encode(self, text: str) -> list[int]:
        """Tokens of a plain text, with the special tokens that the tokenizer adds."""
        return self._encode(text, add_special_tokens=True)

    def encode_more(self, text: str, before: str = "") -> list[int]:
        """Tokens of a text that continues `before`, without added special tokens.

        Raises:
            InvalidRequest: tokens of `before` would change, as a token spans the boundary.
        """
        tokens = self._plain(before + text)
        known = self._plain(before)
        if tokens[: len(known)] != known:
            raise InvalidRequest(
                "continues",
                "must be false, with the full history: the first token of the new text "
                f"{text[:20]!r} would begin in the session's text",
            )
        return tokens[len(known) :]

    def encode_chat(self, messages: Messages, variables: Variables = NONE) -> list[int]:
        """Tokens of a conversation of (role, content) pairs, up to the start of the assistant's answer."""
        return self._plain(self.template.render(messages, variables))

    def encode_objects(self, messages: Objects, tools: Objects, variables: Variables = NONE) -> list[int]:
        """Tokens of a conversation, as in `encode_chat`, whose messages may have further fields, and of its tools."""
        template = self.tool_template if tools else self.template
        return self._plain(template.render_objects(messages, tools, variables))

    def encode_turn(self, messages: Messages, variables: Variables = NONE) -> list[int]:
        """Tokens that continue a conversation after an assistant's answer with these messages.

        They begin with the end-of-turn token, if the template has one. Raises InvalidRequest if the template cannot
        render a turn by itself.
        """
        return self.encode_more(self.template.render_turn(messages, variables), before="x")

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the tokens without special tokens; incomplete characters become U+FFFD."""
        with panics_as_errors():
            return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def decode_showing(self, token_ids: Sequence[int], shown: Mapping[int, str]) -> str:
        """Text as in `decode`, but with the texts of some special tokens."""
        text, begin = "", 0
        for index, token_id in enumerate(token_ids):
            if token_id in shown:
                text += self.decode(token_ids[begin:index]) + shown[token_id]
                begin = index + 1
        return text + self.decode(token_ids[begin:])

    def num_added(self, token_ids: Sequence[int]) -> int:
        """The number of leading tokens of a prompt that `encode` adds itself."""
        added = zip(token_ids, self._added_to_texts, strict=False)
        return len([*takewhile(lambda pair: pair[0] == pair[1], added)])

    def decode_prompt(self, token_ids: Sequence[int]) -> str:
        """The text that encodes to these tokens. It contains the texts of special ones, unless `encode` adds them."""
        return self.decode_showing(token_ids[self.num_added(token_ids) :], self.special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, which may be part of a character; empty for an unused id.

        Of a special token these are the bytes of its text.
        """
        token = (self._tokenizer.id_to_token(token_id) if 0 <= token_id <= MAX_ID else None) or ""
        if token in self.added_tokens:
            return token.encode()
        if self._is_byte_level:
            return bytes(_BYTES[character] for character in token if character in _BYTES)
        if (match := re.fullmatch("<0x([0-9A-F]{2})>", token)) is not None:
            return bytes.fromhex(match[1])
        return token.replace("\u2581", " ").encode()

    @cached_property
    def added_tokens(self) -> AddedTokens:
        """Tokens added to the vocabulary, including special ones, by their texts."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: AddedToken(token_id, token.special) for token_id, token in added.items()}

    @cached_property
    def special_tokens(self) -> dict[int, str]:
        """The texts of the tokens that are left out of decoded text."""
        return {token.token_id: text for text, token in self.added_tokens.items() if token.is_special}

    @cached_property
    def _added_to_texts(self) -> list[int]:
        return self.encode("")

    @cached_property
    def _is_byte_level(self) -> bool:
        """Whether tokens are written in the byte-level alphabet."""
        decoder = json.loads(self._tokenizer.decoder.__getstate__()) if self._tokenizer.decoder else {}
        return "ByteLevel" in (decoder.get("type"), *(one.get("type") for one in decoder.get("decoders", ())))

    def _plain(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Encode as a batch of one, since only batch calls of the library release the GIL."""
        with panics_as_errors():
            return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise BoughError if the library panics: pyo3's PanicException is not an Exception, so nothing would catch it."""
    try:
        yield
    except BaseException as exc:
        if type(exc).__name__ == "PanicException":
            raise BoughError(f"the tokenizer has failed: {exc}") from exc
        raise
