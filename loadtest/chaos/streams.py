"""Runs streams during fault injection, and compares each with its undisturbed text, token for token."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher

from bough.client import Client
from bough.errors import BoughError, NotFound, PrefixMissing
from bough.protocol.generation import GenerateOptions, Prompt, TokenPrompt
from loadtest.common.streams import Stream, stream

logger = logging.getLogger(__name__)

HANG_SECONDS = 120.0  # without a token, after which a stream counts as hung


@dataclass(frozen=True, slots=True)
class Turn:
    """A request of a conversation: its message and options."""

    token_ids: tuple[int, ...]
    options: GenerateOptions


@dataclass(frozen=True, slots=True)
class Script:
    """A conversation of one or several turns in one session."""

    turns: tuple[Turn, ...]
    sends_new: bool  # whether later turns send only the new message, instead of the whole history


@dataclass(frozen=True, slots=True)
class Answer:
    """A turn's result without faults."""

    token_ids: tuple[int, ...]
    text: str


@dataclass(slots=True)
class Tally:
    """Totals of all streams."""

    finished: int = 0
    statuses: Counter[str] = field(default_factory=Counter)  # of streams that ended with an error, by its name
    unclear: Counter[str] = field(default_factory=Counter)  # ends without a proper status
    hung: int = 0
    unequal: int = 0
    lost_tokens: int = 0
    repeated_tokens: int = 0
    tokens: int = 0
    sent_again: int = 0  # turns that sent the whole history again, as their session was gone

    def compare(self, received: Stream, wanted: Answer) -> bool:
        """Count missing and extra tokens; of an unfinished stream only those before its end."""
        is_whole = received.finished is not None
        tokens = wanted.token_ids if is_whole else wanted.token_ids[: len(received.token_ids)]
        self.tokens += len(received.token_ids)
        is_text_equal = received.text == wanted.text if is_whole else wanted.text.startswith(received.text)
        if tuple(received.token_ids) == tokens and is_text_equal:
            return True
        self.unequal += 1
        for tag, low, high, first, last in SequenceMatcher(None, tokens, received.token_ids, False).get_opcodes():
            if tag != "equal":
                self.lost_tokens += high - low
                self.repeated_tokens += last - first
        return False


def make_scripts(num: int, rng: random.Random, vocab_size: int, max_length: int) -> list[Script]:
    """Greedy and sampled conversations of one and three turns, of at most `max_length` tokens."""
    scripts = []
    for number in range(num):
        num_turns = 3 if number % 3 == 2 else 1
        room = max_length // num_turns
        turns = []
        for _ in range(num_turns):
            num_tokens = rng.randrange(4, room // 3)
            options = GenerateOptions(
                temperature=0.0 if number % 2 == 0 else rng.choice((0.5, 0.8, 1.0)),
                top_p=rng.choice((0.9, 1.0)),
                seed=rng.getrandbits(64),
                repetition_penalty=rng.choice((1.0, 1.0, 1.2)),
                max_tokens=rng.randrange(room // 4, room // 2),
                ignore_eos=True,
            )
            turns.append(Turn(tuple(rng.randrange(vocab_size) for _ in range(num_tokens)), options))
        scripts.append(Script(tuple(turns), sends_new=number % 6 == 5))
    return scripts


async def undisturbed(client: Client, script: Script) -> list[Answer]:
    """The expected answers: every turn as a separate request with the whole history."""
    history: tuple[int, ...] = ()
    answers = []
    for turn in script.turns:
        history += turn.token_ids
        received = await stream(client, TokenPrompt(history), turn.options)
        answers.append(Answer(tuple(received.token_ids), received.text))
        history += answers[-1].token_ids
    return answers


class Streams:
    """Runs many scripts at once until it is stopped."""

    def __init__(
        self,
        addresses: Sequence[str],
        scripts: Sequence[Script],
        answers: Sequence[Sequence[Answer]],
        name: str = "chaos",
    ) -> None:
        """Session names are `name` and a number."""
        self.tally = Tally()
        self.running: dict[str, Stream] = {}  # by session
        self.ended: list[tuple[str, Stream]] = []  # session and stream, of those that finished
        self._addresses = list(addresses)
        self._pairs = list(zip(scripts, answers, strict=True))
        self._is_over = asyncio.Event()
        self._name, self._num_started = name, 0

    def stop(self) -> None:
        """Begin no further scripts."""
        self._is_over.set()

    async def run(self, num_at_once: int, rng: random.Random) -> None:
        """Run scripts until `stop`, and then until the running ones have ended."""
        async with asyncio.TaskGroup() as group:
            for _ in range(num_at_once):
                group.create_task(self._run_one_after_another(random.Random(rng.random())))

    async def _run_one_after_another(self, rng: random.Random) -> None:
        while not self._is_over.is_set():
            script, answers = rng.choice(self._pairs)
            self._num_started += 1
            session_id = f"{self._name}-{self._num_started}"
            rng.shuffle(addresses := [*self._addresses])
            async with Client(*addresses) as client:
                is_whole = await self._converse(client, session_id, script, answers)
            if not is_whole:
                await asyncio.sleep(rng.uniform(0.1, 0.5))  # as callers do that were refused with a retry delay

    async def _converse(self, client: Client, session_id: str, script: Script, answers: Sequence[Answer]) -> bool:
        """Run a conversation up to its first failed turn; returns whether all turns finished."""
        history: tuple[int, ...] = ()
        for turn, answer in zip(script.turns, answers, strict=True):
            options = replace(turn.options, session_id=session_id)
            whole = history + turn.token_ids
            received = None
            if history and script.sends_new:
                continued = replace(options, continues=True)
                received = await self._stream(client, TokenPrompt(turn.token_ids), continued, answer)
            if received is None:
                received = await self._stream(client, TokenPrompt(whole), options, answer)
            if received is None or received.finished is None:
                return False
            history = whole + answer.token_ids
        return True

    async def _stream(self, client: Client, prompt: Prompt, options: GenerateOptions, answer: Answer) -> Stream | None:
        """Run one turn; None if its session is gone and the whole history must be sent."""
        received = self.running[options.session_id] = Stream(time.monotonic())
        try:
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(HANG_SECONDS) as limit:
                await received.take(client, prompt, options, lambda: limit.reschedule(loop.time() + HANG_SECONDS))
            if received.finished is None:
                self.tally.unclear["ended without a status"] += 1
        except TimeoutError:
            self.tally.hung += 1
        except BoughError as exc:
            if options.continues and isinstance(exc, NotFound | PrefixMissing) and not received.token_ids:
                self.tally.sent_again += 1
                return None
            kind = self.tally.unclear if type(exc) is BoughError else self.tally.statuses
            kind[f"{exc}"[:200] if type(exc) is BoughError else type(exc).__name__] += 1
            logger.warning("%s of %s ended: %r", options.request_id or "a request", options.session_id, exc)
        finally:
            del self.running[options.session_id]
        self.tally.finished += received.finished is not None
        self.tally.compare(received, answer)
        if received.finished is not None:
            self.ended.append((options.session_id, received))
        return received
