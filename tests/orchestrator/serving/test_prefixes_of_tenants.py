"""No answer shows one tenant what another has asked: prompts are computed again unless sharing is allowed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from bough.protocol.generation import Finished, GenerateOptions, TokenPrompt
from bough.protocol.prefix_hash import BLOCK_TOKENS, block_hashes
from bough.security.keys import Keyring, hash_of
from orchestrator.serving.tenants import Callers
from tests.fakes.simulated import pair_of
from tests.fakes.stack import Stack, simulated_stack
from tests.fakes.waiting import until

pytestmark = pytest.mark.slow  # running services are called
ALICE, BOB = ["Bearer sk-alice"], ["Bearer sk-bob"]
PROMPT = TokenPrompt(tuple(range(3, 3 + 5 * BLOCK_TOKENS)))
WHOLE = 4 * BLOCK_TOKENS  # of it, what another request can begin from: the last token is the root


def callers(folder: Path, stack: Stack, *, share_prefixes: bool) -> Callers:
    file = folder / "keys"
    file.touch(0o600)
    lines = ({"name": name, "sha256": hash_of(f"sk-{name}")} for name in ("alice", "bob"))
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Callers(stack.requests, Keyring(str(file)), share_prefixes=share_prefixes)


async def cached(callers: Callers, who: Sequence[str], cache_salt: str = "", session_id: str = "") -> int:
    """Tokens of the prompt that were held."""
    options = GenerateOptions(max_tokens=2, temperature=0.0, cache_salt=cache_salt, session_id=session_id)
    events = [event async for event in callers.tenant(who).generate(PROMPT, options)]
    assert isinstance(events[-1], Finished)
    return events[-1].usage.cached_tokens


@pytest.mark.parametrize("session_id", ["", "s"])
async def test_a_tenants_prompt_does_not_show_in_another_tenants_cached_tokens(tmp_path: Path, session_id: str) -> None:
    async with simulated_stack(tmp_path, pair_of(tmp_path)) as stack:
        apart = callers(tmp_path, stack, share_prefixes=False)
        assert await cached(apart, ALICE, session_id=session_id) == 0
        assert await cached(apart, BOB, session_id=session_id) == 0
        assert await cached(apart, ALICE) >= WHOLE  # her own is found
        assert await cached(apart, BOB) >= WHOLE
        assert await cached(Callers(stack.requests), ()) == 0  # or by a caller without a key
        stack.check_integrity()


async def test_concurrent_requests_of_tenants_share_no_work(tmp_path: Path) -> None:
    async with simulated_stack(tmp_path, pair_of(tmp_path)) as stack:
        apart = callers(tmp_path, stack, share_prefixes=False)
        assert await asyncio.gather(cached(apart, ALICE), cached(apart, BOB)) == [0, 0]


async def test_prefixes_are_shared_if_configured(tmp_path: Path) -> None:
    async with simulated_stack(tmp_path, pair_of(tmp_path)) as stack:
        shared = callers(tmp_path, stack, share_prefixes=True)
        assert await cached(shared, ALICE) == 0
        assert await cached(shared, BOB) >= WHOLE


async def test_a_tenant_separates_its_own_users_by_a_salt(tmp_path: Path) -> None:
    async with simulated_stack(tmp_path, pair_of(tmp_path)) as stack:
        apart = callers(tmp_path, stack, share_prefixes=False)
        assert await cached(apart, ALICE, "u1") == 0
        assert await cached(apart, ALICE, "u2") == 0
        assert await cached(apart, ALICE, "u1") >= WHOLE
        assert await cached(apart, BOB, "u1") == 0


async def test_the_index_finds_only_a_tenants_own_prefixes(tmp_path: Path) -> None:
    """Otherwise the target of a request would reveal it."""
    async with simulated_stack(tmp_path, pair_of(tmp_path)) as stack:
        apart = callers(tmp_path, stack, share_prefixes=False)
        await cached(apart, ALICE, session_id="s")
        fingerprint = stack.target.info().model_fingerprint

        async def found(cache_salt: str) -> bool:
            hashes = block_hashes(PROMPT.token_ids, cache_salt=cache_salt)
            return bool(await stack.registry.find_prefixes(fingerprint, hashes, ["target"]))

        await until(lambda: found("alice::"))
        assert not await found("bob::")
        assert not await found("")
