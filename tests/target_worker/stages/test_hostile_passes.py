"""Passes that no head sends: each is refused with its field, and nothing outside a stage's slots is written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bough.errors import InvalidRequest
from bough.model.kv.session_kv import KVMemory, KVShape
from bough.pb import stage_pass_pb2
from target_worker.stages.pass_codec import pass_from_wire, pass_to_wire
from target_worker.stages.passes import PassRows, StagePass
from target_worker.stages.slots import ChangeKind, MirroredSlots, SlotChange
from target_worker.stages.stage import Stage
from target_worker.sweep.streamed_model import StageLayers, StreamedModel
from tests.fakes.fuzz.mutation import Mutator
from tests.fakes.models import CPU, streamed
from tests.fakes.target import SHAPE

NUM_ROWS, OUTSIDE = 40, 16  # rows of the memory, and of what lies before and after it
HERE, OTHER, NOWHERE = 1, 2, 9  # slots, of which the last does not exist
MOVED, FORKED, COMMITTED, ROLLED_BACK, SNAPSHOTS, CLEARED = ChangeKind
MOST_ROWS = 12  # of a pass
WIDTH = 64  # of hidden states of the tiny model
BEGINNING = [
    SlotChange(HERE, MOVED, (10, 20, 0)),
    SlotChange(HERE, COMMITTED, (4, 0, 1, 2, 3)),
    SlotChange(OTHER, MOVED, (30, 40, 0)),
    SlotChange(OTHER, COMMITTED, (8, *range(8))),
]


class Held(NamedTuple):
    """A stage's slots, and the whole of the memory around them."""

    slots: MirroredSlots
    around: list[torch.Tensor]  # (num_layers, OUTSIDE + NUM_ROWS + OUTSIDE, num_kv_heads, width) each

    @classmethod
    def of(cls, shape: KVShape) -> Held:
        """Two slots: of 10 rows with 4 committed tokens, and of 10 with 8."""
        around = [
            torch.arange(part.numel(), dtype=torch.float32).view(part.shape).to(shape.dtype)
            for part in shape.empty(NUM_ROWS + 2 * OUTSIDE, CPU)
        ]
        slots = MirroredSlots(shape, KVMemory(*(part[:, OUTSIDE:-OUTSIDE] for part in around)))
        for change in BEGINNING:
            slots.apply(change)
        return cls(slots, around)

    def copy(self) -> list[torch.Tensor]:
        """The present contents."""
        return [part.clone() for part in self.around]

    def is_as(self, before: list[torch.Tensor], but: slice = slice(0, 0)) -> bool:
        """Whether the contents are as before, except for some rows of the memory."""
        changed = slice(OUTSIDE + but.start, OUTSIDE + but.stop)
        for now, then in zip(self.around, before, strict=True):
            then[:, changed] = now[:, changed]
        return all(map(torch.equal, self.around, before))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        *((SlotChange(NOWHERE, kind, numbers), "slot: must be a slot with at least")
          for kind, numbers in (
              (FORKED, (OTHER, 5)), (COMMITTED, (0,)), (ROLLED_BACK, (0,)), (SNAPSHOTS, (4,)), (CLEARED, ())
          )),
        *((SlotChange(HERE, kind, numbers), "changes.numbers: must be as")
          for kind, numbers in (
              (MOVED, ()), (MOVED, (0, 1)), (FORKED, (1,)), (FORKED, (1, 2, 3)), (COMMITTED, ()), (ROLLED_BACK, ()),
              (ROLLED_BACK, (1, 2)), (CLEARED, (1,)),
          )),
        (SlotChange(HERE, MOVED, (35, NUM_ROWS + 1, 0)), "changes.numbers: must be within the 40 rows"),
        (SlotChange(HERE, MOVED, (20, 10, 0)), "changes.numbers: must be within"),
        (SlotChange(HERE, MOVED, (0, 20, 11)), "changes.numbers: must be within .* keep at most 10"),
        (SlotChange(HERE, MOVED, (0, 5, 6)), "changes.numbers: must be within .* keep at most 5"),
        (SlotChange(NOWHERE, MOVED, (0, 10, 1)), "changes.numbers: must be within .* keep at most 0"),
        (SlotChange(HERE, FORKED, (NOWHERE, 5)), "slot: must be a slot with at least 5 rows, as 9, got no such slot"),
        (SlotChange(HERE, FORKED, (OTHER, 9)), "changes.numbers: must be a length above 4"),
        (SlotChange(HERE, FORKED, (OTHER, 4)), "changes.numbers: must be a length above 4"),
        (SlotChange(HERE, FORKED, (OTHER, 11)), "slot: must be a slot with at least 11 rows, as 1, got a slot of 10"),
        (SlotChange(HERE, COMMITTED, (1,)), "changes.numbers: must be rows that"),
        (SlotChange(HERE, COMMITTED, (1, 10)), "slot: must be a slot with at least 11 rows"),
        (SlotChange(HERE, COMMITTED, (1, 2**32 - 1)), "slot: must be a slot with at least 4294967296 rows"),
        (SlotChange(HERE, COMMITTED, (7, *range(3, 10))), "changes.numbers: must be rows that a slot of 10 has room"),
        (SlotChange(HERE, ROLLED_BACK, (5,)), "changes.numbers: must be at most 4"),
    ],
)  # fmt: skip
def test_a_change_that_does_not_fit_is_refused_and_writes_nothing(change: SlotChange, field: str) -> None:
    held = Held.of(SHAPE)
    before = held.copy()
    with pytest.raises(InvalidRequest, match=f"^{field}"):
        held.slots.apply(change)
    assert held.is_as(before)


