"""Memory of keys and values, handed out as slots."""

from __future__ import annotations

from collections.abc import Callable

from bough.model.kv.arena import Arena, committed_rows
from bough.model.kv.session_kv import KVMemory, KVShape, KVSlot
from bough.model.kv.slot import Slot


class KVArena(Arena):
    """Rows of keys and values, handed out as slots. Slots may move whenever one is taken or resized: not in a pass."""

    def __init__(self, shape: KVShape, memory: KVMemory, rows_to_keep: Callable[[Slot], int] = committed_rows) -> None:
        """`rows_to_keep` says how many rows of a slot must survive a move."""

        def new_slot() -> KVSlot:
            slot = KVSlot(shape, 0, memory.keys.device)
            slot.place(memory, 0, 0)
            return slot

        super().__init__(memory.keys.shape[1], shape.row_bytes, new_slot, rows_to_keep)

    def take(self, num_rows: int) -> KVSlot:
        """A slot without tokens; there must be room."""
        slot = super().take(num_rows)
        assert isinstance(slot, KVSlot), "made by this arena"
        return slot
