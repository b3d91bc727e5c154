"""Keys and values of sessions in slots, for all layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from transformers import PretrainedConfig

from bough.model.kv.arena import Arena, committed_rows
from bough.model.kv.slot import Slot
from bough.model.kv.state_shape import GROWN_ROWS, PATH_ROWS, StateShape
from bough.model.kv.states import SessionStates


@dataclass(frozen=True, slots=True)
class KVShape:
    """Shape and dtype of a model's keys and values."""

    num_layers: int  # with attention
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    states: StateShape | None = None  # recurrent layers' states, in addition to the rows
    value_dim: int = 0  # of a head's value, if not `head_dim`

    @classmethod
    def of(cls, config: PretrainedConfig, dtype: torch.dtype) -> KVShape:
        """The shape for all layers of a configuration; of latent attention (`kv_lora_rank`), values are latents."""
        if rank := int(getattr(config, "kv_lora_rank", None) or 0):
            return cls(int(config.num_hidden_layers), 1, int(config.qk_rope_head_dim), dtype, value_dim=rank)
        heads = int(config.num_attention_heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        states = StateShape.of(config, dtype)
        num_layers = int(config.num_hidden_layers) - (states.num_layers if states else 0)
        return cls(num_layers, kv_heads, head_dim, dtype, states)

    @property
    def state_bytes(self) -> int:
        """Bytes of a target's session in addition to its rows, independent of its length."""
        return self.states.session_bytes(PATH_ROWS) if self.states else 0

    @property
    def growing_bytes(self) -> int:
        """Bytes of a draft's session in addition to its rows."""
        return self.states.session_bytes(GROWN_ROWS) if self.states else 0

    @property
    def row_bytes(self) -> int:
        """Bytes of keys and values of one token in all layers."""
        return sum(math.prod(size) for size in self.sizes(1)) * self.dtype.itemsize

    def sizes(self, num_rows: int) -> list[tuple[int, int, int, int]]:
        """Shapes of the keys and of the values of `num_rows` tokens."""
        widths = self.head_dim, self.value_dim or self.head_dim
        return [(self.num_layers, num_rows, self.num_kv_heads, width) for width in widths]

    def empty(self, num_rows: int, device: torch.device) -> KVMemory:
        """Allocate uninitialised memory for `num_rows` tokens.

        Rows are written before they are read, and the system supplies pages only when they are touched.
        """
        return KVMemory(*(torch.empty(size, dtype=self.dtype, device=device) for size in self.sizes(num_rows)))

    def within(self, memory: memoryview, num_rows: int) -> KVMemory:
        """Use existing memory of at least `num_rows` * `row_bytes` bytes."""
        sizes = self.sizes(num_rows)
        numbers = torch.frombuffer(memory[: num_rows * self.row_bytes], dtype=self.dtype)
        parts = torch.split(numbers, [math.prod(size) for size in sizes])
        return KVMemory(*(part.view(size) for part, size in zip(parts, sizes, strict=True)))


class KVMemory(NamedTuple):
    """Rows of keys and values for all layers; a slot is a range of rows."""

    keys: torch.Tensor  # (num_layers, num_rows, num_kv_heads, head_dim)
    values: torch.Tensor  # likewise, of another width if the shape says so


class KVSlot(Slot):
    """A session's rows of keys and values, with the tokens that are committed in them."""

    memory: KVMemory  # the memory that contains the slot
    keys: torch.Tensor  # (num_layers, num_rows, num_kv_heads, head_dim)
    values: torch.Tensor  # likewise

    def __init__(self, shape: KVShape, num_rows: int, device: torch.device) -> None:
        """Allocate separate memory."""
        super().__init__()
        self.states = SessionStates(shape.states) if shape.states else None
        self.place(shape.empty(num_rows, device), 0, num_rows)

    def place(self, memory: KVMemory, begin: int, end: int) -> None:
        """Assign these rows instead of the slot's own."""
        self.memory, self.begin, self.end = memory, begin, end
        self.keys, self.values = memory.keys[:, begin:end], memory.values[:, begin:end]

    def move(self, begin: int, end: int, num_kept: int) -> None:
        """Assign these rows instead of the slot's own, keeping keys and values of the first `num_kept`."""
        old_keys, old_values = self.keys[:, :num_kept], self.values[:, :num_kept]
        is_elsewhere = begin != self.begin
        self.place(self.memory, begin, end)
        if is_elsewhere:
            for new, old in ((self.keys, old_keys), (self.values, old_values)):
                for layer in range(len(new)):
                    new[layer, :num_kept] = old[layer].clone()  # source and target may overlap

    @property
    def num_rows(self) -> int:
        return self.keys.shape[1]

    def usable(self, length: int) -> int:
        length = super().usable(length)
        return self.states.usable(length) if self.states else length

    def roll_back(self, length: int) -> None:
        length = self.usable(length)
        super().roll_back(length)
        if self.states:
            self.states.roll_back(length)

    def clear(self) -> None:
        super().clear()
        self.states = None  # remaining references to the slot must not keep their memory

    def compact(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        super().compact(rows, tokens)
        if self.states:
            self.states.commit(rows)

    def snapshot_at(self, lengths: Collection[int]) -> None:
        if self.states:
            self.states.wanted = frozenset(lengths)

    @property
    def layer_rows(self) -> int:
        """Rows from a layer to the next; more than `num_rows` in shared memory."""
        return self.keys.stride(0) // self.keys.stride(1)

    def _copy(self, source: Slot, rows: range) -> None:
        assert isinstance(source, KVSlot), "slots of one arena are of one kind"
        new = slice(rows.start, rows.stop)
        self.keys[:, new] = source.keys[:, new]
        self.values[:, new] = source.values[:, new]
        if self.states and source.states:
            self.states.fork(source.states, rows.stop)

    def _gather(self, rows: Sequence[int], begin: int) -> None:
        end = begin + len(rows)
        source = torch.tensor(rows, device=self.keys.device)
        self.keys[:, begin:end] = self.keys.index_select(1, source)
        self.values[:, begin:end] = self.values.index_select(1, source)


class KVArena(Arena):
    """Hands out rows of keys and values as slots. Slots may move whenever one is taken or resized."""

    def __init__(
        self,
        shape: KVShape,
        memory: KVMemory,
        rows_to_keep: Callable[[Slot], int] = committed_rows,
        most_slots: int = 0,
        kind: Callable[[KVShape, int, torch.device], KVSlot] = KVSlot,
    ) -> None:
        """`rows_to_keep` returns how many rows of a slot a move must keep; `most_slots` is as in `Arena`."""

        def new_slot() -> KVSlot:
            slot = kind(shape, 0, memory.keys.device)
            slot.place(memory, 0, 0)
            return slot

        super().__init__(memory.keys.shape[1], shape.row_bytes, new_slot, rows_to_keep, most_slots)

    def take(self, num_rows: int) -> KVSlot:
        slot = super().take(num_rows)
        assert isinstance(slot, KVSlot), "made by this arena"
        return slot


class SplitLayers:
    """Replaces a tensor (num_layers, num_rows, num_kv_heads, head_dim) by a tensor for each device.

    It implements the operations of tensors that slots use.
    """

    def __init__(self, parts: Sequence[torch.Tensor], places: Sequence[tuple[int, int]]) -> None:
        """`parts` have some layers each; `places` is by layer: the index of its part, and the index within it."""
        self._parts, self._places = tuple(parts), tuple(places)

    @property
    def device(self) -> torch.device:
        """The device of the first part."""
        return self._parts[0].device

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole."""
        return (len(self._places), *self._parts[0].shape[1:])

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        """A layer; rows of a layer; or rows of all layers, [:, begin:end]."""
        layer, *rows = index if isinstance(index, tuple) else (index,)
        if isinstance(layer, slice):
            assert layer == slice(None), "of all layers or of one"
            return SplitLayers([part[:, rows[0]] for part in self._parts], self._places)
        part, number = self._places[layer]
        return self._parts[part][(number, *rows)]

    def __setitem__(self, index: tuple[Any, Any], value: Any) -> None:
        layer, rows = index
        if isinstance(layer, slice):
            for mine, theirs in zip(self._parts, value._parts, strict=True):
                mine[:, rows] = theirs
        else:
            part, number = self._places[layer]
            self._parts[part][number, rows] = value

    def index_select(self, dim: int, rows: torch.Tensor) -> SplitLayers:
        """A copy of these rows along axis `dim`, of every layer on its device."""
        return SplitLayers([part.index_select(dim, rows.to(part.device)) for part in self._parts], self._places)


def split_memory(
    shape: KVShape, num_rows: int, device: torch.device, elsewhere: Mapping[int, torch.device]
) -> KVMemory:
    """Memory for `num_rows` tokens: layers in `elsewhere` on their devices, others on `device`."""
    if {device, *elsewhere.values()} == {device}:
        return shape.empty(num_rows, device)
    devices = list(dict.fromkeys((device, *elsewhere.values())))
    layers: list[list[int]] = [[] for _ in devices]
    places = []
    for layer in range(shape.num_layers):
        part = devices.index(elsewhere.get(layer, device))
        places.append((part, len(layers[part])))
        layers[part].append(layer)

    def empty(whole: Sequence[int]) -> torch.Tensor:
        sizes = ((len(own), *whole[1:]) for own in layers)
        parts = [torch.empty(size, dtype=shape.dtype, device=d) for size, d in zip(sizes, devices, strict=True)]
        return cast(torch.Tensor, SplitLayers(parts, places))  # slots use only what it implements

    return KVMemory(*map(empty, shape.sizes(num_rows)))
