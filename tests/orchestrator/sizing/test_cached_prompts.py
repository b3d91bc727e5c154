"""A first round is planned for the tokens that the target has to read; rounds are reported with predictions."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bough.cli.inspection.doctor import doctor
from bough.cli.main import argument_parser
from bough.client import Client
from bough.errors import Unavailable
from bough.protocol.decision import Decision
from bough.protocol.generation import Finished, GenerateOptions, Speculation, TokenPrompt, Tokens
from bough.protocol.ids import ScopedId
from bough.protocol.prefix_hash import BLOCK_TOKENS, block_hashes
from orchestrator.sizing.plans import Situation
from tests.fakes.simulated import pair_of
from tests.fakes.stack import Stack, simulated_stack
from tests.fakes.stack import stack as real_stack
from tests.fakes.waiting import until

pytestmark = pytest.mark.slow  # running services are called


HISTORY = tuple(range(3, 3 + 8 * BLOCK_TOKENS))
TURN = TokenPrompt((*HISTORY, 7, 8, 9))
FOUND = {"target": len(HISTORY) // BLOCK_TOKENS}  # blocks of it that the index has
OPTIONS = GenerateOptions(max_tokens=12, temperature=0.0, ignore_eos=True)
NAMED = replace(OPTIONS, session_id="s")


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    async with simulated_stack(tmp_path, pair_of(tmp_path)) as running:
        yield running


async def generated(
    stack: Stack, prompt: TokenPrompt, options: GenerateOptions = OPTIONS
) -> tuple[list[int], int, Decision]:
    """The tokens, those of the prompt that were cached, and the decision about the first round."""
    options = replace(options, request_id=uuid.uuid4().hex)
    events = [event async for event in stack.requests.generate(prompt, options)]
    tokens = [token for event in events if isinstance(event, Tokens) for token in event.token_ids]
    assert isinstance(events[-1], Finished)
    *_, first = (each for each in stack.requests.decisions(ScopedId(options.request_id)) if each.number == 1)
    return tokens, events[-1].usage.cached_tokens, first


async def planned(stack: Stack, prompt: TokenPrompt, options: GenerateOptions = OPTIONS) -> tuple[int, int, int]:
    """Tokens before the first tree: planned to be read, reported as read, and cached."""
    situations: list[Situation] = []
    with pytest.MonkeyPatch.context() as patch:
        plan = stack.requests.sizer.plan
        patch.setattr(
            stack.requests.sizer, "plan", lambda situation: (situations.append(situation), plan(situation))[1]
        )
        _, num_cached, first = await generated(stack, prompt, options)
    return situations[0].num_context, first.num_context, num_cached


async def held(stack: Stack) -> None:
    """The target has read HISTORY, and the index knows."""
    fingerprint = stack.target.info().model_fingerprint
    await generated(stack, TokenPrompt((*HISTORY, 5)))

    async def is_noted() -> bool:
        return await stack.registry.find_prefixes(fingerprint, block_hashes(HISTORY), ["target"]) == FOUND

    await until(is_noted)


async def test_a_prefix_of_another_request_is_planned_as_cached(stack: Stack) -> None:
    """OpenAI clients name no session: the whole prompt was planned to be read, with a tree to fit."""
    assert await planned(stack, TokenPrompt((*HISTORY, 6))) == (len(HISTORY), len(HISTORY), 0)
    await held(stack)
    assert await planned(stack, TURN) == (2, 2, len(HISTORY))
    assert await planned(stack, TURN, NAMED) == (2, 2, len(HISTORY)), "the session is new, the prompt is not"


async def test_the_next_turn_may_come_before_the_index_has_the_last(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions are recorded behind their streams, some milliseconds later: one turn in ten came before that."""
    note = stack.registry.note_prefixes

    async def slow(*arguments: Any) -> None:
        await asyncio.sleep(0.03)
        await note(*arguments)

    monkeypatch.setattr(stack.registry, "note_prefixes", slow)
    monkeypatch.setattr(stack.requests.recorder, "noting_seconds", 30.0)  # a slow machine decides nothing
    await generated(stack, TokenPrompt((*HISTORY, 5)), replace(OPTIONS, max_tokens=1))
    assert await planned(stack, TURN) == (2, 2, len(HISTORY))


async def test_a_sessions_name_changes_no_token(stack: Stack) -> None:
    unnamed, _, _ = await generated(stack, TURN)
    again, num_cached, _ = await generated(stack, TURN)
    named, _, _ = await generated(stack, TURN, NAMED)
    plain, _, _ = await generated(stack, TURN, replace(OPTIONS, speculation=Speculation(disabled=True)))
    assert num_cached == len(HISTORY)
    assert unnamed == again == named == plain


async def test_without_the_index_a_prompt_is_planned_as_cached(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the target holds it is not known then: a small tree loses little if it does not."""
    await held(stack)

    async def away(*_: object) -> dict[str, int]:
        raise Unavailable("the index is away")

    monkeypatch.setattr(stack.requests.directory.registry, "find_prefixes", away)
    assert await planned(stack, TURN) == (2, 2, len(HISTORY))
    new = TokenPrompt(tuple(range(100, 101 + 3 * BLOCK_TOKENS)))
    assert await planned(stack, new) == (0, 3 * BLOCK_TOKENS, 0), "what was read is what is reported"
    stack.requests.directory.index_problem = "the index is away"
    assert await planned(stack, TokenPrompt((*new.token_ids[1:], 4))) == (0, 3 * BLOCK_TOKENS, 0)


async def test_a_prompt_in_the_index_that_the_target_lost_is_reported_as_read(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its rows would be taken for those of other sessions."""

    async def find(*_: object) -> dict[str, int]:
        return FOUND

    monkeypatch.setattr(stack.requests.directory.registry, "find_prefixes", find)
    assert await planned(stack, TURN) == (2, len(HISTORY) + 2, 0)


async def test_rounds_are_counted_to_the_end_of_an_answer(stack: Stack) -> None:
    """The last round, which has one token left and needs no draft, was numbered 1, as if a session had begun."""
    for max_tokens in range(1, 8):
        options = replace(
            OPTIONS, request_id=f"of {max_tokens}", max_tokens=max_tokens, speculation=Speculation(budget=2)
        )
        async for _ in stack.requests.generate(TURN, options):
            pass
        numbers = [each.number for each in stack.requests.decisions(ScopedId(options.request_id))]
        assert numbers == list(range(1, len(numbers) + 1))


async def test_a_running_system_reports_expected_and_realised_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What expectations are worth on a random model of one layer is another matter: they are there, and move."""
    always = Speculation(
        budget=8, lookup=0
    )  # trees that size themselves may send no guesses of a draft that costs much
    options = GenerateOptions(max_tokens=40, temperature=0.0, ignore_eos=True, speculation=always)
    async with real_stack(tmp_path) as running, Client(address := running.addresses["orchestrator"]) as client:
        assert await client.calibrations() == ()
        events = [event async for event in client.generate(TokenPrompt((40, 41, 42)), options)]
        (report,) = await client.calibrations()
        assert await doctor(argument_parser().parse_args(["doctor", "--address", address])) == 0
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert 1 <= report.num_rounds <= finished.speculation.num_rounds  # a draft may be asked only now and then
    assert 1.0 <= report.realised_tokens < 40
    assert 1.0 < report.expected_tokens < 32
    told = r"tokens a round of [0-9.]+ s, where [0-9.]+ tokens and [0-9.]+ s were expected"
    assert re.search(told, capsys.readouterr().out)
