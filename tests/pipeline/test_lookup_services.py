"""Generation whose guesses come from the session's own text, alone and with a draft worker's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from bough.client import Client
from bough.config.processes import OrchestratorConfig, parse
from bough.health.problems import find_problems
from bough.processes.launch import Cluster
from bough.protocol.generation import Finished, GenerateOptions, Speculation, TokenPrompt, Tokens
from bough.trees.tree_plan import Scheme, StaticShape
from orchestrator.assembly import assembled
from tests.fakes.tiers import long_but
from tests.fakes.waiting import until

PASSAGE = tuple(range(40, 60))
PROMPT = TokenPrompt(PASSAGE * 4)
TWO_WORDS = {65: 50.0, 66: 50.0}
PLAIN = Speculation(disabled=True)
SIZE = Speculation(budget=32)  # where rounds are counted: a size that is chosen follows from what sweeps take here
GREEDY = GenerateOptions(max_tokens=60, temperature=0.0, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.8, seed=5)
PENALISED = replace(SAMPLED, repetition_penalty=1.2, frequency_penalty=0.2, logit_bias={45: 3.0}, logprobs=1)

OPTIONS = {"greedy": GREEDY, "sampled": SAMPLED, "penalised": PENALISED}


@pytest.fixture(scope="module")
async def draftless(tiny_cluster: Cluster) -> AsyncIterator[Client]:
    """The cluster's target, served without any draft worker by another orchestrator."""
    flags = ["--index-url", tiny_cluster.index_url, "--draft", "none", "--port", "0", "--metrics-port", "-1"]
    async with assembled(parse(OrchestratorConfig, "o", flags, {}), asyncio.Event()) as orchestrator:
        await until(lambda: orchestrator.directory.has_target)
        async with Client(f"127.0.0.1:{orchestrator.port}") as client:
            yield client


@pytest.fixture
async def drafting(tiny_cluster: Cluster) -> AsyncIterator[Client]:
    async with Client(tiny_cluster.address) as client:
        yield client


async def generate(client: Client, options: GenerateOptions) -> tuple[list[Tokens], Finished]:
    """The rounds and the end of a request."""
    events = [event async for event in client.generate(PROMPT, options)]
    assert isinstance(events[-1], Finished)
    return [event for event in events if isinstance(event, Tokens)], events[-1]


def output(rounds: list[Tokens]) -> list[tuple[int, object]]:
    """Tokens with their log-probabilities, where asked for."""
    ids = [token for event in rounds for token in event.token_ids]
    logprobs = [entry for event in rounds for entry in event.logprobs] or [None] * len(ids)
    return list(zip(ids, logprobs, strict=True))


@pytest.mark.parametrize("options", long_but([PENALISED], OPTIONS.values()), ids=OPTIONS)
async def test_lookup_gives_plain_decodings_output(
    draftless: Client, drafting: Client, options: GenerateOptions
) -> None:
    plain, _ = await generate(draftless, replace(options, speculation=PLAIN))
    runs = await asyncio.gather(
        *(
            generate(client, replace(options, speculation=Speculation(lookup=lookup)))
            for client in (draftless, drafting)
            for lookup in (2, 31)
        )
    )
    for rounds, _ in runs:
        assert output(rounds) == output(plain)


async def test_repetitive_text_has_more_tokens_per_round(draftless: Client) -> None:
    """A text of only two words has already said what comes next."""
    options = replace(GREEDY, max_tokens=200, logit_bias=TWO_WORDS, speculation=SIZE)
    rounds, finished = await generate(draftless, options)
    metrics = finished.speculation
    assert metrics.tokens_per_round > 2.5
    assert metrics.num_lookup_tokens == sum(event.num_lookup for event in rounds)
    assert metrics.num_lookup_tokens == sum(sum(event.drafted) for event in rounds)
    _, without = await generate(draftless, replace(GREEDY, logit_bias=TWO_WORDS, speculation=Speculation(lookup=0)))
    assert without.speculation.tokens_per_round == 1.0


async def test_a_token_guessed_by_both_counts_for_the_draft(drafting: Client) -> None:
    _, both = await generate(drafting, replace(GREEDY, speculation=SIZE))
    _, draft_alone = await generate(drafting, replace(GREEDY, speculation=replace(SIZE, lookup=0)))
    assert draft_alone.speculation.num_lookup_tokens == 0
    assert both.speculation.num_lookup_tokens < both.speculation.num_accepted_tokens
    # What is looked up takes places of the draft's guesses in a tree of one size: a round or two more is chance.
    assert both.speculation.num_rounds <= 1.1 * draft_alone.speculation.num_rounds + 1


async def test_trees_are_no_larger_than_requested(drafting: Client, draftless: Client) -> None:
    sizes = Speculation(budget=6, depth=2, lookup=31)
    for client in (drafting, draftless):
        rounds, _ = await generate(client, replace(GREEDY, speculation=sizes))
        assert max(event.num_nodes for event in rounds) <= 6
        assert max(event.tree_depth for event in rounds) <= 2


async def test_a_deliberately_missing_draft_is_no_problem(draftless: Client) -> None:
    _, finished = await generate(draftless, GREEDY)
    assert finished.warnings == ()
    assert finished.speculation.num_degraded_rounds == 0
    server = await draftless.server_info()
    assert server.is_draftless
    assert find_problems(server) == []


@pytest.mark.parametrize("scheme", [Scheme.WITHOUT_REPLACEMENT, Scheme.TRAVERSAL])
async def test_lookups_are_added_to_samples_on_request(drafting: Client, scheme: Scheme) -> None:
    """That the distribution stays the target's is shown in tests/target_worker/verification/test_traversal.py."""
    sampling = Speculation(growth=StaticShape.chains(2, 3), scheme=scheme)
    options = replace(SAMPLED, logit_bias=TWO_WORDS, logprobs=0)
    alone, finished = await generate(drafting, replace(options, speculation=sampling))
    assert finished.speculation.num_lookup_tokens == 0
    assert max(event.num_nodes for event in alone) <= 7
    both, finished = await generate(drafting, replace(options, speculation=replace(sampling, lookup=20)))
    assert finished.speculation.num_lookup_tokens > 0
    assert 7 < max(event.num_nodes for event in both) <= 27
    assert len(both) < len(alone), "it takes fewer rounds"


async def test_without_samples_lookups_are_verified_by_the_targets_own_draws(
    draftless: Client,
) -> None:
    options = replace(SAMPLED, logit_bias=TWO_WORDS)
    plain, _ = await generate(draftless, replace(options, speculation=PLAIN))
    way = Speculation(growth=StaticShape.chains(2, 3), scheme=Scheme.WITHOUT_REPLACEMENT, lookup=20)
    rounds, finished = await generate(draftless, replace(options, speculation=way))
    assert finished.speculation.num_lookup_tokens > 0
    assert output(rounds) == output(plain)
