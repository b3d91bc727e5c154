"""The index on a real cluster: every operation, whichever node is asked first."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from bough.client import Client
from bough.errors import Unavailable
from bough.protocol.ids import ScopedId
from bough.registry.registry import Quota, Registry
from bough.tokenization.vocabulary import TokenizerFiles
from tests.fakes.fleet import fleet
from tests.fakes.index_cluster import cluster
from tests.fakes.index_server import Server, connected
from tests.fakes.streams import OPTIONS, expected, read
from tests.registry.test_index_faults import OPERATIONS, REQUEST, SESSION

pytestmark = pytest.mark.slow  # running services are called


@pytest.fixture(scope="module")
async def nodes(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[Server]]:
    async with cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


def url(node: Server) -> str:
    return node.url.replace("redis://", "redis+cluster://")


async def test_every_operation_works_from_every_node(nodes: list[Server]) -> None:
    for node in nodes:
        async with connected(url(node)) as registry:
            for name, operation in OPERATIONS.items():
                try:
                    await operation(registry)
                except Unavailable as exc:
                    raise AssertionError(name) from exc
            claim = await registry.claim_session(ScopedId("s"), "me")
            written = replace(SESSION, epoch=claim.epoch)
            await registry.record_session(written, 0)
            assert await registry.load_session(ScopedId("s")) == written
            assert registry.safe_url.startswith("redis+cluster://")


async def test_a_namespace_and_its_quota_use_one_slot(nodes: list[Server]) -> None:
    for namespace in ("bough", "another", "a third"):
        registry = Registry(url(nodes[0]), namespace, quota=Quota(max_records=3))
        await registry.wait()
        for number in range(6):
            await registry.record_session(replace(SESSION, session_id=ScopedId(f"s{number}"), epoch=2**51), 0)
            await registry.record_request(replace(REQUEST, request_id=ScopedId(f"r{number}"), epoch=2**51), 0)
        found = [number for number in range(6) if await registry.load_session(ScopedId(f"s{number}")) is not None]
        assert len(found) == 3
        keys = [key for node in nodes for key in node.redis.keys(f"{{{namespace}}}:*")]
        assert len({nodes[0].redis.execute_command("CLUSTER KEYSLOT", key) for key in keys}) == 1
        await registry.close()


async def test_a_cluster_and_a_single_server_are_not_confused(nodes: list[Server], index_url: str) -> None:
    """Either way the mistake is said, and nothing hangs."""
    for wrong in (index_url.replace("redis://", "redis+cluster://"), *(node.url for node in nodes)):
        results = []
        for name in ("bough", "another", "a third", "one more", "and one"):
            registry = Registry(wrong, name)
            try:
                await registry.workers()
                results.append("")
            except Unavailable as exc:
                results.append(str(exc))
            await registry.close()
        assert any("luster" in text for text in results), results


async def test_requests_are_served_and_recorded(nodes: list[Server], byte_tokenizer: TokenizerFiles) -> None:
    async with fleet(url(nodes[1]), byte_tokenizer, "served by a cluster") as fakes:
        await fakes.target("t1")
        await fakes.target("t2")
        (_, first), (_, second) = await fakes.orchestrator(num_targets=2), await fakes.orchestrator(num_targets=2)
        async with Client(first.address) as one, Client(second.address) as other:
            kept = replace(OPTIONS, session_id="s")
            seen = await read(one, kept)
            assert seen.token_ids == expected(fakes)
            assert seen.end.warnings == ()
            session = await fakes.registry.load_session(ScopedId("s"))
            assert session is not None
            assert len(session.tokens) == seen.started.prompt_tokens + 60
            again = await read(other, replace(kept, request_id="again"))
            assert again.end.usage.cached_tokens > 0
            await other.close_session("s")
            assert await fakes.registry.load_session(ScopedId("s")) is None
