"""The two sides of `loadtest.peers.llama_cpp`: processes that answer greedily under a common memory limit.

The benchmark calls each over its own streaming API, from outside the limited group.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, NamedTuple

from bough.client import Client
from bough.errors import BoughError
from bough.processes.exit_with_parent import MODULE, start
from bough.protocol.generation import GenerateOptions, Speculation, TokenPrompt
from loadtest.common.limits import limited
from loadtest.common.streams import stream

SERVER = Path(__file__).with_name("llama_cpp_server.py")
REQUEST_SECONDS = 1800.0
START_SECONDS = 900.0  # includes compilation of kernels
STOP_SECONDS = 30.0
LOG_BYTES = 4000  # of a log's end that are quoted when a process fails to start
OF_ONE_SESSION = ("--kv-memory", "250MB")  # the default of 2 GB is for many sessions and would not fit
READY = "ready: "  # prefix of the line in which `bough up` prints its address


class PeerError(BoughError):
    """A side failed to start or to answer; the message has the last lines of its log."""


def require_peer(python: str) -> None:
    """Check that llama.cpp is installed, before anything is written or started.

    Raises:
        PeerError: it is not installed.
    """
    try:
        subprocess.run([python, "-c", "import xllamacpp"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as exc:
        raise PeerError(
            "--peer-python: must be a Python that can import xllamacpp, such as that of an environment in which "
            f"`pip install '.[peer]'` was run, got {python}"
        ) from exc


def why_unlimited(memory_bytes: int) -> str:
    """Why memory cannot be limited here; empty if it can."""
    try:
        with limited(memory_bytes):
            return ""
    except OSError as exc:
        return f"control groups for memory cannot be made here: {exc}"


class Answer(NamedTuple):
    """A side's answer to a prompt, and its times."""

    token_ids: tuple[int, ...]
    first_seconds: float  # from the request to the first tokens
    num_first: int  # tokens in the first event: several if they were guessed with the prompt
    seconds: float  # from the request to the last token

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first event; 0 if there was only one event."""
        seconds, num_tokens = self.seconds - self.first_seconds, len(self.token_ids) - self.num_first
        return num_tokens / seconds if num_tokens and seconds > 0 else 0.0

    @property
    def overall_rate(self) -> float:
        """Tokens per second, prefill included."""
        return len(self.token_ids) / self.seconds


def answer_of(chunks: Sequence[tuple[float, Sequence[int]]], began: float) -> Answer:
    """An answer from its events: times and token ids.

    Raises:
        PeerError: no token came.
    """
    filled = [(moment, tokens) for moment, tokens in chunks if tokens]
    if not filled:
        raise PeerError("tokens: there were none; at least one must come")
    token_ids = tuple(token for _, tokens in filled for token in tokens)
    return Answer(token_ids, filled[0][0] - began, len(filled[0][1]), filled[-1][0] - began)


@dataclass(frozen=True, slots=True)
class LlamaSettings:
    """Settings of llama.cpp; the fields are those that `llama_cpp_server.py` reads."""

    model: str
    draft: str  # empty for plain decoding
    draft_tokens: int  # length of the drafted chain
    threads: int
    context: int
    ubatch: int


class LlamaServer:
    """A running llama.cpp server."""

    def __init__(self, ready: dict[str, Any]) -> None:
        self.address: str = ready["address"]
        self.version: str = ready["version"]
        self.system_info: str = ready["system_info"]

    def ask(self, prompt: Sequence[int], num_tokens: int) -> Answer:
        """Generate `num_tokens` tokens greedily, ignoring end-of-text tokens.

        Raises:
            PeerError: the server does not answer.
        """
        body = {
            "prompt": list(prompt),
            "n_predict": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
            "stream": True,
        }
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.address}/completion", json.dumps(body).encode(), headers)
        began = time.monotonic()
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as lines:
                return answer_of([(time.monotonic(), tokens) for tokens in map(event_tokens, lines)], began)
        except OSError as exc:
            raise PeerError(f"llama.cpp does not answer: {exc}") from exc


def event_tokens(line: bytes) -> list[int]:
    """Token ids in a line of llama.cpp's event stream; none in blank lines and in the last event."""
    prefix = b"data: "
    return json.loads(line.removeprefix(prefix)).get("tokens", []) if line.startswith(prefix) else []


