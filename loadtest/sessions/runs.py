"""The measurements of `loadtest.sessions`: concurrent sessions, second turns, shared prompts and long prompts."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from bough.client import Client
from bough.protocol.generation import ChatPrompt, Finished, GenerateOptions, Message, Prompt, TokenPrompt, Tokens

TURN_TOKENS = 48  # of an answer in a conversation
SECOND_QUESTION = "Now say the same in one short sentence."


@dataclass(slots=True)
class Stream:
    """A request and its times."""

    began: float  # seconds on the monotonic clock
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    rounds: list[tuple[float, Tokens]] = field(default_factory=list)  # with their arrival times
    finished: Finished | None = None

    @property
    def ended(self) -> float:
        """Arrival time of the last token."""
        return self.rounds[-1][0]

    @property
    def first_token_seconds(self) -> float:
        return self.rounds[0][0] - self.began

    @property
    def done(self) -> Finished:
        """The last event."""
        assert self.finished is not None, "read to its end"
        return self.finished

    def tokens_between(self, begin: float, end: float) -> int:
        """Number of tokens that arrived after `begin` and until `end`."""
        return sum(len(tokens.token_ids) for moment, tokens in self.rounds if begin < moment <= end)


async def stream(client: Client, prompt: Prompt, options: GenerateOptions) -> Stream:
    """Send a request and read it to its end."""
    received = Stream(time.monotonic())
    async for event in client.generate(prompt, options):
        if isinstance(event, Tokens):
            received.rounds.append((time.monotonic(), event))
            received.token_ids += event.token_ids
            received.text += event.text
        elif isinstance(event, Finished):
            received.text += event.text
            received.finished = event
    return received


class Together(NamedTuple):
    """Concurrent sessions, each with one prompt after another."""

    num_sessions: int
    numbers: tuple[int, ...]  # of all prompts
    streams: list[Stream]  # in the same order: all sessions' first ones, all second ones, and so on
    seconds: float  # from the first request to the last token

    @property
    def num_tokens(self) -> int:
        return sum(len(each.token_ids) for each in self.streams)

    @property
    def steady_rate(self) -> float:
        """Tokens per second from the time when all have a first token until the first session ends."""
        begin = max(each.rounds[0][0] for each in self.streams[: self.num_sessions])
        end = min(each.ended for each in self.streams[-self.num_sessions :])
        num_tokens = sum(each.tokens_between(begin, end) for each in self.streams)
        return num_tokens / (end - begin) if end > begin else 0.0


async def together(
    client: Client, num_sessions: int, numbers: Sequence[int], prompts: Sequence[Prompt], options: GenerateOptions
) -> Together:
    """Distribute prompts among concurrent sessions; each sends the next one after its answer."""

    async def run(own: Sequence[int]) -> list[Stream]:
        return [await stream(client, prompts[number], options) for number in own]

    began = time.monotonic()
    dealt = [numbers[first::num_sessions] for first in range(num_sessions)]
    by_session = await asyncio.gather(*map(run, dealt))
    streams = [each for turn in zip(*by_session, strict=True) for each in turn]
    return Together(num_sessions, tuple(numbers), streams, max(each.ended for each in streams) - began)


class SecondTurn(NamedTuple):
    """The cost of a conversation's second question."""

    sweeps: float  # time to the first token / time of a sweep
    cached_share: float  # share of the first turn's tokens that were cached


async def second_turn(client: Client, question: str, *, sends_new: bool) -> SecondTurn:
    """Ask two questions; the second call sends only the new message, or the whole conversation."""
    session_id = f"turns-{uuid.uuid4().hex}"
    options = GenerateOptions(session_id=session_id, temperature=0.0, max_tokens=TURN_TOKENS)
    first_question, second_question = Message("user", question), Message("user", SECOND_QUESTION)
    first = await stream(client, ChatPrompt((first_question,)), options)
    if sends_new:
        prompt = ChatPrompt((second_question,))
        options = GenerateOptions(session_id=session_id, temperature=0.0, max_tokens=8, continues=True)
    else:
        prompt = ChatPrompt((first_question, Message("assistant", first.text), second_question))
        options = GenerateOptions(session_id=session_id, temperature=0.0, max_tokens=8)
    second = await stream(client, prompt, options)
    usage = first.done.usage
    history = usage.prompt_tokens + usage.completion_tokens
    return SecondTurn(
        second.first_token_seconds / sweep_seconds(first), min(1.0, second.done.usage.cached_tokens / history)
    )


def sweep_seconds(alone: Stream) -> float:
    """Seconds of one session's sweep: the median over rounds without the first, which reads the prompt."""
    rounds = [tokens.timings for _, tokens in alone.rounds[1:] or alone.rounds]
    return statistics.median((timings.target_ns - timings.queue_ns) / 1e9 for timings in rounds)


class SharedPrompt(NamedTuple):
    """Sessions with a common prefix."""

    prompt_tokens: int  # of all sessions
    computed_tokens: int  # of these, computed instead of reused
    times_computed: float  # how often the common prefix was computed; 1 is best


async def shared_prompt(client: Client, shared: Sequence[int], rests: Sequence[Sequence[int]]) -> SharedPrompt:
    """Run sessions with a common prefix concurrently; `rests` are their own tokens."""
    options = GenerateOptions(temperature=0.0, max_tokens=4, ignore_eos=True)
    prompts = [TokenPrompt((*shared, *rest)) for rest in rests]
    streams = await asyncio.gather(*(stream(client, prompt, options) for prompt in prompts))
    usages = [each.done.usage for each in streams]
    computed = sum(usage.prompt_tokens - usage.cached_tokens for usage in usages)
    times = (computed - sum(map(len, rests))) / len(shared)
    return SharedPrompt(sum(usage.prompt_tokens for usage in usages), computed, times)


class LongPrompt(NamedTuple):
    """The cost of a long prompt during other sessions' answers."""

    prompt_tokens: int
    longest_pause_sweeps: float  # longest time between two rounds of the others, relative to the typical time before
    first_token_sweeps: float  # TTFT of the prompt, relative to the same


async def long_prompt(
    client: Client, others: Sequence[Prompt], tokens: Sequence[int], options: GenerateOptions
) -> LongPrompt:
    """The prompt comes when the others have had a few rounds, as many as one more of them takes for some tokens."""

    async def later() -> Stream:
        some, few = (replace(options, max_tokens=count) for count in (16, 2))
        await stream(client, others[0], some)
        return await stream(client, TokenPrompt(tuple(tokens)), few)

    long, *answers = await asyncio.gather(later(), *(stream(client, prompt, options) for prompt in others))
    pauses = [
        (after, after - before)
        for each in answers
        for before, after in itertools.pairwise(moment for moment, _ in each.rounds)
    ]
    end = long.began + long.first_token_seconds
    typical = statistics.median(pause for after, pause in pauses if after <= long.began)
    meanwhile = max((pause for after, pause in pauses if long.began < after <= end), default=0.0)
    return LongPrompt(len(tokens), meanwhile / typical, long.first_token_seconds / typical)
