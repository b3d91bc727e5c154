"""`bough generate` and `bough chat`: answer one prompt, or a conversation."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import sys
import uuid
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from typing import Any

from bough.cli.flags.reaching import client_from
from bough.cli.flags.requests import options_from
from bough.client import Client
from bough.concurrency.tasks import end
from bough.errors import BoughError, InvalidRequest, NotFound
from bough.protocol.generation import (
    ChatPrompt,
    Event,
    Finished,
    GenerateOptions,
    Message,
    Prompt,
    PromptLogprobs,
    Started,
    TextPrompt,
    Tokens,
)
from bough.runtime.log_lines import say, say_error, shown

LEAVING = ("/exit", "/quit", "exit", "quit")
PROMPT = "> "
COMMAND = re.compile("/[a-z]+")
HELP = (
    "/new begins a new conversation",
    "/exit, exit, quit or Ctrl-D leaves",
    "Ctrl-C ends an answer",
)


async def generate(arguments: argparse.Namespace) -> int:
    """Answer one prompt, streamed as text or as one JSON line."""
    text = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    messages, kwargs = (*_system(arguments), Message("user", text)), arguments.chat_template_kwargs
    prompt: Prompt = TextPrompt(text) if arguments.raw else ChatPrompt(messages, chat_template_kwargs=kwargs)
    async with client_from(arguments) as client:
        answer = await CollectedAnswer.read(client, prompt, options_from(arguments), is_shown=not arguments.json)
    if arguments.json:
        print(json.dumps(answer.as_json()))
    return 0


async def chat(arguments: argparse.Namespace) -> int:
    """Answer lines of input until its end; the history is not sent or computed again for each turn."""
    options = replace(options_from(arguments), session_id=arguments.session or uuid.uuid4().hex)
    history = list(_system(arguments))
    async with client_from(arguments) as client:
        name = options.model or (await client.model_info()).model_name
        say(f"{name}; /help lists commands", file=sys.stderr)
        while line := await _read_line():
            text = line.rstrip("\r\n")
            match _command(text):
                case "exit":
                    break
                case "new":
                    history = list(_system(arguments))
                case "help":
                    say(*HELP, file=sys.stderr)
                case "unknown":
                    say(f"{text.strip()} is no command; /help lists them", file=sys.stderr)
                case "question":
                    await _ask(client, history, text, options, arguments.chat_template_kwargs)
        if not arguments.session:
            with suppress(BoughError):  # the session then expires by itself
                await client.close_session(options.session_id)
    return 0


def _command(line: str) -> str:
    """What a line of a chat is: "exit", "new", "help", "unknown", "question", or "" if there is nothing in it."""
    word = line.strip()
    if word in LEAVING:
        return "exit"
    if word in ("/new", "/help"):
        return word[1:]
    if COMMAND.fullmatch(word):
        return "unknown"
    return "question" if word else ""


async def _ask(client: Client, history: list[Message], text: str, options: GenerateOptions, kwargs: str) -> None:
    """Print the answer to a question, up to Ctrl-C, and append both to the history.

    Raises:
        BoughError: there is no answer, and nobody at a terminal who could ask again.
    """
    question, request_id = Message("user", text), uuid.uuid4().hex
    turn = next_turn(client, history, question, replace(options, request_id=request_id), kwargs)
    try:
        answer = await _until_ctrl_c(client, request_id, turn)
    except BoughError as exc:
        if not sys.stdin.isatty():
            raise
        say_error(exc)
        return
    if answer is not None:
        history += (question, Message("assistant", answer.text))


async def _until_ctrl_c(
    client: Client, request_id: str, turn: Coroutine[None, None, CollectedAnswer]
) -> CollectedAnswer | None:
    """The answer, aborted at Ctrl-C; None if it had not begun by then, or at a second Ctrl-C."""
    answering = asyncio.create_task(turn)
    aborting: list[asyncio.Task[None]] = []

    async def abort() -> None:
        try:
            await client.abort(request_id)
        except BoughError:  # it has not begun, or nobody answers
            answering.cancel()

    def interrupted() -> None:
        if aborting:
            answering.cancel()
        else:
            aborting.append(asyncio.create_task(abort()))

    try:
        with _on_ctrl_c(interrupted):
            await asyncio.wait({answering})
        await end(*aborting)
        if answering.cancelled():
            print()
            return None
        return answering.result()
    finally:
        await end(answering)


@contextmanager
def _on_ctrl_c(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` at Ctrl-C while the block runs."""
    loop, before = asyncio.get_running_loop(), signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, act)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)


