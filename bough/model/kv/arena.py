"""An arena of rows for the slots of many sessions; each slot has as many adjacent rows as it needs.

Fragmentation loses no room: if no gap is large enough, as few rows as possible are moved. So a budget of bytes is a
number of rows, and users only count rows. Free rows are kept behind each slot instead of at the end: most slots can
then grow in place.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter, sub

from bough.model.kv.slot import Slot


@dataclass(slots=True, eq=False)
class _Placed:
    """A slot and its rows."""

    slot: Slot
    begin: int
    end: int


SLOTS_A_CHECK = 32  # the calls between two integrity checks increase by one with this many slots
_BEGIN, _END = attrgetter("begin"), attrgetter("end")


def committed_rows(slot: Slot) -> int:
    """Rows of a slot to keep in a move: the committed tokens, and what a sweep in flight adds."""
    return slot.length + slot.num_in_sweep


class Arena:
    """Hands out rows as slots. Slots may move whenever one is taken or resized, so never while layers compute."""

    def __init__(
        self,
        num_rows: int,
        row_bytes: int,
        new_slot: Callable[[], Slot] = Slot,
        rows_to_keep: Callable[[Slot], int] = committed_rows,
        most_slots: int = 0,
    ) -> None:
        """`new_slot` makes a slot without rows; `rows_to_keep` returns how many rows of a slot a move must keep.

        `most_slots` limits slots that need memory outside their rows; with 0 they need none.
        """
        self.most_slots = most_slots
        self.num_rows = num_rows
        self.row_bytes = row_bytes
        self._new_slot, self._rows_to_keep = new_slot, rows_to_keep
        self._placed: list[_Placed] = []  # in the order of rows
        self.num_free = num_rows  # rows that belong to no slot
        self._num_unchecked = 0  # calls of `is_check_due` since it last returned True

    def take(self, num_rows: int) -> Slot:
        """Take a slot without tokens; there must be room."""
        assert num_rows <= self.num_free, "the caller has made room for the slot"
        index = self._make_gap(num_rows)
        begin, end = self._end_before(index), self._begin_after(index - 1)
        if index:
            begin += (end - begin - num_rows) // 2  # the previous slot can then grow too
        slot = self._new_slot()
        slot.move(begin, begin + num_rows, 0)
        self._placed.insert(index, _Placed(slot, begin, begin + num_rows))
        self.num_free -= num_rows
        return slot

    def resize(self, slot: Slot, num_rows: int) -> None:
        """Resize a slot, whose kept rows must fit; there must be room."""
        index, num_more = self._index(slot), num_rows - slot.num_rows
        placed = self._placed[index]
        assert num_more <= self.num_free, "the caller has made room for the slot"
        assert num_rows >= self._rows_to_keep(slot), "the kept rows do not fit"
        if placed.begin + num_rows > self._begin_after(index):
            window = self._cheapest(num_more, range(index + 1), range(index + 1, len(self._placed) + 1))
            self._spread(window, placed, num_more)
        self._place(placed, placed.begin, num_rows)
        self.num_free -= num_more

    def give_back(self, slot: Slot) -> None:
        """Free a slot's rows; it must not be used any more."""
        del self._placed[self._index(slot)]
        self.num_free += slot.num_rows
        slot.move(0, 0, 0)
        slot.clear()

    def is_check_due(self) -> bool:
        """Whether to check integrity now: more rarely with more slots, as a check looks at all of them."""
        self._num_unchecked += 1
        if self._num_unchecked * SLOTS_A_CHECK < len(self._placed):
            return False
        self._num_unchecked = 0
        return True

    def check_integrity(self) -> None:
        """Assert the invariants between calls."""
        end = 0
        for placed in self._placed:
            assert end <= placed.begin <= placed.end, "two slots share rows"
            assert placed.slot.num_rows == placed.end - placed.begin, "a slot has other rows than its assigned ones"
            assert placed.slot.length <= placed.slot.num_rows, "a slot holds more tokens than rows"
            end = placed.end
        assert end <= self.num_rows, "more rows than the budget allows"
        assert self.num_free == self.num_rows - sum(placed.slot.num_rows for placed in self._placed), "rows are lost"

    def _index(self, slot: Slot) -> int:
        index = bisect_left(self._placed, slot.begin, key=_BEGIN)
        while self._placed[index].slot is not slot:  # slots without rows begin where another does
            index += 1
        return index

    def _end_before(self, index: int) -> int:
        return self._placed[index - 1].end if index else 0

    def _begin_after(self, index: int) -> int:
        return self._placed[index + 1].begin if index + 1 < len(self._placed) else self.num_rows

    def _make_gap(self, num_rows: int) -> int:
        """Make a gap of `num_rows`, moving slots if necessary; returns the index at which to insert a slot."""
        num_slots = len(self._placed)
        begins, ends = map(_BEGIN, self._placed), map(_END, self._placed)
        gaps = [*map(sub, (*begins, self.num_rows), (0, *ends))]  # without a Python step for each slot
        if max(gaps) >= num_rows:
            return gaps.index(max(gaps))
        window = self._cheapest(num_rows, range(num_slots + 1), range(num_slots + 1))
        self._part(window, window.stop)
        return window.stop

    def _cheapest(self, num_rows: int, firsts: range, ends: range) -> range:
        """The window of slots with `num_rows` free rows around and between them that moves the fewest rows."""
        num_used = [0, *accumulate(placed.slot.num_rows for placed in self._placed)]  # by the slots before each
        costs = [0, *accumulate(self._rows_to_keep(placed.slot) for placed in self._placed)]
        num_free_before = [self._end_before(first) - num_used[first] for first in firsts]  # ascending, as rows are free
        best, least = None, self.num_rows + 1
        for end in ends:
            wanted = self._begin_after(end - 1) - num_used[end] - num_rows
            first = min(bisect_right(num_free_before, wanted) - 1 + firsts.start, end)
            if first >= firsts.start and costs[end] - costs[first] < least:
                best, least = range(first, end), costs[end] - costs[first]
        assert best is not None, "there are not as many free rows"
        return best

    def _part(self, window: range, index: int) -> None:
        """Move the window's slots before `index` down and the others up: all its free rows are then at `index`."""
        begin, end = self._end_before(window.start), self._begin_after(window.stop - 1)
        for placed in self._placed[window.start : index]:
            self._place(placed, begin, placed.slot.num_rows)
            begin = placed.end
        for placed in reversed(self._placed[index : window.stop]):
            self._place(placed, end - placed.slot.num_rows, placed.slot.num_rows)
            end = placed.begin

    def _spread(self, window: range, growing: _Placed, num_rows: int) -> None:
        """Move the window's slots: `growing` gets `num_rows` behind it, and all share the other free rows."""
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
            self._place(placed, to, placed.slot.num_rows)

    def _place(self, placed: _Placed, begin: int, num_rows: int) -> None:
        """Move a slot to rows that are free or its own."""
        placed.begin, placed.end = begin, begin + num_rows
        placed.slot.move(begin, begin + num_rows, self._rows_to_keep(placed.slot))
