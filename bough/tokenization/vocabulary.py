"""A model's tokenizer as data that can be sent and compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


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
        import tokenizers  # not for clients, which never ask

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
