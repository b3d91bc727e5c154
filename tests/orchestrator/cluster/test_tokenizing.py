"""Tokenizing and templates keep no other stream waiting, and equal tokenizers are built once."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from bough.protocol.generation import ChatPrompt, Message, Prompt, TextPrompt, TokenPrompt
from bough.tokenization.chat_template import ChatTemplate
from bough.tokenization.tokenizer import Tokenizer
from tests.fakes.fleet import Fleet
from tests.fakes.stage import SHORT, Orchestrator, finish
from tests.fakes.waiting import until


@dataclass
class Held:
    """A function that waits inside until the test lets it go on."""

    wrapped: Any
    has_begun: threading.Event = field(default_factory=threading.Event)
    may_go_on: threading.Event = field(default_factory=threading.Event)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.has_begun.set()
        assert self.may_go_on.wait(30), "the event loop stood still for as long as this did"
        return self.wrapped(*args, **kwargs)


@pytest.mark.parametrize(
    ("owner", "name", "prompt"),
    [
        (Tokenizer, "_encode", TextPrompt("hello")),
        (ChatTemplate, "render", ChatPrompt((Message("user", "hello"),))),
    ],
)
async def test_streams_go_on_while_a_prompt_is_made_into_tokens(
    orchestrator: Orchestrator, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, prompt: Prompt
) -> None:
    function = getattr(owner, name)
    held = Held(function)
    monkeypatch.setattr(owner, name, lambda self, *args, **kwargs: held(self, *args, **kwargs))
    slow = asyncio.create_task(finish(orchestrator, prompt))
    await until(held.has_begun.is_set)
    assert (await finish(orchestrator, TokenPrompt((1, 2)))).usage.completion_tokens == 3
    assert not slow.done()
    held.may_go_on.set()
    assert (await slow).usage.prompt_tokens == 5


async def test_a_continued_turn_is_made_into_tokens_beside_the_streams_too(
    orchestrator: Orchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = replace(SHORT, session_id="kept")
    await finish(orchestrator, TokenPrompt((1, 2)), kept)
    held = Held(Tokenizer._encode)
    monkeypatch.setattr(Tokenizer, "_encode", lambda self, *args, **kwargs: held(self, *args, **kwargs))
    slow = asyncio.create_task(finish(orchestrator, TextPrompt("more"), replace(kept, continues=True)))
    await until(held.has_begun.is_set)
    assert (await finish(orchestrator, TokenPrompt((1, 2)))).usage.completion_tokens == 3
    held.may_go_on.set()
    assert (await slow).usage.prompt_tokens == 2 + 3 + 4


async def test_workers_with_equal_tokenizers_share_one(fakes: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    build = Tokenizer.__init__

    def counted(self: Tokenizer, *args: Any) -> None:
        threads.append(threading.current_thread())
        build(self, *args)

    own, other = fakes.tokenizer, replace(fakes.tokenizer, chat_template="{{ 'another' }}")
    for name, fakes.tokenizer in (("a", own), ("b", replace(own)), ("c", other)):
        await fakes.target(name)
    monkeypatch.setattr(Tokenizer, "__init__", counted)
    requests, _ = await fakes.orchestrator(num_targets=3)
    found = [requests.directory.find(name) for name in "abc"]
    tokenizers = [known.tokens for known in found if known is not None]
    assert tokenizers[0] is tokenizers[1]
    assert tokenizers[2].files == other  # the vocabulary is the same, and its chats are not
    assert len(threads) == 2
    assert threading.main_thread() not in threads