@given(
    changes=st.lists(
        st.builds(
            SlotChange,
            st.sampled_from([HERE, OTHER, NOWHERE]),
            st.sampled_from(ChangeKind),
            st.lists(st.sampled_from([*range(12), 20, 30, NUM_ROWS, 2**32 - 1]), max_size=5).map(tuple),
        ),
        max_size=12,
    )
)
def test_any_changes_write_only_rows_of_the_slot_that_they_name(changes: list[SlotChange]) -> None:
    held = Held.of(SHAPE)
    for change in changes:
        before = held.copy()
        try:
            held.slots.apply(change)
            slot = held.slots.slot(change.slot)
        except InvalidRequest:
            assert held.is_as(before)
            continue
        assert 0 <= slot.begin <= slot.end <= NUM_ROWS
        assert held.is_as(before, but=slice(slot.begin, slot.end))


def wire_of(*rows: PassRows, num_rows: int = 3, dtype: torch.dtype = torch.float32, width: int = WIDTH) -> list[bytes]:
    """A header and a body."""
    header, body = pass_to_wire(StagePass([], rows, torch.ones(num_rows, width, dtype=dtype)))
    return [header, bytes(body)]


ROWS = PassRows(HERE, 4, 3, ())
HEADER, BODY = wire_of(ROWS)


def message_of(**fields: object) -> bytes:
    """The ordinary header with other fields."""
    message = stage_pass_pb2.StagePass.FromString(HEADER)
    message.MergeFrom(stage_pass_pb2.StagePass(**fields))  # type: ignore[arg-type]
    return message.SerializeToString()


@pytest.mark.parametrize(
    ("header", "body", "field"),
    [
        (HEADER[:-1], BODY, "header: must be a valid message"),
        (b"\xff" * 20, BODY, "header: must be a valid message"),
        (message_of(dtype="int8"), BODY, "dtype: must be one of .*, got 'int8'"),
        (message_of(width=WIDTH + 1), BODY, r"body: must be rows of 260 bytes, got 768 bytes"),
        (message_of(width=2**32 - 1), BODY, "body: must be rows of"),
        (HEADER, BODY[:-1], "body: must be rows of 256 bytes, got 767 bytes"),
        (HEADER, b"", "body: must be rows of 256 bytes, got 0 bytes"),
        (message_of(changes=[stage_pass_pb2.SlotChange(slot=1)]), BODY, "changes.kind: must be one of .*, got 0"),
        (message_of(changes=[stage_pass_pb2.SlotChange(slot=1, kind=99)]), BODY, "changes.kind: .*, got 99"),  # type: ignore[arg-type]
    ],
)
def test_an_invalid_message_is_refused_by_its_field(header: bytes, body: bytes, field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}"):
        pass_from_wire(header, body)


