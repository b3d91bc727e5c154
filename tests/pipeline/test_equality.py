"""Speculation is invisible (docs/design.md, rule 2): any way to speculate gives plain decoding's output, over services.

Tokens, pieces of text, log-probabilities and the way it ends, compared for equality. Sampling is varied together with
temperature and seed so that every setting meets every way to speculate, and meets greedy decoding and chance.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import NamedTuple

import pytest

from bough.client import Client
from bough.processes.launch import Cluster
from bough.protocol.generation import Constraint, Finished, GenerateOptions, Speculation, TokenPrompt, Tokens
from bough.trees.tree_plan import Scheme, StaticShape
from tests.fakes.tiers import long_but

# A passage that comes back, so that there is something to look up.
PROMPT = TokenPrompt((*range(40, 56), *range(60, 72), *range(40, 56)))
PLAIN = Speculation(disabled=True)
SHAPE = StaticShape((0, 0, 0, 1, 1, 2, 4, 4, 7))
WAYS = {
    "self-sized": Speculation(),
    "self-sized, not looked up": Speculation(lookup=0),
    "best-first": Speculation(budget=32, lookup=0),
    "best-first, looked up": Speculation(budget=32, lookup=31),
    "narrow": Speculation(budget=6, width=1, depth=4, lookup=2),
    "shape": Speculation(growth=SHAPE, lookup=0),
    "shape, looked up": Speculation(growth=SHAPE, lookup=5),
    "chain": Speculation(growth=StaticShape.chains(1, 5), lookup=0),
    "chains": Speculation(growth=StaticShape.chains(3, 4), lookup=4),
}
ENDS = frozenset(range(0, 262, 9))
LETTERS = dict.fromkeys(range(66, 92), 12.0)
GREEDY = GenerateOptions(max_tokens=24, temperature=0.0, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.8)
RECORDS = Constraint(
    json_schema='{"type": "array", "items": {"type": "object", "additionalProperties": {"type": "null"}}}'
)
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3}
REQUESTS = {
    "greedy": replace(GREEDY, logprobs=3),
    "greedy, penalties": replace(GREEDY, **PENALTIES, logprobs=0),
    "greedy, bias and penalties": replace(GREEDY, logit_bias={45: 9.0, 70: 9.0, 71: -100.0}, frequency_penalty=2.0),
    "greedy, ends by itself": replace(GREEDY, ignore_eos=False, stop_token_ids=ENDS),
    "greedy, no end before": replace(GREEDY, ignore_eos=False, stop_token_ids=ENDS, min_tokens=15, include_stop=True),
    "sampled": replace(SAMPLED, seed=1, logprobs=2),
    "sampled, no end before": replace(SAMPLED, seed=4, stop_token_ids=ENDS, min_tokens=12, logprobs=1),
    "top-k": replace(SAMPLED, seed=2, top_k=5, repetition_penalty=1.3),
    "top-p": replace(SAMPLED, seed=3, top_p=0.7, logit_bias={50: 4.0}, logprobs=1),
    "min-p": replace(SAMPLED, seed=4, min_p=0.1, presence_penalty=0.7, frequency_penalty=0.2),
    "top-n-sigma": replace(SAMPLED, temperature=1.5, seed=7, top_n_sigma=1.0, top_p=0.95),
    "all at once": replace(
        SAMPLED, seed=2**64 - 1, top_k=40, top_p=0.95, min_p=0.01, logit_bias=LETTERS, logprobs=4, **PENALTIES
    ),
    "greedy, JSON": replace(GREEDY, ignore_eos=False, constraint=RECORDS, logprobs=1),
    "sampled, JSON": replace(SAMPLED, ignore_eos=False, seed=6, constraint=RECORDS, frequency_penalty=0.2, top_p=0.9),
    "hot": replace(SAMPLED, temperature=1.6, seed=5, stop_token_ids=frozenset(range(3, 262, 20))),
}
# Other requests have their parameters too. The suite asks these in tests/sizing/test_random_sizes.py alone.
PARTS = (
    "greedy, penalties",
    "greedy, bias and penalties",
    "greedy, JSON",
    "sampled, no end before",
    "top-k",
    "top-p",
    "min-p",
    "hot",
)
TWO_WORDS = {65: 50.0, 66: 50.0}  # whoever says no others has said most before
REPEATING = {
    "greedy": replace(GREEDY, max_tokens=60, logit_bias=TWO_WORDS, logprobs=2),
    "sampled": replace(SAMPLED, max_tokens=60, logit_bias=TWO_WORDS, seed=9, logprobs=1, **PENALTIES),
}


class Output(NamedTuple):
    """What a client sees of a request, but for where its rounds ended."""

    token_ids: tuple[int, ...]
    texts: tuple[str, ...]
    logprobs: tuple[object, ...]
    end: tuple[str, str, str]  # reason, what it was stopped by, text that was still held back

    @property
    def text(self) -> str:
        return "".join(self.texts) + self.end[2]


@pytest.fixture
async def client(tiny_cluster: Cluster) -> AsyncIterator[Client]:
    async with Client(tiny_cluster.address) as client:
        yield client


async def generate(client: Client, options: GenerateOptions, speculation: Speculation) -> tuple[Output, Finished]:
    """A request from beginning to end."""
    events = [event async for event in client.generate(PROMPT, replace(options, speculation=speculation))]
    rounds, last = [event for event in events if isinstance(event, Tokens)], events[-1]
    assert isinstance(last, Finished)
    assert last.speculation.num_degraded_rounds == 0
    output = Output(
        tuple(token for one in rounds for token in one.token_ids),
        tuple(text for one in rounds for text in one.texts),
        tuple(entry for one in rounds for entry in one.logprobs),
        (last.finish_reason, last.stop_reason, last.text),
    )
    return output, last


async def require_equal(client: Client, options: GenerateOptions) -> tuple[Output, dict[str, Finished]]:
    """Plain decoding's output, which all ways gave too, in sweeps that they shared; and how each ended."""
    plain, finished = await generate(client, options, PLAIN)
    assert finished.speculation.num_accepted_tokens == 0
    runs = await asyncio.gather(*(generate(client, options, way) for way in WAYS.values()))
    for name, (output, _) in zip(WAYS, runs, strict=True):
        assert output == plain, name
    return plain, {name: finished for name, (_, finished) in zip(WAYS, runs, strict=True)}


