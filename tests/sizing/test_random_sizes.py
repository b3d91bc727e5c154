"""Whatever a sizer chooses and a target leaves out, the same seed gives the same tokens: both choose at random here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from bough.client import Client
from bough.protocol.generation import Finished, GenerateOptions, Speculation, Started, TokenPrompt, Tokens
from bough.simulation.pair import SimulatedPair
from bough.trees.tree_plan import Scheme, StaticShape
from target_worker.scheduler import engine
from tests.fakes.fleet import Fleet
from tests.fakes.random_sizes import RandomDivision, RandomlyDividingTarget, RandomSizer, use_random_sizes
from tests.fakes.simulated import pair_of, text_of
from tests.fakes.stack import Stack, simulated_stack, stack
from tests.fakes.streams import OPTIONS, expected, kill_the_one_that_gets, read
from tests.fakes.tiers import long_but
from tests.pipeline.test_equality import GREEDY, PARTS, PLAIN, REQUESTS, SAMPLED

PROMPT = TokenPrompt((*range(40, 52), *range(60, 66), *range(40, 46)))
NUM_RUNS = 5  # of each request at once


async def generate(
    client: Client, options: GenerateOptions, prompt: TokenPrompt = PROMPT
) -> tuple[tuple[object, ...], Finished]:
    """What a client sees, and how it ended."""
    events = [event async for event in client.generate(prompt, options)]
    rounds, last = [event for event in events if isinstance(event, Tokens)], events[-1]
    assert isinstance(last, Finished)
    output = (
        tuple(token for one in rounds for token in one.token_ids),
        "".join(text for one in rounds for text in one.texts) + last.text,
        tuple(entry for one in rounds for entry in one.logprobs),
        (last.finish_reason, last.stop_reason),
    )
    return output, last


@pytest.fixture(scope="module")
async def services(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """The real services on the smallest model, whose draft it is itself; nodes are left out by chance."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "share_rows", RandomDivision(1))
        async with stack(tmp_path_factory.mktemp("random")) as running:
            yield running


@pytest.fixture(scope="module")
def sizer(services: Stack) -> RandomSizer:
    return use_random_sizes(services.requests, seed=2)


@pytest.fixture
async def client(services: Stack, sizer: RandomSizer) -> AsyncIterator[Client]:
    async with Client(services.addresses["orchestrator"]) as connected:
        yield connected


@pytest.mark.slow
@pytest.mark.parametrize("name", long_but(PARTS, REQUESTS))
async def test_random_sizes_give_plain_decodings_output(client: Client, name: str) -> None:
    """Penalties, biases and filters, stop tokens, log-probabilities; five sessions share sweeps, each cut otherwise."""
    options = REQUESTS[name]
    plain, end = await generate(client, replace(options, speculation=PLAIN))
    assert end.speculation.num_draft_tokens == 0
    runs = await asyncio.gather(*(generate(client, options) for _ in range(NUM_RUNS)))
    for output, _ in runs:
        assert output == plain
    assert any(end.speculation.num_accepted_tokens for _, end in runs), "nothing was guessed right: nothing was tested"
    assert len({end.speculation.num_draft_tokens for _, end in runs}) > 1, "sizes were the same"


@pytest.mark.slow
async def test_concurrent_sessions_of_many_kinds_have_their_own_texts(client: Client) -> None:
    """Greedy and sampled with seeds of their own, some plain, some of a fixed size."""
    kinds = [GREEDY, *(replace(SAMPLED, seed=seed) for seed in range(3))]
    alone = await asyncio.gather(*(generate(client, replace(options, speculation=PLAIN)) for options in kinds))
    plain = [output for output, _ in alone]
    ways = [Speculation(), Speculation(budget=9), PLAIN, Speculation(growth=StaticShape.chains(2, 3))]
    runs = await asyncio.gather(
        *(generate(client, replace(options, speculation=way)) for options in kinds for way in ways)
    )
    assert [output for output, _ in runs] == [output for output in plain for _ in ways]
    assert len({output[0] for output in plain}) == len(kinds)