async def next_turn(
    client: Client, history: list[Message], question: Message, options: GenerateOptions, template_kwargs: str = ""
) -> CollectedAnswer:
    """The answer to a question; the history is sent only if the session cannot be continued."""
    turn = ChatPrompt((question,), chat_template_kwargs=template_kwargs)
    if any(message.role == "assistant" for message in history):
        continuing = replace(options, continues=True)
        try:
            return await CollectedAnswer.read(client, turn, continuing, is_shown=True)
        except (NotFound, InvalidRequest):  # forgotten, or the model's template cannot be continued
            pass
    return await CollectedAnswer.read(client, replace(turn, messages=(*history, question)), options, is_shown=True)


class CollectedAnswer:
    """The collected events of one request."""

    def __init__(self) -> None:
        self.text = ""
        self.rounds: list[Tokens] = []
        self.started: Started | None = None
        self.finished: Finished | None = None

    @classmethod
    async def read(cls, client: Client, prompt: Prompt, options: GenerateOptions, *, is_shown: bool) -> CollectedAnswer:
        """Read a stream to its end and print it if `is_shown`."""
        answer = cls()
        async for event in client.generate(prompt, options):
            text = answer.add(event)
            if is_shown:
                print(shown(text, sys.stdout), end="", flush=True)
        if is_shown:
            print()
            for remark in answer.remarks(options):
                say(remark, file=sys.stderr)
        return answer

    def add(self, event: Event) -> str:
        """Add an event and return its text."""
        match event:
            case PromptLogprobs():
                return ""
            case Started():
                self.started = event
                return ""
            case Tokens():
                self.rounds.append(event)
            case Finished():
                self.finished = event
        self.text += event.text
        return event.text

    def remarks(self, options: GenerateOptions) -> Iterator[str]:
        """A warning about the end of an answer that its text does not show."""
        if self.finished is None:
            return
        for warning in self.finished.warnings:
            yield f"warning: {warning}"
        number = self.finished.usage.completion_tokens
        if self.finished.finish_reason == "length" and number >= options.max_tokens:
            yield f"stopped after {number} tokens: --max-tokens allows no more"

    @property
    def token_ids(self) -> list[int]:
        """All generated tokens."""
        return [token for tokens in self.rounds for token in tokens.token_ids]

    def as_json(self) -> dict[str, Any]:
        """The content of `bough generate --json`."""
        assert self.started is not None, "a finished stream has started"
        assert self.finished is not None, "the stream was read to its end"
        finished = self.finished
        logprobs = [asdict(position) for tokens in self.rounds for position in tokens.logprobs]
        return {
            "request_id": self.started.request_id,
            "model": self.started.model_name,
            "seed": self.started.seed,
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": finished.finish_reason,
            "stop_reason": finished.stop_reason,
            "usage": asdict(finished.usage),
            "metrics": {
                "num_failovers": finished.num_failovers,
                "speculation": asdict(finished.speculation),
                "timings": {**asdict(finished.timings), "link_efficiency": round(finished.timings.link_efficiency, 4)},
            },
            "warnings": list(finished.warnings),
            **({"logprobs": logprobs} if logprobs else {}),
        }


def _system(arguments: argparse.Namespace) -> tuple[Message, ...]:
    return (Message("system", arguments.system),) if arguments.system else ()


async def _read_line() -> str:
    """The next line with its line end; empty at the end of the input.

    A terminal is awaited in the event loop: a thread would block Ctrl-C until the line is complete.
    """
    if not sys.stdin.isatty():
        return await asyncio.to_thread(sys.stdin.readline)
    print(PROMPT, end="", flush=True)
    readable, loop = asyncio.Event(), asyncio.get_running_loop()
    is_warned = False

    def interrupted() -> None:
        nonlocal is_warned
        if is_warned:
            raise KeyboardInterrupt
        is_warned = True  # the user may have meant an answer that has just ended
        print(f"\n/exit or Ctrl-D leaves\n{PROMPT}", end="", flush=True)

    loop.add_reader(sys.stdin, readable.set)
    try:
        with _on_ctrl_c(interrupted):
            await readable.wait()
    finally:
        loop.remove_reader(sys.stdin)
    return sys.stdin.readline()
