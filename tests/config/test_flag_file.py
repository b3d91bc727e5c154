"""`bough up --config FILE`: flags from a file, which those of the command line win over."""

from __future__ import annotations

from pathlib import Path

import pytest

from bough.cli.main import main, parsed
from bough.config.flag_parser import flags_from
from bough.errors import ConfigError

KNOWN = ("--target", "--kv-memory", "--port", "--insecure", "--drop-layers")


def test_a_flag_file_has_the_values_of_a_command_line(tmp_path: Path) -> None:
    file = tmp_path / "bough.toml"
    file.write_text('target = "a b"\nport = 7\ninsecure = true\ndrop-layers = [3, 14]\nkv-memory = "4GB"\n')
    assert flags_from(str(file), KNOWN) == [
        "--target=a b", "--port=7", "--insecure", "--drop-layers=3,14", "--kv-memory=4GB",
    ]  # fmt: skip
    file.write_text("insecure = false\n")
    assert flags_from(str(file), KNOWN) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('kv-memry = "4GB"', r"kv-memry: must be the name of a flag without its dashes \(similar: kv-memory\)"),
        ("nonsense = 1", r"nonsense: must be the name of a flag without its dashes$"),
        ("[target]\nmodel = 1", "target: must be a text, a number, or a list of these, got {'model': 1}"),
        ("port 7", "--config: must be a TOML file, got .*line 1"),
    ],
)
def test_unknown_flags_are_refused_by_name(text: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "bough.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        flags_from(str(file), KNOWN)


def test_the_command_line_overrides_the_flag_file(tmp_path: Path) -> None:
    file = tmp_path / "bough.toml"
    file.write_text('port = 7000\nhttp-port = 7001\nsimulate = "two-cores"\n')
    arguments = parsed(["up", "--http-port", "9001", "--config", str(file)])
    assert (arguments.port, arguments.http_port, arguments.simulate) == (7000, "9001", "two-cores")


def test_an_invalid_file_is_an_error_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["up", "--config", str(tmp_path / "nowhere")])
    assert capsys.readouterr().err.startswith("error: --config: must be a TOML file, got ")
    (tmp_path / "file").write_text('port = "x"\n')
    with pytest.raises(SystemExit, match="2"):
        main(["up", "--config", str(tmp_path / "file")])
    assert "--port: must be a whole number, got 'x'" in capsys.readouterr().err