def peer_environment(environ: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    """Environment of the peer's process, without the OpenMP settings that `bough.model` sets for bough."""
    return {name: value for name, value in environ.items() if name != "GOMP_SPINCOUNT"} | dict(added)


@contextmanager
def llama_server(
    python: str, settings: LlamaSettings, memory_bytes: int, variables: Mapping[str, str]
) -> Iterator[LlamaServer]:
    """Run a llama.cpp server with a memory limit (0 is none) and further environment variables.

    Raises:
        PeerError: it failed to start.
        OSError: memory cannot be limited here.
    """
    with limited(memory_bytes) as prefix, TemporaryFile() as log:
        process = start(
            [python, "-P", str(SERVER), json.dumps(asdict(settings))],
            lambda command: subprocess.Popen(
                [*(prefix if memory_bytes else ()), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=peer_environment(os.environ, variables),
            ),
        )
        try:
            assert process.stdout is not None, "it was opened"
            line = process.stdout.readline()
            if not line:
                raise PeerError(f"llama.cpp ended with status {process.wait()}:\n{_tail(log)}")
            yield LlamaServer(json.loads(line))
        finally:
            _stop(process)


class Bough:
    """A running `bough up`."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def ask(self, prompt: Sequence[int], num_tokens: int, *, is_plain: bool) -> Answer:
        """Generate `num_tokens` tokens greedily, ignoring end-of-text tokens."""
        options = GenerateOptions(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, speculation=Speculation(disabled=is_plain)
        )
        received = await stream(self._client, TokenPrompt(tuple(prompt)), options)
        return answer_of([(moment, tokens.token_ids) for moment, tokens in received.rounds], received.began)


@asynccontextmanager
async def bough_up(context: int, memory_bytes: int, *, is_resident: bool) -> AsyncIterator[Bough]:
    """Run `bough up` for the demonstration with a memory limit for all its processes; 0 is none.

    Flags are its defaults, but for a context as long as the peer's, and KV of one session as the peer has it. Resident
    is without `--resident-layers 0`.

    Raises:
        PeerError: they failed to start in time, for example because memory is too small and they restart repeatedly.
        OSError: memory cannot be limited here.
    """
    environ = {**os.environ, **({"BOUGH_TARGET_RESIDENT_LAYERS": "-1"} if is_resident else {})}
    up = [
        sys.executable,
        *MODULE,
        "bough.cli.main",
        "up",
        "--port",
        "0",
        *OF_ONE_SESSION,
        "--max-context",
        str(context),
    ]
    with limited(memory_bytes) as prefix, TemporaryFile() as log:
        within = prefix if memory_bytes else []
        process = start(
            up,
            lambda command: subprocess.Popen([*within, *command], stdout=subprocess.PIPE, stderr=log, env=environ),
        )
        try:
            async with Client(await _ready_address(process, log)) as client:
                yield Bough(client)
        finally:
            _stop(process)


async def _ready_address(process: subprocess.Popen[bytes], log: IO[bytes]) -> str:
    """Wait until the process reports that it is ready; returns its address.

    Raises:
        PeerError: it has ended, or took too long.
    """
    try:
        address = await asyncio.wait_for(asyncio.to_thread(_announced, process), START_SECONDS)
    except TimeoutError:
        raise PeerError(f"bough up was not ready after {START_SECONDS:.0f} s:\n{_tail(log)}") from None
    if not address:
        raise PeerError(f"bough up ended with status {process.wait()}:\n{_tail(log)}")
    return address


def _announced(process: subprocess.Popen[bytes]) -> str:
    """The address in its output; empty if the output ends without one."""
    assert process.stdout is not None, "it was opened"
    lines = (line.decode() for line in process.stdout)
    return next((line.removeprefix(READY).split()[0] for line in lines if line.startswith(READY)), "")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a side with SIGTERM; llama.cpp's server also ends at the end of standard input."""
    if process.stdin is not None:
        process.stdin.close()
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _tail(log: IO[bytes]) -> str:
    log.seek(0, os.SEEK_END)
    log.seek(max(0, log.tell() - LOG_BYTES))
    return log.read().decode(errors="replace")
