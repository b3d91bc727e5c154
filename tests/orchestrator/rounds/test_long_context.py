"""What a round takes of the event loop does not grow with the context."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from bough.protocol.generation import Finished, GenerateOptions, TokenPrompt, Tokens
from bough.protocol.ids import ScopedId
from bough.protocol.prefix_hash import CHECKPOINT_TOKENS, TokenHistory
from orchestrator.opening import opening
from tests.fakes.fleet import Fleet
from tests.fakes.stage import MAX_CONTEXT, Stage, orchestrating

NUM_ROUNDS = 50
OPTIONS = GenerateOptions(max_tokens=NUM_ROUNDS, temperature=0.0, session_id="long")


class Reads:
    """Tokens that were read of histories since the last time it was asked."""

    def __init__(self) -> None:
        self.num = 0

    def taken(self) -> int:
        num, self.num = self.num, 0
        return num


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    reads, read = Reads(), TokenHistory.read

    def counted(self: TokenHistory, begin: int, end: int) -> array[int]:
        reads.num += end - begin
        return read(self, begin, end)

    monkeypatch.setattr(TokenHistory, "read", counted)
    return reads


async def test_a_round_only_reads_a_few_of_a_sessions_tokens(stage: Stage, reads: Reads) -> None:
    """Hashes for the target and the index, records, the root: 31 ms a round at 131,000 tokens, when each read all."""
    prompt = TokenPrompt(tuple(number % 257 for number in range(MAX_CONTEXT - NUM_ROUNDS - 1)))
    by_round = []
    async with orchestrating(stage, "--lookup", "0") as orchestrator:
        async for event in orchestrator.requests.generate(prompt, OPTIONS):
            if isinstance(event, Tokens):
                by_round.append(reads.taken())
        assert isinstance(event, Finished)
        record = await stage.registry.load_session(ScopedId("long"))
        again = replace(OPTIONS, max_tokens=1)
        history: Sequence[int] = () if record is None else record.tokens
        assert tuple(history[: len(prompt.token_ids)]) == prompt.token_ids
        assert len(history) == MAX_CONTEXT - 1
        ends = [e async for e in orchestrator.requests.generate(TokenPrompt(tuple(history)), again)][-1]
        assert isinstance(ends, Finished)
        assert ends.usage.cached_tokens == len(history) - 1
    assert by_round[0] > len(prompt.token_ids)  # which are sent to the target
    # The first records are written during one of these rounds: all tokens for the session, the request and the blocks.
    assert sum(by_round[1:]) < 4 * MAX_CONTEXT + NUM_ROUNDS * 6 * CHECKPOINT_TOKENS


async def test_a_long_prompt_is_copied_and_hashed_off_the_event_loop(
    fakes: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each took the event loop 19 ms at 131,000 tokens, with several targets to choose from."""
    threads: dict[str, set[threading.Thread]] = {"hash": set(), "copy": set()}
    create, hash_blocks = TokenHistory.__init__, opening.block_hashes

    def created(self: TokenHistory, tokens: Iterable[int] = ()) -> None:
        threads["copy"].add(threading.current_thread())
        create(self, tokens)

    def hashed(*args: Any, **kwargs: Any) -> list[int]:
        threads["hash"].add(threading.current_thread())
        return hash_blocks(*args, **kwargs)

    for name in ("a", "b"):
        await fakes.target(name)
    requests, _ = await fakes.orchestrator(num_targets=2)
    monkeypatch.setattr(TokenHistory, "__init__", created)
    monkeypatch.setattr(opening, "block_hashes", hashed)
    options = GenerateOptions(request_id="r", max_tokens=2)
    events = [event async for event in requests.generate(TokenPrompt((1,) * 200), options)]
    assert isinstance(events[-1], Finished)
    assert threads["copy"]
    assert threads["hash"]
    assert threading.main_thread() not in threads["copy"] | threads["hash"]
