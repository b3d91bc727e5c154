"""A model's tokenizer files as a value that can be sent and compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class TokenizerFiles:
    """A model's tokenizer files, enough to rebuild the tokenizer in another process."""

    tokenizer_json: bytes
    chat_template: str
    eos_token_ids: tuple[int, ...]
    bos_token: str = ""
    eos_token: str = ""
    tool_template: str = ""  # the chat template for conversations with tools, if it differs

    @cached_property
    def vocabulary(self) -> tuple[str, ...]:
        """Tokens in id order; empty text for unused ids."""
        import tokenizers  # imported here, as clients do not install it

        vocab = tokenizers.Tokenizer.from_buffer(self.tokenizer_json).get_vocab(with_added_tokens=True)
        tokens = [""] * (max(vocab.values()) + 1)
        for token, index in vocab.items():
            tokens[index] = token
        return tuple(tokens)

    @cached_property
    def fingerprint(self) -> str:
        """A hash over the vocabulary in id order; equal if each token id means the same."""
        data = json.dumps(self.vocabulary, ensure_ascii=True).encode()
        return hashlib.blake2b(data, digest_size=12).hexdigest()


def first_difference(draft: Sequence[str], target: Sequence[str]) -> str | None:
    """Describes the first token id that differs between a draft's and a target's vocabulary; None if equal."""
    for index, (draft_token, target_token) in enumerate(zip(draft, target, strict=False)):
        if draft_token != target_token:
            return f"token {index} is {draft_token!r} in the draft and {target_token!r} in the target"
    if len(draft) != len(target):
        return f"the draft has {len(draft)} tokens and the target {len(target)}"
    return None
