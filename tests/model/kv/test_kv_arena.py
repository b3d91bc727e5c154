"""Slots of many sizes in one piece of memory: nothing overlaps or is lost, and no room is lost between them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bough.model.kv.session_kv import KVArena, KVShape, KVSlot

SHAPE = KVShape(2, 1, 1, torch.float32)
ROWS = 40


def new_arena() -> KVArena:
    return KVArena(SHAPE, SHAPE.empty(ROWS, torch.device("cpu")))


def fill(slot: KVSlot, mark: int) -> None:
    """Commits as many tokens as there is room for, but one."""
    start, end = slot.length, slot.num_rows - 1
    for layer in range(2):
        slot.keys[layer, start:end, 0, 0] = torch.arange(start, end) + 1000.0 * mark + 0.25 * layer
        slot.values[layer, start:end, 0, 0] = torch.arange(start, end) - 1000.0 * mark + 0.25 * layer
    slot.tokens.extend([mark] * (end - start))


def require_whole(slot: KVSlot, mark: int) -> None:
    rows = torch.arange(slot.length)
    assert set(slot.tokens) <= {mark}
    for layer in range(2):
        assert torch.equal(slot.keys[layer, : slot.length, 0, 0], rows + 1000.0 * mark + 0.25 * layer)
        assert torch.equal(slot.values[layer, : slot.length, 0, 0], rows - 1000.0 * mark + 0.25 * layer)


@given(st.lists(st.tuples(st.sampled_from("trg"), st.integers(0, 9), st.integers(1, 20)), max_size=40))
def test_moved_slots_keep_their_content(steps: list[tuple[str, int, int]]) -> None:
    """Every request succeeds if there are enough free rows in total, however they are distributed."""
    arena, slots = new_arena(), dict[int, KVSlot]()
    for number, (kind, which, num_rows) in enumerate(steps):
        mark = [*slots][which % len(slots)] if slots else -1
        if kind == "t" and num_rows <= arena.num_free:
            slots[number] = arena.take(num_rows)
            assert slots[number].num_rows == num_rows
        elif kind == "r" and slots and slots[mark].length < num_rows <= arena.num_free + slots[mark].num_rows:
            arena.resize(slots[mark], num_rows)
            assert slots[mark].num_rows == num_rows
        elif kind == "g" and slots:
            arena.give_back(slots.pop(mark))
        for mark, slot in slots.items():
            fill(slot, mark)
        arena.check_integrity()
        for mark, slot in slots.items():
            require_whole(slot, mark)
    assert arena.num_free == ROWS - sum(slot.num_rows for slot in slots.values())


def test_a_slot_between_others_grows_into_all_free_space() -> None:
    arena = new_arena()
    slots = {mark: arena.take(10) for mark in range(4)}
    for mark, slot in slots.items():
        fill(slot, mark)
    arena.give_back(slots.pop(0))
    arena.give_back(slots.pop(2))
    arena.resize(slots[1], 30)
    assert (slots[1].num_rows, arena.num_free) == (30, 0)
    for mark, slot in slots.items():
        require_whole(slot, mark)


def test_the_check_detects_rows_with_two_owners() -> None:
    arena = new_arena()
    first, second = arena.take(10), arena.take(10)
    second.keys = first.keys[:, :9]
    with pytest.raises(AssertionError, match="other rows than its assigned"):
        arena.check_integrity()


def test_a_fork_copies_the_rows_that_its_slot_lacks() -> None:
    arena = new_arena()
    source, slot = arena.take(10), arena.take(12)
    fill(source, 3)
    for layer in range(2):
        slot.keys[layer, :4] = source.keys[layer, :4]
        slot.values[layer, :4] = source.values[layer, :4]
    slot.tokens.extend(source.tokens[:4])
    slot.fork(source, 7)
    assert (slot.length, source.length) == (7, 9)
    require_whole(slot, 3)


def test_slots_that_grow_together_seldom_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they stood close together, each step of one moved others: thirty rows for each new one.

    Up to three quarters of the memory a row is copied less than once for each that is taken.
    """
    num_copied = 0
    move = KVSlot.move

    def counted(slot: KVSlot, begin: int, end: int, num_kept: int) -> None:
        nonlocal num_copied
        num_copied += num_kept if begin != slot.begin else 0
        move(slot, begin, end, num_kept)

    monkeypatch.setattr(KVSlot, "move", counted)
    num_rows, num_slots, step = 4000, 8, 20
    arena = KVArena(SHAPE, SHAPE.empty(num_rows, torch.device("cpu")))
    slots = {mark: arena.take(step) for mark in range(num_slots)}
    while arena.num_free > num_rows // 4:
        for mark, slot in slots.items():
            fill(slot, mark)
            arena.resize(slot, slot.num_rows + step)
    arena.check_integrity()
    for mark, slot in slots.items():
        require_whole(slot, mark)
    assert num_copied < num_rows - arena.num_free
