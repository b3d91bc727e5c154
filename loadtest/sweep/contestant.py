"""A contestant of the comparison: an engine in its own process."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

SMALL = ["--kv-memory", "200MB", "--max-context", "512", "--max-nodes", "256", "--max-sweep-tokens", "256"]  # targets


class Contestant:
    """An engine of `loadtest.sweep.engines` in its own process."""

    def __init__(self, *words: str, prefix: list[str]) -> None:
        command = [*prefix, sys.executable, "-m", "loadtest.sweep.engines", *words]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.first_token_seconds = float(self._answer())  # since opening the model

    def __enter__(self) -> Contestant:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None, "it was opened"
        self._process.stdin.close()
        self._process.wait(60)

    def ask(self, *command: str | int) -> Any:
        """Send a command and wait for its answer."""
        assert self._process.stdin is not None, "it was opened"
        print(json.dumps(command), file=self._process.stdin, flush=True)
        return self._answer()

    def seconds(self, num_tokens: int, repeats: int) -> float:
        """Seconds of one sweep, from several consecutive ones without the first."""
        sweeps = self.ask("sweep", num_tokens, repeats + 1)[1:]
        return float(sum(sweep["seconds"] for sweep in sweeps) / repeats)

    def _answer(self) -> Any:
        assert self._process.stdout is not None, "it was opened"
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(map(str, self._process.args))} ended with status {self._process.wait()}")  # type: ignore[arg-type]
        return json.loads(line)
