"""Who has which place at a head, on a clock that the test moves."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from typing import Any

import pytest

from bough.errors import InvalidRequest, PairingError, Unavailable
from bough.sizing.stage_split import StageRoom
from target_worker.stages import codec
from target_worker.stages.roster import (
    LEASE_SECONDS,
    Assignment,
    JoinCall,
    Roster,
    StageFacts,
    StageFigures,
)

FACTS = StageFacts("0.1", "code", "checkpoint", "tokenizer", "bfloat16", "cpu, 4 rows")
SPLIT = [Assignment(1, 20, 40, 4096, 8, 2048, 64, 256, 64), Assignment(2, 40, 80, 4096, 8, 2048, 64, 256, 64)]


def call(stage_id: str = "a", address: str = "", memory_bytes: int = 1, **others: Any) -> JoinCall:
    place = JoinCall(
        stage_id, address or f"{stage_id}:1", FACTS, StageRoom("b", memory_bytes, 1e9, 0.25), StageFigures()
    )
    return replace(place, **others)


class Head:
    """A roster of two stages, and its clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.roster = Roster(FACTS, 3, lambda: self.now)

    def complete(self) -> Roster:
        """The roster, once "a" and "b" have joined and have their layers."""
        self.roster.join(call("a"))
        self.roster.join(call("b"))
        self.roster.assign(SPLIT)
        return self.roster

    def renew(self, seconds: float, *stage_ids: str) -> None:
        """Let time pass in which these stages keep calling."""
        for _ in range(math.ceil(seconds)):
            self.now += 1.0
            for stage_id in stage_ids:
                self.roster.join(call(stage_id))


def test_places_are_given_in_the_order_of_joining() -> None:
    head = Head()
    assert [head.roster.join(call(stage_id)) for stage_id in ("a", "b", "a")] == [1, 0, 0]
    assert head.roster.members() is None  # no layers yet
    head.roster.assign(SPLIT)
    assert [head.roster.join(call(stage_id)) for stage_id in ("a", "b")] == SPLIT
    assert head.roster.members() == ["a:1", "b:1"]
    assert head.roster.missing() == ""


@pytest.mark.parametrize("field", ["bough_version", "code", "checkpoint", "tokenizer", "dtype", "arithmetic"])
def test_a_stage_that_differs_is_refused_with_both_values(field: str) -> None:
    other = call(address="far:9", facts=replace(FACTS, **{field: "another"}))
    problem = rf"^{field}: must be '{getattr(FACTS, field)}' as at the head, got 'another' at far:9$"
    with pytest.raises(PairingError, match=problem):
        Head().roster.join(other)
    assert FACTS.contradiction(other.facts) == (field, getattr(FACTS, field), "another")
    assert FACTS.contradiction(FACTS) is None


def test_a_head_with_all_its_stages_refuses_more() -> None:
    with pytest.raises(Unavailable, match=r"all places of stages are taken, by a:1, b:1"):
        Head().complete().join(call("c"))


def test_a_place_is_free_after_its_lease_and_keeps_its_layers() -> None:
    head = Head()
    head.complete()
    head.renew(LEASE_SECONDS, "a")
    with pytest.raises(Unavailable):
        head.roster.join(call("c"))
    assert head.roster.members() == ["a:1", "b:1"]
    head.renew(1.0, "a")
    assert head.roster.members() is None
    assert head.roster.missing() == "stage 2 (layers 40 to 79) is missing: last seen 6 s ago at b:1"
    assert head.roster.join(call("c")) == SPLIT[1]
    assert head.roster.members() == ["a:1", "c:1"]
    with pytest.raises(Unavailable):  # it has lost its place
        head.roster.join(call("b"))


def test_a_stage_that_was_only_slow_keeps_its_place() -> None:
    head = Head()
    head.complete()
    head.now += 60.0
    assert head.roster.join(call("b")) == SPLIT[1]
    assert head.roster.missing() == "stage 1 (layers 20 to 39) is missing: last seen 60 s ago at a:1"


def test_a_process_that_restarts_at_its_address_need_not_wait() -> None:
    head = Head()
    head.complete()
    assert head.roster.join(call("new", address="b:1")) == SPLIT[1]
    assert head.roster.members() == ["a:1", "b:1"]


def test_stages_that_never_joined_are_missing() -> None:
    head = Head()
    head.roster.join(call("a"))
    assert head.roster.missing() == "stage 2 is missing: it has not joined yet"


def test_a_loader_waits_for_all_stages() -> None:
    """A stage that has gone in the meantime does not count."""
    head, rooms = Head(), list[list[StageRoom] | None]()
    head.roster.join(call("a", memory_bytes=5))
    assert head.roster.wait_complete(0.0) is None
    waiting = threading.Thread(target=lambda: rooms.append(head.roster.wait_complete(60.0)))
    waiting.start()
    head.now += LEASE_SECONDS + 1.0
    head.roster.join(call("b", memory_bytes=7))
    assert head.roster.wait_complete(0.0) is None
    head.roster.join(call("c", memory_bytes=6))
    head.roster.join(call("b", memory_bytes=7))
    waiting.join()
    (found,) = rooms
    assert found is not None
    assert sorted(room.memory_bytes for room in found) == [6, 7]


def test_metrics_are_the_last_reported_ones() -> None:
    head = Head()
    figures = StageFigures(20, 40, 7, "a CPU")
    head.complete().join(call("b", figures=figures))
    assert [each.figures for each in head.roster.calls()] == [StageFigures(), figures]


def test_calls_and_answers_round_trip_over_the_wire() -> None:
    mine = call(figures=StageFigures(20, 40, 2**40, "a CPU"))
    assert codec.join_from_wire(codec.join_to_wire(mine)) == mine
    for answer in (0, 2, SPLIT[0]):
        assert codec.join_reply_from_wire(codec.join_reply_to_wire(answer)) == answer


@pytest.mark.parametrize(
    ("field", "malformed"),
    [
        ("stage_id", call(stage_id="")),
        ("stage_id", call(stage_id="x" * 65, address="a:1")),
        ("address", call(address="host")),
        ("address", call(address="h" * 300 + ":1")),
        ("address", call(address="a\n:1")),
        ("facts.code", call(facts=replace(FACTS, code="x" * 5000))),
        ("room.link_bytes_per_second", call(room=StageRoom("b", 1, math.nan, 1.0))),
        ("room.layer_seconds", call(room=StageRoom("b", 1, 1.0, -1.0))),
        ("figures.device", call(figures=StageFigures(device="\x1b[2J"))),
    ],
)
def test_malformed_calls_are_refused_by_field(field: str, malformed: JoinCall) -> None:
    with pytest.raises(InvalidRequest) as refused:
        codec.join_from_wire(codec.join_to_wire(malformed))
    assert refused.value.field == field


def test_stages_that_have_layers_get_the_places_of_these_from_a_head_that_starts_again() -> None:
    """They call in any order."""
    head = Head()
    for stage_id, first in (("b", 40), ("a", 20)):
        head.roster.join(call(stage_id, figures=StageFigures(first, first + 20)))
    assert head.roster.wait_complete(0.0) is not None
    assert [each.figures.first_layer for each in head.roster.calls()] == [20, 40]
    head.roster.assign(SPLIT)
    assert head.roster.join(call("b")) == SPLIT[1]
    assert head.roster.members() == ["a:1", "b:1"]
