"""Opens, uses and abandons sessions in every possible way, and counts what this process holds."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import NamedTuple

from bough.client import Client
from bough.errors import BoughError, NotFound
from bough.protocol.generation import Finished, GenerateOptions, Speculation, Started, TokenPrompt, Tokens

PLAIN = Speculation(disabled=True)
SHORT = GenerateOptions(temperature=0.0, max_tokens=1, ignore_eos=True, speculation=PLAIN)
LONG = GenerateOptions(temperature=0.0, max_tokens=40, ignore_eos=True, speculation=Speculation(budget=4))
PROMPT_TOKENS = 6


class Holdings(NamedTuple):
    """Resources held by this process."""

    tasks: int
    threads: int
    descriptors: int

    @classmethod
    def now(cls) -> Holdings:
        """The present resources, after garbage collection."""
        gc.collect()
        return cls(len(asyncio.all_tasks()), threading.active_count(), len(os.listdir("/proc/self/fd")))


class Abandoner:
    """Opens and abandons sessions at one orchestrator."""

    def __init__(self, address: str, rng: random.Random) -> None:
        self.outcomes: Counter[str] = Counter()
        self._address = address
        self._rng = rng
        self._num = 0
        # Repeated entries are chosen more often: most sessions end normally.
        self._ways: list[Callable[[Client], Awaitable[str]]] = [
            self._finished,
            self._finished,
            self._finished,
            self._kept,
            self._left_in_the_middle,
            self._left_at_once,
            self._gone_with_its_connection,
            self._aborted,
            self._refused,
        ]

    async def run(self, num: int, num_at_once: int) -> None:
        """Run `num` sessions; returns when all are over."""
        left = iter(range(num))

        async def work() -> None:
            async with Client(self._address) as client:
                for number in left:
                    way = self._ways[number % len(self._ways)]
                    self.outcomes[await way(client)] += 1

        await asyncio.gather(*(work() for _ in range(num_at_once)))

    def _prompt(self) -> TokenPrompt:
        return TokenPrompt(tuple(self._rng.randrange(250) for _ in range(PROMPT_TOKENS)))

    def _named(self, options: GenerateOptions, **names: str) -> GenerateOptions:
        """A session with a unique name."""
        self._num += 1
        return replace(options, **{name: f"{prefix}-{self._num}" for name, prefix in names.items()})  # type: ignore[arg-type]

    async def _finished(self, client: Client) -> str:
        last = [event async for event in client.generate(self._prompt(), SHORT)][-1]
        return "finished" if isinstance(last, Finished) else "unfinished"

    async def _kept(self, client: Client) -> str:
        """A session whose KV and index entry stay until they are evicted or expire."""
        options = self._named(SHORT, session_id="kept")
        last = [event async for event in client.generate(self._prompt(), options)][-1]
        return "kept" if isinstance(last, Finished) else "unfinished"

    async def _left_in_the_middle(self, client: Client) -> str:
        async with aclosing(client.generate(self._prompt(), LONG)) as events:
            async for event in events:
                if isinstance(event, Tokens):
                    return "left in the middle"
        return "ended before it could be left"

    async def _left_at_once(self, client: Client) -> str:
        async with aclosing(client.generate(self._prompt(), LONG)) as events:
            with suppress(TimeoutError):
                await asyncio.wait_for(anext(events), self._rng.uniform(0, 0.02))
        return "left at once"

    async def _gone_with_its_connection(self, client: Client) -> str:
        async with Client(self._address) as own:
            events = own.generate(self._prompt(), LONG)
            await anext(events)
        with suppress(BoughError, asyncio.CancelledError):
            async for _ in events:
                pass
        return "gone with its connection"

    async def _aborted(self, client: Client) -> str:
        options = self._named(LONG, request_id="aborted")
        async for event in client.generate(self._prompt(), options):
            if isinstance(event, Started):
                with suppress(NotFound):  # the request had ended already
                    await client.abort(options.request_id)
        return "aborted"

    async def _refused(self, client: Client) -> str:
        prompt = TokenPrompt((-1 % 2**31,)) if self._rng.random() < 0.5 else TokenPrompt(tuple(range(200)) * 100)
        try:
            async for _ in client.generate(prompt, SHORT):
                pass
        except BoughError:
            return "refused"
        return "not refused"
