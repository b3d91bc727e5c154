"""The record of decisions: what is kept, for how long, and how well predictions agreed."""

from __future__ import annotations

import pytest

from bough.protocol.decision import Decision, Mode, RoundSeconds
from orchestrator.sizing.totals import HALF_LIFE_ROUNDS, MAX_DRAFTS, MAX_ROUNDS, MAX_SESSIONS, DecisionLog


def decision(number: int = 1, draft_id: str = "d", expected_tokens: float = 2.0, tokens: int = 3) -> Decision:
    """A round that was expected to take a second, and took two."""
    return Decision(
        number,
        Mode.DRAFT,
        draft_id,
        num_grown=8,
        expected_tokens=expected_tokens,
        tokens=tokens,
        expected=RoundSeconds(draft=0.25, sweep=0.75),
        seconds=RoundSeconds(draft=0.5, network=0.1, queue=0.1, sweep=1.2, other=0.1),
    )


def test_rounds_come_back_in_order_those_of_the_last_session_where_none_is_named() -> None:
    log = DecisionLog()
    for number in (1, 2, 3):
        log.add("a", decision(number))
    log.add("b", decision(7))
    assert [each.number for each in log.of("a")] == [1, 2, 3]
    assert [each.number for each in log.of("")] == [7]
    log.add("a", decision(4))
    assert [each.number for each in log.of("")] == [1, 2, 3, 4]
    assert log.of("c") == ()
    assert DecisionLog().of("") == ()


def test_only_the_last_rounds_sessions_and_drafts_are_kept() -> None:
    log = DecisionLog()
    for number in range(MAX_ROUNDS + 3):
        log.add("long", decision(number))
    assert [log.of("long")[0].number, len(log.of("long"))] == [3, MAX_ROUNDS]
    for index in range(MAX_SESSIONS):
        log.add(f"s{index}", decision(draft_id=f"d{index}"))
    assert log.of("long") == ()
    assert len(log.of("s0")) == 1
    log.add("s0", decision())
    log.add("one more", decision())
    assert len(log.of("s0")) == 2, "used last, not first"
    assert log.of("s1") == ()
    assert len(log.calibrations()) == MAX_DRAFTS
    assert "d0" not in {each.draft_id for each in log.calibrations()}


def test_calibrations_are_means_by_draft_worker() -> None:
    log = DecisionLog()
    for _ in range(10):
        log.add("s", decision(draft_id="steady"))
    log.add("s", decision(draft_id="other", expected_tokens=1.5, tokens=1))
    steady, other = log.calibrations()
    assert (steady.draft_id, steady.num_rounds) == ("steady", 10)
    assert (steady.expected_tokens, steady.realised_tokens) == (pytest.approx(2.0), pytest.approx(3.0))
    assert (steady.expected_seconds, steady.realised_seconds) == (pytest.approx(1.0), pytest.approx(2.0))
    assert (other.num_rounds, other.expected_tokens, other.realised_tokens) == (1, 1.5, 1.0)


def test_old_rounds_count_for_less() -> None:
    log = DecisionLog()
    for tokens in (1, 9):
        for _ in range(300):
            log.add("s", decision(tokens=tokens))
    (calibration,) = log.calibrations()
    assert calibration.num_rounds == 600
    old = 0.5 ** (300 / HALF_LIFE_ROUNDS)
    assert calibration.realised_tokens == pytest.approx((9.0 + old * 1.0) / (1 + old))


@pytest.mark.parametrize("without", ["draft", "tree", "prediction"])
def test_rounds_in_which_nothing_was_predicted_of_a_draft_are_no_part_of_it(without: str) -> None:
    log, entry = DecisionLog(), decision()
    if without == "draft":
        entry.draft_id = ""
    elif without == "tree":
        entry.num_grown = 1
    else:
        entry.expected = RoundSeconds()
    log.add("s", entry)
    assert log.calibrations() == ()
    assert log.of("s") == (entry,)
