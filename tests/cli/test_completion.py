"""Shells complete commands, flags and values; help says what no flag says."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from bough.cli.completion import commands_of, flags_of
from bough.cli.main import argument_parser, main


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit, match="0"):
        main(["completion", shell])
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("bough ge", "generate"),
        ("bough up --plan", "--planner"),
        ("bough up --planner ", "self fixed"),
        ("bough generate --sess", "--session"),
        ("bough keys r", "remove"),
        ("bough up --target ", ""),
    ],
)
def test_bash_completes_commands_and_flags(words: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = words.split(" ")
    asked = f"COMP_WORDS=({' '.join(repr(word) for word in line)}); COMP_CWORD={len(line) - 1}; _bough"
    command = f'{script("bash", capsys)}\n{asked}\necho "${{COMPREPLY[@]}}"'
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == expected
    assert ran.stderr == ""


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_every_flag_is_in_every_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    for parser in commands_of(argument_parser()).values():
        for flag in flags_of(parser):
            assert flag.name.removeprefix("--") in text
    if shutil.which(shell) is not None:
        assert subprocess.run([shell, "-n", "-c", text], check=False).returncode == 0


def test_help_lists_variables_exit_statuses_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        argument_parser().parse_args(["--help"])
    text = capsys.readouterr().out
    for word in ("BOUGH_ADDRESS", "BOUGH_API_KEY", "BOUGH_CACHE_DIR", "BOUGH_TARGET_KV_MEMORY", "130  ended by Ctrl-C"):
        assert word in text
    for name in commands_of(argument_parser()):
        with pytest.raises(SystemExit, match="0"):
            argument_parser().parse_args([name, "--help"])
        assert "`bough --help` lists environment variables and exit statuses" in capsys.readouterr().out
