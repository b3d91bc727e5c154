"""How to speculate, from the flags of `bough generate` and `bough chat`: one parser for both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bough.cli.flags.requests import options_from
from bough.cli.main import argument_parser, main
from bough.errors import BoughError
from bough.protocol.generation import Speculation
from bough.trees.tree_plan import Scheme, StaticShape

COMMANDS = (["generate", "hello"], ["chat"])


def speculation(*flags: str) -> Speculation:
    """The same from both commands."""
    generate, chat = (options_from(argument_parser().parse_args([*command, *flags])) for command in COMMANDS)
    assert generate == chat
    return generate.speculation


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], Speculation()),
        (["--growth", "best-first", "--budget", "32", "--width", "4"], Speculation(budget=32, width=4)),
        (["--growth", "chain:5"], Speculation(growth=StaticShape.chains(1, 5))),
        (["--growth", "chains:4x6", "--lookup", "3"], Speculation(growth=StaticShape.chains(4, 6), lookup=3)),
        (
            ["--growth", "chains:4x6", "--scheme", "without-replacement", "--lookup", "0"],
            Speculation(growth=StaticShape.chains(4, 6), scheme=Scheme.WITHOUT_REPLACEMENT, lookup=0),
        ),
        (
            ["--growth", "chain:4", "--scheme", "without-replacement", "--lookup", "2"],
            Speculation(growth=StaticShape.chains(1, 4), scheme=Scheme.WITHOUT_REPLACEMENT, lookup=2),
        ),
        (["--no-speculation", "--depth", "3"], Speculation(disabled=True, depth=3)),
    ],
)
def test_flags_set_the_speculation(flags: list[str], expected: Speculation) -> None:
    assert speculation(*flags) == expected


def test_bough_shape_prints_a_valid_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vector, file = tmp_path / "vector.json", tmp_path / "shape.json"
    vector.write_text("[0.6, 0.2, 0.1]")
    with pytest.raises(SystemExit, match="0"):
        main(["shape", "--vector", str(vector), "--nodes", "8"])
    file.write_text(capsys.readouterr().out)
    chosen = speculation("--growth", str(file), "--scheme", "without-replacement")
    assert chosen.scheme is Scheme.WITHOUT_REPLACEMENT
    assert isinstance(chosen.growth, StaticShape)
    assert list(chosen.growth.parents) == json.loads(file.read_text())["parents"]
    assert chosen.growth.budget == 8


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--growth", "chains:4"],
            "--growth: must be a chain such as chain:5, or chains such as chains:4x5, got chains:4",
        ),
        (
            ["--growth", "chains:0x4"],
            "--growth: must be a chain such as chain:5, or chains such as chains:4x5, got chains:0x4",
        ),
        (["--growth", "chains:99x99"], "--growth chains:99x99: must have at most 4096 nodes, got 9802"),
        (
            ["--growth", "bestfirst"],
            "--growth: must be best-first, .*, got bestfirst, which cannot be read: No such file or directory",
        ),
        (
            ["--growth", "chain:4", "--budget", "9"],
            "--budget: must not be given with --growth chain:4, which sets the size of a tree, got 9",
        ),
        (
            ["--scheme", "without-replacement"],
            "--scheme: must be target with best-first growth, .*, got without-replacement",
        ),
    ],
)
def test_flags_that_cannot_be_used_are_refused_by_name(flags: list[str], message: str) -> None:
    with pytest.raises(BoughError, match=message):
        speculation(*flags)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[0, 0, 1]", "must have a list `parents` of nodes"),
        ('{"parents": [0, true]}', "must have a list `parents` of nodes"),
        ('{"parents": [0, 2]}', r"parents\[1\]: must be 0 to 1, .*, got 2"),
    ],
)
def test_a_file_without_a_shape_is_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "shape.json"
    file.write_text(content)
    with pytest.raises(BoughError, match=rf"--growth: .*shape\.json.*{message}"):
        speculation("--growth", str(file))


def test_a_command_ends_with_one_line_that_names_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["generate", "hello", "--scheme", "without-replacement"])
    assert capsys.readouterr().err.startswith("error: --scheme: must be target with best-first growth")