@pytest.mark.slow
async def test_a_stop_text_ends_at_the_same_position(client: Client) -> None:
    options = replace(SAMPLED, seed=6, logit_bias=dict.fromkeys(range(66, 92), 12.0))
    whole, _ = await generate(client, replace(options, speculation=PLAIN))
    stop = str(whole[1])[9:12]
    assert len(stop) == 3
    stopped = replace(options, stop=(stop,))
    plain, _ = await generate(client, replace(stopped, speculation=PLAIN))
    assert plain[3] == ("stop", stop)
    assert [output for output, _ in await asyncio.gather(*(generate(client, stopped) for _ in range(4)))] == [plain] * 4


@pytest.mark.slow
async def test_samples_keep_the_requested_size(client: Client) -> None:
    """Of them nothing is cut or left out, so that the same plan gives the same text."""
    for scheme in (Scheme.WITHOUT_REPLACEMENT, Scheme.TRAVERSAL):
        way = Speculation(growth=StaticShape.chains(2, 3), scheme=scheme)
        runs = await asyncio.gather(*(generate(client, replace(SAMPLED, seed=7, speculation=way)) for _ in range(4)))
        assert len({output for output, _ in runs}) == 1
        assert runs[0][1].speculation.num_accepted_tokens > 0


@pytest.mark.slow
async def test_random_sizes_cover_every_kind_of_cut(client: Client, sizer: RandomSizer, services: Stack) -> None:
    """Or the tests above would show nothing."""
    await asyncio.gather(*(generate(client, GREEDY) for _ in range(8)))
    assert len(sizer.sizes) > 10
    assert 1 in sizer.sizes
    assert sizer.num_cut > 20
    assert sizer.num_left_out > 50
    services.check_integrity()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_a_target_failure_in_mid_text_changes_nothing(fakes: Fleet, seed: int) -> None:
    """Both leave out random nodes; the other need not verify the same nodes as the first."""
    targets = [(worker := RandomlyDividingTarget(name, fakes.tokenizer), await fakes.worker(worker)) for name in "ab"]
    requests, process = await fakes.orchestrator("--lookup", "16", num_targets=2)
    sizer = use_random_sizes(requests, seed)
    kill_the_one_that_gets(9, targets)
    async with Client(process.address) as client:
        seen = await asyncio.wait_for(read(client, OPTIONS), 30)
    assert seen.token_ids == expected(fakes)
    assert seen.end.num_failovers == 1
    assert sizer.num_left_out > 0
    assert seen.end.speculation.num_accepted_tokens > 0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> SimulatedPair:
    """Workers that take no time to speak of, and fail now and then."""
    failures = [{"worker": kind, "probability": 0.02} for kind in ("draft", "target")]
    return pair_of(tmp_path_factory.mktemp("profiles"), clock_scale=5000, failures=failures)


@pytest.mark.slow
async def test_simulated_workers_give_the_text_models_text_with_any_sizes(
    pair: SimulatedPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight sessions at once, of forty tokens each."""
    monkeypatch.setattr(engine, "share_rows", RandomDivision(3))
    options = [replace(SAMPLED, seed=seed, max_tokens=40, temperature=0.8 if seed else 0.0) for seed in range(8)]
    async with simulated_stack(tmp_path, pair) as running, Client(running.addresses["orchestrator"]) as client:
        sizer = use_random_sizes(running.requests, seed=4)
        runs = await asyncio.gather(*(_simulated(client, own) for own in options))
    for seed, (start, tokens) in enumerate(runs):
        assert tokens == text_of(pair, seed, start, 40)
    assert sizer.num_cut > 50
    assert sizer.num_left_out > 50
    assert len(sizer.sizes) > 10


async def _simulated(client: Client, options: GenerateOptions) -> tuple[int, list[int]]:
    """Where the output begins, and its tokens."""
    events = [event async for event in client.generate(PROMPT, options)]
    assert isinstance(events[0], Started)
    return events[0].prompt_tokens, [
        token for event in events if isinstance(event, Tokens) for token in event.token_ids
    ]
