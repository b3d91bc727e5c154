"""The keys and values of one session, for every layer, in the rows of its slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import PretrainedConfig

from bough.model.kv.slot import Slot


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


class KVSlot(Slot):
    """Room for `num_rows` tokens of one session, and the tokens whose keys and values are valid."""

    memory: KVMemory  # that it has rows of
    keys: torch.Tensor  # (num_layers, num_rows, num_kv_heads, head_dim)
    values: torch.Tensor  # likewise

    def __init__(self, shape: KVShape, num_rows: int, device: torch.device) -> None:
        """In memory of its own."""
        super().__init__()
        self.place(shape.empty(num_rows, device), 0, num_rows)

    def place(self, memory: KVMemory, begin: int, end: int) -> None:
        """Gives it these rows instead of those that it had."""
        self.memory, self.begin, self.end = memory, begin, end
        self.keys, self.values = memory.keys[:, begin:end], memory.values[:, begin:end]

    def move(self, begin: int, end: int, num_kept: int) -> None:
        """As any slot's: the keys and values of the first `num_kept` rows come along."""
        old_keys, old_values = self.keys[:, :num_kept], self.values[:, :num_kept]
        is_elsewhere = begin != self.begin
        self.place(self.memory, begin, end)
        if is_elsewhere:
            for new, old in ((self.keys, old_keys), (self.values, old_values)):
                for layer in range(len(new)):
                    new[layer, :num_kept] = old[layer].clone()  # the two may overlap

    @property
    def num_rows(self) -> int:
        """Tokens that there is room for, a tree's included."""
        return self.keys.shape[1]

    @property
    def layer_rows(self) -> int:
        """From a row of one layer to the same row of the next, in rows: more than `num_rows` in shared memory."""
        return self.keys.stride(0) // self.keys.stride(1)

    def _copy(self, source: Slot, rows: range) -> None:
        assert isinstance(source, KVSlot), "slots of one arena are of one kind"
        new = slice(rows.start, rows.stop)
        self.keys[:, new] = source.keys[:, new]
        self.values[:, new] = source.values[:, new]

    def _gather(self, rows: Sequence[int], begin: int) -> None:
        end = begin + len(rows)
        source = torch.tensor(rows, device=self.keys.device)
        self.keys[:, begin:end] = self.keys.index_select(1, source)
        self.values[:, begin:end] = self.values.index_select(1, source)