@pytest.mark.parametrize("name", long_but([name for name in REQUESTS if name not in PARTS], REQUESTS))
async def test_every_speculation_gives_plain_decodings_output(client: Client, name: str) -> None:
    options = REQUESTS[name]
    plain, ends = await require_equal(client, options)
    assert len(plain.logprobs) == (0 if options.logprobs is None else len(plain.token_ids))
    num_accepted = sum(finished.speculation.num_accepted_tokens for finished in ends.values())
    assert num_accepted > 0, "nothing was guessed right, so that nothing was tested"


@pytest.mark.parametrize("name", long_but(["greedy"], REPEATING))
async def test_accepted_lookups_equal_plain_decoding(client: Client, name: str) -> None:
    _, ends = await require_equal(client, REPEATING[name])
    for way, finished in ends.items():
        assert "self-sized" in way or finished.speculation.num_accepted_tokens > 0, way
        assert WAYS[way].lookup != 0 or finished.speculation.num_lookup_tokens == 0, way
    # What the draft had guessed too is the draft's: most of it, by most ways, and all where chance decides.
    assert name != "greedy" or ends["best-first, looked up"].speculation.num_lookup_tokens > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_a_stop_text_ends_every_speculation_at_the_same_position(client: Client, temperature: float) -> None:
    """It is longer than a token, and lies within what one round accepts or across two, as trees will have it."""
    options = replace(GREEDY, temperature=temperature, seed=6, logit_bias=LETTERS, frequency_penalty=0.5, logprobs=1)
    whole, _ = await generate(client, options, PLAIN)
    stop = whole.text[11:14]
    assert len(stop) == 3
    stopped, _ = await require_equal(client, replace(options, stop=("no such text", stop)))
    assert stopped.end == ("stop", stop, "")
    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert whole.token_ids[: len(stopped.token_ids)] == stopped.token_ids


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.long), 0.8])
async def test_min_tokens_holds_for_every_speculation(client: Client, temperature: float) -> None:
    """Stop tokens are not drawn so early, and neither are they guessed; a stop text that is whole so early is text."""
    ends = frozenset(range(0, 262, 2))  # every other token: without a bound it ends at once
    logprobs = 0 if temperature else None  # plain greedy decoding looks at the largest logit alone
    options = replace(GREEDY, temperature=temperature, seed=3, stop_token_ids=ends, logprobs=logprobs)
    for min_tokens in (1, 10):
        plain, _ = await require_equal(client, replace(options, min_tokens=min_tokens))
        assert not set(plain.token_ids[:min_tokens]) & ends
        assert len(plain.token_ids) >= min_tokens
        assert plain.end[0] == "stop" or len(plain.token_ids) == options.max_tokens
    whole, _ = await generate(client, replace(options, min_tokens=24, logit_bias=LETTERS), PLAIN)
    early = whole.text[2:5]
    told = replace(
        options, min_tokens=5, stop_token_ids=frozenset(), logit_bias=LETTERS, stop=(early,), include_stop=True
    )
    stopped, _ = await require_equal(client, told)
    if stopped.end[0] == "stop":  # it came again
        assert stopped.text.endswith(early)
        assert len(stopped.token_ids) > 5


@pytest.mark.parametrize("scheme", [Scheme.WITHOUT_REPLACEMENT, Scheme.TRAVERSAL])
@pytest.mark.parametrize("growth", [SHAPE, StaticShape.chains(3, 4)], ids=["shape", "chains"])
async def test_schemes_that_verify_samples_are_repeatable(client: Client, scheme: Scheme, growth: StaticShape) -> None:
    """Their text depends on the tree, as on another seed: the same seed and the same plan give it again."""
    way = Speculation(growth=growth, scheme=scheme)
    options = replace(SAMPLED, seed=7, top_p=0.9, logit_bias=LETTERS, frequency_penalty=0.3, logprobs=1)
    (first, finished), (second, _) = [await generate(client, options, way) for _ in range(2)]
    assert first == second
    assert finished.speculation.num_accepted_tokens > 0
    assert len(first.token_ids) == options.max_tokens
    assert first.end[0] == "length"
    stop = first.text[9:12]
    stopped, _ = await generate(client, replace(options, stop=(stop,)), way)
    assert stopped.end == ("stop", stop, "")
    assert stopped.text == first.text[: first.text.index(stop)]
    other, _ = await generate(client, replace(options, seed=8), way)
    assert other.token_ids != first.token_ids


async def test_greedy_output_is_the_same_with_all_schemes(client: Client) -> None:
    plain, _ = await generate(client, GREEDY, PLAIN)
    for scheme in Scheme:
        output, _ = await generate(client, GREEDY, Speculation(growth=SHAPE, scheme=scheme, lookup=0))
        assert output == plain
