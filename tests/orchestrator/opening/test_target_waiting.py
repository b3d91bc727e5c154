"""While the only target restarts, new requests wait for it, within bounds; what none can answer is refused at once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import httpx
import pytest
from prometheus_client import CollectorRegistry

from bough.client import Client
from bough.errors import DeadlineExceeded, Exhausted, NotFound, Unavailable
from bough.protocol.generation import GenerateOptions, Resume
from orchestrator.cluster import served_models
from orchestrator.cluster.worker_handle import Health, Pause
from orchestrator.http_api.app import http_app
from orchestrator.serving.requests import Requests
from orchestrator.serving.tenants import Callers
from tests.fakes.fleet import Fleet
from tests.fakes.streams import OPTIONS, PROMPT, expected, read
from tests.fakes.waiting import until

NAMELESS = replace(OPTIONS, request_id="")


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held requests look for a target again at once."""
    monkeypatch.setattr(served_models, "POLL_SECONDS", 0.01)


@contextmanager
def away(requests: Requests) -> Iterator[None]:
    """No target can be used in the block."""
    (known,) = requests.directory.targets
    known.health = Health(Pause(until=math.inf))
    yield
    known.health = Health()


def client_of(address: str) -> Client:
    """A client that does not try again where it is refused."""
    return Client(address, patience_seconds=0.0)


async def test_new_requests_wait_while_the_only_target_restarts(fakes: Fleet) -> None:
    """The restarted one has another name and address. No target is listed or known meanwhile."""
    _, server = await fakes.target("t1")
    requests, process = await fakes.orchestrator(poll_seconds=0.02)
    await server.kill()
    await until(lambda: not requests.directory.targets)
    async with client_of(process.address) as client:
        held = [asyncio.create_task(read(client, replace(NAMELESS, model=name))) for name in ("", "fake")]
        await until(lambda: requests.figures().num_held == 2)
        assert (requests.loads().num_requests_running, requests.loads().num_requests_waiting) == (0, 2)
        with pytest.raises(NotFound, match=r"^model: must be one of 'fake', got 'other'$"):
            await read(client, replace(NAMELESS, model="other"))
        await fakes.target("t2")
        for task in held:
            assert (await asyncio.wait_for(task, 30)).token_ids == expected(fakes)
    assert requests.figures().num_held == 0


async def test_resumed_requests_and_sessions_wait_too(fakes: Fleet) -> None:
    options = replace(OPTIONS, session_id="s")
    await fakes.target("t1")
    requests, process = await fakes.orchestrator()
    async with client_of(process.address) as client:
        whole = await read(client, options)
        await fakes.written("r")
        turn = replace(options, request_id="", continues=True, max_tokens=4)
        seen = []
        for again in (replace(options, resume=Resume(0)), turn):
            with away(requests):
                held = asyncio.create_task(read(client, again))
                await until(lambda: requests.figures().num_held == 1)
            seen.append(await held)
    resumed, continued = seen
    assert resumed.token_ids == whole.token_ids
    assert continued.started.prompt_tokens > whole.started.prompt_tokens + len(whole.token_ids)


async def test_a_request_waiting_for_a_target_has_a_place_and_leaves_it(fakes: Fleet) -> None:
    """So that the limits of admission hold; a client that goes away, or aborts, is forgotten at once."""
    await fakes.target("t1")
    requests, process = await fakes.orchestrator("--max-running", "2", "--max-waiting", "1")
    async with client_of(process.address) as client:
        with away(requests):
            aborted = asyncio.create_task(read(client))
            await until(lambda: requests.figures().num_held == 1)
            leaving, queued = (asyncio.create_task(read(client, NAMELESS)) for _ in range(2))
            await until(lambda: requests.loads().num_requests_waiting == 3)
            with pytest.raises(Exhausted, match="2 requests run and 1 wait") as caught:
                await read(client, NAMELESS)
            assert caught.value.retry_seconds is not None
            leaving.cancel()
            await client.abort("r")
            assert (await aborted).end.finish_reason == "abort"
            await until(lambda: requests.loads().num_requests_waiting == requests.figures().num_held == 1)
        assert (await queued).token_ids == expected(fakes)


