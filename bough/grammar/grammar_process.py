"""Processes in which llguidance, native code, reads grammars that clients send.

Such code may crash, or use any memory or time, so no serving process runs it. A process that does has limits of CPU
time, time and memory for each call, which the kernel enforces. A grammar that breaks them ends its process, and only
its own call: a process has one call at a time.

They are forked from a process that has imported llguidance and built the tokenizers, so a new one starts within
milliseconds. That is a fresh interpreter (`python -m bough.grammar.grammar_worker`), as a process that runs gRPC cannot
be forked, and never reads a grammar itself. All of them end with this process, however it ends.
"""

from __future__ import annotations

import array
import atexit
import json
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from bough.errors import Unavailable

_HEADER = struct.Struct("<II")  # bytes of the JSON and of the payload that follow

Fields = Mapping[str, Any]  # of a message, as JSON
NO_FIELDS: Fields = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one call. Checking has half of the time that is available for using a grammar."""

    check_seconds: float = 2.0  # CPU time to write and check a grammar
    compile_seconds: float = 4.0  # CPU time to compile a checked grammar for a vocabulary
    mask_seconds: float = 0.1  # CPU time of one mask, beyond the average
    average_mask_seconds: float = 0.02  # CPU time of a mask of an output, on average
    wall_seconds: float = 60.0  # of any call, even if no processor is free
    memory_bytes: int = 256 * 2**20  # of addresses, without those of the tokenizer and of the stack
    max_lexer_states: int = 50_000
    step_lexer_fuel: int = 200_000
    step_max_items: int = 20_000  # of Earley's algorithm, for one mask

    @property
    def exceeded(self) -> str:
        """The error text for a grammar whose process has ended."""
        memory = self.memory_bytes // 2**20
        return (
            f"it must be read within {self.check_seconds:g} s and {memory} MiB, and give a mask within "
            f"{self.mask_seconds:g} s, and ended the process that tried"
        )


LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of which outputs are made."""

    tokenizer_json: bytes
    num_tokens: int
    ends: tuple[int, ...]  # tokens that end a text


class Refused(Exception):
    """A grammar cannot be used, or an output does not follow it; the message says why."""


class GrammarProcess:
    """One process that reads grammars. It starts with the first call, and again after a call that has ended it.

    For any thread; calls run one at a time.
    """

    def __init__(self, limits: Limits = LIMITS, vocabulary: Vocabulary | None = None) -> None:
        self._limits, self._vocabulary = limits, vocabulary
        self._lock = threading.Lock()
        self._connection: _Connection | None = None

    def call(self, operation: str, payload: bytes = b"", fields: Fields = NO_FIELDS) -> tuple[Fields, bytes]:
        """The answer to an operation of `grammar_worker`, and its payload.

        Raises:
            Refused: the grammar cannot be used, or reading it has ended the process.
            Unavailable: no process can be started, or it was ended by others.
        """
        with self._lock:
            if self._connection is None or self._connection.has_ended():
                self._connection = _SERVER.connect(self._limits, self._vocabulary)
            connection, self._connection = self._connection, None
            connection.send({"operation": operation, **fields}, payload)
            answer = connection.receive()
            if answer is None and not _SERVER.is_running:
                raise Unavailable("the processes that read grammars were ended from outside")
            if answer is None:
                raise Refused(self._limits.exceeded)
            if not answer[0].get("is_last"):
                self._connection = connection
        if "refused" in answer[0]:
            raise Refused(answer[0]["refused"])
        return answer


class _Connection:
    """A connection to one process, which ends with the connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        weakref.finalize(self, connection.close)  # in a cycle of garbage, `__del__` may come after the socket's own

    def has_ended(self) -> bool:
        """Whether the process has ended since its last answer."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))  # the process sends nothing unasked

    def send(self, fields: Fields, payload: bytes) -> None:
        with suppress(OSError):  # the process has ended, as `receive` finds
            send(self._socket, fields, payload)

    def receive(self) -> tuple[Fields, bytes] | None:
        """An answer; None if the process has ended. Raises Unavailable if it does not answer."""
        try:
            return receive(self._socket)
        except TimeoutError as exc:
            raise Unavailable("a process that reads grammars does not answer") from exc
        except OSError:
            return None


