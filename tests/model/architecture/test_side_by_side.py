"""Functions that run side by side: all ask before any is answered, and an error ends all of them."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

import pytest

from bough.model.architecture.moe import ask, is_side_by_side, side_by_side

number: ContextVar[int] = ContextVar("number")


def test_all_ask_before_any_goes_on_and_context_variables_are_their_own() -> None:
    seen: list[str] = []

    def act(name: str, num_questions: int) -> Callable[[], str]:
        def run() -> str:
            assert is_side_by_side()
            token = number.set(num_questions)
            for question in range(num_questions):
                seen.append(f"{name}{question}")
                assert ask((name, question)) == f"{name} {question}"
                assert number.get() == num_questions
            number.reset(token)
            return name.upper()

        return run

    rounds: list[list[tuple[str, int]]] = []

    def answer(questions: list[tuple[str, int]]) -> list[str]:
        rounds.append(questions)
        return [f"{name} {question}" for name, question in questions]

    assert side_by_side([act("a", 2), act("b", 0), act("c", 1)], answer) == ["A", "B", "C"]
    assert seen == ["a0", "c0", "a1"]
    assert rounds == [[("a", 0), ("c", 0)], [("a", 1)]]
    assert not is_side_by_side()


@pytest.mark.parametrize("is_answer_wrong", [True, False])
def test_an_error_is_the_caller_s_and_others_give_back_what_they_hold(is_answer_wrong: bool) -> None:
    given_back: list[str] = []

    def holds() -> None:
        try:
            ask("what")
        finally:
            given_back.append("it")

    def fails() -> None:
        if not is_answer_wrong:
            raise ValueError("wrong")
        ask("what")

    def answer(_: list[str]) -> list[str]:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        side_by_side([holds, fails], answer)
    assert given_back == ["it"]