@pytest.mark.parametrize("flag", ["--failover-timeout", "--queue-timeout"])
async def test_waiting_is_limited(fakes: Fleet, flag: str) -> None:
    await fakes.target("t1")
    requests, process = await fakes.orchestrator(flag, "0.05")
    async with client_of(process.address) as client, http_client(requests) as http:
        refused = pytest.raises(Unavailable, match=r"t1: does not answer; none came back in time \(--failover-timeout")
        with away(requests):
            with refused:
                await read(client)
            late = await http.post("/detokenize", json=TEXTS["/detokenize"])
    assert requests.totals.failed["Unavailable"] == 1
    assert late.status_code == 503
    assert "none came back in time" in late.json()["error"]["message"]


async def test_a_target_gone_for_long_is_not_waited_for(fakes: Fleet) -> None:
    await fakes.target("t1")
    requests, process = await fakes.orchestrator()
    seen = requests.directory._seen
    async with client_of(process.address) as client:
        with away(requests):
            for identity, (info, when) in seen.items():
                seen[identity] = info, when - 60.0
            with pytest.raises(Unavailable, match="none came back in time"):
                await asyncio.wait_for(read(client), 5)


async def test_a_callers_deadline_ends_its_wait(fakes: Fleet) -> None:
    await fakes.target("t1")
    requests, _ = await fakes.orchestrator()
    with away(requests), pytest.raises(DeadlineExceeded):
        async for _ in requests.generate(PROMPT, GenerateOptions(request_id="r"), timeout_seconds=0.05):
            pass
    assert requests.figures().num_held == 0


async def test_a_draining_orchestrator_lets_accepted_requests_wait(fakes: Fleet) -> None:
    """As long as it drains: to a client of HTTP a refusal would be a failed request."""
    await fakes.target("t1")
    requests, process = await fakes.orchestrator()
    async with client_of(process.address) as client:
        with away(requests):
            held = asyncio.create_task(read(client))
            await until(lambda: requests.figures().num_held == 1)
            draining = asyncio.create_task(requests.drain("it drains", 60.0))
            await until(lambda: requests.admission.is_closed)
            assert not held.done()
        assert (await held).token_ids == expected(fakes)
        await draining


async def test_a_drain_also_limits_waiting_requests(fakes: Fleet) -> None:
    await fakes.target("t1")
    requests, process = await fakes.orchestrator()
    async with client_of(process.address) as client, http_client(requests) as http:
        with away(requests):
            held = asyncio.create_task(read(client))
            text = asyncio.create_task(http.post("/detokenize", json=TEXTS["/detokenize"]))
            await until(lambda: requests.figures().num_held == requests.texts.waiting.num_held == 1)
            await requests.drain("it drains", 0.1)
            with pytest.raises(Unavailable, match="it drains; this call was cut off"):
                await held
            refused = await text
    assert (refused.status_code, "it drains" in refused.text) == (503, True)


TEXTS = {  # all that is asked of a tokenizer alone
    "/tokenize": {"prompt": "ab", "return_token_strs": True},
    "/detokenize": {"tokens": [70, 71]},
    "/v1/completions": {"prompt": [70, 71], "echo": True, "max_tokens": 1},
}


def http_client(requests: Requests) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(http_app(Callers(requests), CollectorRegistry()))
    return httpx.AsyncClient(transport=transport, base_url="http://orchestrator")


async def test_texts_wait_for_a_tokenizer_like_requests_for_a_target(fakes: Fleet) -> None:
    """They have no places: their number is limited, and they do not count as load of requests."""
    await fakes.target("t1")
    requests, _ = await fakes.orchestrator()
    waiting = requests.texts.waiting
    async with http_client(requests) as client:
        there = [(await client.post(path, json=body)).json() for path, body in TEXTS.items()]
        with away(requests):
            held = [asyncio.create_task(client.post(path, json=body)) for path, body in TEXTS.items()]
            await until(lambda: waiting.num_held == len(TEXTS))
            assert (requests.figures().num_held, requests.loads().num_requests_waiting) == (0, 0)
            unknown = await client.post("/tokenize", json={"prompt": "ab", "model": "other"})
            waiting.most_held = len(TEXTS)
            refused = await client.post("/tokenize", json=TEXTS["/tokenize"])
        assert (unknown.status_code, refused.status_code) == (404, 503)
        assert "t1: does not answer" in refused.json()["error"]["message"]
        seen = [(await asyncio.wait_for(task, 30)).json() for task in held]
    assert seen[:2] == there[:2]
    assert seen[2]["choices"][0]["text"].startswith(there[1]["prompt"])
    assert waiting.num_held == 0
