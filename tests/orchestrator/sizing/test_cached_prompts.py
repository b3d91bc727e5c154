"""A first round is planned for the tokens that the target has to read, and not for those that it holds already."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from bough.errors import Unavailable
from bough.protocol.decision import Decision
from bough.protocol.generation import Finished, GenerateOptions, Speculation, TokenPrompt, Tokens
from bough.protocol.prefix_hash import BLOCK_TOKENS, block_hashes
from tests.fakes.simulated import pair_of
from tests.fakes.stack import Stack, simulated_stack
from tests.fakes.waiting import until

pytestmark = pytest.mark.slow  # running services are called
HISTORY = tuple(range(3, 3 + 8 * BLOCK_TOKENS))
TURN = TokenPrompt((*HISTORY, 7, 8, 9))
OPTIONS = GenerateOptions(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    async with simulated_stack(tmp_path, pair_of(tmp_path)) as running:
        yield running


async def generated(
    stack: Stack, prompt: TokenPrompt, options: GenerateOptions = OPTIONS
) -> tuple[list[int], Finished, Decision]:
    """The tokens, the end, and the decision about the first round."""
    options = replace(options, request_id=uuid.uuid4().hex)
    events = [event async for event in stack.requests.generate(prompt, options)]
    tokens = [token for event in events if isinstance(event, Tokens) for token in event.token_ids]
    assert isinstance(events[-1], Finished)
    *_, first = (each for each in stack.requests.decisions(options.request_id) if each.number == 1)
    return tokens, events[-1], first


async def held(stack: Stack) -> None:
    """The target has read HISTORY, and the index knows."""
    fingerprint = stack.target.info().model_fingerprint
    await generated(stack, TokenPrompt((*HISTORY, 5)))
    found = {"target": len(HISTORY) // BLOCK_TOKENS}
    hashes = block_hashes(HISTORY)

    async def is_noted() -> bool:
        return await stack.registry.find_prefixes(fingerprint, hashes, ["target"]) == found

    await until(is_noted)


async def test_what_another_request_has_left_is_not_planned_to_be_read_again(stack: Stack) -> None:
    """OpenAI clients name no session: the whole prompt was planned to be read, with a tree to fit."""
    await held(stack)
    tokens, end, first = await generated(stack, TURN)
    assert end.usage.cached_tokens == len(HISTORY)
    assert first.num_context == len(TURN.token_ids) - 1 - len(HISTORY)
    assert first.expected.sweep < 3 * first.seconds.sweep
    named = replace(OPTIONS, session_id="s")
    await generated(stack, TokenPrompt((*HISTORY, 7, 8)), named)
    again, _, of_session = await generated(stack, TURN, named)
    assert first.best_nodes <= 2 * of_session.best_nodes
    plain, _, _ = await generated(stack, TURN, replace(OPTIONS, speculation=Speculation(disabled=True)))
    assert tokens == again == plain


async def test_without_the_index_a_first_tree_is_that_of_a_prompt_that_is_held(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the target holds the prompt is not known then: a small tree loses little if it does not."""
    await held(stack)
    _, _, known = await generated(stack, TURN)

    async def away(*_: object) -> dict[str, int]:
        raise Unavailable("the index is away")

    monkeypatch.setattr(stack.requests.directory.registry, "find_prefixes", away)
    _, end, first = await generated(stack, TURN)
    assert end.usage.cached_tokens == len(HISTORY)
    assert first.best_nodes <= 2 * known.best_nodes
    fresh = TokenPrompt(tuple(range(100, 100 + 3 * BLOCK_TOKENS)))
    _, end, first = await generated(stack, fresh)
    assert end.usage.cached_tokens == 0
    assert first.best_nodes <= 2 * known.best_nodes
    assert first.num_context == len(fresh.token_ids) - 1, "what was read is what is reported"


async def test_a_prompt_that_the_index_has_and_the_target_lost_is_reported_as_read(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its rows would be taken for those of other sessions."""
    found = {"target": len(HISTORY) // BLOCK_TOKENS}

    async def find(*_: object) -> dict[str, int]:
        return found

    monkeypatch.setattr(stack.requests.directory.registry, "find_prefixes", find)
    _, end, first = await generated(stack, TURN)
    assert end.usage.cached_tokens == 0
    assert first.num_context == len(TURN.token_ids) - 1


async def test_rounds_are_counted_to_the_end_of_an_answer(stack: Stack) -> None:
    """The last round, which has one token left and needs no draft, was numbered 1, as if a session had begun."""
    for max_tokens in range(1, 8):
        options = replace(
            OPTIONS, request_id=f"of {max_tokens}", max_tokens=max_tokens, speculation=Speculation(budget=2)
        )
        async for _ in stack.requests.generate(TURN, options):
            pass
        numbers = [each.number for each in stack.requests.decisions(options.request_id)]
        assert numbers == list(range(1, len(numbers) + 1))
