"""Commands in scripts whose output is not read to its end, as in `bough doctor | head`, or that end by a signal."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest

from bough.cli.main import EXIT_PIPE

LONGEST_SECONDS = 120
COMMAND = "from bough.cli.main import main; main()"
PRINTS_MUCH = """
import bough.cli.main
async def much(arguments):
    for number in range(10**6):
        print(number)
    return 0
bough.cli.main._command = lambda name: much
bough.cli.main.main(["doctor"])
"""  # more than a pipe holds, so that it is in the middle of it when its reader goes


def left(program: str, *arguments: str, num_read: int = 0) -> tuple[int, bytes]:
    """Exit status and standard error of a command whose reader closes after this many bytes."""
    reader, writer = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    try:
        while num_read:
            found = os.read(reader, num_read)
            assert found, "there was more to read"
            num_read -= len(found)
        os.close(reader)
        _, errors = process.communicate(timeout=LONGEST_SECONDS)
    finally:
        process.kill()
        process.wait()
    return process.returncode, errors


@pytest.mark.parametrize("buffered", [True, False])
def test_a_closed_reader_ends_a_command_silently(buffered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What little it has to say is written at its end, or line by line."""
    monkeypatch.setenv("PYTHONUNBUFFERED", "" if buffered else "1")
    assert left(COMMAND, "doctor", "--address", "127.0.0.1:1") == (EXIT_PIPE, b"")


def test_help_without_a_reader_is_no_error() -> None:
    """argparse itself takes no notice of what it could not write."""
    status, errors = left(COMMAND, "--help")
    assert status in (0, EXIT_PIPE)
    assert errors == b""


def test_a_reader_that_stops_reading_ends_a_command_silently() -> None:
    assert left(PRINTS_MUCH, num_read=100) == (EXIT_PIPE, b"")


def test_a_command_with_a_reader_ends_normally() -> None:
    arguments = ["doctor", "--address", "127.0.0.1:1"]
    ended = subprocess.run([sys.executable, "-c", COMMAND, *arguments], capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, b"")
    assert b"problem: 127.0.0.1:1 does not answer: nothing listens there; is it running?" in ended.stdout


@pytest.mark.parametrize("arguments", [("generate", "hello"), ("top",), ("doctor",)])
def test_a_background_command_of_a_script_ends_by_sigint(arguments: tuple[str, ...]) -> None:
    """The shell of a script makes `command &` ignore it, and `bough generate &` continued until it was killed."""
    ignoring = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        command = [*ignoring, sys.executable, "-c", COMMAND, *arguments, "--address", address]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            silent.settimeout(LONGEST_SECONDS)
            connection, _ = silent.accept()
            with connection:
                process.send_signal(signal.SIGINT)
                assert process.wait(LONGEST_SECONDS) == 128 + signal.SIGINT
        finally:
            process.kill()
            process.wait()
