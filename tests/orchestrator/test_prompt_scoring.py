"""Prompts whose log-probabilities are asked for, at fake targets."""

from __future__ import annotations

from dataclasses import replace

from bough.client import Client
from bough.protocol.generation import PromptLogprobs, Resume
from tests.fakes.fleet import Fleet
from tests.fakes.streams import OPTIONS, expected, read, until

SCORED = replace(OPTIONS, max_tokens=5, prompt_logprobs=0)


async def test_a_request_that_is_finished_is_not_scored_again(fakes: Fleet) -> None:
    """It was, without a claim: nobody freed the target's slot. A client that saw no token has not seen all scores."""
    target, _ = await fakes.target("t")
    requests, server = await fakes.orchestrator()
    async with Client(server.address) as client:
        whole = await read(client, SCORED)
        assert whole.token_ids == expected(fakes, SCORED)
        await fakes.written("r")
        await until(lambda: not target.held)
        for num_seen, scores, num_tokens in ((5, 0, 0), (0, 1, 5)):
            target.calls.clear()
            rest = await read(client, replace(SCORED, resume=Resume(num_seen, tuple(whole.token_ids[:num_seen]))))
            assert sum(isinstance(event, PromptLogprobs) for event in rest.events) == 2 * scores
            assert len(rest.token_ids) == num_tokens
            assert bool(target.calls) == bool(scores)
            await until(lambda: not target.held and not requests._recorder._logs)
