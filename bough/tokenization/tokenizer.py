"""A model's tokenizer at work: text to tokens and back, without torch or transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property

import tokenizers

from bough.errors import InvalidRequest
from bough.tokenization.chat_template import ChatTemplate, Messages
from bough.tokenization.vocabulary import TokenizerFiles

MAX_ID = 2**32 - 1  # that the library can be asked for


def _byte_characters() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for: its own where that can be seen."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(ord("\u00ae"), 256)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_characters()


class Tokenizer:
    """Text to tokens and back."""

    def __init__(self, files: TokenizerFiles) -> None:
        self.files = files
        self._tokenizer = tokenizers.Tokenizer.from_buffer(files.tokenizer_json)
        self._template = ChatTemplate(files.chat_template, files.bos_token, files.eos_token)

    @cached_property
    def longest_token(self) -> int:
        """Characters that one token stands for, at most."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)))

    def encode(self, text: str) -> list[int]:
        """Tokens of a plain text, with the special tokens that the tokenizer adds by itself."""
        return self._encode(text, add_special_tokens=True)

    def encode_more(self, text: str, before: str = "") -> list[int]:
        """Tokens of a plain text that goes on: without what a tokenizer adds to a beginning.

        Raises:
            InvalidRequest: after the text `before` it would be other tokens.
        """
        tokens = self._plain(before + text)
        known = self._plain(before)
        if tokens[: len(known)] != known:
            raise InvalidRequest(
                f"continues: true, but the first token of what is new, {text[:20]!r}, would reach into what is held; "
                "the full history, with continues false, would do"
            )
        return tokens[len(known) :]

    def encode_chat(self, messages: Messages) -> list[int]:
        """Tokens of a conversation of (role, content), opened for the assistant's answer."""
        return self._plain(self._template.render(messages))

    def encode_turn(self, messages: Messages) -> list[int]:
        """Tokens that follow the text of an assistant's answer when the conversation goes on with these messages.

        They begin with the token that ends an answer, where the template has one. Raises InvalidRequest where the
        template cannot be continued.
        """
        return self.encode_more(self._template.render_turn(messages), before="x")

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the tokens, special tokens left out; bytes that form no character become U+FFFD."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, special tokens spelled out; nothing for an id without a token.

        A token may be a part of a character, which as a text of its own would be U+FFFD.
        """
        token = (self._tokenizer.id_to_token(token_id) if 0 <= token_id <= MAX_ID else None) or ""
        if token in self._added:
            return token.encode()
        if self._is_byte_level:
            return bytes(_BYTES[character] for character in token if character in _BYTES)
        if (match := re.fullmatch("<0x([0-9A-F]{2})>", token)) is not None:
            return bytes.fromhex(match[1])
        return token.replace("\u2581", " ").encode()

    @cached_property
    def _added(self) -> frozenset[str]:
        """Tokens that stand beside the model's own, as they are spelled."""
        return frozenset(token.content for token in self._tokenizer.get_added_tokens_decoder().values())

    @cached_property
    def _is_byte_level(self) -> bool:
        """Whether each character of a token stands for a byte."""
        decoder = json.loads(self._tokenizer.decoder.__getstate__()) if self._tokenizer.decoder else {}
        return "ByteLevel" in (decoder.get("type"), *(one.get("type") for one in decoder.get("decoders", ())))

    def _plain(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """As a batch of one: for a batch, unlike for a text, the library lets other threads run meanwhile."""
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
