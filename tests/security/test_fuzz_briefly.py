"""A few thousand of the messages that `python -m loadtest.fuzz` sends by the million."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.fuzz.__main__ import in_process
from loadtest.fuzz.decoding import Layer, all_layers, problem_of
from loadtest.fuzz.mutation import Mutator
from loadtest.fuzz.sockets import at_sockets


def test_whatever_comes_is_read_or_refused_in_few_words() -> None:
    outcomes = in_process(4000, seed=20)
    assert not outcomes.problems, outcomes.examples
    assert set(outcomes.counts) == {layer.name for layer in all_layers()}


async def test_whatever_comes_over_sockets_is_answered_and_leaves_nothing_behind(tmp_path: Path) -> None:
    figures = await at_sockets(tmp_path, 400, seed=20, report=lambda _: None)
    assert not figures.outcomes.problems, figures.outcomes.examples
    assert figures.is_exact
    assert set(figures.outcomes.counts) == {"http", "grpc", "http2 frames"}
    assert sum(figures.outcomes.counts.values()) >= 400


@pytest.mark.parametrize("error", [RuntimeError("x"), RecursionError(), UnicodeDecodeError("utf-8", b"", 0, 1, "x")])
def test_an_error_that_is_none_of_ours_is_found(error: Exception) -> None:
    def fail(data: bytes) -> object:
        raise error

    assert type(error).__name__ in problem_of(Layer("some", lambda m: m.garbage(), fail), b"x")


def test_a_seed_gives_the_same_messages() -> None:
    def drawn() -> list[bytes]:
        mutator = Mutator(3)
        return [layer.make(mutator) for layer in all_layers() for _ in range(20)]

    assert drawn() == drawn()