class _Server:
    """The process from which those that read grammars are forked; started when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        self._numbers: dict[Vocabulary, int] = {}  # vocabularies that the process has

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def connect(self, limits: Limits, vocabulary: Vocabulary | None) -> _Connection:
        """A connection with a new process. Raises Unavailable."""
        with self._lock:
            try:
                if not self.is_running:
                    self._start()
                ours, theirs = socket.socketpair()
                with theirs:
                    ours.settimeout(2 * limits.wall_seconds)
                    request = {"limits": asdict(limits), "vocabulary": self._number(vocabulary)}
                    self._ask(request, theirs.fileno())
                return _Connection(ours)
            except OSError as exc:
                raise Unavailable(f"no process that reads grammars could be started: {exc}") from exc

    def close(self) -> None:
        """End the process, and with it those that it has forked."""
        with self._lock:
            if self._process is not None and self._requests is not None:
                self._requests.close()
                self._process.kill()
                self._process.wait()

    def _start(self) -> None:
        if self._requests is not None:
            self._requests.close()
        self._numbers.clear()
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "bough.grammar.grammar_worker"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # llguidance prints clients' texts
                env=_environment(),
                start_new_session=True,  # Ctrl-C is meant for this process
            )

    def _number(self, vocabulary: Vocabulary | None) -> int | None:
        """The process's number of a vocabulary, which is sent if the process does not have it."""
        if vocabulary is None or vocabulary in self._numbers:
            return None if vocabulary is None else self._numbers[vocabulary]
        with open(os.memfd_create("tokenizer"), "wb") as file:  # too large for a message
            file.write(vocabulary.tokenizer_json)
            file.flush()
            self._ask({"num_tokens": vocabulary.num_tokens, "ends": vocabulary.ends}, file.fileno())
        return self._numbers.setdefault(vocabulary, len(self._numbers))

    def _ask(self, request: Fields, descriptor: int) -> None:
        assert self._requests is not None, "it has been started"
        socket.send_fds(self._requests, [json.dumps(request).encode()], [descriptor])


def _environment() -> dict[str, str]:
    """The environment without bough's own settings, some of which are secrets."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("BOUGH_")}
    return variables | {"MALLOC_ARENA_MAX": "1"}  # further arenas reserve addresses, which are limited


_SERVER = _Server()
atexit.register(_SERVER.close)


def send(connection: socket.socket, fields: Mapping[str, object], payload: bytes = b"") -> None:
    """Send a message. Raises OSError."""
    text = json.dumps(fields).encode()
    connection.sendall(b"".join((_HEADER.pack(len(text), len(payload)), text, payload)))


def receive(connection: socket.socket) -> tuple[Fields, bytes] | None:
    """The next message; None if the peer has ended. Raises OSError."""
    sizes = _bytes(connection, _HEADER.size)
    if sizes is None:
        return None
    num_text, num_payload = _HEADER.unpack(sizes)
    message = _bytes(connection, num_text + num_payload)
    return None if message is None else (json.loads(message[:num_text]), message[num_text:])


def _bytes(connection: socket.socket, num_bytes: int) -> bytes | None:
    received = bytearray(num_bytes)
    view = memoryview(received)
    while view:
        if not (num := connection.recv_into(view)):
            return None
        view = view[num:]
    return bytes(received)


def to_bytes(tokens: Sequence[int]) -> bytes:
    """Tokens as part of a payload."""
    return array.array("i", tokens).tobytes()


def from_bytes(payload: bytes) -> list[int]:
    """Tokens of a part of a payload."""
    return array.array("i", payload).tolist()
