"""Several models in one index: a request gets the one that it names, and what has begun with one never goes on with
another."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from bough.client import Client
from bough.errors import InvalidRequest, NotFound, Unavailable
from bough.protocol.generation import GenerateOptions, Resume, TextPrompt
from bough.protocol.ids import ScopedId
from orchestrator.serving.requests import Requests
from tests.fakes.fleet import Fleet, Process
from tests.fakes.streams import OPTIONS, expected, kill_the_one_that_gets, read
from tests.fakes.waiting import until

TURN = GenerateOptions(session_id="s", seed=3, max_tokens=20, ignore_eos=True)
NEXT = replace(TURN, continues=True)
MORE = TextPrompt("more")


async def two_models(fakes: Fleet, *flags: str) -> tuple[dict[str, Process], Requests, Client]:
    """Targets t-a and t-b with the models a and b, and a client of an orchestrator that knows them."""
    servers = {name: (await fakes.target_of(f"t-{name}", name))[1] for name in ("a", "b")}
    requests, process = await fakes.orchestrator("--failover-timeout", "1", *flags, num_targets=2, poll_seconds=0.05)
    return servers, requests, Client(process.address, patience_seconds=0.5)


async def test_all_models_are_listed_and_served_by_name(fakes: Fleet) -> None:
    _, _, client = await two_models(fakes)
    async with client:
        models = await client.models()
        assert [(model.model_name, model.model_fingerprint) for model in models] == [("a", "a"), ("b", "b")]
        assert await client.model_info() == models[0]
        for name in ("b", "a", "b"):
            seen = await read(client, replace(OPTIONS, request_id="", model=name))
            assert (seen.started.model_name, seen.token_ids) == (name, expected(fakes))
        with pytest.raises(NotFound, match=r"^model: must be one of 'a', 'b', got 'c'$"):
            await read(client, replace(OPTIONS, model="c"))
        with pytest.raises(InvalidRequest, match=r"^model: must have at most 256 characters, got 3000"):
            await read(client, replace(OPTIONS, model=3_000 * "c"))
        with pytest.raises(InvalidRequest, match=r"^model: must be one of 'a', 'b', as several"):
            await read(client, OPTIONS)


async def test_a_single_model_need_not_be_named(fakes: Fleet) -> None:
    """With any number of targets that serve it and any rounding."""
    await fakes.target("t1")
    other, _ = await fakes.target("t2")
    other.arithmetic = "other"
    _, process = await fakes.orchestrator(num_targets=2)
    async with Client(process.address) as client:
        assert len(await client.models()) == 1
        for name in ("", "fake"):
            seen = await read(client, replace(OPTIONS, request_id="", model=name))
            assert (seen.started.model_name, seen.token_ids) == ("fake", expected(fakes))


async def test_a_session_stays_with_its_model(fakes: Fleet) -> None:
    _, _, client = await two_models(fakes)
    async with client:
        await read(client, replace(TURN, model="b"))
        assert (await read(client, NEXT, MORE)).started.model_name == "b"
        assert (await read(client, TURN)).started.model_name == "b", "the whole text, and no model named"
        assert (await read(client, replace(NEXT, model="b"), MORE)).started.model_name == "b"
        with pytest.raises(InvalidRequest, match=r"^model: must be 'b', the model of session_id 's', got 'a'$"):
            await read(client, replace(NEXT, model="a"), MORE)


async def test_a_whole_text_restarts_a_session_with_the_named_model(fakes: Fleet) -> None:
    _, _, client = await two_models(fakes)
    async with client:
        await read(client, replace(TURN, model="b"))
        moved = await read(client, replace(TURN, model="a"))
        assert (moved.started.model_name, moved.end.usage.cached_tokens) == ("a", 0)
        after = await read(client, NEXT, MORE)
        assert after.started.model_name == "a"
        assert after.started.prompt_tokens == moved.started.prompt_tokens + 20 + len(MORE.text)


@pytest.mark.slow
@pytest.mark.parametrize("options", [NEXT, TURN])
async def test_a_session_whose_model_is_gone_does_not_continue_with_another(
    fakes: Fleet, options: GenerateOptions
) -> None:
    """One model's tokens were the other's prompt, without a word."""
    servers, requests, client = await two_models(fakes)
    async with client:
        await read(client, replace(TURN, model="b"))
        await servers["b"].kill()
        await until(lambda: [target.info.model_name for target in requests.directory.targets] == ["a"])
        with pytest.raises(Unavailable, match="session_id: 's' uses the model 'b', and no target that serves it"):
            await read(client, options, MORE)
        with pytest.raises(Unavailable, match="model: no target that serves 'b' can be used now"):
            await read(client, replace(OPTIONS, model="b"))
        assert (await read(client, replace(TURN, model="a"), MORE)).started.model_name == "a"


@pytest.mark.slow
async def test_a_broken_request_does_not_continue_with_another_model(fakes: Fleet) -> None:
    servers = {name: await fakes.target_of(f"t-{name}", name) for name in ("a", "b")}
    _, process = await fakes.orchestrator("--failover-timeout", "1", num_targets=2)
    kill_the_one_that_gets(3, [servers["b"]])
    options = replace(OPTIONS, session_id="s", model="b")
    async with Client(process.address, patience_seconds=0.5) as client:
        with pytest.raises(Unavailable, match="no target with this model could be used"):
            await asyncio.wait_for(read(client, options), 30)
        await until(lambda: fakes.registry.load_request(ScopedId("r")))  # the index gets it in the background
        # Held until the target's pause is over, after which it is tried once more; or refused before that.
        with pytest.raises(
            Unavailable, match=r"no (usable target gives the same tokens|target with this model could be used)"
        ):
            await read(client, replace(options, model="", resume=Resume(0)))
    assert servers["a"][0].calls == []


async def test_a_resumed_request_cannot_change_its_model(fakes: Fleet) -> None:
    _, _, client = await two_models(fakes)
    options = replace(OPTIONS, session_id="s", model="b")
    async with client:
        await read(client, options)
        await fakes.written("r")
        with pytest.raises(InvalidRequest, match=r"^model: must be 'b', the model that request_id 'r'"):
            await read(client, replace(options, model="a", resume=Resume(0)))
        assert (await read(client, replace(options, model="", resume=Resume(0)))).token_ids == expected(fakes)
