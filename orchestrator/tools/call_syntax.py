"""What one call looks like: how it is read, and the rules of a grammar that allow nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from bough.protocol.generation import Function
from bough.tokenization.tokenizer import AddedToken
from orchestrator.tools.call_reader import CallReader

Write = Callable[[str], str]  # from a text to a part of a rule


class CallSyntax(Protocol):
    """One way of spelling a call, without the mark before it."""

    @property
    def texts(self) -> Sequence[str]:
        """Texts that are the same in every call, which may be tokens."""
        ...

    def reader(self, functions: Sequence[Function]) -> CallReader:
        """Reads one call, perhaps of one of these functions."""
        ...

    def rules(self, name: str, function: Function, write: Write, *, follows_schema: bool) -> list[str]:
        """The rule of this name and those that it needs: a call with arguments of the schema, or with any.

        Raises:
            InvalidRequest: the schema cannot be followed.
        """
        ...


def written(text: str, added_tokens: Mapping[str, AddedToken]) -> str:
    """A text as part of a rule: where the vocabulary has a token for a part of it, models were trained with that."""
    tokens = sorted((token for token in added_tokens if token in text), key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, tokens))})", text) if tokens else [text]
    return " ".join(
        f"<[{added_tokens[part].token_id}]>" if part in added_tokens else json.dumps(part) for part in parts if part
    )
