"""KV memory of simulated targets: it is never exceeded, the oldest ends first, and whoever gave way ends too."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from bough.simulation.capacity import simulate
from bough.simulation.capacity_slots import STEP_TOKENS, SlotMemory
from bough.simulation.profile import parse_profile
from bough.simulation.scenario import RequestKind, Scenario


@dataclass(eq=False)
class Holder:
    number: int
    wanted_tokens: int = 100
    final_tokens: int = 1000
    slot_tokens: int = 0
    gives_way: bool = False


def full(num_sessions: int, num_steps: int) -> tuple[SlotMemory, list[Holder]]:
    """Sessions of a step each that will not grow, in memory of so many steps."""
    memory = SlotMemory(num_steps * STEP_TOKENS)
    sessions = [Holder(number, STEP_TOKENS, STEP_TOKENS) for number in range(num_sessions)]
    for session in sessions:
        assert memory.fits(session)
        memory.enter(session)
    return memory, sessions


def test_nobody_comes_in_where_those_who_are_there_will_want_the_room() -> None:
    memory, (first,) = full(1, 2)
    first.final_tokens = 1000
    assert not memory.fits(Holder(1))
    first.final_tokens = STEP_TOKENS
    assert memory.fits(Holder(1))


def test_the_youngest_gives_way_after_its_round_and_at_once_where_it_waits_itself() -> None:
    memory, (old, middle, young) = full(3, 3)
    old.wanted_tokens = old.final_tokens = 2 * STEP_TOKENS
    assert not memory.grow(old)
    assert memory.settle() == ([], [])
    assert young.gives_way
    assert not middle.gives_way
    memory.leave(young)
    assert memory.settle() == ([old], [])
    middle.wanted_tokens = middle.final_tokens = 2 * STEP_TOKENS
    assert not memory.grow(middle)
    assert memory.settle() == ([], [middle]), "it is the youngest there"
    assert memory.free_tokens == STEP_TOKENS


def test_room_that_comes_by_itself_takes_the_order_back() -> None:
    memory, (old, middle, young) = full(3, 3)
    old.wanted_tokens = old.final_tokens = 2 * STEP_TOKENS
    memory.grow(old)
    memory.settle()
    assert young.gives_way
    memory.leave(middle)
    assert memory.settle() == ([old], [])
    assert not young.gives_way


@pytest.mark.parametrize("kv_tokens", [1024, 2048, 5000])
def test_all_requests_end_however_little_room_there_is_and_memory_is_not_exceeded(
    kv_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    least = kv_tokens
    leave = SlotMemory.leave

    def watched(memory: SlotMemory, session: Holder) -> None:
        nonlocal least
        least = min(least, memory.free_tokens)
        leave(memory, session)

    monkeypatch.setattr(SlotMemory, "leave", watched)
    described = {
        "source": "made up",
        "target": {"max_context": 1024, "kv_tokens": kv_tokens, "link_seconds": 1.0},
        "draft": {"base_seconds": 0.02},
        "acceptance": {"kind": "by_rank", "vector": [0.7, 0.1, 0.05]},
    }
    kinds = (RequestKind(100, 900), RequestKind(50, 300))
    report = simulate(Scenario(parse_profile(json.dumps(described)), num_users=4, kinds=kinds, requests_each=2))
    assert report.num_requests == 8
    assert report.is_complete
    assert least >= 0
    assert (report.preemptions > 0) == (kv_tokens == 1024), "elsewhere few enough come in at once"
