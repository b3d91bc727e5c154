"""The two doors of an orchestrator as a user under gevent calls them: sync gRPC stubs, and SSE by `requests`.

bough's own client is asyncio's and does not run under gevent, and resuming would hide what a load test is to count.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import grpc
import requests

from bough import wire_generation as wire
from bough.errors import Exhausted
from bough.generation import ChatPrompt, Finished, GenerateOptions, Message, Tokens
from bough.pb import generation_pb2_grpc
from bough.rpc import to_error
from loadtest.locust.mix import Question
from loadtest.locust.samples import Arrivals, Sample

CONNECT_SECONDS = 10.0
TOO_MANY_REQUESTS = 429


@dataclass(slots=True)
class Conversation:
    """What has been said, by both sides; of a single request nothing is kept."""

    session_id: str = ""
    messages: list[Message] = field(default_factory=list)
    turn: int = 0

    @staticmethod
    def begin() -> Conversation:
        """One whose KV is kept under a name."""
        return Conversation(uuid.uuid4().hex)


class Door(Protocol):
    """One user's way in."""

    name: str  # in samples

    def ask(self, conversation: Conversation, question: Question, users: int) -> Sample:
        """Reads one answer to its end; whatever goes wrong is in the sample."""
        ...

    def close(self) -> None:
        """Ends the connection."""
        ...


class GrpcDoor:
    """A channel of one user's own, as an application would have it."""

    name = "grpc"

    def __init__(self, address: str, timeout_seconds: float, started: float) -> None:
        """`started` is the moment from which samples count, on the monotonic clock."""
        self._address, self._timeout_seconds, self._started = address, timeout_seconds, started
        self._channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self._stub = generation_pb2_grpc.GenerationStub(self._channel)

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()

    def ask(self, conversation: Conversation, question: Question, users: int) -> Sample:
        """One `Generate` call. Of a conversation only what is new is sent."""
        conversation.turn += 1
        options = GenerateOptions(
            session_id=conversation.session_id,
            max_tokens=question.answer_tokens,
            ignore_eos=True,
            continues=conversation.turn > 1,
        )
        request = wire.request_to_wire(ChatPrompt((Message("user", question.text),)), options)
        arrivals = Arrivals(time.monotonic())
        sample = Sample(self.name, arrivals.began - self._started, 0.0, turn=conversation.turn, users=users)
        try:
            for message in self._stub.Generate(request, timeout=self._timeout_seconds):
                event = wire.event_from_wire(message)
                if isinstance(event, Tokens):
                    arrivals.take(time.monotonic(), len(event.token_ids))
                elif isinstance(event, Finished):
                    sample = replace(sample, num_prompt_tokens=event.usage.prompt_tokens)
        except grpc.RpcError as exc:
            error = to_error(cast(grpc.Call, exc), self._address)  # what a sync stub raises is its call
            if isinstance(error, Exhausted):
                sample = replace(sample, is_refused=True, retry_seconds=error.retry_seconds or 0.0)
            sample = replace(sample, error=str(error))
        return _completed(sample, arrivals)


class HttpDoor:
    """A session of `requests` of one user's own; `/v1/chat/completions`, streamed.

    `iter_lines` with `chunk_size=None` gives lines as they come; locust's FastHttpUser waits for 1024 bytes.
    """

    name = "http"

    def __init__(self, url: str, timeout_seconds: float, started: float) -> None:
        """`url` is without /v1; `started` as in `GrpcDoor`."""
        self._url, self._timeout_seconds, self._started = url.rstrip("/"), timeout_seconds, started
        self._session = requests.Session()

    def close(self) -> None:
        """Ends the connection."""
        self._session.close()

    def ask(self, conversation: Conversation, question: Question, users: int) -> Sample:
        """One streamed chat completion. The whole conversation is sent, as OpenAI's clients do."""
        conversation.turn += 1
        messages = [*conversation.messages, Message("user", question.text)]
        arrivals = Arrivals(time.monotonic())
        sample = Sample(self.name, arrivals.began - self._started, 0.0, turn=conversation.turn, users=users)
        text: list[str] = []
        try:
            with self._session.post(
                f"{self._url}/v1/chat/completions",
                json=_body(messages, question.answer_tokens),
                headers={"x-session-id": conversation.session_id} if conversation.session_id else {},
                stream=True,
                timeout=(CONNECT_SECONDS, self._timeout_seconds),
            ) as response:
                if response.status_code != requests.codes.ok:
                    return _completed(_refused(sample, response), arrivals)
                for chunk in _chunks(response):
                    sample = _read(chunk, sample, arrivals, text)
        except (requests.RequestException, ValueError) as exc:
            sample = replace(sample, error=f"{type(exc).__name__}: {exc}")
        if conversation.session_id and not sample.error:
            conversation.messages = [*messages, Message("assistant", "".join(text))]
        return _completed(sample, arrivals)


def _body(messages: list[Message], answer_tokens: int) -> dict[str, Any]:
    return {
        "model": "",
        "messages": [{"role": message.role, "content": message.content} for message in messages],
        "max_completion_tokens": answer_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


def _chunks(response: requests.Response) -> Iterator[Mapping[str, Any]]:
    """The JSON of each `data:` line up to [DONE]. Raises ValueError where the stream ends before that."""
    for line in response.iter_lines(chunk_size=None):  # type: ignore[call-overload]  # requests allows None
        if line == b"data: [DONE]":
            return
        if line.startswith(b"data: "):
            yield json.loads(line.removeprefix(b"data: "))
    raise ValueError("the stream ended before [DONE]")


def _read(chunk: Mapping[str, Any], sample: Sample, arrivals: Arrivals, text: list[str]) -> Sample:
    """Counts the tokens of one chunk by its running usage."""
    if "error" in chunk:
        return replace(sample, error=str(chunk["error"].get("message")))
    usage = chunk.get("usage") or {}
    arrivals.take(time.monotonic(), usage.get("completion_tokens", 0) - arrivals.num_tokens)
    text += [choice["delta"].get("content") or "" for choice in chunk["choices"]]
    return replace(sample, num_prompt_tokens=usage.get("prompt_tokens", sample.num_prompt_tokens))


def _refused(sample: Sample, response: requests.Response) -> Sample:
    """A status that is an error; 429 is a refusal, whose delay is counted."""
    retry_seconds = float(response.headers.get("retry-after") or 0.0)
    is_refused = response.status_code == TOO_MANY_REQUESTS
    return replace(sample, error=response.text[:500], is_refused=is_refused, retry_seconds=retry_seconds)


def _completed(sample: Sample, arrivals: Arrivals) -> Sample:
    return replace(
        sample,
        seconds=time.monotonic() - arrivals.began,
        first_token_seconds=arrivals.first_token_seconds,
        token_seconds=arrivals.token_seconds,
        longest_gap_seconds=arrivals.longest_gap,
        num_tokens=arrivals.num_tokens,
        error=sample.error or ("" if arrivals.num_tokens else "no token came"),
    )
