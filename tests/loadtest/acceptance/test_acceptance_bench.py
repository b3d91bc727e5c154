"""Figures of `loadtest.acceptance`, and which contestants it runs."""

from __future__ import annotations

import pytest

from loadtest.acceptance.__main__ import arguments_from, contestants_at, tokens_per_round


def test_the_output_line_has_means_and_half_widths() -> None:
    cells = [(0.6, "one", 8, 3.5, 0.25), (0.6, "one", 16, 4.0, 0.5), (1.0, "another", 8, 2.0, 0.125)]
    keys = ("temperature", "contestant", "nodes", "tokens_per_round", "interval")
    figures = tokens_per_round([dict(zip(keys, cell, strict=True)) for cell in cells])
    assert figures == {"0.6": {"one": {"8": [3.5, 0.25], "16": [4.0, 0.5]}}, "1.0": {"another": {"8": [2.0, 0.125]}}}


def test_contestants_are_selected_by_parts_of_their_names() -> None:
    def names(*flags: str) -> list[list[str]]:
        arguments = arguments_from(flags)
        return [[*contestants_at(temperature, arguments.contestants)] for temperature in arguments.temperatures]

    assert [len(of_one) for of_one in names()] == [4, 5, 5]
    assert names("--contestants", "Sequoia") == [[], *[["Sequoia: without replacement, optimal shape"]] * 2]
    alone = names("--contestants", "greedy", "Sequoia", "--temperatures", "0", "1")
    assert alone == [["greedy k chains"], ["Sequoia: without replacement, optimal shape"]]


def test_unknown_contestants_are_refused_with_the_list_of_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments_from(["--contestants", "Sequoia", "Medusa"])
    error = capsys.readouterr().err
    assert "--contestants: must be part of a name at these temperatures (" in error
    assert "got 'Medusa'" in error
    assert "SpecExec: target, best-first; " in error
    with pytest.raises(SystemExit):
        arguments_from(["--contestants", "Sequoia", "--temperatures", "0"])
    error = capsys.readouterr().err
    assert "got 'Sequoia'" in error
    assert "Sequoia:" not in error
