"""An arena of keys and values."""

from __future__ import annotations

from collections.abc import Callable

from bough.model.kv.arena import Arena, committed_rows
from bough.model.kv.session_kv import KVMemory, KVShape, KVSlot
from bough.model.kv.slot import Slot


class KVArena(Arena):
    """Hands out rows of keys and values as slots. Slots may move whenever one is taken or resized."""

    def __init__(
        self,
        shape: KVShape,
        memory: KVMemory,
        rows_to_keep: Callable[[Slot], int] = committed_rows,
        most_slots: int = 0,
    ) -> None:
        """`rows_to_keep` returns how many rows of a slot a move must keep; `most_slots` is as in `Arena`."""

        def new_slot() -> KVSlot:
            slot = KVSlot(shape, 0, memory.keys.device)
            slot.place(memory, 0, 0)
            return slot

        super().__init__(memory.keys.shape[1], shape.row_bytes, new_slot, rows_to_keep, most_slots)

    def take(self, num_rows: int) -> KVSlot:
        slot = super().take(num_rows)
        assert isinstance(slot, KVSlot), "made by this arena"
        return slot
