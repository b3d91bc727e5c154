"""A model's tokenizer as data that can be sent, compared and used without torch or transformers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import tokenizers

from bough.chat_template import ChatTemplate, Messages
from bough.errors import InvalidRequest


@dataclass(frozen=True)
class TokenizerFiles:
    """What a worker knows of its model's tokenizer, enough to rebuild it elsewhere."""

    tokenizer_json: bytes
    chat_template: str
    eos_token_ids: tuple[int, ...]
    bos_token: str = ""
    eos_token: str = ""

    @cached_property
    def vocabulary(self) -> tuple[str, ...]:
        """Tokens in id order; ids without a token hold an empty text."""
        vocab = tokenizers.Tokenizer.from_buffer(self.tokenizer_json).get_vocab(with_added_tokens=True)
        tokens = [""] * (max(vocab.values()) + 1)
        for token, index in vocab.items():
            tokens[index] = token
        return tuple(tokens)

    @cached_property
    def fingerprint(self) -> str:
        """Hash over the vocabulary in id order: equal means that a token id means the same to both."""
        data = json.dumps(self.vocabulary, ensure_ascii=True).encode()
        return hashlib.blake2b(data, digest_size=12).hexdigest()


def first_difference(draft: Sequence[str], target: Sequence[str]) -> str | None:
    """Names the first token id that means different things to a draft and a target, or None."""
    for index, (drafted, wanted) in enumerate(zip(draft, target, strict=False)):
        if drafted != wanted:
            return f"token {index} is {drafted!r} to the draft and {wanted!r} to the target"
    if len(draft) != len(target):
        return f"the draft knows {len(draft)} tokens and the target {len(target)}"
    return None


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

    def _plain(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """As a batch of one: for a batch, unlike for a text, the library lets other threads run meanwhile."""
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
