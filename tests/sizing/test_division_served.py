"""Sessions that share sweeps, through running services: the target divides each among them, and says how."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bough.client import Client
from bough.protocol.decision import Decision, Mode
from bough.protocol.generation import GenerateOptions, Speculation, Started, TextPrompt, Tokens
from tests.fakes.simulated import pair_of, text_of
from tests.fakes.stack import simulated_stack

pytestmark = pytest.mark.slow
# Every row takes half as long as a sweep of one: nothing is free, and every session in a sweep delays all.
STEEP = {"compute_base_seconds": 0.2, "compute_row_seconds": 0.1, "kv_tokens": 16384}
NUM_TOKENS = 80


async def answered(client: Client, seed: int, speculation: Speculation) -> tuple[int, list[int], list[Decision]]:
    """Where the output begins, its tokens, and what was decided about its rounds."""
    options = GenerateOptions(
        max_tokens=NUM_TOKENS, temperature=0.8, seed=seed, ignore_eos=True, speculation=speculation
    )
    events = [event async for event in client.generate(TextPrompt("Once upon a time"), options)]
    assert isinstance(events[0], Started)
    tokens = [token for event in events if isinstance(event, Tokens) for token in event.token_ids]
    return events[0].prompt_tokens, tokens, [*await client.decisions(events[0].request_id)]


async def test_sessions_in_a_shared_sweep_learn_which_nodes_were_left_out(tmp_path: Path) -> None:
    """Four size themselves; a fifth has a size of its own, of which nothing may be left out."""
    pair = pair_of(tmp_path, target=STEEP, clock_scale=50)
    ways = [*([Speculation()] * 4), Speculation(budget=6, lookup=0)]
    async with simulated_stack(tmp_path, pair) as running, Client(running.addresses["orchestrator"]) as client:
        answers = await asyncio.gather(*(answered(client, seed, way) for seed, way in enumerate(ways)))
    for seed, (begin, tokens, _) in enumerate(answers):
        assert tokens == text_of(pair, seed, begin, NUM_TOKENS)
    sized = [decision for _, _, decisions in answers[:4] for decision in decisions]
    assert sum(decision.num_left_out for decision in sized) > 10, "the target divides, not only those who ask"
    assert all(decision.num_left_out < max(1, decision.num_sent) for decision in sized), "a root is verified always"
    assert all(decision.num_left_out == 0 for decision in answers[4][2])
    assert {decision.mode for decision in answers[4][2][:-1]} == {Mode.FIXED}
