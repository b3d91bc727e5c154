"""Output of commands that start processes: what they wait for, and then how to call the server."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TextIO

from bough.config.processes import OrchestratorConfig
from bough.processes.launch import PendingProcesses
from bough.runtime.log_lines import on_one_line
from bough.security.tls import files_towards

QUIET_SECONDS = 5.0  # until the first message, if the output is not a terminal; each next one comes after twice as long
ERASE_LINE = "\r\x1b[K"
QUESTION = "Why is the sky blue?"


class Progress:
    """Shows what a start waits for: one changing line on a terminal, elsewhere a line after 5, 10, 20, ... seconds."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """Prints to standard error by default."""
        self._stream = stream if stream is not None else sys.stderr
        self._is_terminal = self._stream.isatty()
        self._next_seconds = QUIET_SECONDS  # since the start

    def __call__(self, waiting: PendingProcesses) -> None:
        """Print what is waited for."""
        text = on_one_line(f"waiting {waiting.seconds:.0f} s for {', '.join(waiting.names)}")
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1  # a line that wraps could not be erased
            print(f"{ERASE_LINE}{text[:width]}", end="", file=self._stream, flush=True)
        elif waiting.seconds >= self._next_seconds:
            print(text, file=self._stream, flush=True)
            self._next_seconds *= 2

    def clear(self) -> None:
        """Erase the line from a terminal."""
        if self._is_terminal:
            print(ERASE_LINE, end="", file=self._stream, flush=True)


def activation() -> str:
    """How to activate the environment of the printed commands `bough` and `python`; empty if they are found."""
    script = Path(sys.executable).with_name("activate")
    python = str(script.with_name("python"))  # while pip's scripts are run by python3
    is_found = not script.exists() or shutil.which("python") == python
    return "" if is_found else f" (after `source {script}`)"


def certificate_flags(config: OrchestratorConfig, authority: str, cert: str, key: str) -> str:
    """Flags with these names for the certificate files that a client needs; empty without TLS."""
    files = files_towards(config)
    given = {authority: files.authority, cert: files.cert, key: files.key}
    return "".join(f" {flag} {file}" for flag, file in given.items() if file)


def bough_command(name: str, address: str, config: OrchestratorConfig) -> str:
    """A subcommand of bough that reaches an orchestrator with these settings."""
    return f"bough {name} --address {address}{certificate_flags(config, '--tls-ca', '--tls-cert', '--tls-key')}"


def curl_command(url: str, config: OrchestratorConfig) -> str:
    """A chat over HTTP by curl; BOUGH_API_KEY has the key if one is required."""
    known = certificate_flags(config, "--cacert", "--cert", "--key")
    header = ' -H "Authorization: Bearer $BOUGH_API_KEY"' if config.keys else ""
    body = json.dumps({"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 64})
    return f"curl {url}/v1/chat/completions{known}{header} -H 'Content-Type: application/json' -d '{body}'"
