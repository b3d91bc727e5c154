"""Tokenizing and templates keep no other stream waiting, and equal tokenizers are built once."""

from __future__ import annotations

import asyncio
import gc
import threading
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from bough.protocol.generation import ChatPrompt, Message, Prompt, TextPrompt, TokenPrompt
from bough.tokenization.chat_template import ChatTemplate
from bough.tokenization.tokenizer import Tokenizer
from orchestrator.cluster.tokenizer_threads import Tokenizing
from tests.fakes.fleet import Fleet
from tests.fakes.heap import malloc_bytes
from tests.fakes.stage import SHORT, Orchestrator, finish
from tests.fakes.waiting import until


@dataclass
class Held:
    """A function that waits inside until the test lets it continue."""

    wrapped: Any
    has_begun: threading.Event = field(default_factory=threading.Event)
    may_go_on: threading.Event = field(default_factory=threading.Event)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.has_begun.set()
        assert self.may_go_on.wait(30), "the event loop stood still for as long as this did"
        return self.wrapped(*args, **kwargs)


@pytest.mark.parametrize(
    ("owner", "name", "prompt", "continues"),
    [
        (Tokenizer, "_encode", TextPrompt("hello"), False),
        (Tokenizer, "_encode", TextPrompt("hello"), True),
        (ChatTemplate, "render", ChatPrompt((Message("user", "hello"),)), False),
    ],
)
async def test_streams_continue_while_a_prompt_is_tokenized(
    orchestrator: Orchestrator,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    prompt: Prompt,
    continues: bool,
) -> None:
    options = replace(SHORT, session_id="kept", continues=continues)
    if continues:
        await finish(orchestrator, TokenPrompt((1, 2)), replace(SHORT, session_id="kept"))
    function = getattr(owner, name)
    held = Held(function)
    monkeypatch.setattr(owner, name, lambda self, *args, **kwargs: held(self, *args, **kwargs))
    slow = asyncio.create_task(finish(orchestrator, prompt, options))
    await until(held.has_begun.is_set)
    assert (await finish(orchestrator, TokenPrompt((1, 2)))).usage.completion_tokens == 3
    assert not slow.done()
    held.may_go_on.set()
    assert (await slow).usage.prompt_tokens == (2 + 3 + 5 if continues else 5)


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
    tokenizers = [known.tokenizer for known in found if known is not None]
    assert tokenizers[0] is tokenizers[1]
    assert tokenizers[2].files == other  # the vocabulary is the same, and its chats are not
    assert len(threads) == 2
    assert threading.main_thread() not in threads


async def test_memory_of_an_unused_tokenizer_is_released(fakes: Fleet) -> None:
    """The library keeps them in each thread that has encoded: every restart of a model's last worker left megabytes."""
    tokenizing = Tokenizing()
    text = " ".join(f"{word:0200}" for word in range(1000))

    async def encode() -> None:
        tokenizer = await tokenizing.shared(fakes.tokenizer)
        await tokenizing.run(lambda: tokenizer.encode(text))

    try:
        before = malloc_bytes()
        await encode()
        gc.collect()
        kept = malloc_bytes() - before
        assert kept > 4_000_000
        await tokenizing.shared(replace(fakes.tokenizer, chat_template="{{ 'another' }}"))
        await until(lambda: malloc_bytes() - before < kept / 4)  # once the thread has ended
    finally:
        tokenizing.close()


async def test_waiting_work_is_done_after_another_tokenizer_is_built(fakes: Fleet) -> None:
    tokenizing, held = Tokenizing(), Held(lambda: 1)
    try:
        waiting = [asyncio.create_task(tokenizing.run(held))]
        await until(held.has_begun.is_set)
        building = asyncio.create_task(tokenizing.shared(fakes.tokenizer))
        waiting += [asyncio.create_task(tokenizing.run(lambda: 1)) for _ in range(3)]
        await building
        held.may_go_on.set()
        assert await asyncio.gather(*waiting, tokenizing.run(lambda: 1)) == [1] * 5
    finally:
        tokenizing.close()


async def test_work_waiting_for_replaced_threads_is_dropped_at_the_end(fakes: Fleet) -> None:
    """Only the newest threads were ended: the others did all that was queued first, and kept the process alive."""
    tokenizing, others = Tokenizing(), set(threading.enumerate())
    first, second = Held(lambda: 1), Held(lambda: 1)
    running = [asyncio.create_task(tokenizing.run(first))]
    await until(first.has_begun.is_set)
    building = asyncio.create_task(tokenizing.shared(fakes.tokenizer))
    await asyncio.sleep(0)
    running.append(asyncio.create_task(tokenizing.run(second)))
    waiting = asyncio.create_task(tokenizing.run(lambda: 1))
    await building
    await until(second.has_begun.is_set)
    tokenizing.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    for held in (first, second):
        held.may_go_on.set()
    assert await asyncio.gather(*running) == [1, 1]
    await until(lambda: not any(one.name.startswith("tokenizing") for one in {*threading.enumerate()} - others))


async def test_a_tokenizer_built_at_the_end_starts_no_threads(fakes: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizing, held = Tokenizing(), Held(Tokenizer.__init__)
    monkeypatch.setattr(Tokenizer, "__init__", lambda self, *args: held(self, *args))
    building = asyncio.create_task(tokenizing.shared(fakes.tokenizer))
    await until(held.has_begun.is_set)
    tokenizing.close()
    held.may_go_on.set()
    await building
    with pytest.raises(RuntimeError, match="after shutdown"):
        await tokenizing.run(lambda: 1)