class Running(NamedTuple):
    """A stage with the tiny model's last layers."""

    stage: Stage
    held: Held


@pytest.fixture(scope="module")
def layers(tiny: Path) -> Iterator[StreamedModel]:
    with streamed(tiny, torch.float32, stage=StageLayers(2, 4, 4)) as model:
        yield model


@pytest.fixture
def running(layers: StreamedModel) -> Running:
    held = Held.of(layers.skeleton.kv_shape())
    return Running(Stage(layers, held.slots, MOST_ROWS), held)


def tree_of(*parents: int, base: int = 4) -> PassRows:
    return PassRows(HERE, base, 0, parents)


@pytest.mark.parametrize(
    ("wire", "field"),
    [
        (wire_of(ROWS, dtype=torch.bfloat16), "dtype: must be float32, got bfloat16"),
        (wire_of(ROWS, width=32), f"width: must be {WIDTH}, got 32"),
        (wire_of(), "rows: must be at least one, got none"),
        (wire_of(PassRows(NOWHERE, 0, 3, ())), "slot: .* got no such slot"),
        (wire_of(PassRows(HERE, 4, 7, ())), "slot: must be a slot with at least 11 rows, as 1, got a slot of 10 rows"),
        (wire_of(PassRows(HERE, 4, 2**32 - 1, ())), "rows: must be at most 12 in all, got 4294967295"),
        (wire_of(tree_of(-1, *range(12))), "rows: must be at most 12 in all, got 13"),
        (wire_of(PassRows(HERE, 4, 6, ()), PassRows(OTHER, 8, 7, ())), "rows: must be at most 12 in all, got 13"),
        (wire_of(PassRows(HERE, 2**32 - 1, 3, ())), "rows.base: must be 4, after the rows of slot 1, got 4294967295"),
        (wire_of(PassRows(HERE, 3, 3, ())), "rows.base: must be 4, after the rows of slot 1, got 3"),
        (wire_of(PassRows(HERE, 4, 2, ()), PassRows(HERE, 5, 1, ())), "rows.base: must be 6, .* got 5"),
        (wire_of(PassRows(HERE, 4, 0, ())), "rows.num_tokens: must be at least 1 without a tree, got 0"),
        (wire_of(ROWS, num_rows=2), "body: must be hidden states of 3 rows, got 2"),
        (wire_of(tree_of(-1, *range(6))), "slot: must be a slot with at least 11 rows"),
        (wire_of(tree_of(-1, 0, 1, base=5)), "rows.base: must be 4, after the rows of slot 1, got 5"),
        (wire_of(tree_of(0, 0, 1)), r"tree.parents\[0\]: must be -1"),
        (wire_of(tree_of(-1, -1, 0)), r"tree.parents\[1\]"),
        (wire_of(tree_of(-1, -(2**31), 0)), r"tree.parents\[1\]"),
        (wire_of(tree_of(-1, 0, 2)), r"tree.parents\[2\]"),
    ],
)
def test_a_pass_that_does_not_fit_is_refused_and_writes_nothing(
    running: Running, wire: list[bytes], field: str
) -> None:
    before = running.held.copy()
    with pytest.raises(InvalidRequest, match=f"^{field}"):
        running.stage.run(*wire)
    assert running.held.is_as(before)


@pytest.mark.parametrize("num_messages", [300, pytest.param(20_000, marks=pytest.mark.long)])
def test_changed_passes_are_computed_or_refused(running: Running, num_messages: int) -> None:
    """With hidden states that fit the unchanged pass, at a stage that has forgotten the last one."""
    stage, held = running
    again = stage_pass_pb2.StagePass.FromString(wire_of(ROWS)[0])
    for change in BEGINNING:
        again.changes.add(slot=change.slot, kind=change.kind.value, numbers=change.numbers)  # type: ignore[arg-type]
    mutator, num_refused, before = Mutator(7), 0, held.copy()
    for _ in range(num_messages):
        stage.slots.forget_all()
        try:
            stage.run(mutator.message(again), BODY)
        except InvalidRequest:
            num_refused += 1
        assert held.is_as(before, but=slice(0, NUM_ROWS))
    assert 0 < num_refused < num_messages
