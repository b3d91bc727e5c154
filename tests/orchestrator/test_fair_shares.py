"""With keys, one tenant's slow bodies keep no other tenant out, and refused callers are counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from orchestrator.http_api import body
from tests.fakes.http_stack import error_of
from tests.fakes.waiting import PATIENCE_SECONDS
from tests.orchestrator.test_keys_over_both_apis import ALICE, BOB, BODY, Guarded, answer, guarded, refusal

pytestmark = pytest.mark.slow  # running services are called
PATH = "/v1/completions"
NUM_BYTES = 3000


@asynccontextmanager
async def slow_body(endpoint: Guarded, key: str, num_sent: int) -> AsyncIterator[None]:
    """A request whose body does not end."""
    port = httpx.URL(endpoint.orchestrator.requests.http_url).port
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n"
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}content-length: {NUM_BYTES}\r\n\r\n".encode() + b"{" * num_sent)
    try:
        yield
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("most", "num_bytes", "num_sent"), [(2, 10**6, 1), (100, 4 * NUM_BYTES, NUM_BYTES - 1)], ids=["bodies", "bytes"]
)
async def test_slow_bodies_of_one_key_leave_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, num_bytes: int, num_sent: int
) -> None:
    """One key had all connections, or all bytes, for a minute at a time, however few requests it was allowed."""
    monkeypatch.setattr(body, "connection_limit", lambda **_: most)
    monkeypatch.setattr(body, "MAX_ALL_BYTES", num_bytes)
    async with guarded(tmp_path) as endpoint, endpoint.http(ALICE) as alice, endpoint.http(BOB) as bob:
        async with (
            slow_body(endpoint, ALICE, num_sent),
            slow_body(endpoint, ALICE, num_sent),
            asyncio.timeout(PATIENCE_SECONDS),
        ):
            while (response := await alice.post(PATH, json=BODY)).status_code != 429:
                pass  # as soon as the bytes of the others are there
            assert "of this key" in error_of(response)["message"]
            assert response.headers["retry-after"]
            assert (await bob.post(PATH, json=BODY)).status_code == 200
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (await alice.post(PATH, json=BODY)).status_code == 429:
                await asyncio.sleep(0.01)  # until the server has noticed that they left


async def test_refused_callers_are_counted(tmp_path: Path) -> None:
    """Metrics count unknown keys and limits of keys that were reached."""
    async with (
        guarded(tmp_path, tokens_per_minute=1) as endpoint,
        endpoint.client(ALICE) as alice,
        endpoint.client("sk") as stranger,
    ):
        await answer(alice)
        await refusal(answer(alice))
        await refusal(answer(stranger))
        async with endpoint.http("sk-nobody") as http, endpoint.http(BOB) as bob:
            assert (await http.get("/metrics")).status_code == 401
            assert (await bob.post(PATH, json=BODY | {"n": 10})).status_code == 200
            figures = (await bob.get("/metrics")).text
    told = {
        line.split('"')[1]: float(line.split()[-1])
        for line in figures.splitlines()
        if line.startswith("bough_request_failures_total")
    }
    assert (told["KeyLimit"], told["Unauthenticated"], told["Exhausted"]) == (1, 2, 0)
