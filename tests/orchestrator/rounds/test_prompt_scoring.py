"""Prompts whose log-probabilities are asked for, at fake targets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tokenizers import processors

from bough.client import Client
from bough.errors import InvalidRequest
from bough.protocol.generation import PromptLogprobs, Resume, TokenPrompt
from bough.tokenization.tokenizer import Tokenizer
from bough.tokenization.vocabulary import TokenizerFiles
from orchestrator.rounds.round import token_begins
from tests.fakes.fleet import Fleet
from tests.fakes.streams import OPTIONS, expected, read
from tests.fakes.waiting import until

SCORED = replace(OPTIONS, max_tokens=5, prompt_logprobs=0)


async def test_a_finished_request_is_not_scored_again(fakes: Fleet) -> None:
    """It was, without a claim: the target's slot was not freed. A client that saw no token has not seen all scores."""
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
            await until(lambda: not target.held and not requests.recorder._logs)


async def test_targets_that_cannot_score_are_named(fakes: Fleet) -> None:
    """An older target draws what follows: it may answer with as many tokens as it got, and has scored none."""
    target, _ = await fakes.target("t")
    _, server = await fakes.orchestrator()
    target.knows_given = False
    async with Client(server.address) as client:
        for prompt in ((64, 27), (64, 27, 27)):
            with pytest.raises(InvalidRequest, match="prompt_logprobs: must be left out, as this target worker is old"):
                await read(client, SCORED, TokenPrompt(prompt))
        await until(lambda: not target.held)


async def test_a_target_whose_trees_have_one_node_scores_nothing(fakes: Fleet) -> None:
    target, _ = await fakes.target("t")
    target.max_nodes = 1
    _, server = await fakes.orchestrator()
    async with Client(server.address) as client:
        with pytest.raises(InvalidRequest, match="prompt_logprobs: must be left out, as this target's trees have one"):
            await read(client, SCORED)
    assert not target.calls


def test_offsets_of_tokens_refer_to_the_text_as_written(byte_tokenizer: TokenizerFiles) -> None:
    """Special tokens were left out of what was counted, though the text that is echoed shows them."""
    text = "a</s>é<s>c"
    plain = Tokenizer(byte_tokenizer)
    inner = plain._tokenizer.from_str(plain._tokenizer.to_str())
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 260)])
    adding = Tokenizer(TokenizerFiles(inner.to_str().encode(), "", ()))
    assert adding.encode(text) == [260, *plain.encode(text)]
    assert token_begins(plain, plain.encode(text)) == (0, 1, 5, 5, 6, 9)
    assert token_begins(adding, adding.encode(text)) == (0, 0, 1, 5, 5, 6, 9)
    assert [one.decode_prompt(one.encode(text)) for one in (plain, adding)] == [text, text]
