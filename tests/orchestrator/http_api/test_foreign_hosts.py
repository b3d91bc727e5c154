"""A web page whose name leads to this machine's loopback address reads nothing there: its browser tells the name."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from bough.config.processes import OrchestratorConfig, parse
from bough.security.keys import hash_of
from orchestrator.assembly import assembled
from tests.fakes.http_stack import error_of


async def statuses(index_url: str, flags: list[str], hosts: list[str]) -> list[int]:
    """What an orchestrator on loopback answers to requests for its version that name these hosts."""
    everywhere = ["--index-url", index_url, "--draft", "none", "--port", "0"]
    config = parse(OrchestratorConfig, "o", [*everywhere, *flags], {})
    async with assembled(config, asyncio.Event()) as orchestrator, httpx.AsyncClient() as client:
        url = httpx.URL(orchestrator.requests.http_url).copy_with(host="127.0.0.1", path="/version")
        answers = [await client.get(url, headers={"host": host}) for host in hosts]
    for host, answer in zip(hosts, answers, strict=True):
        if answer.status_code == 421:
            error = error_of(answer)
            assert error["param"] == "host"
            assert error["message"].startswith("host: must be an address, localhost or the name")
            assert error["message"].endswith(f"got '{host}'")
            assert answer.headers["x-request-id"]
    return [answer.status_code for answer in answers]


async def test_names_of_others_are_refused_on_loopback_without_keys(index_url: str) -> None:
    own = ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000", "10.0.0.1", "bough.example:80"]
    foreign = ["evil.example", "localhost.evil.example:8000", "127.0.0.1.evil.example", "[::1", "a@b", "127.1"]
    found = await statuses(index_url, ["--advertise", "bough.example"], own + foreign)
    assert found == [200] * len(own) + [421] * len(foreign)
    assert await statuses(index_url, [], ["bough.example"]) == [421]


async def test_keys_are_guard_enough(index_url: str, tmp_path: Path) -> None:
    """Behind a proxy an orchestrator with keys is called by any name."""
    (keys := tmp_path / "keys").touch(0o600)
    keys.write_text(f'{{"name": "alice", "sha256": "{hash_of("sk-alice")}"}}\n')
    assert await statuses(index_url, ["--keys", str(keys)], ["bough.example"]) == [401]
