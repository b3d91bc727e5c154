"""What is refused before it is read: bodies of too many values, and host names of others on the loopback address."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bough.config.processes import OrchestratorConfig, parse
from bough.security.keys import hash_of
from orchestrator.assembly import assembled
from orchestrator.http_api import body
from orchestrator.http_api.body import MAX_ENTRIES, MAX_VALUES, require_entries
from orchestrator.http_api.fields.errors import ApiError
from tests.fakes.http_stack import error_of

VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(alphabet='\\"[]{},:a\n\u00e9', max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text('\\"[{,', max_size=3), inner)),
    max_leaves=20,
)


def num_entries(value: Any) -> int:
    """Objects, arrays and strings, keys among them."""
    match value:
        case dict():
            return 1 + len(value) + sum(map(num_entries, value.values()))
        case list():
            return 1 + sum(map(num_entries, value))
    return int(isinstance(value, str))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=VALUES, is_ascii=st.booleans())
def test_entries_are_counted_without_those_inside_texts(
    monkeypatch: pytest.MonkeyPatch, value: Any, is_ascii: bool
) -> None:
    content = json.dumps(value, ensure_ascii=is_ascii).encode()
    monkeypatch.setattr(body, "MAX_ENTRIES", num_entries(value))
    require_entries(content)
    monkeypatch.setattr(body, "MAX_ENTRIES", num_entries(value) - 1)
    with pytest.raises(ApiError):
        require_entries(content)


@pytest.mark.parametrize("each", ["[]", "{}", "[1]", '""', '{"role": "user"}', '"\\""', "[[[]]]"])
def test_a_body_with_too_many_entries_is_refused(each: str) -> None:
    few, many = (f'{{"prompt": [{", ".join([each] * num)}]}}'.encode() for num in (10_000, MAX_ENTRIES))
    require_entries(few)
    with pytest.raises(ApiError, match=f"body: must have at most {MAX_ENTRIES} objects, arrays and strings"):
        require_entries(many)


def test_many_tokens_are_accepted_and_too_many_are_refused() -> None:
    require_entries(b"[" + b"1," * (MAX_VALUES - 1) + b"1]")
    with pytest.raises(ApiError, match=f"{MAX_VALUES} values"):
        require_entries(b"[" + b"1," * (MAX_VALUES + 1) + b"1]")


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


async def test_host_names_of_others_are_refused_on_loopback_without_keys(index_url: str) -> None:
    own = ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000", "10.0.0.1", "bough.example:80"]
    foreign = ["evil.example", "localhost.evil.example:8000", "127.0.0.1.evil.example", "[::1", "a@b", "127.1"]
    found = await statuses(index_url, ["--advertise", "bough.example"], own + foreign)
    assert found == [200] * len(own) + [421] * len(foreign)
    assert await statuses(index_url, [], ["bough.example"]) == [421]


async def test_with_keys_any_host_name_is_accepted(index_url: str, tmp_path: Path) -> None:
    """Behind a proxy an orchestrator with keys is called by any name."""
    (keys := tmp_path / "keys").touch(0o600)
    keys.write_text(f'{{"name": "alice", "sha256": "{hash_of("sk-alice")}"}}\n')
    assert await statuses(index_url, ["--keys", str(keys)], ["bough.example"]) == [401]
