"""An arena of rows for the slots of many sessions; each slot has as many adjacent rows as it needs.

Fragmentation loses no room: if no gap is large enough, as few rows as possible are moved. So a budget of bytes is a
number of rows, and users only count rows. Free rows are kept behind each slot rather than at the end, so that most
slots can grow in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bough.model.kv.slot import Slot


@dataclass(slots=True, eq=False)
class _Placed:
    """A slot and its rows."""

    slot: Slot
    begin: int
    end: int


def committed_rows(slot: Slot) -> int:
    """Rows of a slot to keep in a move: the committed tokens."""
    return slot.length


class Arena:
    """Hands out rows as slots. Slots may move whenever one is taken or resized, so never during a pass."""

    def __init__(
        self,
        num_rows: int,
        row_bytes: int,
        new_slot: Callable[[], Slot] = Slot,
        rows_to_keep: Callable[[Slot], int] = committed_rows,
    ) -> None:
        """`new_slot` makes a slot without rows; `rows_to_keep` returns how many rows of a slot a move must keep."""
        self.num_rows = num_rows
        self.row_bytes = row_bytes
        self._new_slot, self._rows_to_keep = new_slot, rows_to_keep
        self._placed: list[_Placed] = []  # in the order of rows

    @property
    def num_free(self) -> int:
        """Rows that belong to no slot."""
        return self.num_rows - sum(placed.end - placed.begin for placed in self._placed)

    def take(self, num_rows: int) -> Slot:
        """Take a slot without tokens; there must be room."""
        assert num_rows <= self.num_free, "whoever takes a slot has seen to its room"
        index = self._make_gap(num_rows)
        begin, end = self._end_before(index), self._begin_after(index - 1)
        if index:
            begin += (end - begin - num_rows) // 2  # so that the previous slot can grow too
        slot = self._new_slot()
        slot.move(begin, begin + num_rows, 0)
        self._placed.insert(index, _Placed(slot, begin, begin + num_rows))
        return slot

    def resize(self, slot: Slot, num_rows: int) -> None:
        """Resize a slot, whose kept rows must fit; there must be room."""
        index = self._index(slot)
        placed = self._placed[index]
        assert num_rows - slot.num_rows <= self.num_free, "whoever resizes a slot has seen to its room"
        assert num_rows >= self._rows_to_keep(slot), "what is kept does not fit"
        if placed.begin + num_rows > self._begin_after(index):
            window = self._cheapest(num_rows - slot.num_rows, range(index + 1), range(index + 1, len(self._placed) + 1))
            self._spread(window, placed, num_rows - slot.num_rows)
        self._put(placed, placed.begin, num_rows)

    def give_back(self, slot: Slot) -> None:
        """Free a slot's rows; it must not be used any more."""
        del self._placed[self._index(slot)]
        slot.move(0, 0, 0)
        slot.tokens.clear()

    def check_integrity(self) -> None:
        """Assert the invariants between calls."""
        end = 0
        for placed in self._placed:
            assert end <= placed.begin <= placed.end, "two slots share rows"
            assert placed.slot.num_rows == placed.end - placed.begin, "a slot has other rows than were given to it"
            assert placed.slot.length <= placed.slot.num_rows, "a slot holds more tokens than rows"
            end = placed.end
        assert end <= self.num_rows, "more rows than the budget allows"

    def _index(self, slot: Slot) -> int:
        return next(index for index, placed in enumerate(self._placed) if placed.slot is slot)

    def _end_before(self, index: int) -> int:
        return self._placed[index - 1].end if index else 0

    def _begin_after(self, index: int) -> int:
        return self._placed[index + 1].begin if index + 1 < len(self._placed) else self.num_rows

    def _make_gap(self, num_rows: int) -> int:
        """Make a gap of `num_rows`, moving slots if necessary; returns the index at which to insert a slot."""
        num_slots = len(self._placed)
        gaps = [self._begin_after(index - 1) - self._end_before(index) for index in range(num_slots + 1)]
        if max(gaps) >= num_rows:
            return gaps.index(max(gaps))
        window = self._cheapest(num_rows, range(num_slots + 1), range(num_slots + 1))
        self._part(window, window.stop)
        return window.stop

    def _cheapest(self, num_rows: int, firsts: range, ends: range) -> range:
        """The window of slots with `num_rows` free rows around and between them that moves the fewest rows."""
        best, least = None, self.num_rows + 1
        for first in firsts:
            begin, num_used, cost = self._end_before(first), 0, 0
            for index in range(first, len(self._placed) + 1):
                is_enough = self._begin_after(index - 1) - begin - num_used >= num_rows
                if index in ends and is_enough and cost < least:
                    best, least = range(first, index), cost
                if cost >= least or index == len(self._placed):
                    break
                num_used += self._placed[index].slot.num_rows
                cost += self._rows_to_keep(self._placed[index].slot)
        assert best is not None, "there are not as many free rows"
        return best

    def _part(self, window: range, index: int) -> None:
        """Move the window's slots before `index` down and the others up, so that all its free rows are at `index`."""
        begin, end = self._end_before(window.start), self._begin_after(window.stop - 1)
        for placed in self._placed[window.start : index]:
            self._put(placed, begin, placed.slot.num_rows)
            begin = placed.end
        for placed in reversed(self._placed[index : window.stop]):
            self._put(placed, end - placed.slot.num_rows, placed.slot.num_rows)
            end = placed.begin

    def _spread(self, window: range, growing: _Placed, num_rows: int) -> None:
        """Move the window's slots so that `growing` gets `num_rows` behind it, and share the other free rows."""
        slots = self._placed[window.start : window.stop]
        begin, end = self._end_before(window.start), self._begin_after(window.stop - 1)
        share = (end - begin - num_rows - sum(placed.slot.num_rows for placed in slots)) // len(slots)
        begins = []
        for placed in slots:
            begins.append(begin)
            begin += placed.slot.num_rows + share + (num_rows if placed is growing else 0)
        moves = list(zip(slots, begins, strict=True))
        down = [(placed, to) for placed, to in moves if to < placed.begin]
        up = [(placed, to) for placed, to in moves if to > placed.begin]
        for placed, to in (*down, *reversed(up)):  # in an order in which no move overwrites an unmoved slot
            self._put(placed, to, placed.slot.num_rows)

    def _put(self, placed: _Placed, begin: int, num_rows: int) -> None:
        """Move a slot to rows that are free or its own."""
        placed.begin, placed.end = begin, begin + num_rows
        placed.slot.move(begin, begin + num_rows, self._rows_to_keep(placed.slot))
