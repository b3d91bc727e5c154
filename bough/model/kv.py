"""The keys and values of one session, for every layer.

A slot knows rows, not meanings: rows [0, length) hold committed tokens at the positions of the same numbers, and what a
tree puts above them counts for nothing until it is compacted down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import PretrainedConfig

from bough.errors import PrefixMissing
from bough.prefix import prefix_hash


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one slot of a model takes."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: PretrainedConfig, dtype: torch.dtype) -> KVShape:
        """Of a model with all layers that its configuration names."""
        heads = int(config.num_attention_heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        return cls(int(config.num_hidden_layers), kv_heads, head_dim, dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of keys and values of one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def size(self, num_rows: int) -> tuple[int, int, int, int]:
        """Of the keys, and of the values, of so many tokens."""
        return self.num_layers, num_rows, self.num_kv_heads, self.head_dim

    def empty(self, num_rows: int, device: torch.device) -> KVMemory:
        """Room for so many tokens.

        Rows are written before they are read, and memory never touched is never taken from the system.
        """
        return KVMemory(*(torch.empty(self.size(num_rows), dtype=self.dtype, device=device) for _ in range(2)))

    def within(self, memory: memoryview, num_rows: int) -> KVMemory:
        """Room for so many tokens in memory that somebody has taken, `num_rows` * `row_bytes` or more."""
        half = num_rows * self.row_bytes // 2
        parts = (torch.frombuffer(memory[begin : begin + half], dtype=self.dtype) for begin in (0, half))
        return KVMemory(*(part.view(self.size(num_rows)) for part in parts))


class KVMemory(NamedTuple):
    """Rows of keys and values for every layer; a slot is some of them in a row."""

    keys: torch.Tensor  # (num_layers, num_rows, num_kv_heads, head_dim)
    values: torch.Tensor  # likewise


class KVSlot:
    """Room for `num_rows` tokens of one session, and the tokens whose keys and values are valid."""

    memory: KVMemory  # that it has rows of
    begin: int  # the first of them
    keys: torch.Tensor  # (num_layers, num_rows, num_kv_heads, head_dim)
    values: torch.Tensor  # likewise

    def __init__(self, shape: KVShape, num_rows: int, device: torch.device) -> None:
        """In memory of its own."""
        self.tokens: list[int] = []  # committed tokens: row i holds token i
        self.place(shape.empty(num_rows, device), 0, num_rows)

    def place(self, memory: KVMemory, begin: int, end: int) -> None:
        """Gives it these rows instead of those that it had."""
        self.memory, self.begin = memory, begin
        self.keys, self.values = memory.keys[:, begin:end], memory.values[:, begin:end]

    @property
    def num_rows(self) -> int:
        """Tokens that there is room for, a tree's included."""
        return self.keys.shape[1]

    @property
    def layer_rows(self) -> int:
        """From a row of one layer to the same row of the next, in rows: more than `num_rows` in shared memory."""
        return self.keys.stride(0) // self.keys.stride(1)

    @property
    def length(self) -> int:
        """Number of committed tokens held."""
        return len(self.tokens)

    def require(self, context_start: int, expected_hash: int) -> None:
        """That the first `context_start` tokens are the ones that a caller means.

        Raises:
            PrefixMissing: with the length and hash of what is held.
        """
        if context_start > self.length or prefix_hash(self.tokens[:context_start]) != expected_hash:
            held = f"{self.length} tokens" if context_start > self.length else "other tokens"
            raise PrefixMissing(
                f"context.context_start: {context_start} tokens were taken to be held, but {held} are; "
                "send the session's tokens again from what is held",
                self.length,
                prefix_hash(self.tokens),
            )

    def roll_back(self, length: int) -> None:
        """Forgets all but the first `length` tokens."""
        del self.tokens[length:]

    def fork(self, source: KVSlot, length: int) -> None:
        """Takes over another slot's tokens from where this one's end up to `length`, with their keys and values.

        What this slot holds must be the beginning of what the other one does.
        """
        new = slice(self.length, length)
        assert new.start < new.stop <= source.length, "a fork takes what the source has committed, and this lacks"
        self.keys[:, new] = source.keys[:, new]
        self.values[:, new] = source.values[:, new]
        self.tokens.extend(source.tokens[new])

    def compact(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Commits tokens whose keys and values stand in `rows`, by moving them down to follow the committed ones.

        What stands in rows beyond the tokens follows them and is not committed.
        """
        start, end = self.length, self.length + len(rows)
        if list(rows) != list(range(start, end)):
            source = torch.tensor(rows, device=self.keys.device)
            self.keys[:, start:end] = self.keys.index_select(1, source)
            self.values[:, start:end] = self.values.index_select(1, source)
        self.tokens.extend(tokens)
