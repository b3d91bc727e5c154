"""Clients of both APIs for users under gevent: synchronous gRPC stubs, and SSE with `requests`.

bough's own client needs asyncio and does not run under gevent; it also resumes streams, which would hide failures.
Both clients send the API key in BOUGH_API_KEY, if it is set.
"""

from __future__ import annotations

import os
import time
import uuid
from dataclasses import dataclass, field
from typing import Protocol, cast

import grpc
import requests

from bough.protocol import codec_generation as wire
from bough.protocol.generation import ChatPrompt, GenerateOptions, Message
from bough.rpc.services import GENERATION, stub_of
from bough.rpc.status_map import to_error
from bough.security.keys import credentials
from loadtest.locust.plan import Question
from loadtest.locust.reading import CHAT_PATH, OK, Reading, chat_body
from loadtest.locust.samples import Sample

CONNECT_SECONDS = 10.0
KEY_VARIABLE = "BOUGH_API_KEY"


@dataclass(slots=True)
class Conversation:
    """The messages of a conversation; for single requests nothing is kept."""

    session_id: str = ""
    messages: list[Message] = field(default_factory=list)
    turn: int = 0

    @staticmethod
    def begin() -> Conversation:
        """Begin a conversation in a named session."""
        return Conversation(uuid.uuid4().hex)


class Api(Protocol):
    """A user's client of one API."""

    name: str  # in samples

    def ask(self, conversation: Conversation, question: Question, users: int) -> Sample:
        """Send a request and read its answer; errors are recorded in the sample."""
        ...

    def close(self) -> None:
        """Ends the connection."""
        ...


class GrpcApi:
    """A user's own channel, as an application would have."""

    name = "grpc"

    def __init__(self, address: str, timeout_seconds: float, started: float) -> None:
        """`started` is the moment from which samples count, on the monotonic clock."""
        self._address, self._timeout_seconds, self._started = address, timeout_seconds, started
        self._channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self._stub = stub_of(GENERATION, self._channel)
        self._credentials = _credentials()

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()

    def ask(self, conversation: Conversation, question: Question, users: int) -> Sample:
        """One `Generate` call; in a conversation it sends only the new message."""
        conversation.turn += 1
        options = GenerateOptions(
            session_id=conversation.session_id,
            max_tokens=question.answer_tokens,
            ignore_eos=True,
            continues=conversation.turn > 1,
        )
        request = wire.request_to_wire(ChatPrompt((Message("user", question.text),)), options)
        reading = Reading(self.name, self._started)
        try:
            call = self._stub.Generate(request, timeout=self._timeout_seconds, metadata=self._credentials)
            for message in call:
                reading.take_event(message)
        except grpc.RpcError as exc:
            reading.fail(to_error(cast(grpc.Call, exc), self._address))  # sync stubs raise their call
        return reading.sample(users)


class HttpApi:
    """A user's own `requests` session for streams of `/v1/chat/completions`.

    `iter_lines` with `chunk_size=None` gives lines as they come; locust's FastHttpUser waits for 1024 bytes.
    """

    name = "http"

    def __init__(self, url: str, timeout_seconds: float, started: float) -> None:
        """`url` is without /v1; `started` as in `GrpcApi`."""
        self._url, self._timeout_seconds, self._started = url.rstrip("/"), timeout_seconds, started
        self._session = requests.Session()
        self._session.headers.update(_credentials())

    def close(self) -> None:
        """Ends the connection."""
        self._session.close()

    def ask(self, conversation: Conversation, question: Question, users: int) -> Sample:
        """One streamed chat completion. The whole conversation is sent, as OpenAI's clients do."""
        conversation.turn += 1
        messages = [*conversation.messages, Message("user", question.text)]
        reading = Reading(self.name, self._started)
        try:
            with self._session.post(
                f"{self._url}{CHAT_PATH}",
                json=chat_body(messages, question.answer_tokens),
                headers={"x-session-id": conversation.session_id} if conversation.session_id else {},
                stream=True,
                timeout=(CONNECT_SECONDS, self._timeout_seconds),
            ) as response:
                if response.status_code != OK:
                    reading.take_status(response.status_code, response.text, response.headers.get("retry-after"))
                else:
                    for line in response.iter_lines(chunk_size=None):  # type: ignore[call-overload]  # allowed
                        reading.take_line(line.decode())
                        # The session's own timeout restarts with each keep-alive.
                        if time.monotonic() - reading.arrivals.began > self._timeout_seconds:
                            raise requests.Timeout(f"no end within {self._timeout_seconds:g} s")
        except (requests.RequestException, ValueError) as exc:
            reading.error = f"{type(exc).__name__}: {exc}"
        sample = reading.sample(users)
        if conversation.session_id and not sample.error:
            conversation.messages = [*messages, Message("assistant", reading.text)]
        return sample


def _credentials() -> tuple[tuple[str, str], ...]:
    return credentials(os.environ.get(KEY_VARIABLE, ""))
