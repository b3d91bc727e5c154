"""The slots of a staged target: the head records every change, and each stage repeats it in its own memory.

The head alone knows sessions and tokens. Its slots and a stage's have the same rows, so a change is a few numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch

from bough.errors import InvalidRequest
from bough.model.kv.session_kv import KVMemory, KVShape, KVSlot
from bough.model.kv.slot import Slot

NO_TOKEN = 0  # stands for each token of a stage's slots, of which only the number matters


class ChangeKind(IntEnum):
    """What happened to a slot; numbers as in `SlotChangeKind` on the wire, which describes them."""

    MOVED = 1
    FORKED = 2
    COMMITTED = 3
    ROLLED_BACK = 4
    SNAPSHOTS = 5
    CLEARED = 6


class SlotChange(NamedTuple):
    """A change of a slot."""

    slot: int  # its number
    kind: ChangeKind
    numbers: tuple[int, ...]


class SlotLog:
    """Changes of slots since the last pass, in order."""

    def __init__(self) -> None:
        self._num_slots = self._num_forgotten = 0
        self._changes: list[SlotChange] = []

    def number_slot(self) -> int:
        """A number for a new slot."""
        self._num_slots += 1
        return self._num_slots

    def add(self, slot: int, kind: ChangeKind, *numbers: int) -> None:
        """Record a change."""
        if slot > self._num_forgotten:
            self._changes.append(SlotChange(slot, kind, numbers))

    def forget(self) -> None:
        """Drop all changes of present slots, later ones included: the stages do not know these slots any more."""
        self._num_forgotten = self._num_slots
        self._changes.clear()

    def take(self) -> list[SlotChange]:
        """All recorded changes; the log is then empty."""
        taken, self._changes = self._changes, []
        return taken


class LoggedSlot(KVSlot):
    """A slot of the head, whose changes are recorded for the stages."""

    def __init__(self, log: SlotLog, shape: KVShape, num_rows: int, device: torch.device) -> None:
        super().__init__(shape, num_rows, device)
        self._log, self.number = log, log.number_slot()

    def move(self, begin: int, end: int, num_kept: int) -> None:
        super().move(begin, end, num_kept)
        self._log.add(self.number, ChangeKind.MOVED, begin, end, num_kept)

    def fork(self, source: Slot, length: int) -> None:
        super().fork(source, length)
        assert isinstance(source, LoggedSlot), "slots of one arena are of one kind"
        self._log.add(self.number, ChangeKind.FORKED, source.number, length)

    def compact(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        super().compact(rows, tokens)
        self._log.add(self.number, ChangeKind.COMMITTED, len(tokens), *rows)

    def roll_back(self, length: int) -> None:
        super().roll_back(length)
        self._log.add(self.number, ChangeKind.ROLLED_BACK, self.length)

    def snapshot_at(self, lengths: Collection[int]) -> None:
        super().snapshot_at(lengths)
        if self.states:
            self._log.add(self.number, ChangeKind.SNAPSHOTS, *sorted(lengths))

    def clear(self) -> None:
        super().clear()
        self._log.add(self.number, ChangeKind.CLEARED)


class MirroredSlots:
    """The head's slots at a stage, in the stage's memory of its own layers."""

    def __init__(self, shape: KVShape, memory: KVMemory) -> None:
        self._shape, self._memory = shape, memory
        self._num_rows = memory.keys.shape[1]
        self._slots: dict[int, KVSlot] = {}

    def spare_slot(self) -> KVSlot:
        """A slot of one row that belongs to no session, before there are any."""
        slot = KVSlot(self._shape, 0, self._memory.keys.device)
        slot.place(self._memory, 0, 1)
        return slot

    def forget_all(self) -> None:
        """Drop all slots, when the head begins anew."""
        self._slots.clear()

    def slot(self, number: int, num_rows: int = 0) -> KVSlot:
        """A slot of at least so many rows. Raises InvalidRequest if there is none."""
        slot = self._slots.get(number)
        if slot is None or slot.num_rows < num_rows:
            got = "no such slot" if slot is None else f"a slot of {slot.num_rows} rows"
            raise InvalidRequest("slot", f"must be a slot with at least {num_rows} rows, as {number}", got)
        return slot

    def apply(self, change: SlotChange) -> None:
        """Repeat a change. Raises InvalidRequest if it does not fit what the slots hold."""
        numbers = change.numbers
        match change.kind:
            case ChangeKind.MOVED if len(numbers) == 3:
                self._move(change.slot, *numbers)
            case ChangeKind.FORKED if len(numbers) == 2:
                self._fork(self.slot(change.slot, numbers[1]), self.slot(numbers[0], numbers[1]), numbers[1])
            case ChangeKind.COMMITTED if numbers:
                self._commit(self.slot(change.slot, max(numbers[1:], default=-1) + 1), numbers[0], numbers[1:])
            case ChangeKind.ROLLED_BACK if len(numbers) == 1:
                self._roll_back(self.slot(change.slot), numbers[0])
            case ChangeKind.SNAPSHOTS:
                self.slot(change.slot).snapshot_at(numbers)
            case ChangeKind.CLEARED if not numbers:
                self.slot(change.slot).clear()
                del self._slots[change.slot]
            case _:
                raise InvalidRequest("changes.numbers", f"must be as {change.kind.name} needs them", numbers)

    def _move(self, number: int, begin: int, end: int, num_kept: int) -> None:
        slot = self._slots.get(number)
        kept = 0 if slot is None else min(slot.num_rows, end - begin)
        if not 0 <= begin <= end <= self._num_rows or num_kept > kept:
            rule = f"must be within the {self._num_rows} rows and keep at most {kept}"
            raise InvalidRequest("changes.numbers", rule, (begin, end, num_kept))
        if slot is None:
            slot = self._slots[number] = KVSlot(self._shape, 0, self._memory.keys.device)
            slot.place(self._memory, 0, 0)
        slot.move(begin, end, num_kept)

    def _fork(self, slot: KVSlot, source: KVSlot, length: int) -> None:
        if not slot.length < length <= source.usable(length):
            raise InvalidRequest("changes.numbers", f"must be a length above {slot.length} that can be copied", length)
        slot.fork(source, length)

    def _commit(self, slot: KVSlot, num_tokens: int, rows: Sequence[int]) -> None:
        if num_tokens > len(rows) or slot.length + len(rows) > slot.num_rows:
            raise InvalidRequest("changes.numbers", f"must be rows that a slot of {slot.num_rows} has room for", rows)
        slot.compact(rows, [NO_TOKEN] * num_tokens)

    def _roll_back(self, slot: KVSlot, length: int) -> None:
        slot.roll_back(length)
        if slot.length != length:
            raise InvalidRequest("changes.numbers", f"must be at most {slot.length}, which can be continued", length)
